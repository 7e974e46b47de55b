#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Installs into an empty folder and uses what is there: the example built by hand, by pkg-config
# (where installed) and by CMake, run alone and as four ranks. Then `make install` as the README has
# it, into /usr/local of a file system of its own (as root, where there are mounts to be had).
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
cmake --install build --prefix "$prefix/usr" >/dev/null
library=$(dirname "$(find "$prefix/usr" -name libcofuse.so)")
export LD_LIBRARY_PATH=$library

flags=(-I "$prefix/usr/include" -L "$library")
gcc -std=c11 -Wall -Wextra -Wpedantic -Werror examples/attention.c -o "$prefix/by_hand" \
    "${flags[@]}" -lcofuse
"$prefix/by_hand" >"$prefix/alone"
cat "$prefix/alone"
"$prefix/usr/bin/cofuse" launch -n 4 -- "$prefix/by_hand" >"$prefix/ranks"
cat "$prefix/ranks"
[ -s "$prefix/alone" ] && [ -s "$prefix/ranks" ]

if command -v pkg-config >/dev/null; then
    read -ra flags <<<"$(PKG_CONFIG_PATH=$library/pkgconfig pkg-config --cflags --libs cofuse)"
    gcc -std=c11 examples/attention.c -o "$prefix/by_pkg_config" "${flags[@]}"
fi

mkdir "$prefix/by_cmake"
cat >"$prefix/by_cmake/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(example C)
find_package(cofuse 0.1 REQUIRED)
add_executable(example $PWD/examples/attention.c)
target_link_libraries(example cofuse::cofuse)
END
cmake -G Ninja -S "$prefix/by_cmake" -B "$prefix/by_cmake/build" \
    -DCMAKE_PREFIX_PATH="$prefix/usr" >/dev/null
cmake --build "$prefix/by_cmake/build" >/dev/null
"$prefix/by_cmake/build/example" >/dev/null

# shellcheck disable=SC2016 # for the shell within
as_root='mount -t tmpfs none "$0"
for folder in /etc /usr/local; do
    mkdir -p "$0$folder/new" "$0$folder/work"
    mount -t overlay overlay -o "lowerdir=$folder,upperdir=$0$folder/new,workdir=$0$folder/work" \
        $folder
done'
mkdir "$prefix/mounts"
if [ "$(id -u)" -eq 0 ] && unshare -m sh -ec "$as_root" "$prefix/mounts" 2>/dev/null; then
    unset LD_LIBRARY_PATH
    unshare -m sh -ec "$as_root
        make install >/dev/null
        cc examples/attention.c -o /etc/example -lcofuse
        /etc/example
        cofuse launch -n 2 -- /etc/example" "$prefix/mounts"
else
    echo "make install as root: not tested, there are no mounts to be had"
fi
