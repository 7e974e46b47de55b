#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# tests/run_tests.sh [PATTERN]: runs the tests whose name matches the extended regular expression.
#
# One line per test; a test's output is shown when it fails. A test fails by a non-zero exit or by
# its time limit, after which its process group is killed; 77 means skipped, with the last line of
# output as the reason. The sanitizer builds are made in the background meanwhile. Closes with
# "N passed, N failed" (and ", N skipped" where any was).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
pattern=${1:-}

n_passed=0 n_failed=0 n_skipped=0
scratch=$(mktemp -d)
builder=
cleanup() {
    [ -z "$builder" ] || kill -TERM -- "-$builder" 2>/dev/null
    rm -rf "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

wanted() { [[ $1 =~ $pattern ]]; }

# run NAME SECONDS COMMAND...
run() {
    local name=$1 seconds=$2
    shift 2
    wanted "$name" || return 0
    local log=$scratch/log begin=${EPOCHREALTIME/./} group rc took note
    # A session of its own: nothing of the test outlives it, and nothing but it is killed.
    setsid timeout -k 5 "$seconds" "$@" >"$log" 2>&1 </dev/null &
    group=$!
    { wait "$group"; } 2>/dev/null # no word of the shell on a killed test
    rc=$?
    kill -KILL -- "-$group" 2>/dev/null
    took=$(((${EPOCHREALTIME/./} - begin) / 100000))
    took=${took%?}.${took: -1}
    [[ $took == .* ]] && took=0$took
    # A program that counts for itself says how many.
    note=$(tail -n 1 "$log" | grep -oE '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$')
    note=${note:+$note, }
    case $rc in
    0)
        n_passed=$((n_passed + 1))
        echo "ok - $name (${note}$took s)"
        ;;
    77)
        n_skipped=$((n_skipped + 1))
        echo "ok - $name # SKIP $(tail -n 1 "$log")"
        ;;
    *)
        n_failed=$((n_failed + 1))
        if [ $rc -eq 124 ] || [ $rc -eq 137 ]; then
            note+="over the limit of $seconds s, "
        fi
        echo "not ok - $name (${note}exit $rc, $took s)"
        head -c 20000 "$log" | tail -n 200 | sed 's/^/    /'
        ;;
    esac
}

# Builds the presets one after the other, beside the tests that need none of them.
background_builds() {
    local preset
    for preset in "$@"; do
        nice -n 19 ci/build.sh "$preset" >"$scratch/build-$preset" 2>&1 </dev/null
        echo $? >"$scratch/code"
        mv "$scratch/code" "$scratch/built-$preset"
    done
}

# Waits for a preset; a build that fails is a failed test.
built() {
    until [ -f "$scratch/built-$1" ]; do
        kill -0 "$builder" 2>/dev/null || [ -f "$scratch/built-$1" ] || return 1
        sleep 0.1
    done
    local rc
    rc=$(cat "$scratch/built-$1")
    run "$1/build" 30 sh -c "cat '$scratch/build-$1'; exit $rc"
    return "$rc"
}

presets=()
for preset in asan ubsan tsan fault; do
    case $pattern in
    '' | *"$preset"*) presets+=("$preset") ;;
    esac
done
if [ ${#presets[@]} -gt 0 ]; then
    set -m # a process group of its own, to be ended as one
    background_builds "${presets[@]}" &
    set +m
    builder=$!
fi

for script in style headers symbols dependencies docs install; do
    run "ci/$script" 300 "ci/check_$script.sh"
done

for source in tests/unit_*.c; do
    [ -f "$source" ] || continue
    name=$(basename "$source" .c)
    run "unit/${name#unit_}" 120 "build/tests/$name"
done

for script in tests/scenario_*.sh; do
    [ -f "$script" ] || continue
    name=$(basename "$script" .sh)
    run "scenario/${name#scenario_}" 300 bash "$script"
done

# Every case; then small ones in the other ways to run.
run check/shm 400 build/cofuse check --ranks 1,2,3,4
small=('*s=? *' 's=129 ')
run check/thread 300 build/cofuse check --engine thread --ranks 2,3 "${small[@]}"
run check/staged 300 env COFUSE_FORCE_STAGED=1 build/cofuse check --ranks 2,3 "${small[@]}"
run check/plain 300 env COFUSE_GEMM=plain COFUSE_CPU_ISA=scalar \
    build/cofuse check --ranks 2 "${small[@]}"

# Address space randomisation of some kernels is too wide for ThreadSanitizer's shadow.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
    fixed_addresses=(setarch "$(uname -m)" -R)
fi
export ASAN_OPTIONS=abort_on_error=0:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1

for preset in "${presets[@]}"; do
    built "$preset" || continue
    [ "$preset" != fault ] || continue
    for source in tests/unit_*.c; do
        [ -f "$source" ] || continue
        name=$(basename "$source" .c)
        # ThreadSanitizer is slow, and has nothing to find in tests of one thread's arithmetic.
        [[ $preset:$name =~ ^tsan:unit_(attention_cpu|attention_ref|gemm|layout|vec|dlpack)$ ]] &&
            continue
        run "$preset/${name#unit_}" 240 "${fixed_addresses[@]}" "build/$preset/tests/$name"
    done
    case $preset in
    tsan)
        run tsan/check 400 "${fixed_addresses[@]}" build/tsan/cofuse check \
            --engine thread --ranks 1,2,3 '*s=? *' '*s=129 *heads=1:1*'
        ;;
    *)
        run "$preset/check" 400 "build/$preset/cofuse" check --ranks 1,2,3 "${small[@]}"
        ;;
    esac
done

# Negative controls: a build that leaves one step of a protocol out must be caught by its test.
for script in tests/negative_*.sh; do
    [ -f "$script" ] || continue
    [[ " ${presets[*]} " == *" fault "* ]] || continue
    name=$(basename "$script" .sh)
    run "fault/${name#negative_}" 300 bash "$script"
done

closing="$n_passed passed, $n_failed failed"
[ $n_skipped -eq 0 ] || closing+=", $n_skipped skipped"
echo "$closing"
[ $n_failed -eq 0 ] && [ $n_passed -gt 0 ]
