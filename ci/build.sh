#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# ci/build.sh PRESET [ninja arguments]: configures and builds a preset of CMakePresets.json.
# Prints nothing when all is well, everything when not (V=1: always). Builds of one preset wait for
# each other.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift
dir=build
[ "$preset" = release ] || dir=build/$preset
mkdir -p "$dir"
log=$dir/build.log
exec {lock}>"$dir/lock"
flock "$lock"

build() {
    # A directory that was moved, or an interrupted configuration, starts over.
    if [ -f "$dir/CMakeCache.txt" ] &&
        ! grep -qFx "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$dir/CMakeCache.txt"; then
        rm -rf "$dir/CMakeCache.txt" "$dir/CMakeFiles"
    fi
    if [ ! -f "$dir/build.ninja" ] || [ ! -f "$dir/CMakeCache.txt" ]; then
        cmake --preset "$preset"
    fi
    cmake --build --preset "$preset" -- "$@"
}

if [ -n "${V:-}" ]; then
    build "$@"
elif ! build "$@" >"$log" 2>&1; then
    cat "$log"
    echo "build of preset '$preset' failed" >&2
    exit 1
fi
