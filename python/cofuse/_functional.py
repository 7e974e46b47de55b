# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Operators as functions: outputs are made like the inputs, plans are kept with the team.

A plan is made at the first call with its parameters, which is collective like the call itself; the
last MAX_PLANS that were used are kept.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Optional, Sequence, Union

from ._cofuse import AllreduceRmsnormPlan, AttentionPlan, GradReturnPlan, Team
from ._layout import Layout

if TYPE_CHECKING:
    from ._cofuse import AnyStream


def _empty(like: Any, shape: Sequence[int], dtype: Optional[str] = None) -> Any:
    """A tensor of the same library, on the same device, of the same type unless one is named."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        kind = like.dtype if dtype is None else getattr(torch, dtype)
        return torch.empty(shape, dtype=kind, device=like.device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(like, numpy.ndarray):
        return numpy.empty(shape, like.dtype if dtype is None else dtype)
    raise TypeError(
        f"{type(like)}: outputs can be made for torch and NumPy; for other tensors, make them and "
        "call the plan"
    )


_TYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def _type_name(dtype: Any) -> str:
    """What torch and NumPy call it: of "bf16", "bfloat16", torch.bfloat16, numpy.float32, ..."""
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    name = name.rpartition(".")[2]
    name = _TYPES.get(name, name)
    if name not in _TYPES.values():
        raise ValueError(f"dtype = {dtype!r}: wanted bfloat16, float16 or float32")
    return name


def _stream_of(tensor: Any, stream: AnyStream) -> AnyStream:
    """The given stream; for None and a CUDA tensor of torch's, the one torch works on there."""
    torch = sys.modules.get("torch")
    if stream is None and torch is not None and isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        current: AnyStream = torch.cuda.current_stream(tensor.device)
        return current
    return stream


MAX_PLANS = 64
"""Plans that a team keeps for the functions, the last ones used."""


def _kept(team: Team, key: tuple[Any, ...]) -> Any:
    """The team's open plan for this key, or None."""
    plan = team._plans.get(key)
    return plan if plan is not None and plan.is_open else None


def _keep(team: Team, key: tuple[Any, ...], plan: Any) -> None:
    """Makes it the plan that was used last. The one unused for longest goes when there are too
    many, after what is queued of it. All ranks make the same calls, so it is the same one."""
    plans = team._plans
    plans.pop(key, None)
    if len(plans) >= MAX_PLANS:
        plans.pop(next(iter(plans))).destroy()
    plans[key] = plan


def forget_plans(team: Team) -> None:
    """Lets go of the plans that the functions keep with the team, after what is queued of them.

    Every rank of the team calls it, after the same calls of the functions; it does not wait for
    the others. The functions then make their plans anew. That is the way on after an error that
    ends a plan on all ranks (`Timeout`, `Mismatch`, then `Poisoned`), and it gives memory back.
    """
    plans = team._plans
    while plans:
        key = next(iter(plans))
        plans[key].destroy()  # one that cannot go yet stays in the table
        del plans[key]


def _dims(tensor: Any, name: str) -> tuple[int, ...]:
    if len(tensor.shape) != 4:
        raise ValueError(f"{name}: {len(tensor.shape)} dims, wanted 4")
    return tuple(tensor.shape)


_ATTENTION = ("format", "mask", "layout", "chunking", "schedule", "scale", "forward_only",
              "wire_f32", "window")


def _attention_plan(
    q: Any, k: Any, v: Any, team: Team, n_rows: Optional[int], options: tuple[Any, ...]
) -> AttentionPlan:
    """The team's plan for these shapes and options; looked up by what determines it."""
    key = (q.dtype, q.shape, k.shape, v.shape, n_rows, options)
    plan: Optional[AttentionPlan] = _kept(team, key)
    if plan is None:
        params = dict(zip(_ATTENTION, options))
        window = params.pop("window")
        if window is not None:
            params.update(has_window=True, window_left=window[0], window_right=window[1])
        first, second, n_heads, head_dim_qk = _dims(q, "q")
        n_batch, n_local = (second, first) if params["format"] in ("sbhd", 1) else (first, second)
        plan = AttentionPlan(
            team,
            dtype=q.dtype,
            n_batch=n_batch,
            n_rows=n_local * team.size if n_rows is None else n_rows,
            n_heads=n_heads,
            n_kv_heads=_dims(k, "k")[2],
            head_dim_qk=head_dim_qk,
            head_dim_v=_dims(v, "v")[3],
            **params,
        )
    _keep(team, key, plan)
    return plan


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    team: Team,
    mask: Union[str, int] = "none",
    window: Optional[tuple[int, int]] = None,
    scale: Optional[float] = None,
    n_rows: Optional[int] = None,
    format: Union[str, int] = "bshd",
    layout: Union[str, int] = "zigzag",
    chunking: Union[str, int] = "balanced",
    schedule: Union[str, int] = "default",
    forward_only: bool = False,
    wire_f32: bool = False,
    stream: AnyStream = None,
) -> tuple[Any, Any]:
    """Context-parallel attention over the sequence of all ranks: (o, lse).

    q [B, S_local, H, Dqk], k [B, S_local, Hkv, Dqk], v [B, S_local, Hkv, Dv] in float32, float16
    or bfloat16; o [B, S_local, H, Dv] in the same type, lse float32 [B, H, S_local]. With format
    "sbhd" the first two dims are exchanged, those of lse apart. n_rows is the whole sequence: P
    times S_local unless given, which it is on all ranks where they hold different numbers of rows.
    window: (left, right), of the keys that the mask leaves query row i sees i - left .. i + right,
    -1 being no limit. scale: None means 1/sqrt(Dqk). forward_only: no memory for a backward of the
    same plan; needed on CUDA devices, where there is no backward yet.
    No gradient is recorded: `attention_backward` computes it.
    """
    options = (format, mask, layout, chunking, schedule, scale, forward_only, wire_f32, window)
    plan = _attention_plan(q, k, v, team, n_rows, options)
    first, second, n_heads, _ = q.shape
    batch, rows = (second, first) if format in ("sbhd", 1) else (first, second)
    o = _empty(q, (first, second, n_heads, v.shape[3]))
    lse = _empty(q, (batch, n_heads, rows), "float32")
    plan.forward(q, k, v, o, lse, None, _stream_of(q, stream))
    return o, lse


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    dout: Any,
    *,
    team: Team,
    mask: Union[str, int] = "none",
    window: Optional[tuple[int, int]] = None,
    scale: Optional[float] = None,
    n_rows: Optional[int] = None,
    format: Union[str, int] = "bshd",
    layout: Union[str, int] = "zigzag",
    chunking: Union[str, int] = "balanced",
    schedule: Union[str, int] = "default",
    wire_f32: bool = False,
    stream: AnyStream = None,
) -> tuple[Any, Any, Any]:
    """Gradients (dq, dk, dv) of `attention` for dout, shaped like q, k, v.

    o and lse are what `attention` returned; the parameters are those it was called with.
    """
    options = (format, mask, layout, chunking, schedule, scale, False, wire_f32, window)
    plan = _attention_plan(q, k, v, team, n_rows, options)
    dq, dk, dv = (_empty(t, tuple(t.shape)) for t in (q, k, v))
    plan.backward(q, k, v, o, lse, dout, dq, dk, dv, None, _stream_of(q, stream))
    return dq, dk, dv


def grad_return(
    dk: Any,
    dv: Any,
    *,
    team: Team,
    dtype: Any = None,
    writers: Union[str, int, None] = None,
    writer_table: Optional[Sequence[int]] = None,
    layout: Union[str, int] = "zigzag",
    chunking: Union[str, int] = "balanced",
    transfer: Union[str, int] = "push",
    wire_f32: bool = False,
    max_ctas: int = 0,
    stream: AnyStream = None,
) -> tuple[Any, Any]:
    """Sums of all ranks' partials for the rows of this rank: (dk, dv) [S_local, B, Hkv, D].

    dk, dv [S, B, Hkv, D] are this rank's partials for the whole sequence, in the order of global
    rows. dtype, of the outputs: "float32", "float16", "bfloat16", torch.bfloat16, numpy.float32 and
    the like; partials have the same or are float32. writers: "all" (None), "causal", or "table"
    with writer_table.
    """
    n_rows, n_batch, n_heads, head_dim_k = _dims(dk, "dk")
    head_dim_v = _dims(dv, "dv")[3]
    own = _type_name(dk.dtype)
    wanted = own if dtype is None else _type_name(dtype)
    n_local = Layout(n_rows, team.size, layout, chunking).local_rows(team.rank)
    dk_out = _empty(dk, (n_local, n_batch, n_heads, head_dim_k), wanted)
    dv_out = _empty(dv, (n_local, n_batch, n_heads, head_dim_v), wanted)
    options = (wanted, layout, chunking, transfer, wire_f32, max_ctas)
    key = (own, dk.shape, dv.shape, options)
    plan: Optional[GradReturnPlan] = _kept(team, key)
    if plan is None:
        plan = GradReturnPlan(
            team,
            dtype=wanted,
            partial_f32=own == "float32" and wanted != own,
            n_batch=n_batch,
            n_rows=n_rows,
            n_heads=n_heads,
            head_dim_k=head_dim_k,
            head_dim_v=head_dim_v,
            layout=layout,
            chunking=chunking,
            transfer=transfer,
            wire_f32=wire_f32,
            max_ctas=max_ctas,
        )
    _keep(team, key, plan)
    plan.run(dk, dv, dk_out, dv_out, writers, writer_table, _stream_of(dk, stream))
    return dk_out, dv_out


def _capacity(n_tokens: int) -> int:
    """Tokens that a plan made for a call with so many has room for: few plans serve all calls."""
    return max(64, 1 << max(n_tokens - 1, 0).bit_length())


def allreduce_rmsnorm(
    x: Any,
    residual: Any = None,
    weight: Any = None,
    *,
    team: Team,
    eps: float = 1e-6,
    weight_bias: int = 0,
    rounding: Union[str, int] = "match_unfused",
    algorithm: Union[str, int] = "auto",
    one_shot_bytes: int = 0,
    max_ctas: int = 0,
    max_tokens: Optional[int] = None,
    stream: AnyStream = None,
) -> tuple[Any, Any]:
    """The sum of x over all ranks, plus residual, and its RMSNorm: (norm_out, residual_out).

    x and residual [..., H] in float32, float16 or bfloat16, weight [H] in the same type or
    float32; residual_out = sum of x + residual, norm_out = residual_out * weight / RMS of its rows.
    Without residual, residual_out is the sum; without weight too, norm_out is None. residual and
    weight are the same on all ranks, and every rank passes as many rows.
    weight_bias: 1 where weights are stored as their difference from 1. eps is used with a weight.
    max_tokens: rows that the plan has room for (None: those of x, rounded up to a power of two).
    A CUDA tensor of torch's goes to torch's current stream unless another one is named.
    """
    if weight is None and residual is not None:
        raise TypeError("residual: given without a weight; without a norm there is none to add")
    variant = "only" if weight is None else "norm" if residual is None else "residual_norm"
    shape = tuple(x.shape)
    if not shape:
        raise ValueError("x: 0 dims, wanted [..., H]")
    n_tokens = 1
    for dim in shape[:-1]:
        n_tokens *= dim
    room = _capacity(n_tokens) if max_tokens is None else max_tokens
    weight_dtype = None if weight is None else weight.dtype
    options = (variant, rounding, eps, weight_bias, algorithm, one_shot_bytes, max_ctas)
    key = ("allreduce_rmsnorm", x.dtype, weight_dtype, shape[-1], room, options)
    plan: Optional[AllreduceRmsnormPlan] = _kept(team, key)
    if plan is None:
        plan = AllreduceRmsnormPlan(
            team,
            dtype=x.dtype,
            weight_dtype=weight_dtype,
            hidden=shape[-1],
            max_tokens=room,
            variant=variant,
            rounding=rounding,
            eps=0.0 if weight is None else eps,
            weight_bias=weight_bias,
            algorithm=algorithm,
            one_shot_bytes=one_shot_bytes,
            max_ctas=max_ctas,
        )
    _keep(team, key, plan)
    residual_out = _empty(x, shape)
    norm_out = None if weight is None else _empty(x, shape)
    plan.run(x, residual, weight, residual_out, norm_out, None, _stream_of(x, stream))
    return norm_out, residual_out
