#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# python/build_site.sh [FOLDER]: the package without pip, in FOLDER/cofuse (default: build/site),
# for PYTHONPATH=FOLDER. It runs on every Python from 3.9 on, also where neither CMake nor a
# compiler is, if the C library there is not older than the one here.
#
# PYTHON: an interpreter with headers, other than python3.
set -euo pipefail
cd "$(dirname "$0")/.."
site=${1:-build/site}
log=build/python.log

build() {
    cmake -S . -B build/python -G Ninja -DCMAKE_BUILD_TYPE=Release -DCOFUSE_PYTHON=ON \
        -DPython_EXECUTABLE="$(command -v "${PYTHON:-python3}")" &&
        cmake --build build/python &&
        cmake --install build/python --prefix "$site" --strip
}

mkdir -p build
if ! build >"$log" 2>&1; then
    cat "$log"
    exit 1
fi
cp python/cofuse/*.py python/cofuse/*.pyi python/cofuse/py.typed "$site/cofuse/"
echo "PYTHONPATH=$(realpath "$site")"
