#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# .npy files in and out of `cofuse run`: the bits that safetensors files give, whichever form either
# side has; and each refusal comes before a rank is started, names what is wrong and writes nothing.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/cofuse}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=tests/expect.sh
source tests/expect.sh

if ! python3 -c 'import json, struct' 2>/dev/null; then
    echo "no python3 to make files with"
    exit 77
fi

# tensors.py make DIR: the same tensors as safetensors and as .npy files, and some bad ones.
# tensors.py same FILE.safetensors NAME FILE.npy [DESCR]: exit 0 when dtype, shape and bits agree.
cat >"$scratch/tensors.py" <<'PY'
import ast, json, random, struct, sys

NAMES = {"F32": "<f4", "F16": "<f2"}

def npy(path, descr, shape, data, order="False"):
    head = "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }" % (descr, order, tuple(shape))
    head += " " * (-(len(head) + 11) % 64) + "\n"
    open(path, "wb").write(b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head.encode() + data)

def safetensors(path, tensors, dtype):
    head, data = {}, b""
    for name, (shape, part) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape,
                      "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + data)

def values(shape, code):
    n = 1
    for dim in shape:
        n *= dim
    return struct.pack("<%d%s" % (n, code), *(random.gauss(0, 1) for _ in range(n)))

def make(where):
    random.seed(1)
    shapes = {"q": [2, 37, 4, 16], "k": [2, 37, 2, 16], "v": [2, 37, 2, 16],
              "dout": [2, 37, 4, 16]}
    inputs = {name: (shape, values(shape, "f")) for name, shape in shapes.items()}
    safetensors(where + "/in.safetensors", inputs, "F32")
    safetensors(where + "/in.npy", inputs, "F32")
    for name, (shape, data) in inputs.items():
        npy(where + "/%s.npy" % name, "<f4", shape, data)
        npy(where + "/%s_f2.npy" % name, "<f2", shape, values(shape, "e"))
    shape, data = inputs["q"]
    npy(where + "/big.npy", ">f4", shape, data)
    npy(where + "/fortran.npy", "<f4", shape, data, "True")
    npy(where + "/short.npy", "<f4", shape, data[:-1])
    npy(where + "/long.npy", "<f4", shape, data + b"x")
    npy(where + "/flat.npy", "<f4", [len(data) // 4], data)
    npy(where + "/other.npy", "<f4", [2, 36, 2, 16], values([2, 36, 2, 16], "f"))
    npy(where + "/objects.npy", "|O", shape, data)
    bf16 = {name: ([2, 37, 2, 16], bytes(2 * 37 * 2 * 16 * 2)) for name in "qkv"}
    safetensors(where + "/bf16.safetensors", bf16, "BF16")
    partials = {name: ([3, 29, 2, 2, dim], values([3, 29, 2, 2, dim], "f"))
                for name, dim in (("dk", 8), ("dv", 12))}
    safetensors(where + "/partials.safetensors", partials, "F32")
    for name, (shape, data) in partials.items():
        npy(where + "/partial_%s.npy" % name, "<f4", shape, data)
    npy(where + "/partial_28.npy", "<f4", [3, 28, 2, 2, 8], values([3, 28, 2, 2, 8], "f"))
    npy(where + "/vast.npy", "<f4", [3, 0, 1 << 40, 1 << 40, 1], b"")

def same(st_path, name, npy_path):
    with open(st_path, "rb") as file:
        n = struct.unpack("<Q", file.read(8))[0]
        entry = json.loads(file.read(n))[name]
        data = file.read()[slice(*entry["data_offsets"])]
    with open(npy_path, "rb") as file:
        assert file.read(8) == b"\x93NUMPY\1\0"
        n = struct.unpack("<H", file.read(2))[0]
        assert (n + 10) % 64 == 0
        head = ast.literal_eval(file.read(n).decode())
        assert head == {"descr": NAMES[entry["dtype"]], "fortran_order": False,
                        "shape": tuple(entry["shape"])}, head
        assert file.read() == data and any(data), "bits differ"

if sys.argv[1] == "make":
    make(sys.argv[2])
else:
    same(*sys.argv[2:])
PY
python3 "$scratch/tensors.py" make "$scratch" || exit 1
cofuse=$(realpath "$cofuse")
cd "$scratch" || exit 2

run() { # NAME ARGUMENTS...: it succeeds
    local name=$1
    shift
    expect "$name" 0 '' timeout 120 "$cofuse" run "$@" --repeat 1
}
same() { # FILE.safetensors NAME FILE.npy
    expect "$3 has the bits of $2 in $1" 0 '' python3 tensors.py same "$@"
}

attention=(attention --backward --mask causal --ranks 3)
inputs=q=q.npy,k=k.npy,v=v.npy
run "attention, safetensors" "${attention[@]}" -i in.safetensors -o out.safetensors
run "attention, npy" "${attention[@]}" -i $inputs,dout=dout.npy --compare \
    -o o=o.npy,lse=lse.npy,dq=dq.npy,dk=dk.npy,dv=dv.npy
for name in o lse dq dk dv; do
    same out.safetensors $name $name.npy
done
run "attention, npy to safetensors" "${attention[@]}" -i $inputs,dout=dout.npy \
    -o mixed.safetensors --scale 0.25 # what the other file's default is
expect "the same file from either input" 0 '' cmp out.safetensors mixed.safetensors
rm -f o.npy lse.npy dq.npy dk.npy dv.npy
run "attention, one output of five" "${attention[@]}" -i in.safetensors -o dk=dk.npy
same out.safetensors dk dk.npy
verdict "outputs that are not named are not written" \
    "$(ls -- *.npy.tmp-* o.npy lse.npy dq.npy dv.npy 2>/dev/null)"
run "attention, dout by seed" "${attention[@]}" -i $inputs -o seeded.safetensors --seed 7
run "attention, dout by seed, npy" "${attention[@]}" -i $inputs -o dout=seeded.npy --seed 7
same seeded.safetensors dout seeded.npy
run "attention, other keys" "${attention[@]}" -i query=q.npy,k=k.npy,v=v.npy --names q=query
run "attention, lse of BF16" attention -i bf16.safetensors --ranks 2 -o lse=lse.npy

run "grad_return, safetensors" grad_return -i partials.safetensors -o return.safetensors
run "grad_return, npy" grad_return -i dk=partial_dk.npy,dv=partial_dv.npy --compare \
    -o dk=return_dk.npy,dv=return_dv.npy
same return.safetensors dk return_dk.npy
same return.safetensors dv return_dv.npy

run "attention, half precision" attention -i q=q_f2.npy,k=k_f2.npy,v=v_f2.npy --ranks 2 --compare \
    -o o=half.npy
expect "its output is of half precision" 0 '' grep -qa "'descr': '<f2'" half.npy

# ---- refusals ----------------------------------------------------------------------------------

refused() { # NAME TEXT OPERATOR ARGUMENTS...
    local name=$1 text=$2 rc problem=
    shift 2
    ls >before
    timeout 60 "$cofuse" run "$@" >log 2>&1
    rc=$?
    ls >after
    [ $rc = 2 ] || problem="exit status $rc"
    [ "$(wc -l <log)" = 1 ] || problem+="; more than a line"
    grep -qF -e "$text" log || problem+="; no \"$text\""
    cmp -s before after || problem+="; files: $(diff before after | tr '\n' ' ')"
    verdict "$name" "${problem#; }"
}
touch before after log

kv=k=k.npy,v=v.npy
refused "big-endian" "big.npy: descr '>f4': big-endian" attention -i q=big.npy,$kv
refused "Fortran order" "fortran.npy: fortran_order is True" attention -i q=fortran.npy,$kv
refused "file too short" "short.npy: the file has" attention -i q=short.npy,$kv
refused "file too long" "long.npy: the file has" attention -i q=long.npy,$kv
refused "objects" "objects.npy: descr '|O': Python objects" attention -i q=objects.npy,$kv
refused "one dim" "flat.npy: tensor \"q\" has shape [4736], wanted 4 dims" attention \
    -i q=flat.npy,$kv
refused "shapes differ" "other.npy: tensor \"v\" (v) has shape [2, 36, 2, 16]" attention \
    -i q=q.npy,k=k.npy,v=other.npy
refused "dtypes differ" "v_f2.npy: tensor \"v\" (v) has dtype F16, q has F32" attention \
    -i q=q.npy,k=k.npy,v=v_f2.npy
refused "safetensors as .npy" "in.npy: the file does not begin with" attention -i q=in.npy,$kv
refused "no v" "there is no tensor \"v\"" attention -i q=q.npy,k=k.npy
refused "a tensor too many" "\"dq\" is no tensor that is read" attention -i $inputs,dq=q.npy
refused "one tensor twice" "\"q\" is there twice" attention -i $inputs,q=q.npy
refused "no file" "none.npy: No such file" attention -i q=none.npy,$kv
refused "no key" "\"q.npy\": a .npy file is given as key=FILE.npy" attention -i q.npy
refused "mixed list" "\"v=in.safetensors\": wanted key=FILE.npy" attention \
    -i q=q.npy,k=k.npy,v=in.safetensors
refused "vast rows" "its rows are too large" grad_return -i dk=vast.npy,dv=vast.npy
refused "partials differ" "differ in dtype" grad_return \
    -i dk=partial_dk.npy,dv=partial_28.npy

refused "not made" "\"dq\": this run makes o, lse" attention -i $inputs -o o=new.npy,dq=new2.npy
refused "read, not made" "\"dout\": this run makes o, lse, dq, dk, dv" attention \
    -i $inputs,dout=dout.npy -o dout=new.npy --backward
refused "not made by grad_return" "\"o\": this run makes dk, dv" grad_return \
    -i partials.safetensors -o o=new.npy
refused "BF16" "\"o\" has dtype BF16" attention -i bf16.safetensors -o lse=new.npy,o=new2.npy
refused "output without a key" "\"new.npy\": a .npy file is given as" attention -i $inputs \
    -o new.npy
refused "output is the input" "\"./k.npy\": it is the input" attention -i $inputs -o o=./k.npy
refused "outputs in one file" "one file for o and lse" attention -i $inputs \
    -o o=new.npy,lse=./new.npy
refused "no directory" "/nonexistent" attention -i $inputs -o o=/nonexistent/o.npy
long=$(printf '%0245d' 0) # a file name has 255 bytes, a temporary one 11 more than its file's
refused "a long name" "no temporary file beside it: File name too long" attention \
    -i in.safetensors -o "$long"
refused "a long name of .npy" "no temporary file beside it: File name too long" attention \
    -i $inputs -o o="${long:4}.npy"

# ---- links whose file is not there yet ----
mkdir far
ln -s far/there.npy near.npy
ln -s near.npy nearer.npy
ln -s "$PWD/far/absolute" absolute
ln -s nowhere/file lost
refused "two links, one file" "one file for o and lse" attention -i $inputs \
    -o o=nearer.npy,lse=near.npy
refused "a link and its file" "one file for o and lse" attention -i $inputs \
    -o o=nearer.npy,lse=./far/there.npy
refused "a link to no folder" "directory ./nowhere: No such file" attention -i $inputs -o lost
run "links whose files are not there yet" attention -i $inputs -o o=nearer.npy
run "a link of a full path" attention -i $inputs -o absolute
for link in near.npy nearer.npy absolute; do
    expect "$link is a link still" 0 '' test -L $link
done
same absolute o far/there.npy
verdict "no temporary is left" "$(ls -- *.tmp-* far/*.tmp-* 2>/dev/null)"

closing
