#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# `cofuse run allreduce_rmsnorm` on files: the reference's bits on all ranks, and the same bits by
# every algorithm, in parts, on either engine, staged, and for rows alone. Sums of integers and
# their norms are held against Python. Files and options that are wrong are refused with a text.
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

def inputs(p, t=37, h=300, dtype="F32", weight=None, integers=False):
    return {"x": tensor(dtype, [p, t, h], integers), "residual": tensor(dtype, [t, h], integers),
            "weight": tensor(weight or dtype, [h], integers)}

def without(tensors, *names):
    return {name: tensors[name] for name in tensors if name not in names}

def rows(tensors, first, n):
    """The same with the rows first .. first + n - 1 alone."""
    dtype, (p, t, h), x = tensors["x"]
    size = h * len(x) // (p * t * h)
    part = lambda data, r: data[(r * t + first) * size:(r * t + first + n) * size]
    return {"x": (dtype, [p, n, h], b"".join(part(x, r) for r in range(p))),
            "residual": (dtype, [n, h], part(tensors["residual"][2], 0)),
            "weight": tensors["weight"]}

for p in 1, 2, 3, 5:
    for dtype in "F32", "BF16", "F16":
        made = inputs(p, dtype=dtype)
        save(at + "%s_%d" % (dtype.lower(), p), made)
        if p == 3:
            save(at + "%s_rows" % dtype.lower(), rows(made, 11, 5))
        if dtype == "F16" and p == 2:
            for name in made:
                save_npy(at + name + ".npy", made[name])
save(at + "f32_weight", inputs(3, dtype="BF16", weight="F32"))
save(at + "many", inputs(16, t=3, h=5))
save(at + "long_row", inputs(2, t=2, h=70001, dtype="BF16"))
save(at + "integers", inputs(3, integers=True))
save(at + "empty", inputs(2, t=0))
save(at + "metadata", inputs(3), {"op": "allreduce_rmsnorm", "variant": "norm", "eps": "0.25",
                                  "rounding": "exact", "weight_bias": "1"})
two = inputs(2)
save(at + "renamed", {"a": two["x"], "b": two["residual"], "c": two["weight"]})
for name in two:
    save(at + "no_" + name, without(two, name))
save(at + "x_alone", {"x": two["x"]})
save(at + "two_dims", {**two, "x": tensor("F32", [74, 300])})
save(at + "no_hidden", inputs(2, h=0))
save(at + "other_tokens", {**two, "residual": tensor("F32", [36, 300])})
save(at + "other_hidden", {**two, "residual": tensor("F32", [37, 299])})
save(at + "long_weight", {**two, "weight": tensor("F32", [301])})
save(at + "other_dtype", {**two, "residual": tensor("BF16", [37, 300])})
save(at + "other_weight", {**two, "weight": tensor("BF16", [300])})
save(at + "i32", {k: ("I32", v[1], v[2]) for k, v in two.items()})
save(at + "many_ranks", inputs(17, t=1, h=1))
save(at + "other_op", two, {"op": "attention"})
save(at + "wrong_variant", two, {"variant": "some"})
save(at + "wrong_eps", two, {"eps": "0"})
save(at + "wrong_bias", two, {"weight_bias": "2"})
raw = open(at + "f32_2", "rb").read()
open(at + "cut", "wb").write(raw[:-4])
open(at + "nothing", "wb").write(b"")
PY

run=("$cofuse" run allreduce_rmsnorm --repeat 1 -o "$scratch/out" -i)
passed=' +[0-9]+ +[0-9.]+( +ok  [0-9.e+-]+)+$' # the table's row

# same NAME WAY...: passes --compare, and has the bits of "$scratch/first"
same() {
    local name=$1
    shift
    rm -f "$scratch/out"
    expect "$name" 0 "^$passed" "$@" --compare
    expect "$name: bits" 0 '' cmp "$scratch/first" "$scratch/out"
}

# ---- bits ----
for ranks in 1 2 3 5; do
    for dtype in f32 bf16 f16; do
        for rounding in match_unfused exact; do
            file=$scratch/${dtype}_$ranks words="$dtype, $ranks ranks, $rounding"
            way=("${run[@]}" "$file" --rounding "$rounding")
            rm -f "$scratch/out"
            expect "$words" 0 "^$passed" "${way[@]}" --compare
            mv "$scratch/out" "$scratch/first"
            same "$words, one_shot, parts" "${way[@]}" --engine thread --algorithm one_shot \
                --max-tokens 5
            same "$words, two_shot" "${way[@]}" --engine thread --algorithm two_shot
        done
    done
    words="f16, $ranks ranks, exact" # of the last file
    same "$words, two_shot, parts" "${way[@]}" --engine thread --algorithm two_shot --max-tokens 5
    for algorithm in one_shot two_shot; do
        same "$words, shm $algorithm" "${way[@]}" --engine shm --algorithm $algorithm
        for engine in shm thread; do
            same "$words, staged $engine $algorithm" env COFUSE_FORCE_STAGED=1 "${way[@]}" \
                --engine $engine --algorithm $algorithm --max-tokens 7
        done
    done
    same "$words, scalar" env COFUSE_CPU_ISA=scalar "${way[@]}" --engine thread
    same "$words, two threads" "${way[@]}" --engine thread --threads 2
done
for words in '--variant norm' '--variant only' '--variant norm --rounding exact' \
    '--variant only --algorithm two_shot' '--weight-bias 1' '--eps 1e-5 --algorithm two_shot'; do
    for file in bf16_3 f16_2 f32_weight many long_row; do
        # shellcheck disable=SC2086
        expect "$file $words" 0 "^$passed" "${run[@]}" "$scratch/$file" --engine thread \
            --compare $words
    done
done
expect "no rows" 0 "^$passed" "${run[@]}" "$scratch/empty" --compare
expect "other keys" 0 "^$passed" "${run[@]}" "$scratch/renamed" \
    --names x=a,residual=b,weight=c --compare
expect "choices of the metadata" 0 'variant=norm rounding=exact eps=0.25 weight_bias=1' \
    "${run[@]}" "$scratch/metadata" --compare
expect "an option goes before them" 0 \
    'variant=residual_norm rounding=match_unfused eps=0.5 weight_bias=0' \
    "${run[@]}" "$scratch/metadata" --compare --variant residual_norm \
    --rounding match_unfused --eps 0.5 --weight-bias 0
expect "only has no eps" 0 'variant=only rounding=exact eps=0 weight_bias=0' \
    "${run[@]}" "$scratch/metadata" --compare --variant only
expect "no residual wanted" 0 "^$passed" "${run[@]}" "$scratch/no_residual" --variant norm --compare
expect "x alone" 0 "^$passed" "${run[@]}" "$scratch/x_alone" --variant only --compare
expect "the sample" 0 "^$passed" "$cofuse" run allreduce_rmsnorm --compare \
    -i samples/minilm_partials.safetensors

# ---- a row's bits do not depend on the others ----
cat >"$scratch/rows.py" <<'PY'
import sys
from tensor_files import load
(head, whole), (part_head, part) = load(sys.argv[1]), load(sys.argv[2])
for name in "residual_out", "norm_out":
    t, h = head[name]["shape"]
    n, part_h = part_head[name]["shape"]
    size = len(whole(name)) // t
    assert (t, n, part_h) == (37, 5, h), (t, n, part_h, h)
    assert whole(name)[11 * size:16 * size] == part(name), name
print("the rows are the same")
PY
for dtype in f32 bf16 f16; do
    expect "$dtype, all rows" 0 '' "${run[@]}" "$scratch/${dtype}_3" --algorithm two_shot
    mv "$scratch/out" "$scratch/first"
    expect "$dtype, five rows" 0 '' "${run[@]}" "$scratch/${dtype}_rows" --algorithm one_shot
    expect "$dtype, rows alone" 0 '^the rows are the same' \
        python3 "$scratch/rows.py" "$scratch/first" "$scratch/out"
done

# ---- sums and norms by Python ----
cat >"$scratch/values.py" <<'PY'
import math, sys
from tensor_files import load, unpack
(head, part), (out_head, out) = load(sys.argv[1] + "/integers"), load(sys.argv[1] + "/out")
variant, bias, eps = sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
p, t, h = head["x"]["shape"]
x, residual, weight = (unpack("F32", part(name)) for name in ("x", "residual", "weight"))
got = {name: unpack("F32", out(name)) for name in out_head if name != "__metadata__"}
wanted = ["residual_out"] if variant == "only" else ["norm_out", "residual_out"]
assert sorted(got) == wanted and all(out_head[name]["shape"] == [t, h] for name in got), out_head
for row in range(t):
    at = range(row * h, row * h + h)
    z = [sum(x[r * t * h + i] for r in range(p)) for i in at]
    if variant == "residual_norm":
        z = [value + residual[i] for value, i in zip(z, at)]
    for value, want in zip((got["residual_out"][i] for i in at), z):
        assert value == want, "row %d: residual_out %g, wanted %g" % (row, value, want)
    if variant == "only":
        continue
    inv = 1 / math.sqrt(sum(value * value for value in z) / h + eps)
    for value, want in zip((got["norm_out"][i] for i in at),
                           (z[i] * inv * (weight[i] + bias) for i in range(h))):
        assert abs(value - want) <= 1e-6 * abs(want), "row %d: norm_out %r, wanted %r" % (
            row, value, want)
print("the values are right")
PY
while read -r variant bias eps algorithm; do
    expect "integers, $variant" 0 '' "${run[@]}" "$scratch/integers" --variant "$variant" \
        --weight-bias "$bias" --eps "$eps" --algorithm "$algorithm"
    expect "$variant by Python" 0 '^the values are right' \
        python3 "$scratch/values.py" "$scratch" "$variant" "$bias" "$eps"
done <<'END'
residual_norm 0 1e-6 one_shot
residual_norm 1 1000 two_shot
norm 0 0.5 two_shot
norm 1 1e-6 auto
END
expect "integers, only" 0 '' "${run[@]}" "$scratch/integers" --variant only
expect "only by Python" 0 '^the values are right' python3 "$scratch/values.py" "$scratch" only 0 1

# ---- x from a seed ----
seeded=("${run[@]}" "$scratch/no_x" --ranks 3)
expect "a seed" 0 "^$passed" "${seeded[@]}" --seed 5 --compare
mv "$scratch/out" "$scratch/first"
expect "the same seed again" 0 '' "${seeded[@]}" --seed 5
expect "the same seed: bits" 0 '' cmp "$scratch/first" "$scratch/out"
expect "another seed" 0 '' "${seeded[@]}" --seed 6
expect "another seed: other bits" 1 '' cmp -s "$scratch/first" "$scratch/out"
python3 - "$scratch" <<'PY' || exit 2
import sys
from tensor_files import load, save
at = sys.argv[1] + "/"
(head, part), (out_head, out) = load(at + "no_x"), load(at + "first")
assert out_head["x"]["shape"] == [3, 37, 300] and out_head["__metadata__"]["seed"] == "5"
save(at + "with_x", {name: (where[name]["dtype"], where[name]["shape"], data(name))
                     for name, where, data in (("x", out_head, out), ("residual", head, part),
                                               ("weight", head, part))})
PY
expect "x that was written" 0 '' "${run[@]}" "$scratch/with_x" --seed 7
cat >"$scratch/results.py" <<'PY'
import sys
from tensor_files import load
(_, a), (head, b) = load(sys.argv[1]), load(sys.argv[2])
assert "x" not in head and all(a(n) == b(n) for n in ("residual_out", "norm_out"))
PY
expect "x that was written: results" 0 '' python3 "$scratch/results.py" "$scratch/first" \
    "$scratch/out"

# ---- .npy ----
npy=("$cofuse" run allreduce_rmsnorm --repeat 1
    -i "x=$scratch/x.npy,residual=$scratch/residual.npy,weight=$scratch/weight.npy")
expect "safetensors" 0 '' "${run[@]}" "$scratch/f16_2"
expect ".npy in, safetensors out" 0 "^$passed" "${npy[@]}" -o "$scratch/first" --compare
expect ".npy in: results" 0 '' python3 "$scratch/results.py" "$scratch/out" "$scratch/first"
expect ".npy out" 0 '' "${npy[@]}" -o "norm_out=$scratch/norm_out.npy"
cat >"$scratch/npy.py" <<'PY'
import sys
from tensor_files import load
raw, (_, part) = open(sys.argv[1], "rb").read(), load(sys.argv[2])
assert raw[:6] == b"\x93NUMPY" and b"(37, 300)" in raw[:128]
assert raw[-37 * 300 * 2:] == part("norm_out")
PY
expect ".npy out: bits" 0 '' python3 "$scratch/npy.py" "$scratch/norm_out.npy" "$scratch/out"
expect ".npy has no bf16" 2 'dtype BF16, which .npy does not have' "$cofuse" run \
    allreduce_rmsnorm -i "$scratch/bf16_2" -o "norm_out=$scratch/norm_out.npy"
expect "an output that is not made" 2 '"norm_out": this run makes residual_out$' \
    "${npy[@]}" --variant only -o "norm_out=$scratch/norm_out.npy"

# ---- what is refused: exit status 2, and what was wanted ----
refused() { # FILE TEXT [OPTION...]
    local file=$1 text=$2
    shift 2
    rm -f "$scratch/out"
    expect "file $file $*" 2 "$text" "${run[@]}" "$scratch/$file" "$@"
    expect "file $file: no output" 1 '' test -e "$scratch/out"
}
refused absent 'absent'
refused nothing 'nothing'
refused cut 'cut'
refused renamed 'there is no tensor "x" \(x\); --names tells other keys'
refused no_x 'there is no tensor "x" \(x\)'
refused no_residual 'there is no tensor "residual" \(residual\)'
refused no_weight 'there is no tensor "weight" \(weight\)'
refused no_weight 'there is no tensor "weight" \(weight\)' --variant norm
refused no_x 'option --seed: there is no tensor "x" that tells the number of ranks' --seed 1
refused x_alone 'there is no tensor "residual"' --names x=y --seed 1 --ranks 2 --variant only
refused two_dims 'tensor "x" has shape \[74, 300\], wanted \[P, T, H\], none but T empty'
refused no_hidden 'tensor "x" has shape \[2, 37, 0\], wanted \[P, T, H\], none but T empty'
refused other_tokens '"residual" has shape \[36, 300\], wanted \[T, H\] = \[37, 300\]'
refused other_hidden '"residual" has shape \[37, 299\], wanted \[T, H\] = \[37, 300\]'
refused long_weight '"weight" has shape \[301\], wanted \[H\] = \[300\]'
refused other_dtype '"residual" has dtype BF16, "x" has F32: wanted the same$'
refused other_weight '"weight" has dtype BF16, "x" has F32: wanted the same, or F32'
refused i32 'params.dtype = i32: wanted bf16, f16 or f32'
refused many_ranks 'addends of 17 ranks, wanted at most 16'
refused other_op 'op = "attention", wanted allreduce_rmsnorm'
refused wrong_variant 'metadata variant'
refused wrong_eps 'metadata eps'
refused wrong_bias 'metadata weight_bias'
file=$scratch/f32_2
expect "--ranks" 0 '' "${run[@]}" "$file" --ranks 2
expect "other --ranks" 2 'option --ranks = 3: "x" has the addends of 2 ranks' \
    "${run[@]}" "$file" --ranks 3
for option in --ranks=0 --ranks=17 --device=tpu --engine=gpu --variant=sum --rounding=none --eps=0 \
    --eps=-1 --eps=nan --weight-bias=2 --algorithm=ring --max-tokens=0 --threads=257 --repeat=0 \
    --seed=-1 --names=dq=x; do
    expect "$option" 2 "option ${option%%=*} = \"${option#*=}\": wanted " \
        "${run[@]}" "$file" "$option"
done
expect "threads on devices" 2 'option --engine = "thread": wanted shm with --device cuda' \
    "${run[@]}" "$file" --engine thread --device cuda
expect "no input" 2 'option -i is missing' "$cofuse" run allreduce_rmsnorm
expect "a surplus word" 2 'surplus word "more"' "${run[@]}" "$file" more
expect "output over input" 2 'it is the input' \
    "$cofuse" run allreduce_rmsnorm -i "$file" -o "$scratch/./f32_2"
expect "output into nowhere" 2 'nowhere' \
    "$cofuse" run allreduce_rmsnorm -i "$file" -o "$scratch/nowhere/x"
expect "help" 0 '^usage: cofuse run allreduce_rmsnorm' "$cofuse" run allreduce_rmsnorm --help

closing
