#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# The Python package as a user gets it: pip builds it from a copy of the tree into a new virtual
# environment, and its tests run there with NumPy alone (what needs torch is skipped).
#
# PYTHON: another interpreter than python3.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

skip() {
    echo "$1"
    exit 77
}
# Sessions with no launcher around: the tests start ranks of their own.
while IFS= read -r name; do
    unset "$name"
done < <(compgen -e | grep -E '^(COFUSE|MASTER|TORCHELASTIC|OMPI|PMI|SLURM)|^(RANK|WORLD_SIZE)$')

command -v "$python" >/dev/null || skip "$python is missing"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' || skip "$python is older than 3.9"
header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[ -f "$header" ] || skip "Python.h is missing (Debian: python3-dev)"
"$python" -m venv "$scratch/venv" >"$scratch/log" 2>&1 ||
    skip "$python has no venv (Debian: python3-venv)"
venv=$scratch/venv/bin/python
"$venv" -m pip install --disable-pip-version-check -q 'scikit-build-core>=0.10' numpy pytest \
    >"$scratch/log" 2>&1 || skip "pip gets no packages here"

# A copy, so that nothing is written into the tree.
mkdir "$scratch/tree"
cp -r CMakeLists.txt LICENSE NOTICE pyproject.toml cmake docs include python src \
    "$scratch/tree" || exit 1
# The kernels take nvcc long, and are in the build already; so are the objects with -O3.
SKBUILD_CMAKE_DEFINE='CMAKE_COMPILE_WARNING_AS_ERROR=ON;COFUSE_CUDA=OFF'
SKBUILD_CMAKE_DEFINE+=';CMAKE_C_FLAGS_RELEASE=-O1 -g1 -DNDEBUG'
export SKBUILD_CMAKE_DEFINE
if ! "$venv" -m pip install --disable-pip-version-check -q --no-build-isolation "$scratch/tree" \
    >"$scratch/log" 2>&1; then
    cat "$scratch/log"
    echo "pip install failed"
    exit 1
fi
cd "$scratch" || exit 2
"$venv" -c 'import cofuse; print("cofuse", cofuse.__version__, cofuse._cofuse.__file__)' || exit 1
"$venv" -B -m pytest -q -rs -p no:cacheprovider tree/python/tests
