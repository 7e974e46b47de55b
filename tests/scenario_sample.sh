#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# The sample, forward and backward, within the error rule for every rank count; on either engine, in
# staged form, with every instruction set and matrix product that is here. Bits agree where they are
# promised: run to run, between the engines, and between direct and staged transfers.
set -euo pipefail
cd "$(dirname "$0")/.."
cofuse=${COFUSE:-build/cofuse}
sample=samples/minilm_qkv.safetensors
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
run=("$cofuse" run attention -i "$sample" --backward --repeat 1)

for mask in none causal; do
    "${run[@]}" --mask $mask --ranks 1,2,3,4,8 --compare
done
"${run[@]}" --mask causal --ranks 2,3 --compare --engine thread --layout contiguous
COFUSE_CPU_ISA=scalar "${run[@]}" --mask causal --ranks 2 --compare
COFUSE_GEMM=plain "${run[@]}" --mask causal --ranks 3 --compare
COFUSE_CPU_ISA=avx2 "${run[@]}" --mask none --ranks 2 --compare

bits() { # NAME ARGUMENTS...
    local name=$1
    shift
    "${run[@]}" --mask causal --ranks 4 -o "$scratch/$name" "$@"
    cmp "$scratch/first" "$scratch/$name"
    echo "ok bits: $name"
}
"${run[@]}" --mask causal --ranks 4 -o "$scratch/first"
bits again
bits thread --engine thread
COFUSE_FORCE_STAGED=1 bits staged
bits two_threads --threads 2
