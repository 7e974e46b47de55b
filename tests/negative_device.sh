#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Leaves out or weakens one step at a time of what the tests of src/device do (MODEL_STEPS of
# tests/device_model.h), under ThreadSanitizer, and wants the test to fail: a data race, a wrong
# value, a wait that ends at its deadline, or a barrier of a block that not all threads come to.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
controls=( # TEST STEP
    'calls STORE_RELAXED'
    'calls LOAD_RELAXED'
    'calls NO_READY_WAIT'
    'calls NO_ACK_WAIT'
    'calls NO_END_ACK_WAIT'
    'calls NO_RESET'
    'calls SIGNAL_BEFORE_DATA'
    'calls ACK_BEFORE_READ'
    'calls END_BEFORE_READ'
    'calls ACKS_OF_ZERO'
    'calls NO_SYNC_SIGNAL'
    'calls NO_SYNC_BEGIN_READ'
    'calls NO_SYNC_BEGIN'
    'calls NO_SYNC_END'
    'failure RELEASE_AFTER_FAILURE'
    'words STORE_RELAXED'
    'words LOAD_RELAXED'
    'words COUNT_BEFORE_DATA'
    'words NO_CREDIT'
    'words TAG_BEFORE_PAYLOAD'
    'words ONE_HALF'
    'grid ONE_HALF'
    'grid NO_READY_WAIT'
    'grad STORE_RELAXED'
    'grad LOAD_RELAXED'
    'grad NO_READY_WAIT'
    'grad NO_ACK_WAIT'
)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Address space randomisation of some kernels is too wide for ThreadSanitizer's shadow.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
    fixed_addresses=(setarch "$(uname -m)" -R)
fi
mapfile -t units < <(printf '%s\n' "${controls[@]% *}" | sort -u)
ci/build.sh tsan "${units[@]/#/unit_device_}" || exit 1
export TSAN_OPTIONS=halt_on_error=1:report_thread_leaks=0

control() { # TEST STEP
    local log=$scratch/$1-$2 rc how
    MODEL_BREAK=$2 timeout 40 "${fixed_addresses[@]}" "build/tsan/tests/unit_device_$1" >"$log" 2>&1
    rc=$?
    how=$(grep -oE -m 1 'ThreadSanitizer: data race' "$log" ||
        grep -E -m 1 '^not ok ' "$log")
    case $rc:$how in
    66:*race | 1:*) echo "ok $1 $2: ${how:0:90}" ;;
    124:) echo "ok $1 $2: hangs" ;;
    *)
        echo "not ok $1 $2: exit status $rc"
        tail -n 20 "$log" | sed 's/^/    /'
        ;;
    esac
}

run_controls() {
    local n_running=0 what
    for what in "${controls[@]}"; do
        if [ $n_running -ge "$(nproc)" ]; then
            wait -n
            n_running=$((n_running - 1))
        fi
        control "${what% *}" "${what#* }" &
        n_running=$((n_running + 1))
    done
    wait
}

run_controls | tee "$scratch/lines"
n_passed=$(grep -c '^ok ' "$scratch/lines")
n_failed=$(grep -c '^not ok ' "$scratch/lines")
echo "$n_passed passed, $n_failed failed"
[ "$n_failed" -eq 0 ] && [ "$n_passed" -eq ${#controls[@]} ]
