#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# allreduce_rmsnorm with one protocol step left out (src/core/faults.h): its checks must fail. That
# a call waits for the readers of its x shows where x is large and written to as soon as the call is
# over.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/fault/cofuse}
export COFUSE_TIMEOUT=3 COFUSE_INIT_TIMEOUT=20
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=tests/expect.sh
source tests/expect.sh

check=("$cofuse" check 'allreduce_rmsnorm*calls=12*delay=random*' --ranks '3,4')
control NONE 0 "${check[@]}"
for step in ARN_READY_WAIT ARN_SUM_WAIT ARN_HALF; do
    control $step "1 3" "${check[@]}"
done
in_arena=("$cofuse" check 'allreduce_rmsnorm*h=16384*x=arena*calls=100' --ranks '3,4')
control NONE 0 "${in_arena[@]}"
control ARN_ACK_WAIT 1 "${in_arena[@]}"

closing
