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
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=tests/expect.sh
source tests/expect.sh

left_behind() { find /dev/shm /tmp -maxdepth 1 -name '*cofuse*' 2>/dev/null | sort; }
before=$(left_behind)
run="$cofuse run attention -i $sample --backward --repeat 1"
limited() { # NAME "EXIT-STATUS ..." TEXT SHELL_CODE
    expect "$1" "$2" "$3" timeout 60 bash -c "$4"
}
limited "file size limit" "2 3" "ulimit -f|COF_ERR_NOMEM|limited" "ulimit -f 64; $run --ranks 4"
limited "few descriptors" "0 2 3" "ranks|Too many open files|socket" "ulimit -n 12; $run --ranks 8"
limited "enough descriptors" "0" "ranks" "ulimit -n 64; $run --ranks 8 --compare"
# What the program itself takes, and enough for its libraries, but not for all threads and tensors.
little=$(($(size "$cofuse" | awk 'NR == 2 { print int($4 / 1024) }') + 102000))
limited "little address space" "3" "no memory|could not be made" "ulimit -v $little; $run --ranks 4"
# Shared memory is not taken from /dev/shm: containers keep that small.
if unshare -m true 2>/dev/null; then
    limited "1 MiB of /dev/shm" "0" "ranks" \
        "unshare -m sh -c 'mount -t tmpfs -o size=1m none /dev/shm && $run --ranks 4'"
fi
limited "no oneDNN" "0" "gemm=plain" "COFUSE_GEMM=plain $run --ranks 2"
limited "bad variable" "2 3" 'COFUSE_THREADS = "many"' "COFUSE_THREADS=many $run --ranks 2"
after=$(left_behind)
diff <(echo "$before") <(echo "$after") >"$scratch/log" || problem="files are left behind"
verdict "nothing left in /dev/shm and /tmp" "${problem:-}"

closing
