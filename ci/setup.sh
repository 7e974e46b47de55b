#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Installs the Debian packages that the build needs, where any is missing; `ci/setup.sh test` also
# those of the tests alone: a launcher to start ranks by, the checker of the models and a compiler
# for what it makes.
set -euo pipefail

packages=(gcc g++ make cmake ninja-build binutils libjansson-dev libdnnl2 libdlpack-dev)
[ "${1:-}" != test ] || packages+=(openmpi-bin python3-dev python3-venv spin tcc)

if ! command -v dpkg >/dev/null || ! command -v apt-get >/dev/null; then
    for tool in gcc g++ make cmake ninja; do
        if ! command -v "$tool" >/dev/null; then
            echo "setup: $tool is missing; Cofuse needs what these Debian packages hold:" >&2
            echo "    ${packages[*]}" >&2
            exit 1
        fi
    done
    exit 0
fi

installed() {
    dpkg -s "$1" 2>/dev/null | grep '^Status: install ok installed' >/dev/null
}
missing=()
for package in "${packages[@]}"; do
    installed "$package" && continue
    # Newer releases have oneDNN 3 in the place of oneDNN 2.
    [ "$package" = libdnnl2 ] && installed libdnnl3 && continue
    missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "setup: packages are missing; run:" >&2
    echo "    sudo apt-get install -y ${missing[*]}" >&2
    exit 1
fi

echo "setup: installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } \
    >"$log" 2>&1; then
    cat "$log" >&2
    echo "setup: apt-get failed" >&2
    exit 1
fi
