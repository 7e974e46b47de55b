#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Attention on CUDA devices with one protocol step left out (src/core/faults.h): its checks must
# fail. Skipped where no device is.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/fault/cofuse}
export COFUSE_TIMEOUT=3 COFUSE_INIT_TIMEOUT=20
n_failed=0
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "# no CUDA device"
    exit 77
fi

wanted() { # FAULT 0|fails ARGUMENTS...
    local fault=$1 wanted=$2 rc seen=fails
    shift 2
    COFUSE_FAULT=$fault timeout 200 "$cofuse" check "$@" --device cuda >/dev/null 2>&1
    rc=$?
    [ $rc -ne 0 ] || seen=0
    if [ "$seen" = "$wanted" ] && [ $rc -ne 2 ] && [ $rc -ne 124 ]; then
        echo "ok ${fault}: exit status $rc"
    else
        echo "not ok ${fault}: exit status $rc, wanted: $wanted"
        n_failed=$((n_failed + 1))
    fi
}

ring=('attention*s=698*calls=two*delay=random' 'attention*s=2999*calls=two' --ranks 4)
gather=('attention*s=698*calls=two*schedule=gather' --ranks 4)
wanted NONE 0 "${ring[@]}"
for step in KV_READY_WAIT KV_ACK_WAIT STAGING_WAIT KV_ACK KV_ACK:1; do
    wanted $step fails "${ring[@]}"
done
# Transfers so short end before what has to wait for them begins, waited for or not.
wanted COMM_LATE 0 "${ring[@]}"
wanted ARRIVAL_WAIT,COMM_LATE fails "${ring[@]}"
wanted COMM_LATE 0 "${gather[@]}"
wanted ARRIVAL_WAIT,COMM_LATE fails "${gather[@]}"
[ $n_failed -eq 0 ]
