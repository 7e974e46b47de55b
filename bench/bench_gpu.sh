#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/bench_gpu.sh [--json FILE] [--ranks LIST] [PATTERN...]: what `make bench-gpu` runs: the
# cases of CUDA devices, each on the numbers of ranks that tell something about it. PATTERN and
# --ranks choose others: the variants of `build/cofuse bench --device cuda --list`. Further options
# go to `cofuse bench` (--processes 5, --engine thread, ...).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

options=(--processes 2 --repeat 30 --seconds 0.3)
ranks=1,2,4 patterns=()
while [ $# -gt 0 ]; do
    case $1 in
    --ranks)
        ranks=${2:?a list of rank counts}
        shift 2
        ;;
    --*=*)
        options+=("$1")
        shift
        ;;
    --tiny | --list)
        options+=("$1")
        shift
        ;;
    --*)
        options+=("$1" "${2:?a value for $1}")
        shift 2
        ;;
    *)
        patterns+=("$1")
        shift
        ;;
    esac
done

# Transfers between two ranks; by one size alone too, which copies within a device, and by four,
# which may have to share devices. Signals by two and four; beside a busy device by two alone.
# allreduce_rmsnorm at the shapes of its page's table, between two.
if [ ${#patterns[@]} -eq 0 ]; then
    patterns=('form=get *ranks=2 ' 'form=put *ranks=2 ' 'form=put by=call bytes=67108864 ranks='
        'form=get by=call bytes=67108864 ranks=' 'form=round *ranks=2 '
        'form=round by=call ranks=4 ' 'form=round by=call how=graph ranks=4 '
        'form=signal *ranks=2 ' 'form=empty *ranks=1 '
        'allreduce_rmsnorm name=llama-3-8b how=graph T=* H=4096 ranks=2 ')
fi

exec build/cofuse bench --device cuda --ranks "$ranks" "${options[@]}" "${patterns[@]}"
