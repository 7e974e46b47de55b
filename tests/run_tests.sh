#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# tests/run_tests.sh [PATTERN]: runs the tests whose name matches the extended regular expression.
#
# One line per test, as they end, with the seconds that passed and those of processors that it took;
# several run at once. The output of a test is shown when it fails.
# A test fails by a non-zero exit or by its time limit, after which its process group is killed; 77
# means skipped, with the last line of output as the reason. The sanitizer builds are made in the
# background meanwhile. Closes with "N passed, N failed" (and ", N skipped" where any was).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
pattern=${1:-}

n_passed=0 n_failed=0 n_skipped=0 n_seconds=0
scratch=$(mktemp -d)
builder=
declare -A name_of=() seconds_of=() begin_of=() # of the tests that run, by process
cleanup() {
    [ -z "$builder" ] || kill -TERM -- "-$builder" 2>/dev/null
    local group
    for group in "${!name_of[@]}"; do
        kill -KILL -- "-$group" 2>/dev/null
    done
    rm -rf "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

wanted() { [[ $1 =~ $pattern ]]; }

# Most tests wait for something more than they compute: one more of them than there are cores.
slots=$(($(nproc) + 1))

# Runs a command and leaves its processor time, user's and system's, in the file $0.
# shellcheck disable=SC2016
timed='TIMEFORMAT="%0U %0S"; exec 3>&2 2>"$0"; time "$@" 2>&3 3>&-'

# run NAME SECONDS COMMAND...: starts a test, as soon as there is room.
run() {
    local name=$1 seconds=$2
    shift 2
    wanted "$name" || return 0
    while [ ${#name_of[@]} -ge $slots ]; do
        finish_one
    done
    local log=$scratch/${name//\//-}.log
    # A session of its own: nothing of the test outlives it, and nothing but it is killed.
    setsid timeout -k 5 "$seconds" bash -c "$timed" "$log.cpu" "$@" >"$log" 2>&1 </dev/null &
    name_of[$!]=$name
    seconds_of[$!]=$seconds
    begin_of[$!]=${EPOCHREALTIME/./}
}

# Waits for the next test to end, and says how it went.
finish_one() {
    local group rc
    { wait -n -p group "${!name_of[@]}"; } 2>/dev/null # no word of the shell on a killed test
    rc=$?
    kill -KILL -- "-$group" 2>/dev/null
    report "${name_of[$group]}" "${seconds_of[$group]}" "${begin_of[$group]}" $rc
    unset "name_of[$group]" "seconds_of[$group]" "begin_of[$group]"
}

# alone: the tests before have ended, and none runs beside what follows.
alone() {
    while [ ${#name_of[@]} -gt 0 ]; do
        finish_one
    done
}

report() { # report NAME LIMIT BEGIN EXIT
    local name=$1 seconds=$2 begin=$3 rc=$4 took note user system
    local log=$scratch/${name//\//-}.log
    took=$(((${EPOCHREALTIME/./} - begin) / 100000))
    took=${took%?}.${took: -1}
    [[ $took == .* ]] && took=0$took
    took+=" s"
    if read -r user system < <(tail -n 1 "$log.cpu" | grep -xE '[0-9]+ [0-9]+'); then
        took+=", CPU $((user + system)) s"
        n_seconds=$((n_seconds + user + system))
    fi
    # A program that counts for itself says how many.
    note=$(tail -n 1 "$log" | grep -oE '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$')
    note=${note:+$note, }
    case $rc in
    0)
        n_passed=$((n_passed + 1))
        echo "ok - $name (${note}$took)"
        ;;
    77)
        n_skipped=$((n_skipped + 1))
        echo "ok - $name # SKIP $(tail -n 1 "$log")"
        ;;
    *)
        n_failed=$((n_failed + 1))
        if [ "$rc" -eq 124 ] || [ "$rc" -eq 137 ]; then
            note+="over the limit of $seconds s, "
        fi
        echo "not ok - $name (${note}exit $rc, $took)"
        head -c 20000 "$log" | tail -n 200 | sed 's/^/    /'
        ;;
    esac
}

# The programs of the unit tests, by name.
units=()
for source in tests/unit_*.c tests/unit_*.cc; do
    source=${source##*/unit_}
    units+=("${source%.*}")
done

# Which tests a preset needs. Sanitizer builds are without CUDA. ThreadSanitizer is slow, and finds
# nothing in tests of one thread; what trimul_bits compares runs in trimul_cpu too.
# AddressSanitizer's allocator has locks that a child of fork may find held; the tiles of
# attention_cpu and the kernels of vec_exact, which compiles long, run in its checks too. The
# negative controls take one test.
one_thread='allreduce_rmsnorm_args|allreduce_rmsnorm_ref|attention_args|attention_cpu|attention_ref'
one_thread+='|attention_steps|cuda_peers'
one_thread+='|bench|check_memory|core|dlpack|gemm|gemm_bits|grad_return_args'
one_thread+='|layout|memory|npy|option_table|pin|safetensors|trimul_args|trimul_ref'
one_thread+='|trimul_ref_rules|vec|vec_exact|vec_gate'
needs_cuda='attention_cudnn|cuda_(allreduce.*|attention.*|grad_return|world)'
has_test() { # has_test PRESET UNIT
    [[ ! $2 =~ ^($needs_cuda)$ ]] || return 1
    case $1 in
    tsan) [[ ! $2 =~ ^($one_thread|trimul_bits)$ ]] ;;
    fault) [[ $2 = attention_failure ]] ;;
    *) [[ ! $2 =~ ^(fork|attention_cpu|vec_exact)$ ]] ;;
    esac
}

# Builds the presets one after the other, beside the tests that need none of them: the program and
# those tests that will run.
background_builds() {
    local preset name targets
    for preset in "$@"; do
        targets=(cofuse_program)
        for name in "${units[@]}"; do
            has_test "$preset" "$name" && targets+=("unit_$name")
        done
        nice -n 19 ci/build.sh "$preset" "${targets[@]}" >"$scratch/build-$preset" 2>&1 </dev/null
        echo $? >"$scratch/code"
        mv "$scratch/code" "$scratch/built-$preset"
    done
}

# Waits for a preset; a build that fails is a failed test.
built() {
    local rc=1
    until [ -f "$scratch/built-$1" ] || ! kill -0 "$builder" 2>/dev/null; do
        sleep 0.1
    done
    [ ! -f "$scratch/built-$1" ] || rc=$(cat "$scratch/built-$1")
    run "$1/build" 30 sh -c "cat '$scratch/build-$1'; exit $rc"
    return "$rc"
}

# asan is the address and the undefined-behaviour sanitizer in one; ubsan alone when asked for.
presets=()
for preset in fault asan ubsan tsan; do # the controls first: they wait more than they compute
    case $preset:$pattern in
    asan: | tsan: | fault: | *":"*"$preset"*) presets+=("$preset") ;;
    esac
done
if [ ${#presets[@]} -gt 0 ]; then
    set -m # a process group of its own, to be ended as one
    background_builds "${presets[@]}" &
    set +m
    builder=$!
fi

# The long ones first.
run ci/models 1200 ci/check_models.sh
run check/shm 500 build/cofuse check attention grad_return --ranks 1,2,3,4
run check/allreduce_rmsnorm 500 build/cofuse check allreduce_rmsnorm --ranks 1,2,3,4,6,8
run check/trimul 500 build/cofuse check trimul --ranks 1,2,3,4
run check/trimul_many 300 build/cofuse check --ranks 6,8 'trimul*N=2 *' 'trimul*N=7 *' \
    'trimul*N=17:64:7:17 *'
run check/allreduce_rmsnorm_16 300 build/cofuse check 'allreduce_rmsnorm*h=64 *' --ranks 16
for engine in shm thread attach; do
    run "check/runtime_$engine" 300 build/cofuse check runtime --engine $engine --ranks 1,2,3,4
    run "check/runtime_${engine}_staged" 300 env COFUSE_FORCE_STAGED=1 \
        build/cofuse check runtime --engine $engine --ranks 1,2,3,4
done

for script in style headers symbols dependencies docs install; do
    run "ci/$script" 300 "ci/check_$script.sh"
done

# Tests of transfers, which run in the form for peers that are not mapped too.
transfers='arena|attention_failure|attention_shared|grad_return|lifetime|trimul_(bits|cpu)'
for name in "${units[@]}"; do
    run "unit/$name" 240 "build/tests/unit_$name"
    [[ $name =~ ^($transfers)$ ]] &&
        run "unit/${name}_staged" 240 env COFUSE_FORCE_STAGED=1 "build/tests/unit_$name"
done

for script in tests/scenario_*.sh; do
    [ -f "$script" ] || continue
    name=$(basename "$script" .sh)
    run "scenario/${name#scenario_}" 600 bash "$script"
done

# Small cases in the other ways to run.
small=('attention*s=? *' 'attention*s=129 ' 'grad_return*s=? *' 'grad_return*s=129 '
    'allreduce_rmsnorm*h=? *' 'allreduce_rmsnorm*h=64 *' 'allreduce_rmsnorm*h=257 *'
    'allreduce_rmsnorm*h=1000 *' 'trimul*N=7 *' 'trimul*N=33:5 *' 'trimul*N=17:64:7:17 *')
run check/thread 300 build/cofuse check --engine thread --ranks 3 "${small[@]}"
run check/attach 300 build/cofuse check --engine attach --ranks 2 "${small[@]}"
run check/staged 300 env COFUSE_FORCE_STAGED=1 build/cofuse check --ranks 3 "${small[@]}"
run check/plain 300 env COFUSE_GEMM=plain COFUSE_CPU_ISA=scalar \
    build/cofuse check --ranks 2 'attention*s=? *' 'attention*s=129 *dims=?/? *' \
    'trimul*N=7 *' 'trimul*N=17 *'

# Address space randomisation of some kernels is too wide for ThreadSanitizer's shadow.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
    fixed_addresses=(setarch "$(uname -m)" -R)
fi
export ASAN_OPTIONS=abort_on_error=0:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1

# A build that leaves one step of a protocol out must be caught by its test.
negative_controls() {
    local script name
    for script in tests/negative_*.sh; do
        [ -f "$script" ] || continue
        name=$(basename "$script" .sh)
        run "fault/${name#negative_}" 500 bash "$script"
    done
}

for preset in "${presets[@]}"; do
    built "$preset" || continue
    if [ "$preset" = fault ]; then
        negative_controls
        continue
    fi
    for name in "${units[@]}"; do
        has_test "$preset" "$name" || continue
        run "$preset/$name" 400 "${fixed_addresses[@]}" "build/$preset/tests/unit_$name"
    done
    case $preset in
    tsan)
        run tsan/check 400 "${fixed_addresses[@]}" build/tsan/cofuse check \
            --engine thread --ranks 2,3 'attention*s=7 ' 'attention*s=129 *heads=1:1*' \
            'grad_return*s=1 ' 'allreduce_rmsnorm*h=8 *' 'allreduce_rmsnorm*h=257 *' \
            'trimul*N=2 *' 'trimul*N=17:64:7:17 *D=8 *' runtime
        ;;
    *)
        run "$preset/check" 400 "build/$preset/cofuse" check --ranks 3 'attention*s=? *' \
            'attention*s=129 ' 'grad_return*s=? *' 'allreduce_rmsnorm*h=8 *' \
            'allreduce_rmsnorm*h=257 *' 'allreduce_rmsnorm*layout=odd*' 'trimul*N=2 *' \
            'trimul*N=7 *' 'trimul*N=33:5 *' 'trimul*N=129 *D=8 H=8 *' runtime
        ;;
    esac
done
alone

echo "tests took $n_seconds s of CPU"
closing="$n_passed passed, $n_failed failed"
[ $n_skipped -eq 0 ] || closing+=", $n_skipped skipped"
echo "$closing"
[ $n_failed -eq 0 ] && [ $n_passed -gt 0 ]
