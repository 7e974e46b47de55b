#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Includes point one way: tools, python -> ops -> symm -> backend -> core; device from .cu files and
# tests only; public headers include standard headers and each other; examples see public headers.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
failed=0

# What the program alone may see of an operator: the library never includes it.
readonly TOOL_SIDE='ops/(ops|check|bench|.*_(ref|plain|check|cases|tool|bench)[a-z0-9_]*)\.[ch]$'
readonly TOOL_SIDE_HEADER="^$TOOL_SIDE" TOOL_SIDE_SOURCE="^src/$TOOL_SIDE"
readonly STANDARD='^(stddef|stdint|stdbool)\.h$'

complain() {
    echo "$1: includes $2: $3"
    failed=1
}

check_library() { # check_library FILE INCLUDE ALLOWED-FOLDERS
    local file=$1 include=$2 allowed=$3
    case $include in
    */*) [[ $include =~ ^($allowed)/ ]] || complain "$file" "$include" "only $allowed from here" ;;
    *)
        [ -f "$(dirname "$file")/$include" ] ||
            complain "$file" "$include" "no such file beside it"
        ;;
    esac
    if [[ $include =~ $TOOL_SIDE_HEADER && ! $file =~ $TOOL_SIDE_SOURCE ]]; then
        complain "$file" "$include" "for the program and the tests only"
    fi
}

while IFS=: read -r file include; do
    case $file in
    include/*)
        [ -f "include/cofuse/$include" ] || complain "$file" "$include" "not a public header"
        ;;
    src/core/*) check_library "$file" "$include" 'cofuse|core' ;;
    src/backend/*) check_library "$file" "$include" 'cofuse|core|backend' ;;
    src/symm/*) check_library "$file" "$include" 'cofuse|core|backend|symm' ;;
    src/device/*) check_library "$file" "$include" 'cofuse|core|device' ;;
    src/ops/*.cu) check_library "$file" "$include" 'cofuse|core|backend|symm|ops|device' ;;
    src/ops/*)
        allowed='cofuse|core|backend|symm|ops'
        [[ $file =~ $TOOL_SIDE_SOURCE ]] && allowed+='|tools'
        check_library "$file" "$include" "$allowed"
        ;;
    tools/*)
        [[ $include =~ ^device/ ]] &&
            complain "$file" "$include" "device is for .cu files and tests"
        ;;
    examples/*)
        [[ $include =~ ^cofuse/ ]] || complain "$file" "$include" "examples see public headers only"
        ;;
    esac
done < <(grep -rHoE '^[[:space:]]*#[[:space:]]*include[[:space:]]+"[^"]+"' \
    --include='*.c' --include='*.h' --include='*.inc' --include='*.cu' --include='*.cuh' \
    include src tools examples | sed -E 's/:[^"]*"([^"]+)"/:\1/')

# Angle brackets: the system's headers; jansson in the program only.
while IFS=: read -r file include; do
    case $file:$include in
    include/*:*)
        [[ $include =~ $STANDARD ]] ||
            complain "$file" "<$include>" "public headers include standard ones only"
        ;;
    *:cofuse/*)
        [[ $file =~ ^(examples|tests)/ ]] || complain "$file" "<$include>" 'write "cofuse/..."'
        ;;
    tools/*:jansson.h | tests/*:jansson.h | tests/*:dlpack/*) ;;
    *:jansson.h | *:dlpack/*) complain "$file" "<$include>" "for the program and the tests only" ;;
    esac
done < <(grep -rHoE '^[[:space:]]*#[[:space:]]*include[[:space:]]+<[^>]+>' \
    --include='*.c' --include='*.h' --include='*.inc' include src tools examples tests |
    sed -E 's/:[^<]*<([^>]+)>/:\1/')
exit $failed
