#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# ci/check_symbols.sh [--update]: what the libraries export and need.
#   libcofuse.so        exports exactly ci/symbols.txt (--update rewrites it), needs libc and libm
#   libcofuse_static.a  has global symbols that begin with cof_ or cofi_ only, and where there is
#                       CUDA its kernels, cofk_*, hidden like all the rest
# and no fault of the negative controls is in the release build.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
export LC_ALL=C
shared=build/libcofuse.so static=build/libcofuse_static.a list=ci/symbols.txt
failed=0
fail() {
    echo "$@"
    failed=1
}

exported=$(nm -D --defined-only "$shared" | awk '{ print $NF }' | sort)
if [ "${1:-}" = --update ]; then
    printf '%s\n' "$exported" >"$list"
    exit 0
fi
[ -n "$exported" ] || fail "$shared exports nothing"
difference=$(diff "$list" <(printf '%s\n' "$exported")) ||
    fail "exports differ from $list (< listed, > built; ci/check_symbols.sh --update):
$difference"
other=$(grep -vE '^cof_[a-z0-9_]+$' <<<"$exported") && fail "exported, not cof_*: $other"

# Every function that the headers declare is there.
declared=$(sed -nE 's/^COF_API .*\b(cof_[a-z0-9_]+)\(.*/\1/p' include/cofuse/*.h | sort)
missing=$(comm -23 <(printf '%s\n' "$declared") <(printf '%s\n' "$exported"))
[ -z "$missing" ] || fail "declared, not exported: $missing"

# nvcc names what launches a kernel after it.
other=$(nm -g --defined-only "$static" 2>/dev/null | awk 'NF == 3 { print $3 }' |
    grep -vE '^cof[ik]?_|^_Z[A-Za-z0-9_]*cofk_' | sort -u) &&
    fail "global in $static, none of cof_, cofi_, cofk_: $other"
visible=$(readelf -sW "$static" 2>/dev/null |
    awk '$8 ~ /cofk_/ && $5 == "GLOBAL" && $6 == "DEFAULT" && $7 != "UND" { print $8 }' | sort -u)
[ -z "$visible" ] || fail "kernels in $static that are not hidden: $visible"

needed=$(readelf -dW "$shared" | sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p')
while read -r library; do
    case $library in
    libc.so.6 | libm.so.6 | libpthread.so.0 | ld-linux*.so.*) ;;
    *) fail "$shared needs $library" ;;
    esac
done <<<"$needed"
soname=$(readelf -dW "$shared" | sed -nE 's/.*\(SONAME\).*\[(.*)\]/\1/p')
major=$(sed -nE 's/^#define COF_VERSION_MAJOR ([0-9]+)/\1/p' include/cofuse/version.h)
[ "$soname" = "libcofuse.so.$major" ] || fail "soname is '$soname', wanted libcofuse.so.$major"
readelf -dW "$shared" | grep -q TEXTREL && fail "$shared has text relocations"
readelf -lW "$shared" | grep -q 'GNU_STACK.*RWE' && fail "$shared wants an executable stack"

# Unstripped, so that this sees names too; a copy, so that grep -q may stop reading early.
for file in "$shared" "$static"; do
    if strings -a "$file" | grep -E 'COFI_FAULT_|COFUSE_FAULT|cofi_faults?_' >/dev/null; then
        fail "$file holds a fault of the negative controls"
    fi
done
exit $failed
