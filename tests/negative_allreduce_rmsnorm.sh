#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# allreduce_rmsnorm with one protocol step left out (src/core/faults.h): its checks must fail. That
# a call waits for the readers of its x shows where x is overwritten at once, as the unit test does.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/fault/cofuse}
unit=build/fault/tests/unit_allreduce_rmsnorm_cpu
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

check=("$cofuse" check 'allreduce_rmsnorm*h=1000*calls=12*delay=random*' --ranks 4)
wanted NONE 0 "${check[@]}"
for step in ARN_READY_WAIT ARN_SUM_WAIT ARN_HALF; do
    wanted $step fails "${check[@]}"
done
wanted NONE 0 $unit
wanted ARN_ACK_WAIT fails $unit
[ $n_failed -eq 0 ]
