#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Leaves out one protocol step at a time (src/core/faults.h) and wants `cofuse check` to fail for
# it; with none left out it must pass. A step whose absence no check sees is a hole in the checks.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/fault/cofuse}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=tests/expect.sh
source tests/expect.sh
export COFUSE_TIMEOUT=3 COFUSE_INIT_TIMEOUT=20

check=("$cofuse" check)
attention=("${check[@]}" 'attention*calls=two' --ranks 4)
control NONE 0 "${attention[@]}"
for step in KV_READY_WAIT STAGING_WAIT GRAD_READY_WAIT GRAD_SKIP_LAST; do
    control $step 1 "${attention[@]}"
done
# Ranks then run ahead of each other: wrong results, or words that are overwritten unseen.
for step in KV_ACK_WAIT ARRIVAL_WAIT GRAD_ACK_WAIT; do
    control $step "1 3" "${attention[@]}"
done
# These end at the deadline of the ranks that wait for what never comes.
control KV_ACK 3 "${attention[@]}"
control KV_ACK:1 3 "${attention[@]}"
# Refused memory on one rank is an error on all, at once.
control ARENA_NOMEM:1 3 "${attention[@]}"

# What shared arenas, the wrap of epochs, run sizes and attached memory rest on.
control NONE 0 "${check[@]}" 'runtime case=wrap' 'runtime case=sharing' 'runtime case=digest' \
    --ranks 2
control EPOCH_RESET "1 3" "${check[@]}" 'runtime case=wrap' --ranks 2
control END_ACK_WAIT "1 3" "${check[@]}" 'runtime case=sharing' --ranks 2,3
control DIGEST "1 3" "${check[@]}" 'runtime case=digest' --ranks 2
control COOKIE "1 3" "${check[@]}" 'runtime case=two_phase' --ranks 2,3 --engine attach
control POISON "1 3" "${check[@]}" 'runtime case=poison' --ranks 2
# grad_return by pull.
pull=("${check[@]}" 'grad_return*transfer=pull*calls=three*delay=random' --ranks '3,4')
control PULL_ACK_WAIT "1 3" "${pull[@]}"
control PULL_READY_WAIT 1 "${pull[@]}"

closing
