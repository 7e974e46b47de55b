#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# `cofuse run trimul` on files: within the bound of the reference, and with the same bits of out and
# dx for every number of ranks, grid, shard, engine and batch; weights in either order. Files and
# options that are wrong are refused with a text.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/cofuse}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=tests/expect.sh
source tests/expect.sh
python3 -c 'import struct' 2>/dev/null || { echo "there is no python3"; exit 77; }

export PYTHONPATH=$PWD/tests PYTHONDONTWRITEBYTECODE=1

python3 - "$scratch" <<'PY' || exit 2
import random, sys
from tensor_files import save, save_npy, tensor
at = sys.argv[1] + "/"
random.seed(1)
B, N, D, H = 2, 11, 10, 12

def inputs(dtype="F32", mask=None, b=B):
    return {"x": tensor(dtype, [b, N, N, D]), "mask": tensor(mask or dtype, [b, N, N]),
            "residual": tensor(dtype, [b, N, N, D]), "dout": tensor(dtype, [b, N, N, D])}

def weights(dtype="F32", norm=None):
    shapes = {"p_in.weight": [2 * H, D], "p_in.bias": [2 * H], "g_in.weight": [2 * H, D],
              "g_in.bias": [2 * H], "p_out.weight": [D, H], "p_out.bias": [D],
              "g_out.weight": [D, D], "g_out.bias": [D]}
    norms = {"norm_in.weight": [D], "norm_in.bias": [D], "norm_out.weight": [H],
             "norm_out.bias": [H]}
    return {**{k: tensor(dtype, s) for k, s in shapes.items()},
            **{k: tensor(norm or dtype, s) for k, s in norms.items()}}

def without(tensors, *names):
    return {name: tensors[name] for name in tensors if name not in names}

def entry(tensors, b):
    """One batch entry."""
    return {k: (d, [1] + s[1:], p[b * len(p) // B:(b + 1) * len(p) // B])
            for k, (d, s, p) in tensors.items()}

def reordered(tensors, order):
    """The rows of p_in and g_in in the places that `order` names."""
    made = dict(tensors)
    for key in tensors:
        if key.startswith(("p_in", "g_in")):
            dtype, shape, data = tensors[key]
            row = len(data) // (2 * H)
            made[key] = dtype, shape, b"".join(data[i * row:(i + 1) * row] for i in order)
    return made

for dtype in "F32", "BF16", "F16":
    made, w = inputs(dtype), weights(dtype)
    name = dtype.lower()
    save(at + name, made)
    save(at + name + "_w", w)
    if dtype == "F32":
        for b in range(B):
            save(at + "f32_%d" % b, entry(made, b))
        in_turn = [i // 2 + i % 2 * H for i in range(2 * H)]
        save(at + "in_turn_w", reordered(w, in_turn))
        save(at + "in_turn_told_w", reordered(w, in_turn), {"order": "interleaved"})
        save(at + "swapped_w", reordered(w, [*range(H, 2 * H), *range(H)]))
        for key in made:
            save_npy(at + key + ".npy", made[key])
        for key in w:
            save_npy(at + key + ".npy", w[key])
        save(at + "incoming", made, {"op": "trimul", "direction": "incoming", "eps_in": "0.25"})
        save(at + "no_x", without(made, "x"))
        save(at + "x_alone", {"x": made["x"]})
        save(at + "no_entries", inputs(b=0))
        save(at + "not_square", {"x": tensor("F32", [B, N, N + 1, D])})
        save(at + "other_mask", {**made, "mask": tensor("F32", [B, N, N + 1])})
        save(at + "bf16_mask", {**made, "mask": tensor("BF16", [B, N, N])})
        save(at + "bf16_dout", {**made, "dout": tensor("BF16", [B, N, N, D])})
        save(at + "i32", {k: ("I32", v[1], v[2]) for k, v in made.items()})
        save(at + "other_op", made, {"op": "attention"})
        save(at + "wrong_direction", made, {"direction": "both"})
        save(at + "no_p_out_w", without(w, "p_out.weight"))
        save(at + "bare_w", {k: w[k] for k in w if k in ("p_in.weight", "g_in.weight",
                                                         "p_out.weight", "g_out.weight")})
        save(at + "long_bias_w", {**w, "p_in.bias": tensor("F32", [2 * H + 1])})
        save(at + "thin_w", {**w, "g_out.weight": tensor("F32", [D, D - 1])})
save(at + "mixed", inputs("BF16", mask="F32"))
save(at + "mixed_w", weights("BF16", norm="F32"))
save(at + "two_norms_w", {**weights("BF16", norm="F32"), "norm_out.bias": tensor("BF16", [H])})
PY

run=("$cofuse" run trimul --repeat 1)
number='[0-9.]+'
forward=" +[0-9]+ +[0-9]+x[0-9]+ +$number +ok +[0-9.e+-]+\$"
both=" +[0-9]+ +[0-9]+x[0-9]+ +$number +$number( +ok +[0-9.e+-]+){3}\$"

# ---- every number of ranks, grid and shard ----
for dtype in f32 bf16 f16; do
    files=(-i "$scratch/$dtype" --weights "$scratch/${dtype}_w")
    expect "$dtype" 0 "^$both" "${run[@]}" "${files[@]}" --ranks 1 --backward --compare \
        -o "$scratch/first"
    python3 - "$scratch/first" "$scratch/first_bits" <<'PY'
import sys
from tensor_files import load
head, data = load(sys.argv[1])
open(sys.argv[2], "wb").write(data("out") + data("dx"))
PY
    for grid in 1x2 2x1 2x2 1x4 4x1 3x1 2x3 8x1; do
        ranks=$((${grid%x*} * ${grid#*x}))
        for way in "" "--shard chunk --engine thread --save ab"; do
            rm -f "$scratch/out"
            # shellcheck disable=SC2086 # words
            expect "$dtype $grid $way" 0 "^$both" "${run[@]}" "${files[@]}" --ranks $ranks \
                --grid $grid $way --backward --compare -o "$scratch/out"
            expect "$dtype $grid $way: bits" 0 '' python3 -c '
import sys
from tensor_files import load
head, data = load(sys.argv[1])
assert data("out") + data("dx") == open(sys.argv[2], "rb").read()
' "$scratch/out" "$scratch/first_bits"
        done
    done
done
files=(-i "$scratch/f32" --weights "$scratch/f32_w")
expect "explicit shards" 0 "^$both" "${run[@]}" "${files[@]}" --ranks 4 --grid 2x2 \
    --shard explicit --row-offsets 0:0:11 --col-offsets 0:7:11 --backward --compare
expect "staged" 0 "^$both" env COFUSE_FORCE_STAGED=1 "${run[@]}" "${files[@]}" --ranks 3 \
    --direction incoming --backward --compare
expect "documented mixes" 0 "^$both" "${run[@]}" -i "$scratch/mixed" \
    --weights "$scratch/mixed_w" --ranks 2 --backward --compare
expect "weights alone" 0 "^$both" "${run[@]}" -i "$scratch/x_alone" --weights "$scratch/bare_w" \
    --ranks 2 --backward --compare
for ranks in 1 3; do
    rm -f "$scratch/out"
    expect "no entries, $ranks ranks" 0 "^$both" "${run[@]}" -i "$scratch/no_entries" \
        --weights "$scratch/f32_w" --ranks $ranks --backward --compare -o "$scratch/out"
    expect "their gradients" 0 '' python3 -c '
import sys
from tensor_files import load
head, data = load(sys.argv[1])
assert data("out") == data("dx") == b"" and head["p_in.weight"]["shape"] == [24, 10]
assert not any(any(data(name)) for name in head if name != "__metadata__")
' "$scratch/out"
done
"${run[@]}" "${files[@]}" --ranks 2 -o "$scratch/whole" >/dev/null
for b in 0 1; do
    "${run[@]}" -i "$scratch/f32_$b" --weights "$scratch/f32_w" --ranks 3 \
        -o "$scratch/part_$b" >/dev/null
done
expect "a batch is its entries" 0 '' python3 -c '
import sys
from tensor_files import load
whole, *parts = (load(sys.argv[1] + "/" + n)[1]("out") for n in ("whole", "part_0", "part_1"))
assert whole == b"".join(parts)
' "$scratch"

# ---- orders of weights ----
same() { # NAME ARGUMENTS...: the bits of "$scratch/whole"
    local name=$1
    shift
    rm -f "$scratch/out"
    expect "$name" 0 '' "${run[@]}" -i "$scratch/f32" --ranks 2 -o "$scratch/out" "$@"
    expect "$name: bits" 0 '' cmp "$scratch/whole" "$scratch/out"
}
same "interleaved" --weights "$scratch/in_turn_w" --order interleaved
same "interleaved, by metadata" --weights "$scratch/in_turn_told_w"
same "a and b exchanged" --weights "$scratch/swapped_w" --swap-ab
same ".npy weights" --weights "$(printf '%s,' "$scratch"/*_*.*t.npy "$scratch"/*_*.bias.npy |
    sed "s,[^,]*/\([a-z_.]*\)\.npy,\1=&,g; s/,\$//")"
expect ".npy" 0 "^$forward" "${run[@]}" --ranks 2 --compare --weights "$scratch/f32_w" \
    -i "x=$scratch/x.npy,mask=$scratch/mask.npy" -o "out=$scratch/out.npy"
expect "metadata" 0 'direction=incoming.* eps_in=0.25 ' "${run[@]}" -i "$scratch/incoming" \
    --weights "$scratch/f32_w" --ranks 1 --compare
expect "an option beats it" 0 'direction=outgoing.* eps_in=0.5 ' "${run[@]}" \
    -i "$scratch/incoming" --weights "$scratch/f32_w" --ranks 1 --direction outgoing --eps-in 0.5
expect "dout by seed" 0 "^$both" "${run[@]}" -i "$scratch/x_alone" --weights "$scratch/f32_w" \
    --ranks 2 --backward --seed 7 --compare -o "$scratch/out"
expect "it is written" 0 '' python3 -c '
import sys
from tensor_files import load
head, data = load(sys.argv[1])
assert head["__metadata__"]["seed"] == "7" and len(data("dout")) == len(data("dx"))
assert head["p_in.weight"]["shape"] == [24, 10] and head["p_in.weight"]["dtype"] == "F32"
' "$scratch/out"

# ---- what is refused ----
refuse() { # NAME TEXT ARGUMENTS...
    local name=$1 text=$2
    shift 2
    expect "$name" 2 "^cofuse run trimul: .*$text" "${run[@]}" "$@"
}
bad() { # FILE TEXT
    refuse "$1" "$2" -i "$scratch/$1" --weights "$scratch/f32_w" --backward
}
bad no_x 'no tensor "x"'
bad not_square '"x" has shape \[2, 11, 12, 10\], wanted \[B, N, N, D\]'
bad other_mask '"mask" has shape \[2, 11, 12\], wanted \[B, N, N\] = \[2, 11, 11\]'
bad bf16_mask '"mask" has dtype BF16, "x" has F32: wanted the same, or F32'
bad bf16_dout '"dout" has dtype BF16, "x" has F32: wanted the same'
bad i32 '"x" has dtype I32, wanted BF16, F16 or F32'
bad other_op 'attention'
bad wrong_direction 'direction.*wanted one of outgoing\|incoming'
bad_weights() { # FILE TEXT
    refuse "$1" "$2" -i "$scratch/${3:-f32}" --weights "$scratch/$1"
}
bad_weights no_p_out_w 'no tensor "p_out.weight"'
bad_weights long_bias_w '"p_in.bias" has shape \[25\], wanted \[2H\] = \[24\]'
bad_weights thin_w '"g_out.weight" has shape \[10, 9\], wanted \[D, D\] = \[10, 10\]'
bad_weights f16_w '"norm_in.weight" has dtype F16, "x" has F32: wanted the same, or F32'
bad_weights two_norms_w '"norm_out.bias" has dtype BF16, "norm_in.weight" has F32' mixed
refuse "no input" 'option -i is missing' --weights "$scratch/f32_w"
refuse "no weights" 'option --weights is missing' -i "$scratch/f32"
refuse "a grid of other ranks" '--grid: wanted RxC with R \* C = 4' "${files[@]}" --grid 3x2
refuse "a grid of one number" '--grid = "4": wanted 2 integers' "${files[@]}" --grid 4
refuse "no grid" "--grid = \"2by2\": wanted 2 integers .*with 'x' between" "${files[@]}" \
    --grid 2by2
refuse "offsets of balanced shards" '--row-offsets and --col-offsets: wanted with --shard' \
    "${files[@]}" --row-offsets 0:11
refuse "offsets that are too few" '5 and 2 of them' "${files[@]}" --shard explicit \
    --row-offsets 0:11 --col-offsets 0:11
refuse "save without backward" '--save = "ab": wanted with --backward' "${files[@]}" --save ab
refuse "no choice" '--direction = "both": wanted one of outgoing\|incoming' "${files[@]}" \
    --direction both
refuse "no number" '--eps-in = "0": wanted a number from 1e-37' "${files[@]}" --eps-in 0
refuse "too many ranks" '--ranks = "1000": wanted an integer from 1 to 256' "${files[@]}" \
    --ranks 1000
refuse "a flag with a value" '--backward takes no value' "${files[@]}" --backward=1
refuse "an unknown option" 'unknown option --fast' "${files[@]}" --fast
refuse "a value that is missing" 'option --grid: a value is missing' "${files[@]}" --grid
refuse "a surplus word" 'surplus word "more"' "${files[@]}" more
refuse "a wrong name" '--names = "y=x": wanted some of x=key' "${files[@]}" --names y=x
refuse "the input as output" 'f32' "${files[@]}" -o "$scratch/f32"
expect "--help" 0 '^  -i, --input FILE  ' "${run[@]}" --help
expect "offsets out of order" 2 'row_offsets' "${run[@]}" "${files[@]}" --ranks 2 --shard explicit \
    --row-offsets 0:12:11 --col-offsets 0:11
for word in 'trimul N=8' 'trimul D=8' 'trimul N=8:9 D=8' 'trimul N=8 D=8 speed=9' \
    'trimul N=8 D=8 norm=f16' 'trimul N=0 D=8' 'trimul N=8 D=8 save=all'; do
    printf '%s\n' "$word" >"$scratch/shapes"
    expect "case $word" 2 'line 1: .*(missing|wanted)' "$cofuse" bench --shapes "$scratch/shapes"
done

echo "$n_passed passed, $n_failed failed"
[ "$n_failed" -eq 0 ]
