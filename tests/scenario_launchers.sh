#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# One program under every launcher: none, `cofuse launch`, Open MPI, MPICH (where installed), and
# the variables of torchrun, PMI and Slurm set by hand. All ranks find each other, two jobs at once
# do not meet, and a missing rank is named in time.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/cofuse}
ring=${RING:-build/examples/ring}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=tests/expect.sh
source tests/expect.sh
# Variables of a launcher that runs this script are not for the jobs in it.
while IFS= read -r name; do
    unset "$name"
done < <(compgen -e |
    grep -E '^(COFUSE|MASTER|TORCHELASTIC|OMPI|PMI|MPI_LOCAL|SLURM)|^(LOCAL_)?(RANK|WORLD_SIZE)$')
export COFUSE_INIT_TIMEOUT=60

# Every rank of N has said so once, with the right sum, and nobody said anything else.
complete() { # NAME LOG N EXIT_STATUS
    local wanted problem=
    wanted=$(for ((r = 0; r < $3; r++)); do
        echo "rank $r of $3: engine shm, sum $(($3 * ($3 - 1) / 2))"
    done)
    [ "$4" -eq 0 ] || problem="exit status $4"
    [ "$(sed 's/^\[[0-9]*\] //' "$2" | sort)" = "$wanted" ] || problem+="; output is not complete"
    verdict "$1" "${problem#; }" "$2"
}

# Ranks of a job in the order given, each with the variables given, in which %r is its rank. The
# exit status is the worst.
by_hand() { # LOG RANKS VARIABLE=VALUE...
    local log=$1 ranks=$2 worst=0 rank pids=() pid rc
    shift 2
    : >"$log"
    for rank in $ranks; do
        env "${@//%r/$rank}" timeout -k 5 100 "$ring" >>"$log" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid"
        rc=$?
        [ $rc -le $worst ] || worst=$rc
    done
    return $worst
}

timeout -k 5 100 "$ring" >"$scratch/log" 2>&1
complete "started plainly" "$scratch/log" 1 $?
timeout -k 5 100 "$cofuse" launch -n 3 -- "$ring" >"$scratch/log" 2>&1
complete "cofuse launch" "$scratch/log" 3 $?

# ---- mpirun: two jobs at once, and two programs one after the other in a job ----

mpirun_jobs() { # NAME COMMAND...
    local name=$1 first
    shift
    # Two of Open MPI's that begin at once may both want to make its folder, and one then ends.
    mkdir -p "$scratch/1" "$scratch/2"
    TMPDIR=$scratch/1 timeout -k 5 100 "$@" -n 3 "$ring" >"$scratch/log1" 2>&1 &
    first=$!
    TMPDIR=$scratch/2 timeout -k 5 100 "$@" -n 2 "$ring" >"$scratch/log2" 2>&1
    complete "$name" "$scratch/log2" 2 $?
    wait "$first"
    complete "$name, at once with another" "$scratch/log1" 3 $?
    timeout -k 5 100 "$@" -n 2 sh -c "$ring >/dev/null && $ring" >"$scratch/log" 2>&1
    complete "$name, two programs from a shell" "$scratch/log" 2 $?
    timeout -k 5 100 "$@" -n 1 "$ring" >"$scratch/log" 2>&1
    complete "$name, one rank" "$scratch/log" 1 $?
}

openmpi=$(command -v mpirun.openmpi || command -v mpirun)
if [ -n "$openmpi" ]; then
    mpirun_jobs "Open MPI" "$openmpi" --allow-run-as-root --oversubscribe --bind-to none
else
    : >"$scratch/log"
    verdict "Open MPI" "mpirun is missing: ci/setup.sh test installs it" "$scratch/log"
fi
if command -v mpirun.mpich >/dev/null; then
    mpirun_jobs "MPICH" mpirun.mpich
else
    echo "MPICH is not installed: its variables are tested by hand only"
fi

# ---- by hand ----

torchrun=(RANK=%r LOCAL_RANK=%r WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 MASTER_ADDR=localhost
    "MASTER_PORT=$$" TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0)
by_hand "$scratch/log" "3 2 1 0" "${torchrun[@]}"
complete "torchrun's variables" "$scratch/log" 4 $?
by_hand "$scratch/log" "2 1 0" PMI_RANK=%r PMI_SIZE=3 "PMI_JOBID=$$.0"
complete "PMI's variables" "$scratch/log" 3 $?
slurm=(SLURM_PROCID=%r "SLURM_JOB_ID=$$" SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=3
    SLURM_STEP_NUM_NODES=1 SLURM_NNODES=1)
by_hand "$scratch/log" "2 1 0" "${slurm[@]}"
complete "Slurm's variables" "$scratch/log" 3 $?
by_hand "$scratch/log" 0 SLURM_PROCID=0 "SLURM_JOB_ID=$$" SLURM_NTASKS=8 SLURM_NNODES=1
complete "Slurm's batch shell is a world of one" "$scratch/log" 1 $?

# A job waits for its rank 1 while others with nearly its name come and go: another port, the next
# restart.
by_hand "$scratch/log1" "0 2 3" "${torchrun[@]}" &
first=$!
by_hand "$scratch/log2" "3 2 1 0" "${torchrun[@]}" MASTER_PORT=1
complete "two jobs at once: the other" "$scratch/log2" 4 $?
by_hand "$scratch/log2" "3 2 1 0" "${torchrun[@]}" TORCHELASTIC_RESTART_COUNT=1
complete "two jobs at once: a restart" "$scratch/log2" 4 $?
by_hand "$scratch/log2" 1 "${torchrun[@]}"
rc=$?
wait "$first" && [ $rc -eq 0 ]
rc=$?
cat "$scratch/log2" >>"$scratch/log1"
complete "two jobs at once: the first" "$scratch/log1" 4 $rc

# ---- errors ----

refused() { # NAME WANTED_TEXT N_LINES LIMIT_S RANKS VARIABLE=VALUE...
    local name=$1 text=$2 n=$3 limit=$4 begin=${EPOCHREALTIME/./} rc took problem=
    shift 4
    by_hand "$scratch/log" "$@"
    rc=$?
    took=$(((${EPOCHREALTIME/./} - begin) / 1000))
    [ $rc -eq 1 ] || problem="exit status $rc, wanted 1"
    [ "$(grep -cE "$text" "$scratch/log")" -eq "$n" ] ||
        problem+="; wanted $n lines like \"$text\""
    [ $took -le $((limit * 1000)) ] || problem+="; took $took ms, wanted at most $limit s"
    verdict "$name ($took ms)" "${problem#; }" "$scratch/log"
}
one_host="all ranks must be on one host"
refused "a rank is missing" "did not arrive: 3 \($one_host" 3 12 "2 1 0" "${torchrun[@]}" \
    COFUSE_INIT_TIMEOUT=2
refused "rank 0 is missing" "rank 0 of job .* did not arrive within 2 s \($one_host" 3 12 "3 2 1" \
    "${torchrun[@]}" COFUSE_INIT_TIMEOUT=2
refused "several hosts" "LOCAL_WORLD_SIZE = 2, WORLD_SIZE = 4: ranks on several hosts" 4 20 \
    "3 2 1 0" "${torchrun[@]}" LOCAL_WORLD_SIZE=2
refused "half a set" "RANK = \"0\", but WORLD_SIZE is not set" 1 20 0 RANK=0

# Messages name the word that is wrong, as it was written.
expect "launch: a missing value" 2 'option -n: a value is missing$' "$cofuse" launch -n
expect "launch: a missing value of the long form" 2 'option --ranks: a value is missing$' \
    "$cofuse" launch --ranks
expect "launch: an unknown letter" 2 'unknown option -l$' "$cofuse" launch --ranks=2 -lh true
expect "launch: a surplus value" 2 'option --no-label takes no value$' \
    "$cofuse" launch -n 2 --no-label=3 true

closing
