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
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=tests/expect.sh
source tests/expect.sh
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "# no CUDA device"
    exit 77
fi

check=("$cofuse" check --device cuda --ranks 4)
ring=("${check[@]}" 'attention*s=698*calls=two*delay=random' 'attention*s=2999*calls=two')
gather=("${check[@]}" 'attention*s=698*calls=two*schedule=gather')
control NONE 0 "${ring[@]}"
for step in KV_READY_WAIT KV_ACK_WAIT STAGING_WAIT KV_ACK KV_ACK:1; do
    control $step "1 3" "${ring[@]}"
done
# Transfers so short end before what has to wait for them begins, waited for or not.
control COMM_LATE 0 "${ring[@]}"
control ARRIVAL_WAIT,COMM_LATE "1 3" "${ring[@]}"
control COMM_LATE 0 "${gather[@]}"
control ARRIVAL_WAIT,COMM_LATE "1 3" "${gather[@]}"
closing
