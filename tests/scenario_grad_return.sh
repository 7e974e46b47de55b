#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# `cofuse run grad_return` on files: the reference's bits for every number of ranks, and the same
# bits by push and pull, whole and by section, on either engine and staged. Sums of integers are
# held against sums by Python. Files and options that are wrong are refused with a text.
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
from tensor_files import save, tensor
at = sys.argv[1] + "/"
random.seed(1)

def pair(p, s=37, b=2, h=2, dk=8, dv=5, dtype="F32", integers=False):
    return {"dk": tensor(dtype, [p, s, b, h, dk], integers),
            "dv": tensor(dtype, [p, s, b, h, dv], integers)}

for p in 1, 2, 3, 5:
    save(at + "f32_%d" % p, pair(p))
    save(at + "bf16_%d" % p, pair(p, dtype="BF16"))
save(at + "integers", pair(3, integers=True))
save(at + "empty", pair(2, s=0))
save(at + "metadata", pair(3), {"op": "grad_return", "layout": "contiguous", "chunking": "padded",
                                "transfer": "pull", "writers": "causal"})
two = pair(2)
save(at + "renamed", {"a": two["dk"], "b": two["dv"]})
save(at + "no_dv", {"dk": two["dk"]})
save(at + "four_dims", {**two, "dv": tensor("F32", [2, 37, 4, 5])})
save(at + "other_rows", {**two, "dv": tensor("F32", [2, 36, 2, 2, 5])})
save(at + "other_dtype", {**two, "dv": tensor("BF16", [2, 37, 2, 2, 5])})
save(at + "no_heads", pair(2, h=0))
save(at + "i32", {k: ("I32", v[1], v[2]) for k, v in two.items()})
save(at + "many_writers", {"dk": tensor("F32", [257, 1, 1, 1, 1]),
                           "dv": tensor("F32", [257, 1, 1, 1, 1])})
save(at + "other_op", two, {"op": "attention"})
save(at + "wrong_writers", two, {"writers": "some"})
save(at + "wrong_transfer", two, {"transfer": "fly"})
raw = open(at + "f32_2", "rb").read()
open(at + "cut", "wb").write(raw[:-4])
open(at + "nothing", "wb").write(b"")
PY

run=("$cofuse" run grad_return --repeat 1 -o "$scratch/out" -i)

# same NAME WAY...: passes --compare, and has the bits of "$scratch/first"
same() {
    local name=$1
    shift
    rm -f "$scratch/out"
    expect "$name" 0 '^dv: ok' "$@" --compare
    expect "$name: bits" 0 '' cmp "$scratch/first" "$scratch/out"
}

# ---- bits ----
for ranks in 1 2 3 5; do
    for dtype in f32 bf16; do
        for writers in all causal; do
            file=$scratch/${dtype}_$ranks words="$dtype, $ranks ranks, $writers"
            rm -f "$scratch/out"
            expect "$words" 0 '^dk: ok' "${run[@]}" "$file" --writers $writers --compare
            mv "$scratch/out" "$scratch/first"
            for way in push-whole pull-whole push-section pull-section; do
                same "$words, $way" "${run[@]}" "$file" --writers $writers --engine thread \
                    --transfer ${way%-*} --by ${way#*-}
            done
        done
    done
    words="bf16, $ranks ranks, causal" # of the last file
    same "$words, pull, shm" "${run[@]}" "$file" --writers causal --engine shm --transfer pull
    for way in push-whole pull-section; do
        same "$words, staged $way" env COFUSE_FORCE_STAGED=1 "${run[@]}" "$file" \
            --writers causal --engine shm --transfer ${way%-*} --by ${way#*-}
        same "$words, staged threads $way" env COFUSE_FORCE_STAGED=1 "${run[@]}" "$file" \
            --writers causal --engine thread --transfer ${way%-*} --by ${way#*-}
    done
done
for words in '--layout contiguous' '--chunking padded' '--layout contiguous --chunking padded' \
    '--chunking padded --by section' '--wire f32' '--wire f32 --transfer pull' '--threads 2'; do
    # shellcheck disable=SC2086
    expect "words $words" 0 '^dv: ok' "${run[@]}" "$scratch/bf16_3" --engine thread --compare $words
done
expect "no rows" 0 '^dv: ok' "${run[@]}" "$scratch/empty" --compare
expect "other keys" 0 '^dv: ok' "${run[@]}" "$scratch/renamed" --names dk=a,dv=b --compare
expect "choices of the metadata" 0 'layout=contiguous chunking=padded transfer=pull' \
    "${run[@]}" "$scratch/metadata" --compare
expect "an option goes before them" 0 'layout=zigzag chunking=padded transfer=push' \
    "${run[@]}" "$scratch/metadata" --compare --layout zigzag --transfer push

# ---- sums ----
cat >"$scratch/sums.py" <<'PY'
import sys
from tensor_files import load, unpack
(head, part), (out_head, out) = load(sys.argv[1] + "/integers"), load(sys.argv[1] + "/out")
causal = sys.argv[2] == "causal" # contiguous: writers from the owner of the row on
for name in "dk", "dv":
    p, s, b, h, d = head[name]["shape"]
    assert out_head[name]["shape"] == [s, b, h, d], out_head[name]
    n = s * b * h * d
    parts = unpack("F32", part(name))
    for i, value in enumerate(unpack("F32", out(name))):
        row = i // (b * h * d)
        owner = max(o for o in range(p) if o * s // p <= row)
        want = sum(parts[w * n + i] for w in range(p) if not causal or w >= owner)
        assert value == want, "%s element %d of row %d: %g, wanted %g" % (name, i, row, value, want)
print("the sums are right")
PY
for by in whole section; do
    expect "integers" 0 '^dv: ok' "${run[@]}" "$scratch/integers" --by $by --compare
    expect "sums by Python" 0 '^the sums are right' python3 "$scratch/sums.py" "$scratch" all
    expect "integers, causal" 0 '^dv: ok' "${run[@]}" "$scratch/integers" --by $by --compare \
        --layout contiguous --writers causal
    expect "causal sums by Python" 0 '^the sums are right' \
        python3 "$scratch/sums.py" "$scratch" causal
done

# ---- what is refused: exit status 2, and what was wanted ----
refused() { # FILE TEXT
    rm -f "$scratch/out"
    expect "file $1" 2 "$2" "${run[@]}" "$scratch/$1"
    expect "file $1: no output" 1 '' test -e "$scratch/out"
}
refused absent 'absent'
refused nothing 'nothing'
refused cut 'cut'
refused renamed 'there is no tensor "dk" \(dk\); --names tells other keys'
refused no_dv 'there is no tensor "dv" \(dv\)'
refused four_dims 'tensor "dv": wanted 5 dims \[P, S, B, Hkv, D\]'
refused no_heads 'wanted 5 dims \[P, S, B, Hkv, D\], none but S empty'
refused other_rows 'tensors "dk" and "dv" differ in dtype or in a dim that is not D'
refused other_dtype 'differ in dtype'
refused i32 'params.dtype = i32: wanted bf16, f16 or f32'
refused many_writers 'partials of 257 writers, wanted at most 256'
refused other_op 'op = "attention", wanted grad_return'
refused wrong_writers 'metadata writers'
refused wrong_transfer 'metadata transfer'
file=$scratch/f32_2
expect "--ranks" 0 '' "${run[@]}" "$file" --ranks 2
expect "other --ranks" 2 'option --ranks = 3: "dk" has partials of 2 writers' \
    "${run[@]}" "$file" --ranks 3
for option in --ranks=0 --engine=gpu --layout=round --chunking=none --transfer=fly --by=row \
    --writers=table --wire=f16 --threads=257 --repeat=0 --names=dq=x; do
    expect "$option" 2 "option ${option%%=*} = \"${option#*=}\": wanted " \
        "${run[@]}" "$file" "$option"
done
expect "no input" 2 'option -i is missing' "$cofuse" run grad_return
expect "a surplus word" 2 'surplus word "more"' "${run[@]}" "$file" more
expect "output over input" 2 'it is the input' \
    "$cofuse" run grad_return -i "$file" -o "$scratch/./f32_2"
expect "output into nowhere" 2 'nowhere' \
    "$cofuse" run grad_return -i "$file" -o "$scratch/nowhere/x"
expect "help" 0 '^usage: cofuse run grad_return' "$cofuse" run grad_return --help

closing
