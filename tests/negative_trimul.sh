#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# trimul with one protocol step left out (src/core/faults.h): its checks must fail.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/fault/cofuse}
export COFUSE_TIMEOUT=3 COFUSE_INIT_TIMEOUT=20
n_failed=0

wanted() { # FAULT 0|fails COMMAND...
    local fault=$1 wanted=$2 rc seen=fails
    shift 2
    COFUSE_FAULT=$fault timeout 200 "$@" >/dev/null 2>&1
    rc=$?
    [ $rc -ne 0 ] || seen=0
    if [ "$seen" = "$wanted" ] && [ $rc -ne 2 ] && [ $rc -ne 124 ]; then
        echo "ok ${fault}: exit status $rc"
    else
        echo "not ok ${fault}: exit status $rc, wanted: $wanted"
        n_failed=$((n_failed + 1))
    fi
}

check=("$cofuse" check 'trimul*delay=random*' --ranks 3)
wanted NONE 0 "${check[@]}"
for step in TRI_AB_WAIT TRI_TRI_WAIT TRI_DTRI_WAIT TRI_DAB_WAIT TRI_PARTS_WAIT TRI_SUMS_WAIT \
    TRI_HASH_WAIT; do
    wanted $step fails "${check[@]}"
done
[ $n_failed -eq 0 ]
