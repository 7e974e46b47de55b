# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors and files of scenarios, with nothing but Python. A tensor is (dtype, shape, bytes)."""
import json
import random
import struct

CODES = {"F32": "f", "F16": "e", "I32": "i"}


def save(path, tensors, metadata=None):
    head, data = {}, b""
    for name, (dtype, shape, part) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape,
                      "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    if metadata:
        head["__metadata__"] = metadata
    head = json.dumps(head).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + data)


def load(path):
    """The header, and a function from a name to its bytes."""
    with open(path, "rb") as file:
        raw = file.read()
    n = struct.unpack("<Q", raw[:8])[0]
    head, data = json.loads(raw[8:8 + n]), raw[8 + n:]
    return head, lambda name: data[slice(*head[name]["data_offsets"])]


def save_npy(path, tensor):
    dtype, shape, data = tensor
    head = "{'descr': '%s', 'fortran_order': False, 'shape': %s, }" % (
        {"F32": "<f4", "F16": "<f2"}[dtype], tuple(shape))
    head += " " * (-(len(head) + 11) % 64) + "\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head.encode() + data)


def count(shape):
    n = 1
    for dim in shape:
        n *= dim
    return n


def pack(dtype, values):
    if dtype != "BF16":
        return struct.pack("<%d%s" % (len(values), CODES[dtype]), *values)
    raw = struct.pack("<%df" % len(values), *values)
    return b"".join(raw[i + 2:i + 4] for i in range(0, len(raw), 4))  # cut off


def unpack(dtype, data):
    if dtype == "BF16":
        dtype = "F32"
        data = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
    code = CODES[dtype]
    return struct.unpack("<%d%s" % (len(data) // struct.calcsize(code), code), data)


def tensor(dtype, shape, integers=False):
    value = (lambda: random.randint(-9, 9)) if integers else (lambda: random.gauss(0, 1))
    return dtype, shape, pack(dtype, [value() for _ in range(count(shape))])
