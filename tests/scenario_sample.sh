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

# Inputs that are not finite: the reference takes them where the formulas do, and so do the ranks.
python3 - "$scratch/nan.safetensors" 2>/dev/null <<'PY' && has_nan=1 || has_nan=0
import json, random, struct, sys
shape, tensors, data = [1, 40, 2, 16], {}, b""
random.seed(1)
for name in "qkv":
    values = [random.gauss(0, 1) for _ in range(40 * 2 * 16)]
    if name == "k":
        values[17 * 32] = float("nan")
    if name == "v":
        values[25 * 32] = float("inf")
    part = struct.pack("<%df" % len(values), *values)
    tensors[name] = {"dtype": "F32", "shape": shape,
                     "data_offsets": [len(data), len(data) + len(part)]}
    data += part
head = json.dumps(tensors).encode()
head += b" " * (-len(head) % 8)
open(sys.argv[1], "wb").write(struct.pack("<Q", len(head)) + head + data)
PY
if [ "$has_nan" = 1 ]; then
    "$cofuse" run attention -i "$scratch/nan.safetensors" --mask causal --ranks 1,2,3 \
        --backward --compare --repeat 1
    # Scores of 1e9: the largest has weight 1, whatever the products round to.
    "$cofuse" run attention -i "$scratch/nan.safetensors" --mask causal --ranks 2 --scale 1e9 \
        --compare --repeat 1
fi
