#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Includes point one way: tools, python -> ops -> symm -> backend -> core; device from .cu files and
# tests, but for the two headers that say how memory is laid out; public headers include standard
# headers and each other; examples see public headers. Then what is linked: of CUDA nothing, so that
# the program works where none is.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
failed=0

# What the program alone may see of an operator: the library never includes it.
tool_side='ops/((ops|check|bench)[a-z0-9_]*'
tool_side+='|.*_(ref|plain|check|cases|tool|bench)[a-z0-9_]*)\.(c|h|cu)$'
readonly TOOL_SIDE_HEADER="^$tool_side" TOOL_SIDE_SOURCE="^src/$tool_side"
readonly DEVICE_LAYOUT='^device/(slab|device_arena)\.h$'
readonly STANDARD='^(stddef|stdint|stdbool)\.h$'

complain() {
    echo "$1: includes $2: $3"
    failed=1
}

check_library() { # check_library FILE INCLUDE ALLOWED-FOLDERS
    local file=$1 include=$2 allowed=$3
    [[ $file =~ \.cuh?$ ]] && allowed+='|device'
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
    src/backend/cuda/cuda_none.c) ;; # in the place of functions of symm
    src/backend/*) check_library "$file" "$include" 'cofuse|core|backend' ;;
    src/symm/*)
        [[ $include =~ $DEVICE_LAYOUT ]] ||
            check_library "$file" "$include" 'cofuse|core|backend|symm'
        ;;
    src/device/*) check_library "$file" "$include" 'cofuse|core|device' ;;
    src/ops/*)
        allowed='cofuse|core|backend|symm|ops'
        [[ $file =~ $TOOL_SIDE_SOURCE ]] && allowed+='|tools'
        [[ $include =~ $DEVICE_LAYOUT ]] || check_library "$file" "$include" "$allowed"
        ;;
    tools/*)
        [[ $include =~ ^device/ && ! $include =~ $DEVICE_LAYOUT ]] &&
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
    *:cuda.h | *:cuda_runtime*.h)
        [[ $file =~ _cuda[a-z0-9_]*\.[ch]$|^tests/|^examples/cuda_|^tools/device_info\.c$ ]] ||
            complain "$file" "<$include>" "for files of CUDA: *_cuda.c, *_cuda.h"
        ;;
    tools/*:jansson.h | tests/*:jansson.h | tests/*:dlpack/*) ;;
    *:jansson.h | *:dlpack/*) complain "$file" "<$include>" "for the program and the tests only" ;;
    esac
done < <(grep -rHoE '^[[:space:]]*#[[:space:]]*include[[:space:]]+<[^>]+>' \
    --include='*.c' --include='*.h' --include='*.inc' include src tools examples tests |
    sed -E 's/:[^<]*<([^>]+)>/:\1/')

# ---- what is linked ----

readonly program=build/cofuse shared=build/libcofuse.so
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

needed() { # of a file, one a line
    readelf -dW "$1" | sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p' | sort
}

check_needed() { # FILE LIBRARIES: an extended regular expression, beside libc and the loader
    local library
    while read -r library; do
        [[ $library =~ ^(libc\.so\.6|libm\.so\.6|libpthread\.so\.0|ld-linux.*|$2)$ ]] && continue
        echo "$1 needs $library"
        failed=1
    done < <(needed "$1")
}

for file in "$program" "$shared"; do
    [ -f "$file" ] || {
        echo "$file: build first"
        exit 1
    }
done
check_needed "$shared" -
check_needed "$program" 'libjansson\.so\.4'

# Libraries that only stand in for the driver's are found by LIBRARY_PATH where the toolkit is: a
# library that was linked with them there is the same.
stubs=$(find /usr/local/cuda/lib64/stubs -name libcuda.so 2>/dev/null | head -n 1)
link=$(ninja -C build -t commands libcofuse.so 2>/dev/null | grep -F -e '-shared' | tail -n 1)
if [ -n "$stubs" ] && [ -n "$link" ]; then
    with_stubs=$(sed -E "s,-o libcofuse\.so\.[0-9.]+ ,-o $scratch/libcofuse.so ," <<<"$link")
    if (cd build && LIBRARY_PATH=$(dirname "$stubs") sh -c "$with_stubs") &&
        [ -f "$scratch/libcofuse.so" ]; then
        check_needed "$scratch/libcofuse.so" -
    else
        echo "$shared cannot be linked where LIBRARY_PATH has the stubs of the driver"
        failed=1
    fi
fi

# The driver is looked for when wanted, and may be missing: nothing in the environment, and no
# device to be seen.
env -i PATH="$PATH" CUDA_VISIBLE_DEVICES= "$program" info >"$scratch/info" 2>&1
rc=$?
if [ $rc -ne 0 ] || ! grep -qE '^cuda +[^ ]' "$scratch/info"; then
    echo "$program info fails where there is no device:"
    cat "$scratch/info"
    failed=1
fi
exit $failed
