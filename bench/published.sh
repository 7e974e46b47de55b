#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/published.sh [--ranks N] [--out FOLDER] [--only REGEX] [--seconds S] [--list]: the tables
# that others have published for these operators, measured on this machine's CUDA devices: errors,
# times and the change of algorithm of allreduce_rmsnorm, and all operators beside their rivals.
#
# A line for each row, and its table. N is the number of visible devices, and at least 2; with more
# ranks than devices some share one: everything runs, but times tell nothing of N devices. REGEX
# selects rows by name, so that a part can be done at a time. A row is killed
# after S seconds [150]. Documents go to FOLDER/results and FOLDER/peers/results [build/published];
# --out bench puts them where pages show them from. Exit code 1 when a row fails.
#
# PYTHON: the interpreter that has torch [python3]; the package cofuse is taken from build/site
# (python/build_site.sh) where that exists.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
ranks='' out=build/published only='' limit=150 list=''
usage() {
    echo "usage: bench/published.sh [--ranks N] [--out FOLDER] [--only REGEX] [--seconds S]" \
        "[--list]" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --ranks) ranks=${2:?} && shift 2 ;;
    --out) out=${2:?} && shift 2 ;;
    --only) only=${2:?} && shift 2 ;;
    --seconds) limit=${2:?} && shift 2 ;;
    --list) list=1 && shift ;;
    *) usage ;;
    esac
done
[[ ${ranks:-2} =~ ^([2-9]|1[0-6])$ && $limit =~ ^[1-9][0-9]*$ ]] || usage
python=${PYTHON:-python3}
[ ! -d build/site/cofuse ] || export PYTHONPATH=$PWD/build/site${PYTHONPATH:+:$PYTHONPATH}

# ---- the machine ----

found=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || found=''
names=()
[ -z "$found" ] || mapfile -t names <<<"$found"
n_devices=${#names[@]}
if [ -n "${CUDA_VISIBLE_DEVICES+x}" ]; then
    n_devices=$(awk -F, '{ print NF }' <<<"$CUDA_VISIBLE_DEVICES")
fi
if [ -z "$list" ] && { [ ! -x build/cofuse ] || [ ${#names[@]} -eq 0 ]; }; then
    echo "published: wanted build/cofuse (make) and a CUDA device; nothing was measured" >&2
    exit 1
fi
ranks=${ranks:-$((n_devices > 2 ? n_devices : 2))}
# "NVIDIA H200": h200-4gpus; h200-2gpus-4ranks where the numbers differ.
machine=$(sed -E 's/^NVIDIA //; s/[^A-Za-z0-9].*//' <<<"${names[0]:-gpu}")
machine=${machine,,}-${n_devices}gpus
[ "$ranks" -eq "$n_devices" ] || machine+=-${ranks}ranks

# Ranks that share devices are threads, which run at once, where processes take turns of 2 ms. The
# programs beside rivals start processes all the same, and check by way of the host: less of all.
few=(--processes 1) starts=(--processes 3) sampled=(--samples 5 --processes 2)
engine=() calls=() payloads=() lengths=(16384 65536 262144)
if [ "$ranks" -gt "$n_devices" ]; then
    engine=(--engine thread) starts=("${few[@]}") sampled=(--samples 3 "${few[@]}")
    calls=(--calls 4 --tokens "1,64,512") lengths=(16384 65536)
    payloads=(--payloads "$((1 << 16)),$((1 << 20)),$((1 << 24)),$((1 << 26))")
fi
# Causal attention wants multiples of two chunks to a rank.
rows=''
for n_rows in "${lengths[@]}"; do
    rows+=,$((n_rows - n_rows % (2 * ranks)))
done
# A process set ends before its row does.
sampled+=(--seconds $((limit > 30 ? limit - 15 : limit)))

# ---- rows ----

scratch=$(mktemp -d) child=
cleanup() {
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
    rm -rf "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
n_rows=0 n_failed=0

table_of() { # ROW FILE
    case $1 in
    errors | crossover) python3 -B "bench/$1.py" "$2" ;;
    peers/*) python3 -B bench/peers/show.py "$2" ;;
    *) build/cofuse bench --from "$2" --markdown | grep '^|' ;;
    esac
}

quoted() { # as words of a command line
    local word
    for word; do
        case $word in
        *[\ *?]*) printf " '%s'" "$word" ;;
        *) printf ' %s' "$word" ;;
        esac
    done
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

row() { # ROW FILE COMMAND...
    local name=$1 file=$out/$2 verdict=ok begin rc took
    shift 2
    [[ $name =~ $only ]] || return 0
    if [ -n "$list" ]; then
        printf '%-24s%s\n' "$name" "$(quoted "$@" --json "$file")"
        return 0
    fi
    mkdir -p "$(dirname "$file")"
    touch "$scratch/begin"
    begin=${EPOCHREALTIME/./}
    limited "$@" --json "$file"
    rc=$?
    took=$(((${EPOCHREALTIME/./} - begin) / 100000))
    case $rc in
    0) ;;
    124 | 137) verdict="FAIL, over the limit of $limit s" ;;
    *) verdict="FAIL, exit $rc" ;;
    esac
    # Of a row that failed too: what it had until then.
    true >"$scratch/table"
    if [ "$file" -nt "$scratch/begin" ]; then
        table_of "$name" "$file" >"$scratch/table" 2>&1 || [ $rc -ne 0 ] || verdict="FAIL, no table"
    fi
    n_rows=$((n_rows + 1))
    printf '%-24s %s, %s.%s s, %s\n' "$name" "$verdict" $((took / 10)) $((took % 10)) "$file"
    if [ "$verdict" != ok ]; then
        n_failed=$((n_failed + 1))
        tail -n 40 "$scratch/log" | head -c 6000 | sed 's/^/     /'
    fi
    sed 's/^/     /' "$scratch/table"
}

cofuse=(build/cofuse) device=(--device cuda --ranks "$ranks" "${engine[@]}")
# The table of errors is of 4 ranks; fewer have the same cases.
row errors "results/$machine-errors.json" "${cofuse[@]}" check published_error --verbose \
    --device cuda --ranks $((ranks < 4 ? ranks : 4)) "${engine[@]}"
row latency "results/$machine-latency.json" "${cofuse[@]}" bench \
    'allreduce_rmsnorm name=llama-3-8b how=graph T=* H=4096 ranks=' "${device[@]}" \
    "${starts[@]}" --repeat 20 --seconds 0.2
row crossover "results/$machine-crossover.json" "${cofuse[@]}" bench 'name=crossover ' \
    "${device[@]}" "${few[@]}" --repeat 20 --seconds 0.2
row peers/allreduce_rmsnorm "peers/results/$machine-allreduce_rmsnorm.json" \
    "$python" bench/peers/allreduce_rmsnorm_cuda.py --ranks "$ranks" "${calls[@]}" --no-compile \
    --only cofuse,nccl,nccl-alone,one-shot,one-shot-alone,two-shot,two-shot-alone "${sampled[@]}"
row peers/attention "peers/results/$machine-attention.json" \
    "$python" bench/peers/attention_cuda.py --ranks "$ranks" --rows "${rows#,}" --heads 20 \
    --only cofuse,cofuse-graph,ring,ring-compiled,gather,gather-compiled,sections-alone \
    "${sampled[@]}"
row peers/grad_return "peers/results/$machine-grad_return.json" \
    "$python" bench/peers/grad_return_cuda.py --ranks "$ranks" "${payloads[@]}" "${sampled[@]}"
[ -z "$list" ] || exit 0

if [ $n_rows -eq 0 ]; then
    echo "published: no row matches \"$only\" (--list prints them)" >&2
    exit 2
fi
echo "$((n_rows - n_failed)) passed, $n_failed failed"
[ $n_failed -eq 0 ]
