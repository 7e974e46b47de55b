#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# tests/run_gpu.sh [--json FILE] [--only REGEX] [--limit SECONDS] [--list]: the tests that need CUDA
# devices, on the first visible device and, where there are several, on all.
#
# A line for each row, whose output is shown when it fails. REGEX selects rows by their names
# (--list), so that a part can be done at a time. A row is killed after
# SECONDS [300]. Exit code 1 when a row fails, and where there is no device.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
json='' only='' limit=300 list=''
while [ $# -gt 0 ]; do
    case $1 in
    --json) json=${2:?} && shift 2 ;;
    --only) only=${2:?} && shift 2 ;;
    --limit) limit=${2:?} && shift 2 ;;
    --list) list=1 && shift ;;
    *) echo "usage: tests/run_gpu.sh [--json FILE] [--only REGEX] [--limit SECONDS] [--list]" >&2
        exit 2 ;;
    esac
done

die() {
    echo "test-gpu: $*" >&2
    exit 1
}

# ---- the machine ----

driver='' names=()
if [ -z "$list" ]; then
    [ -x build/cofuse ] || die "there is no build/cofuse: run make first"
    build/cofuse check runtime --device cuda --list >/dev/null || die "no CUDA in this build"
    mapfile -t names < <(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null)
    [ ${#names[@]} -gt 0 ] || die "no CUDA device: nvidia-smi names none; nothing was tested"
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
fi
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
else
    mapfile -t visible < <(seq 0 $((${#names[@]} > 0 ? ${#names[@]} - 1 : 1)))
fi
all=$(IFS=, && echo "${visible[*]}")

# ---- rows ----

scratch=$(mktemp -d) child=
cleanup() {
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
    rm -rf "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
rows=() n_failed=0 n_rows=0

quoted() { # as a JSON string
    local text=${1//\\/\\\\}
    text=${text//\"/\\\"}
    printf '"%s"' "${text//$'\n'/ }"
}

# Of a row that failed: what is not a case that passed, the slowest cases, and where it stood.
show_log() {
    {
        grep -vE '^(ok  |skip) ' "$scratch/log" | tail -n 60 | head -c 12000
        grep -E '^ok ' "$scratch/log" | sed -E 's/^(.*\(([0-9.]+) s\).*)$/\2 \1/' | sort -rn |
            head -n 8 | sed -E 's/^[0-9.]+ /slow /'
        echo "last $(grep -E '^(ok  |skip|FAIL) ' "$scratch/log" | tail -n 1)"
    } | sed 's/^/     /'
}

# The command of a row, killed with all its processes after $limit seconds or by Ctrl-C.
limited() {
    timeout -k 5 "$limit" "$@" >"$scratch/log" 2>&1 </dev/null &
    child=$!
    wait "$child"
    local rc=$?
    child=''
    return $rc
}

# row NAME DEVICES RANKS "VARIABLE=value ..." COMMAND...
row() {
    local name=$1 devices=$2 ranks=$3 environment=$4 begin took rc counts word verdict=ok
    local passed=0 failed=0 skipped=0
    shift 4
    [[ $name =~ $only ]] || return 0
    if [ -n "$list" ]; then
        echo "$name"
        return 0
    fi
    local variables=("CUDA_VISIBLE_DEVICES=$devices")
    for word in $environment; do
        variables+=("$word")
    done
    begin=${EPOCHREALTIME/./}
    limited env "${variables[@]}" "$@"
    rc=$?
    took=$(((${EPOCHREALTIME/./} - begin) / 100000))
    took=$((took / 10)).$((took % 10))
    counts=$(sed -nE 's/^([0-9]+) (checks )?(passed, [0-9]+ failed(, [0-9]+ skipped)?)$/\1 \3/p' \
        "$scratch/log")
    counts=${counts##*$'\n'}
    if [ -n "$counts" ]; then
        read -r passed _ failed _ skipped _ <<<"$counts 0"
    fi
    skipped=${skipped:-0}
    [ -n "$counts" ] || counts="no counts"
    if [ $rc -ne 0 ]; then
        verdict=FAIL
        n_failed=$((n_failed + 1))
        case $rc in
        124 | 137) counts+=", over the limit of $limit s" ;;
        *) counts+=", exit $rc" ;;
        esac
        [ "$failed" -gt 0 ] || failed=1
    fi
    printf '%-4s %-34s %-36s %7s s\n' $verdict "$name" "$counts" "$took"
    [ $rc -eq 0 ] || show_log
    n_rows=$((n_rows + 1))
    rows+=("$(printf '{"name": %s, "command": %s, "environment": %s, "ranks": %s, "devices": %s, ' \
        "$(quoted "$name")" "$(quoted "$*")" "$(quoted "${variables[*]}")" "$ranks" \
        "$(awk -F, '{ print NF }' <<<"$devices")")$(
        printf '"passed": %s, "failed": %s, "skipped": %s, "exit": %s, "seconds": %s}' \
            "$passed" "$failed" "$skipped" "$rc" "$took")")
}

# check NAME DEVICES RANKS "VARIABLE=value ..." OPTIONS AND PATTERNS...
check() {
    local name=$1 devices=$2 ranks=$3 environment=$4
    shift 4
    row "$name/ranks=$ranks" "$devices" "$ranks" "$environment" \
        build/cofuse check "$@" --device cuda --ranks "$ranks" --verbose
}

# What the memory checker has time for: every kernel of the runtime, each kind of call.
small=('*case=put_get bytes=4097*' '*case=put_get memory=device bytes=4099*' '*form=chain*'
    '*case=calls *' '*case=wrap form=push epoch=1 *' '*case=sharing plans=2*' '*case=tagged*'
    '*case=streams*' '*case=graph form=calls*' '*case=zeroed form=two*')
# Both kernels in all types; parts, tails, odd addresses, a second plan, a graph, epochs that turn.
small_allreduce=('*h=1 t=P-1:P:P+1*first ranks=*' '*h=64 t=3 *data=zero*first ranks=*'
    '*h=257 t=3C+2:C-1 *first ranks=*' '*h=257 t=3C+2:C-1 *before_turn ranks=*'
    '*h=1000 t=6:12:4 *layout=odd*first ranks=*' '*h=1000 t=6:12:4 *plans=streams*first ranks=*'
    '*h=1000 t=4:2 *plans=one*graph=replayed epoch=first ranks=*')

# All parts of the kernels: grains of eight and of one, each transfer, sections, a graph, a reset.
small_grad=('*dtype=bf16 *s=129 *dims=64/64*rounds=2*' '*s=2P *dims=5/3*rounds=2*'
    '*s=698 *by=section*calls=three*rounds=2*' '*s=698 *epoch=before_turn*rounds=2*'
    '*s=698 *transfer=caller*calls=three*rounds=2*')

memcheck() { # memcheck NAME DEVICES PATTERNS...
    local name=$1/memcheck/ranks=2 devices=$2
    shift 2
    if [ -z "$list" ] && ! command -v compute-sanitizer >/dev/null; then
        echo "skip $name: there is no compute-sanitizer"
        return 0
    fi
    row "$name" "$devices" 2 COFUSE_TIMEOUT=120 \
        compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 \
        build/cofuse check "$@" --device cuda --ranks 2
}

on_devices() { # on_devices NAME DEVICES LEAST_RANKS
    local name=$1 devices=$2 least=$3 ranks
    for ranks in 1 2 4 8; do
        [ $ranks -ge "$least" ] || continue
        check "$name/shm" "$devices" $ranks '' runtime
        check "$name/thread" "$devices" $ranks CUDA_DEVICE_MAX_CONNECTIONS=32 runtime \
            --engine thread
        [ $ranks -le 4 ] || continue
        check "$name/attach" "$devices" $ranks '' runtime --engine attach
        check "$name/ipc" "$devices" $ranks COFUSE_CUDA_MEMORY=ipc runtime
        [ $ranks -ge 2 ] || continue
        check "$name/staged" "$devices" $ranks COFUSE_FORCE_STAGED=1 runtime
        check "$name/connections=1" "$devices" $ranks CUDA_DEVICE_MAX_CONNECTIONS=1 runtime
    done
    memcheck "$name" "$devices" "${small[@]}"
}

allreduce_on_devices() { # allreduce_on_devices NAME DEVICES LEAST_RANKS
    local name=$1/allreduce_rmsnorm devices=$2 least=$3 ranks
    for ranks in 1 2 4 8; do
        [ $ranks -ge "$least" ] || continue
        check "$name/shm" "$devices" $ranks '' allreduce_rmsnorm
    done
    for ranks in 2 4; do
        check "$name/thread" "$devices" $ranks CUDA_DEVICE_MAX_CONNECTIONS=32 allreduce_rmsnorm \
            --engine thread
        check "$name/words" "$devices" $ranks COFUSE_TAGGED_UNITS=words allreduce_rmsnorm
    done
    check "$name/attach" "$devices" 2 '' allreduce_rmsnorm --engine attach
    memcheck "$name" "$devices" "${small_allreduce[@]}"
}

# Every kind of call and step: both schedules, a window, padding, strides, a graph, an accumulator.
small_attention=('* s=[57] *strides=padded*' '*chunking=padded s=5 *' '* s=129 *calls=graph*'
    '*window=none* s=129 *calls=two*schedule=ring*')

attention_on_devices() { # attention_on_devices NAME DEVICES LEAST_RANKS
    local name=$1/attention devices=$2 least=$3 ranks
    for ranks in 1 2 3 4 8; do
        [ $ranks -ge "$least" ] || continue
        check "$name/shm" "$devices" $ranks '' attention
    done
    check "$name/exact" "$devices" 2 COFUSE_ATTENTION_ENGINE=exact attention
    check "$name/thread" "$devices" 2 CUDA_DEVICE_MAX_CONNECTIONS=32 attention --engine thread
    check "$name/connections=1" "$devices" 2 CUDA_DEVICE_MAX_CONNECTIONS=1 attention
    check "$name/attach" "$devices" 2 '' attention --engine attach
    memcheck "$name" "$devices" "${small_attention[@]}"
}

grad_on_devices() { # grad_on_devices NAME DEVICES LEAST_RANKS
    local name=$1/grad_return devices=$2 least=$3 ranks
    for ranks in 1 2 3 4 8; do
        [ $ranks -ge "$least" ] || continue
        check "$name/shm" "$devices" $ranks '' grad_return
    done
    for ranks in 2 4; do
        check "$name/thread" "$devices" $ranks CUDA_DEVICE_MAX_CONNECTIONS=32 grad_return \
            --engine thread
        check "$name/staged" "$devices" $ranks COFUSE_FORCE_STAGED=1 grad_return
    done
    check "$name/connections=1" "$devices" 2 CUDA_DEVICE_MAX_CONNECTIONS=1 grad_return
    check "$name/attach" "$devices" 2 '' grad_return --engine attach
    memcheck "$name" "$devices" "${small_grad[@]}"
}

row unit/cuda_world "$all" 2 '' build/tests/unit_cuda_world
row unit/cuda_allreduce_plans "${visible[0]}" 4 '' build/tests/unit_cuda_allreduce_plans
on_devices one "${visible[0]}" 1
allreduce_on_devices one "${visible[0]}" 1
row one/allreduce_rmsnorm/killed/ranks=4 "${visible[0]}" 4 '' build/tests/unit_cuda_allreduce
attention_on_devices one "${visible[0]}" 1
row one/attention/killed/ranks=3 "${visible[0]}" 3 '' build/tests/unit_cuda_attention
grad_on_devices one "${visible[0]}" 1
row one/grad_return/killed/ranks=2 "${visible[0]}" 2 '' build/tests/unit_cuda_grad_return
if [ ${#visible[@]} -gt 1 ]; then
    on_devices all "$all" 2
    allreduce_on_devices all "$all" 2
    row all/allreduce_rmsnorm/killed/ranks=4 "$all" 4 '' build/tests/unit_cuda_allreduce
    attention_on_devices all "$all" 2
    row all/attention/killed/ranks=3 "$all" 3 '' build/tests/unit_cuda_attention
    grad_on_devices all "$all" 2
    row all/grad_return/killed/ranks=2 "$all" 2 '' build/tests/unit_cuda_grad_return
fi
[ -z "$list" ] || exit 0

# ---- what came of it ----

if [ -n "$json" ]; then
    {
        printf '{\n  "date": "%s",\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
        printf '  "command": %s,\n' "$(quoted "tests/run_gpu.sh${only:+ --only $only}")"
        printf '  "machine": {"gpus": [%s], "n_gpus": %s, "driver": %s},\n' "$(
            for i in "${!names[@]}"; do
                [ "$i" -eq 0 ] || printf ', '
                quoted "${names[$i]}"
            done
        )" ${#names[@]} "$(quoted "$driver")"
        printf '  "rows": [\n'
        for i in "${!rows[@]}"; do
            printf '    %s%s\n' "${rows[$i]}" "$([ "$i" -eq $((${#rows[@]} - 1)) ] || echo ,)"
        done
        printf '  ]\n}\n'
    } >"$json"
fi
[ $n_rows -gt 0 ] || die "no row matches \"$only\" (--list prints them)"
echo "$((n_rows - n_failed)) passed, $n_failed failed"
[ $n_failed -eq 0 ]
