#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Every public header compiles alone, as C11 and as C++17, and so do the headers of src/device, in
# C++ for the host too; every source file compiles without a warning under clang too, where clang is
# installed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
failed=0
flags=(-Wall -Wextra -Wpedantic -Werror -fsyntax-only)

alone() { # alone COMPILER LANGUAGE STANDARD HEADER
    printf '#include <cofuse/%s>\n' "${4##*/}" |
        "$1" -x "$2" "-std=$3" "${flags[@]}" -Iinclude - || {
        echo "$4 under $1 as $3"
        failed=1
    }
}

for header in include/cofuse/*.h; do
    alone gcc c c11 "$header"
    alone g++ c++ c++17 "$header"
    if command -v clang >/dev/null; then
        alone clang c c11 "$header"
        alone clang c++ c++17 "$header"
    fi
done

for header in src/device/*.h; do
    g++ -x c++ -std=c++17 -Wall -Wextra -Werror -fsyntax-only -Isrc -Iinclude "$header" || {
        echo "$header under g++ for the host"
        failed=1
    }
done

# The build's own commands, with clang in gcc's place.
if command -v clang >/dev/null && [ -f build/compile_commands.json ]; then
    while read -ra words; do
        clang "${words[@]}" -Wno-unknown-warning-option -fsyntax-only || {
            echo "${words[-1]} under clang"
            failed=1
        }
    done < <(sed -nE 's/^ *"command": "[^ ]+ (.*) -o [^ ]+ -c ([^ "]+)",?$/\1 \2/p' \
        build/compile_commands.json)
fi
exit $failed
