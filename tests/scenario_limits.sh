#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Limits of the system become errors with a text, never a signal or a hang; nothing stays behind in
# /dev/shm or /tmp.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/cofuse}
sample=samples/minilm_qkv.safetensors
log=$(mktemp)
trap 'rm -f "$log"' EXIT
n_passed=0 n_failed=0

expect() { # NAME WANTED_EXIT(S) WANTED_TEXT COMMAND...
    local name=$1 wanted=$2 text=$3 rc
    shift 3
    timeout 60 bash -c "$*" >"$log" 2>&1
    rc=$?
    if [[ " $wanted " == *" $rc "* ]] && grep -qE "$text" "$log"; then
        echo "ok $name"
        n_passed=$((n_passed + 1))
    else
        echo "not ok $name: exit status $rc, wanted $wanted with \"$text\""
        sed 's/^/    /' "$log"
        n_failed=$((n_failed + 1))
    fi
}

left_behind() { find /dev/shm /tmp -maxdepth 1 -name '*cofuse*' 2>/dev/null | sort; }
before=$(left_behind)
run="$cofuse run attention -i $sample --backward --repeat 1"
expect "file size limit" "2 3" "ulimit -f|COF_ERR_NOMEM|limited" "ulimit -f 64; $run --ranks 4"
expect "few descriptors" "0 2 3" "ranks|Too many open files|socket" "ulimit -n 12; $run --ranks 8"
expect "enough descriptors" "0" "ranks" "ulimit -n 64; $run --ranks 8 --compare"
# What the program itself takes, and enough for its libraries, but not for all threads and tensors.
little=$(($(size "$cofuse" | awk 'NR == 2 { print int($4 / 1024) }') + 102000))
expect "little address space" "3" "no memory|could not be made" "ulimit -v $little; $run --ranks 4"
# Shared memory is not taken from /dev/shm: containers keep that small.
if unshare -m true 2>/dev/null; then
    expect "1 MiB of /dev/shm" "0" "ranks" \
        "unshare -m sh -c 'mount -t tmpfs -o size=1m none /dev/shm && $run --ranks 4'"
fi
expect "no oneDNN" "0" "gemm=plain" "COFUSE_GEMM=plain $run --ranks 2"
expect "bad variable" "2 3" 'COFUSE_THREADS = "many"' "COFUSE_THREADS=many $run --ranks 2"
after=$(left_behind)
if [ "$before" = "$after" ]; then
    echo "ok nothing left in /dev/shm and /tmp"
    n_passed=$((n_passed + 1))
else
    echo "not ok left behind: $(diff <(echo "$before") <(echo "$after") | tr '\n' ' ')"
    n_failed=$((n_failed + 1))
fi

echo "$n_passed passed, $n_failed failed"
[ $n_failed -eq 0 ]
