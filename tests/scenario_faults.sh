#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Ranks that are killed, stopped or missing in jobs of four: the program ends in time with exit
# status 3, names the rank, leaves no process, no file and no output behind.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/cofuse}
sample=samples/minilm_qkv.safetensors
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=tests/expect.sh
source tests/expect.sh

# job SIGNAL RANK LIMIT_S WANTED_TEXT COMMAND... : the rank gets the signal while the job runs.
job() {
    local name="$6 of four ranks: rank $2 gets $1" signal=$1 rank=$2 limit=$3 text=$4
    local begin rc took problem=
    shift 4
    "$@" >"$scratch/log" 2>&1 </dev/null &
    local parent=$!
    for _ in $(seq 200); do
        [ "$(ranks_alive | wc -l)" -eq 4 ] && break
        sleep 0.05
    done
    sleep 1
    local victim
    victim=$(ranks_alive "$rank")
    [ -n "$victim" ] || problem="rank $rank was not running"
    begin=${EPOCHREALTIME/./}
    [ -z "$victim" ] || kill "-$signal" "$victim"
    wait "$parent"
    rc=$?
    took=$(((${EPOCHREALTIME/./} - begin) / 1000))
    [ "$rc" -eq 3 ] || problem+="; exit status $rc, wanted 3"
    [ "$took" -le $((limit * 1000)) ] || problem+="; took $took ms, wanted at most $limit s"
    grep -qE "$text" "$scratch/log" || problem+="; no message like \"$text\""
    [ -z "$(ranks_alive)" ] || problem+="; processes left: $(ranks_alive | tr '\n' ' ')"
    verdict "$name ($took ms)" "${problem#; }"
}

long_run=("$cofuse" run attention --ranks 4 --mask causal -i "$sample" -o "$scratch/out.safetensors"
    --backward --repeat 1000)
for rank in 0 2 3; do
    job KILL "$rank" 5 "rank $rank .*(killed|died|gone)" "${long_run[@]}"
done
job KILL 1 5 "rank 1 .*(killed|died|gone)" "$cofuse" check attention --ranks 4
export COFUSE_TIMEOUT=2 COFUSE_INIT_TIMEOUT=3
for rank in 2 0; do
    job STOP $rank 12 "waited for rank $rank|rank $rank(, or .*)? did not come" "${long_run[@]}"
done
problem=
[ "$(ls "$scratch")" = log ] || problem="files: $(ls "$scratch")"
verdict "no output of a failed run" "$problem"

# An old output survives a failed run.
echo precious >"$scratch/out.safetensors"
job KILL 1 5 "rank 1 .*(killed|died|gone)" "${long_run[@]}"
problem=
[ "$(cat "$scratch/out.safetensors")" = precious ] || problem="the old file is gone"
verdict "an old output survives" "$problem"
rm -f "$scratch/out.safetensors"

# A rank that never joins: it ends at once (seen as gone), or it sleeps (seen at the deadline).
missing() { # NAME WANTED_TEXT SHELL_CODE_OF_RANK_2
    local begin=${EPOCHREALTIME/./} rc took problem=
    "$cofuse" launch -n 4 -- bash -c \
        "if [ \$COFUSE_RANK = 2 ]; then $3; fi; exec build/examples/attention" >"$scratch/log" 2>&1
    rc=$?
    took=$(((${EPOCHREALTIME/./} - begin) / 1000))
    [ $rc -eq 1 ] || [ $rc -eq 3 ] || problem+="; exit status $rc, wanted 1 or 3"
    [ $took -le 9000 ] || problem+="; took $took ms"
    grep -qE "$2" "$scratch/log" || problem+="; no message like \"$2\""
    [ -z "$(ranks_alive)" ] || problem+="; processes left"
    verdict "$1 ($took ms)" "${problem#; }"
}
missing "a rank ends before it joins" "rank 2 went away before it joined" "exit 0"
missing "a rank does not join in time" "did not arrive: 2" "exec sleep 60"

closing
