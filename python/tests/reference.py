# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients, and the triangle update, in fp64, by the formulas, on whole tensors;
all-reduce and RMSNorm in fp32, operation by operation as the library promises them."""

import numpy as np


def seen(n_rows, mask, window):
    """[S, S]: which keys a query row sees; window (left, right), -1 being no limit."""
    ahead = np.arange(n_rows)[None] - np.arange(n_rows)[:, None]
    left, right = window or (-1, -1)
    return ((mask != "causal") | (ahead <= 0)) & ((left < 0) | (-ahead <= left)) & (
        (right < 0) | (ahead <= right))


def attention(q, k, v, mask, scale=None, dout=None, window=None):
    """q, k, v [B, S, heads, D] -> o, lse [B, H, S], and dq, dk, dv with dout."""
    q, k, v = (t.astype(np.float64) for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = (np.repeat(t, group, axis=2) for t in (k, v))
    scale = scale or 1 / np.sqrt(q.shape[3])
    score = scale * np.einsum("bihd,bjhd->bhij", q, keys)
    score = np.where(seen(q.shape[1], mask, window), score, -np.inf)
    top = score.max(-1, keepdims=True)
    weight = np.exp(score - top)
    total = weight.sum(-1, keepdims=True)
    p = weight / total
    lse = (top + np.log(total))[..., 0]
    o = np.einsum("bhij,bjhd->bihd", p, values)
    if dout is None:
        return o, lse
    dout = dout.astype(np.float64)
    dp = np.einsum("bihd,bjhd->bhij", dout, values)
    delta = np.einsum("bihd,bihd->bhi", dout, o)
    ds = scale * p * (dp - delta[..., None])
    dq = np.einsum("bhij,bjhd->bihd", ds, keys)
    dk = np.einsum("bhij,bihd->bjhd", ds, q)
    dv = np.einsum("bhij,bihd->bjhd", p, dout)
    dk = dk.reshape(*k.shape[:2], k.shape[2], group, -1).sum(3)
    dv = dv.reshape(*v.shape[:2], v.shape[2], group, -1).sum(3)
    return o, lse, dq, dk, dv


def allreduce_rmsnorm(parts, residual, weight, eps, rounded, weight_bias=0, is_exact=False):
    """parts, residual [T, H], weight [H] in fp32 -> norm_out, residual_out, rounded by `rounded`.

    The fp32 operations of include/cofuse/allreduce_rmsnorm.h, in its order, so all bits are equal.
    """
    z = parts[0].copy()
    for part in parts[1:]:
        z += part
    if not is_exact:
        z = rounded(z)
    if residual is not None:
        z = z + residual
        if not is_exact:
            z = rounded(z)
    n_tokens, hidden = z.shape
    squares = np.zeros((n_tokens, -(-hidden // 256) * 256), np.float32)
    squares[:, :hidden] = z * z
    squares = squares.reshape(n_tokens, squares.shape[1] // 256, 256)
    while squares.shape[2] > 1:
        squares = squares[..., 0::2] + squares[..., 1::2]
    total = squares[:, 0]
    for segment in range(1, squares.shape[1]):
        total = total + squares[:, segment]
    inv = np.float32(1) / np.sqrt(total / np.float32(hidden) + np.float32(eps))
    return rounded((z * inv) * (weight + np.float32(weight_bias))), rounded(z)


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def trimul(x, w, mask, direction, eps=1e-5):
    """x [B, N, N, D], mask [B, N, N], all weights present -> out, in fp64."""
    x, mask = x.astype(np.float64), mask.astype(np.float64)
    w = {name: t.astype(np.float64) for name, t in w.items()}
    xn = layer_norm(x, w["norm_in_w"], w["norm_in_b"], eps)
    gate = sigmoid(xn @ w["g_in"].T + w["g_in_b"])
    a, b = np.split((xn @ w["p_in"].T + w["p_in_b"]) * gate * mask[..., None], 2, -1)
    equation = "bikh,bjkh->bijh" if direction == "outgoing" else "bkih,bkjh->bijh"
    tri = layer_norm(np.einsum(equation, a, b), w["norm_out_w"], w["norm_out_b"], eps)
    return (tri @ w["p_out"].T + w["p_out_b"]) * sigmoid(xn @ w["g_out"].T + w["g_out_b"])


def close(ours, wanted, bound):
    """Relative root mean square error within the bound."""
    wanted = np.asarray(wanted, np.float64)
    error = np.sqrt(np.mean((np.asarray(ours, np.float64) - wanted) ** 2))
    size = np.sqrt(np.mean(wanted**2))
    assert error <= bound * size, f"error {error:.3e} of {size:.3e}, wanted {bound} of it"
