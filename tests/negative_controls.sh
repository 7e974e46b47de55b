#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Leaves out one protocol step at a time (src/core/faults.h) and wants `cofuse check` to fail for
# it; with none left out it must pass. A step whose absence no check sees is a hole in the checks.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/fault/cofuse}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export COFUSE_TIMEOUT=3 COFUSE_INIT_TIMEOUT=20
n_passed=0 n_failed=0

control() { # FAULT WANTED_EXIT(S) ARGUMENTS...
    local fault=$1 wanted=$2 rc
    shift 2
    COFUSE_FAULT=$fault timeout 200 "$cofuse" check "$@" >"$log" 2>&1
    rc=$?
    if [[ " $wanted " == *" $rc "* ]]; then
        echo "ok ${fault:-no fault}: exit status $rc"
        n_passed=$((n_passed + 1))
    else
        echo "not ok ${fault:-no fault}: exit status $rc, wanted one of $wanted"
        tail -n 20 "$log" | sed 's/^/    /'
        n_failed=$((n_failed + 1))
    fi
}

cases=('attention*calls=two' --ranks 4)
control "" 0 "${cases[@]}"
for step in KV_READY_WAIT STAGING_WAIT GRAD_READY_WAIT GRAD_SKIP_LAST; do
    control $step "1" "${cases[@]}"
done
# Ranks then run ahead of each other: wrong results, or words that are overwritten unseen.
for step in KV_ACK_WAIT ARRIVAL_WAIT GRAD_ACK_WAIT; do
    control $step "1 3" "${cases[@]}"
done
# These end at the deadline of the ranks that wait for what never comes.
control KV_ACK "3" "${cases[@]}"
control KV_ACK:1 "3" "${cases[@]}"
# Refused memory on one rank is an error on all, at once.
control ARENA_NOMEM:1 "3" "${cases[@]}"

# What shared arenas, the wrap of epochs, run sizes and attached memory rest on.
control "" 0 'runtime case=wrap' 'runtime case=sharing' 'runtime case=digest' --ranks 2
control EPOCH_RESET "1 3" 'runtime case=wrap' --ranks 2
control END_ACK_WAIT "1 3" 'runtime case=sharing' --ranks 2,3
control DIGEST "1 3" 'runtime case=digest' --ranks 2
control COOKIE "1 3" 'runtime case=two_phase' --ranks 2,3 --engine attach
control POISON "1 3" 'runtime case=poison' --ranks 2
# grad_return by pull.
control PULL_ACK_WAIT "1 3" 'grad_return*transfer=pull*calls=three*delay=random' --ranks 3,4
control PULL_READY_WAIT "1" 'grad_return*transfer=pull*calls=three*delay=random' --ranks 3,4

# allreduce_rmsnorm; x is written to as soon as a call is over.
control "" 0 'allreduce_rmsnorm*calls=12*delay=random' --ranks 3
control "" 0 'allreduce_rmsnorm*h=16384*x=arena*calls=100' --ranks 3,4
for step in ARN_READY_WAIT ARN_SUM_WAIT ARN_HALF; do
    control $step "1 3" 'allreduce_rmsnorm*calls=12*delay=random' --ranks 3
done
control ARN_ACK_WAIT "1" 'allreduce_rmsnorm*h=16384*x=arena*calls=100' --ranks 3,4

echo "$n_passed passed, $n_failed failed"
[ $n_failed -eq 0 ]
