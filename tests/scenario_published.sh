#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# The published tables as far as a machine without devices has them: documents of `cofuse check`, of
# runs that end badly too, and the programs that make tables of documents.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/cofuse}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=tests/expect.sh
source tests/expect.sh

json=$scratch/errors.json
expect "the published errors" 0 '^7 passed, 0 failed$' \
    "$cofuse" check published_error --ranks 2,4 --json "$json"
expect "one object for each case" 0 '^7$' grep -c '"verdict": "passed"' "$json"
expect "an error beside its bound" 0 '' grep -qE '"text": "max 0\.0[0-9]+<=0\.03125"' "$json"
expect "the case without the rank count" 0 '^0$' \
    bash -c "grep '\"case\":' '$json' | grep -c ' ranks=' || true"
# shellcheck disable=SC2016
again='"$0" check "$(sed -n "s/^ *\"case\": \"\(.*\)\",$/\1/p" "$1" | head -n 1)" --ranks 4'
expect "a case of the document is a pattern" 0 '^1 passed' bash -c "$again" "$cofuse" "$json"
expect "ranks that are threads" 0 '' "$cofuse" check 'grad_return*s=2P *' --ranks 1,2 \
    --engine thread --json "$scratch/threads.json"
expect "two rank counts in one document" 0 '' \
    bash -c "grep -q '\"ranks\": 1,' '$scratch/threads.json' &&
             grep -q '\"ranks\": 2,' '$scratch/threads.json' &&
             grep -q '\"engine\": \"thread\"' '$scratch/threads.json'"
expect "--json into nowhere" 2 'nowhere/x' \
    "$cofuse" check 'grad_return*s=2P *' --json "$scratch/nowhere/x"

# A rank is killed after the first case: the one in hand is a failure, beside those that passed.
killed() {
    local pid=
    "$cofuse" check allreduce_rmsnorm --ranks 2 --verbose --json "$scratch/killed.json" \
        >"$scratch/killed.log" &
    local parent=$!
    for _ in $(seq 600); do
        ! grep -q '^ok' "$scratch/killed.log" || break
        sleep 0.05
    done
    pid=$(ranks_alive 1 | head -n 1)
    [ -z "$pid" ] || kill -KILL "$pid"
    wait "$parent"
}
expect "a rank that is killed" 3 'rank 1 was killed by signal 9' killed
expect "its case has failed" 0 '' grep -q '"text": "the run itself failed"' "$scratch/killed.json"
expect "and is counted" 0 '' grep -q '"failed": 1,' "$scratch/killed.json"
expect "those before it are kept" 0 '' grep -q '"verdict": "passed"' "$scratch/killed.json"

expect "rows of the script" 0 '^peers/attention .* --ranks 3 --rows 16380,65532 ' \
    bench/published.sh --list --ranks 3
expect "one row" 0 '^1$' bash -c 'bench/published.sh --list --only "^latency" | wc -l'
expect "one rank" 2 '^usage' bench/published.sh --ranks 1
mkdir "$scratch/bin"
program() { # NAME TEXT: a program of this name
    printf '#!/bin/sh\n%s\n' "$2" >"$scratch/bin/$1"
    chmod +x "$scratch/bin/$1"
}
program nvidia-smi 'exit 9'
expect "no device" 1 'a CUDA device; nothing was measured' \
    env PATH="$scratch/bin:$PATH" bench/published.sh
# shellcheck disable=SC2016
program nvidia-smi 'case "$*" in *name*) echo "NVIDIA H200" ;; *) echo 1 ;; esac'
for name in sleeper compute-sanitizer; do
    program $name "echo \$\$ >'$scratch/sleeps'; exec sleep 600"
done
interrupted() { # SCRIPT ARGUMENTS...: ends at SIGTERM while a row runs, with what the row started
    local script rc pid
    rm -f "$scratch/sleeps"
    PATH=$scratch/bin:$PATH PYTHON=sleeper "$@" &
    script=$!
    for _ in $(seq 600); do
        [ ! -s "$scratch/sleeps" ] || break
        sleep 0.05
    done
    kill -TERM "$script"
    wait "$script"
    rc=$?
    pid=$(cat "$scratch/sleeps") || return 1
    for _ in $(seq 100); do
        grep -q '^State:.*[^Z] (' "/proc/$pid/status" 2>/dev/null || return $rc
        sleep 0.05
    done
    kill -KILL "$pid"
    echo "the row still runs"
    return 1
}
expect "published.sh is interrupted" 130 '' interrupted \
    bench/published.sh --only peers/attention --out "$scratch/out"
if "$cofuse" check runtime --device cuda --list >/dev/null 2>&1; then
    expect "run_gpu.sh is interrupted" 130 '' interrupted \
        tests/run_gpu.sh --only one/memcheck --json "$scratch/gpu.json"
fi

if command -v python3 >/dev/null; then
    expect "tables of known answer" 0 '^OK$' python3 -B tests/crossover_test.py
    expect "the table of errors" 0 '^\| 1024 \| 4 \| 0\.03[0-9]+ \| 0\.0625 \| passed \|$' \
        python3 -B bench/errors.py "$json"
    expect "no such cases" 2 'no case with published_error' \
        python3 -B bench/errors.py "$scratch/threads.json"
    "$cofuse" bench 'transfer=pull' --tiny --ranks 1 --json "$scratch/bench.json" >/dev/null
    expect "no such results" 2 'no case names an algorithm' \
        python3 -B bench/crossover.py "$scratch/bench.json"
else
    echo "tables: not tested, there is no python3"
fi

closing
