#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Ranks that are killed, stopped or missing in jobs of four: the program ends in time with exit
# status 3, names the rank, leaves no process, no file and no output behind. Signals to the launcher
# act, whatever becomes of the output; its exit status is that of the first rank that failed.
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

# ---- the launcher ----
# shellcheck disable=SC2016
{
    flood='yes "" & yes "" & exec yes ""' # one of them has a processor
    first_and_killed='if [ "$COFUSE_RANK" = 0 ]; then exit "$1"; fi; exec sleep 60'
    # Rank 1 ends after the launcher has told of rank 0, or in the 2 s that it has.
    first_and_later='if [ "$COFUSE_RANK" = 0 ]; then exit "$1"; fi
        until grep -q "rank 0 ended" "$0"; do sleep 0.02; done; exit "$2"'
    begin='echo line; echo >"$0/begun"; '
}
launch=(timeout -s KILL 60 "$cofuse" launch -n 2 -- sh -c)

# Of empty lines the launcher has the most work, and a pipe takes longer than /dev/null.
to_pipe() {
    "$@" | cat >/dev/null
    return "${PIPESTATUS[0]}"
}
expect "a rank that writes without end beside one that fails" 3 'rank 0 did not end within 2 s' \
    to_pipe "${launch[@]}" "if [ \"\$COFUSE_RANK\" = 1 ]; then exit 7; fi; $flood"
for code in 1 2 4; do
    expect "the first rank ends with $code, the other is killed" $code 'rank 1 did not end within' \
        "${launch[@]}" "$first_and_killed" "$scratch/log" $code
done
expect "the first rank ends with 9, the other is killed" 3 'rank 1 did not end within' \
    "${launch[@]}" "$first_and_killed" "$scratch/log" 9
expect "the first rank ends with 1, the other with 2" 1 'rank 0 ended with exit code 1' \
    "${launch[@]}" "$first_and_later" "$scratch/log" 1 2
expect "the first rank ends with 3, the other with 2" 3 'rank 0 ended with exit code 3' \
    "${launch[@]}" "$first_and_later" "$scratch/log" 3 2
to_full() { "$@" >/dev/full; }
expect "output that cannot be written" 3 'standard output: No space left' to_full "${launch[@]}" \
    'echo line'

begun() { # waits until a rank has begun
    for _ in $(seq 600); do
        [ ! -e "$scratch/begun" ] || break
        sleep 0.05
    done
}
at_term() { # OUTPUT COMMAND...: the launcher, once its ranks have begun; both streams to OUTPUT
    local output=$1 parent
    shift
    rm -f "$scratch/begun"
    "$@" >"$output" 2>&1 &
    parent=$!
    begun
    kill -TERM "$parent" # timeout passes it on
    wait "$parent" 2>/dev/null
}
mkfifo "$scratch/read"
cat "$scratch/read" >/dev/null &
expect "SIGTERM beside a rank that writes without end" 143 '' at_term "$scratch/read" \
    "${launch[@]}" "$begin$flood" "$scratch"
wait
# A reader that has stopped: nothing more goes into this pipe.
mkfifo "$scratch/full"
exec 9<>"$scratch/full"
dd if=/dev/zero of="$scratch/full" bs=4096 oflag=nonblock 2>/dev/null
expect "SIGTERM while nobody reads the output" 143 '' at_term "$scratch/full" \
    "${launch[@]}" "${begin}exec sleep 60" "$scratch"
expect "SIGTERM while nobody reads the messages" 143 '' at_term "$scratch/full" \
    "${launch[@]}" "${begin}exit 7" "$scratch"
exec 9>&-
verdict "no rank is left" "$(ranks_alive)"
# A reader that is slow loses nothing of ranks that have ended.
slow() { "$@" | (sleep 1 && wc -l); }
expect "a slow reader" 0 '^200000$' slow "${launch[@]}" 'seq 100000'

# A rank that was killed is told, also where others that failed of it are seen to end before.
# shellcheck disable=SC2016 # for the ranks' shell
expect "a kill that is seen late" 3 'rank 1 was killed by signal 9' "${launch[@]}" \
    'if [ $COFUSE_RANK = 0 ]; then exit 3; fi; sleep 0.3; kill -KILL $$'

ignoring_hup() { # a job whose ranks end after the launcher got SIGHUP
    local parent
    rm -f "$scratch/begun" "$scratch/go"
    # shellcheck disable=SC2016
    (
        trap '' HUP
        exec "$cofuse" launch -n 1 -- sh -c "$begin"'for i in $(seq 600); do
            [ ! -e "$0/go" ] || break; sleep 0.05; done; echo finished' "$scratch"
    ) &
    parent=$!
    begun
    kill -HUP "$parent"
    touch "$scratch/go"
    wait "$parent"
}
expect "SIGHUP that is ignored, as under nohup" 0 'finished' ignoring_hup

closing
