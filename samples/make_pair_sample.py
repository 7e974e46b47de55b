# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Make the pair sample from the C-alpha coordinates of a protein, with Python alone.

cytochrome_c.txt                  the coordinates: residue, x, y, z in angstrom, a line for each
cytochrome_c_pair.safetensors     x and mask of trimul
cytochrome_c_weights.safetensors  its weights: random, no model's

    samples/make_pair_sample.py                # write both files from cytochrome_c.txt
    samples/make_pair_sample.py --check        # remake, compare; writes nothing
    samples/make_pair_sample.py --pdb d1lfma_.pdb.gz    # write cytochrome_c.txt

README.md says where the coordinates are from. A value is computed in double precision and rounded
once, to the nearest BF16 or F32.
"""
import argparse
import gzip
import json
import math
import random
import struct
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
COORDINATES = HERE / "cytochrome_c.txt"
PAIR = HERE / "cytochrome_c_pair.safetensors"
WEIGHTS = HERE / "cytochrome_c_weights.safetensors"

CENTRES = [4.0 + 2.5 * i for i in range(8)]  # angstrom
WIDTH = 2.5
MASK_RADIUS = 20.0  # pairs further apart are masked
MAX_SEPARATION = 32  # along the chain, where it is clipped
DIM = len(CENTRES) + 4
HIDDEN = 16


def sub(a, b):
    return [p - q for p, q in zip(a, b)]


def dot(a, b):
    return sum(p * q for p, q in zip(a, b))


def cross(a, b):
    return [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]]


def unit(a):
    length = math.sqrt(dot(a, a))
    return [p / length for p in a]


def frame(places, i):
    """Axes of residue i: along the chain, and across it in the plane of its two neighbours."""
    i = min(max(i, 1), len(places) - 2)
    along = unit(sub(places[i + 1], places[i - 1]))
    back = sub(places[i - 1], places[i])
    across = unit(sub(back, [dot(back, along) * p for p in along]))
    return along, across, cross(along, across)


def pair(places, i, j):
    """Features of a pair: how far, which way as residue i sees it, how far along the chain."""
    step = sub(places[j], places[i])
    distance = math.sqrt(dot(step, step))
    near = [math.exp(-(((distance - c) / WIDTH) ** 2)) for c in CENTRES]
    way = [dot(step, axis) / distance if i != j else 0.0 for axis in frame(places, i)]
    return near + way + [max(-1.0, min(1.0, (j - i) / MAX_SEPARATION))], distance


def bf16(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def f32(x):
    return struct.pack("<f", x)


def safetensors(tensors, metadata):
    """tensors: name -> (dtype, shape, values), in the order of the file."""
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, shape, values) in tensors.items():
        part = b"".join(map({"BF16": bf16, "F32": f32}[dtype], values))
        offsets = [len(data), len(data) + len(part)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += part
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def read_coordinates():
    lines = [line.split() for line in COORDINATES.read_text().splitlines()]
    return [[float(word) for word in line[1:]] for line in lines if line and line[0] != "#"]


def make_pair():
    places = read_coordinates()
    n = len(places)
    x, mask = [], []
    for i in range(n):
        for j in range(n):
            features, distance = pair(places, i, j)
            x += features
            mask.append(1.0 if distance <= MASK_RADIUS else 0.0)
    tensors = {"x": ("BF16", [1, n, n, DIM], x), "mask": ("BF16", [1, n, n], mask)}
    metadata = {"op": "trimul", "direction": "outgoing", "protein": "tuna cytochrome c, 1LFM A"}
    return safetensors(tensors, metadata)


def make_weights():
    numbers = random.Random(1)

    def normal(n, scale, mean=0.0):
        """random() is the same in every Python; Box-Muller makes the rest."""
        for _ in range(n):
            u, v = 1 - numbers.random(), numbers.random()
            yield mean + scale * math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)

    tensors = {}
    for name, width in (("norm_in", DIM), ("norm_out", HIDDEN)):
        tensors[name + ".weight"] = ("F32", [width], list(normal(width, 0.1, 1.0)))
        tensors[name + ".bias"] = ("F32", [width], list(normal(width, 0.1)))
    shapes = {"p_in": (2 * HIDDEN, DIM), "g_in": (2 * HIDDEN, DIM), "p_out": (DIM, HIDDEN),
              "g_out": (DIM, DIM)}
    for name, (n_out, n_in) in shapes.items():
        values = list(normal(n_out * n_in, n_in**-0.5))
        tensors[name + ".weight"] = ("BF16", [n_out, n_in], values)
        tensors[name + ".bias"] = ("BF16", [n_out], list(normal(n_out, 0.1)))
    wide_first = dict(sorted(tensors.items(), key=lambda item: item[1][0] != "F32"))
    return safetensors(wide_first, {"op": "trimul", "order": "stacked"})


def write_coordinates(path):
    lines = ["# C-alpha atoms of tuna cytochrome c, chain A of PDB entry 1LFM: x, y, z in angstrom"]
    for line in gzip.open(path, "rt"):
        if line.startswith("ATOM") and line[12:16] == " CA " and line[16] in " A":
            x, y, z = (float(line[at:at + 8]) for at in (30, 38, 46))
            lines.append(f"{line[17:20]} {x:8.3f} {y:8.3f} {z:8.3f}")
    COORDINATES.write_text("\n".join(lines) + "\n")
    print(f"{COORDINATES.name}: {len(lines) - 1} residues")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--pdb", metavar="FILE", help="take the coordinates from a .pdb.gz")
    options = parser.parse_args()
    if options.pdb:
        write_coordinates(options.pdb)
        return 0
    failed = 0
    for path, content in ((PAIR, make_pair()), (WEIGHTS, make_weights())):
        if options.check:
            same = path.read_bytes() == content
            print(f"{path.name}: {'the same' if same else 'DIFFERENT'}")
            failed |= not same
        else:
            path.write_bytes(content)
            print(f"{path.name}: {len(content)} bytes")
    return failed


if __name__ == "__main__":
    sys.exit(main())
