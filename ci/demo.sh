#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Runs the operators over several ranks on sample tensors of a real model, beside the reference.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
failed=0

for mask in none causal; do
    [ "$mask" = none ] || echo
    echo "attention of all-MiniLM-L6-v2, layer 3, 512 tokens, mask $mask, forward and backward:"
    build/cofuse run attention --ranks 1,2,4 --mask "$mask" -i samples/minilm_qkv.safetensors \
        --backward --compare | sed '/^plan /d' || failed=1
done

echo
echo "allreduce_rmsnorm: the output of the same layer's attention, from 4 ranks with 3 heads each:"
build/cofuse run allreduce_rmsnorm -i samples/minilm_partials.safetensors --compare |
    sed '/^plan /d' || failed=1

for direction in outgoing incoming; do
    echo
    echo "trimul, $direction edges: pair features of a protein of 103 residues, 2x2 ranks:"
    build/cofuse run trimul -i samples/cytochrome_c_pair.safetensors \
        --weights samples/cytochrome_c_weights.safetensors --grid 2x2 --direction "$direction" \
        --backward --compare | sed '/^plan /d' || failed=1
done

[ $failed -eq 0 ] || {
    echo "demo: a run failed" >&2
    exit 1
}
