# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the tests run: workers.py NAME ARGUMENTS."""

import gc
import os
import sys
import threading
import time
import weakref

import numpy as np

import cofuse
import reference

B, H, HKV, DQK, DV = 2, 4, 2, 24, 16


def whole(n_rows):
    """The same global q, k, v, dout on every rank."""
    rng = np.random.default_rng(7)
    shapes = [(B, n_rows, H, DQK), (B, n_rows, HKV, DQK), (B, n_rows, HKV, DV), (B, n_rows, H, DV)]
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def attention(n_rows, mask, layout, chunking, *window):
    """Forward and backward against fp64; sequences that do not divide evenly too."""
    n_rows, window = int(n_rows), tuple(map(int, window)) or None
    with cofuse.init() as world:
        team = world.team
        rows = cofuse.Layout(n_rows, world.size, layout, chunking).global_rows(world.rank)
        tensors = whole(n_rows)
        q, k, v, dout = ([np.ascontiguousarray(t[:, rows]) for t in tensors])
        options = dict(team=team, mask=mask, layout=layout, chunking=chunking, n_rows=n_rows,
                       window=window)
        o, lse = cofuse.attention(q, k, v, **options)
        gradients = cofuse.attention_backward(q, k, v, o, lse, dout, **options)
        assert len(team._plans) == 1, "forward and backward share a plan"
        team.barrier()
    valid = rows >= 0
    wanted = reference.attention(*tensors[:3], mask, dout=tensors[3], window=window)
    reference.close(o[:, valid], wanted[0][:, rows[valid]], 1e-5)
    reference.close(lse[:, :, valid], wanted[1][:, :, rows[valid]], 1e-5)
    for ours, theirs in zip(gradients, wanted[2:]):
        reference.close(ours[:, valid], theirs[:, rows[valid]], 1e-5)


def streams():
    """Calls on a stream, whose tensors nobody else keeps; an event to a second stream."""
    with cofuse.init() as world:
        n_local = 32
        shape = dict(dtype="f32", n_batch=1, n_rows=n_local * world.size, n_heads=2,
                     head_dim_qk=16, mask="causal")
        plan = cofuse.AttentionPlan(world.team, **shape)
        first, second = cofuse.Stream(world), cofuse.Stream(world, n_threads=1)
        results = []
        for i in range(300): # more than a queue holds
            q, k, v = (np.full((1, n_local, 2, 16), x, np.float32) for x in (0, 0, i))
            o, lse = np.empty_like(q), np.empty((1, 2, n_local), np.float32)
            stream = first if i % 2 == 0 else second
            plan.forward(q, k, v, o, lse, stream=stream)
            (second if i % 2 == 0 else first).wait(stream.record())
            results.append(o)
            del q, k, v, lse
        first.sync()
        second.sync()
        for i, o in enumerate(results):
            np.testing.assert_allclose(o, i, rtol=1e-6)
        world.team.barrier()


class Nested:
    """An exporter in Python, in which something else happens before the tensor is handed out."""

    def __init__(self, array, before):
        self.array, self.before = array, before

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords):
        self.before()
        return self.array.__dlpack__(**keywords)


def nested_calls():
    """Calls that begin on a stream while others are taking their tensors: each has its place."""
    world = cofuse.init(n_threads=1)
    plan = cofuse.AttentionPlan(world.team, dtype="f32", n_batch=1, n_rows=16, n_heads=1,
                                head_dim_qk=8)
    stream = cofuse.Stream(world)
    q, results, kept = np.ones((1, 16, 1, 8), np.float32), [], []

    def call(depth):
        o, lse = np.empty_like(q), np.empty((1, 1, 16), np.float32)
        v = np.full_like(q, depth)
        results.append((o, depth))
        kept.append(weakref.ref(v))
        before = (lambda: call(depth - 1)) if depth else (lambda: None)
        plan.forward(q, q, Nested(v, before), o, lse, stream=stream)

    for _ in range(15):  # all but the last place of the stream's first list
        call(0)
    call(40)
    assert all(v() is not None for v in kept), "a queued call keeps its tensors"
    stream.sync()
    assert all(v() is None for v in kept)
    for o, value in results:
        np.testing.assert_allclose(o, value, rtol=1e-6)
    world.close()


def grad_return(transfer):
    with cofuse.init() as world:
        n_rows, size = 37, world.size
        partials = [
            [np.random.default_rng(10 * r + i).integers(-8, 9, (n_rows, B, HKV, d))
             for i, d in enumerate((DQK, DV))] for r in range(size)
        ]
        dk, dv = (t.astype(np.float32) for t in partials[world.rank])
        rows = cofuse.Layout(n_rows, size).global_rows(world.rank)
        ours = cofuse.grad_return(dk, dv, team=world.team, transfer=transfer)
        half = cofuse.grad_return(dk, dv, team=world.team, dtype="float16")
        table = [1] * (2 * size) # rank 0 alone writes
        only = cofuse.grad_return(dk, dv, team=world.team, writers="table", writer_table=table)
        for i in range(2):
            wanted = sum(p[i] for p in partials)[rows]
            np.testing.assert_array_equal(ours[i], wanted)
            assert half[i].dtype == np.float16
            np.testing.assert_array_equal(half[i], wanted)
            np.testing.assert_array_equal(only[i], partials[0][i][rows])
        world.team.barrier()


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows_of(dtype, n_tokens, hidden, size):
    """All ranks' x, the residual and the weight, and what rounds to the type; values are of it."""
    def rounded(array):
        return array.astype(dtype).astype(np.float32)

    parts = [rounded(normal(50 + r, n_tokens, hidden)) for r in range(size)]
    return parts, rounded(normal(1, n_tokens, hidden)), normal(2, hidden), rounded


def allreduce_rmsnorm(dtype):
    """Bit by bit what the order of operations gives: every variant, rows that are free per call."""
    with cofuse.init() as world:
        rank, size, team = world.rank, world.size, world.team
        for hidden in (1, 257, 1000):
            for n_tokens in (0, 1, 5, 70, 3):
                parts, residual, weight, rounded = rows_of(dtype, n_tokens, hidden, size)
                x, r = parts[rank].astype(dtype), residual.astype(dtype)
                for is_exact in (False, True):
                    rounding = "exact" if is_exact else "match_unfused"
                    options = dict(team=team, eps=1e-5, weight_bias=1, rounding=rounding)
                    ours = cofuse.allreduce_rmsnorm(x, r, weight, **options)
                    wanted = reference.allreduce_rmsnorm(parts, residual, weight, 1e-5, rounded, 1,
                                                         is_exact)
                    for a, b in zip(ours, wanted):
                        assert a.dtype == x.dtype
                        np.testing.assert_array_equal(a.astype(np.float32), b)
                    norm, total = cofuse.allreduce_rmsnorm(x, weight=weight, **options)
                    wanted = reference.allreduce_rmsnorm(parts, None, weight, 1e-5, rounded, 1,
                                                         is_exact)
                    np.testing.assert_array_equal(norm.astype(np.float32), wanted[0])
                    np.testing.assert_array_equal(total.astype(np.float32), wanted[1])
                nothing, total = cofuse.allreduce_rmsnorm(x, team=team)
                assert nothing is None
                np.testing.assert_array_equal(total.astype(np.float32), wanted[1])
        # Two capacities (64, 128), two roundings, two variants; "only" knows no eps or rounding.
        assert len(team._plans) == 3 * 2 * (2 * 2 + 1)
        team.barrier()


def allreduce_rmsnorm_plan():
    """In place, rows with a pitch, more than two dims, more rows than there is room for, a
    stream, x in the arena, algorithms."""
    import ctypes

    hidden, n_tokens = 96, 30
    with cofuse.init() as world:
        rank, size, team = world.rank, world.size, world.team
        parts, residual, weight, rounded = rows_of(np.float16, n_tokens, hidden, size)
        wanted = reference.allreduce_rmsnorm(parts, residual, weight, 1e-6, rounded)
        params = dict(dtype="f16", weight_dtype=np.float32, hidden=hidden, max_tokens=7, eps=1e-6)
        sizes = cofuse.allreduce_rmsnorm_workspace(team, **params)
        arena = cofuse.Arena(team, sizes["symmetric"] + (1 << 20))
        offset = arena.alloc(2 * n_tokens * hidden)
        memory = (ctypes.c_uint16 * (n_tokens * hidden)).from_address(
            arena.view()["base"][rank] + offset)
        shared = np.frombuffer(memory, np.float16).reshape(n_tokens, hidden)
        stream = cofuse.Stream(world)
        for algorithm in ("auto", "one_shot", "two_shot"):
            plan = cofuse.AllreduceRmsnormPlan(team, arena=arena, algorithm=algorithm, **params)
            assert "allreduce_rmsnorm dtype=f16" in plan.describe
            wide = np.zeros((n_tokens, 3 * hidden), np.float16)
            x = wide[:, hidden : 2 * hidden]
            x[:] = parts[rank]
            z = residual.astype(np.float16).reshape(5, 6, hidden)
            plan.run(x, z, weight, z, x)  # in place
            np.testing.assert_array_equal(x, wanted[0])
            np.testing.assert_array_equal(z.reshape(n_tokens, hidden), wanted[1])
            assert not wide[:, :hidden].any() and not wide[:, 2 * hidden :].any()
            shared[:] = parts[rank]
            norm, z = np.empty_like(shared), residual.astype(np.float16)
            plan.run(shared, z, weight, z, norm, x_source=offset, stream=stream)
            stream.sync()
            np.testing.assert_array_equal(norm, wanted[0])
            np.testing.assert_array_equal(z, wanted[1])
            plan.destroy()
        del shared, memory, x
        team.barrier()


TRIMUL_SHAPES = {"norm_in_w": "D", "norm_in_b": "D", "p_in": "2D", "p_in_b": "2", "g_in": "2D",
                 "g_in_b": "2", "norm_out_w": "H", "norm_out_b": "H", "p_out": "DH",
                 "p_out_b": "D", "g_out": "DD", "g_out_b": "D"}


def trimul_inputs(n_batch, n, dim, hidden):
    """The same global x, mask, dout and weights on every rank."""
    rng = np.random.default_rng(5)
    sizes = {"D": dim, "H": hidden, "2": 2 * hidden}
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    weights = {name: normal(*(sizes[letter] for letter in letters)) / 4
               for name, letters in TRIMUL_SHAPES.items()}
    mask = (rng.random((n_batch, n, n)) < 0.8).astype(np.float32)
    return normal(n_batch, n, n, dim), mask, normal(n_batch, n, n, dim), weights


def trimul_slice(size, rank, n, **params):
    row, n_rows, col, n_cols = cofuse.trimul_block(size, rank, n, **params)
    return np.s_[:, row : row + n_rows, col : col + n_cols]


def trimul(direction):
    """Forward against fp64, backward against differences of it along a random line; explicit
    shards, N changing, saved a and b, a stream, in place."""
    n_batch, n, dim, hidden = 2, 13, 24, 20
    x, mask, dout, weights = trimul_inputs(n_batch, n, dim, hidden)
    with cofuse.init() as world:
        rank, size, team = world.rank, world.size, world.team
        params = dict(dtype="f32", n_batch=n_batch, n_rows=n, dim=dim, hidden=hidden,
                      direction=direction, grid_rows=min(size, 2))
        own = trimul_slice(size, rank, n, **params)
        local, local_mask, local_dout = (np.ascontiguousarray(t[own]) for t in (x, mask, dout))
        wanted = reference.trimul(x, weights, mask, direction)
        sizes = cofuse.trimul_workspace(team, save="ab", **params)
        saved = np.empty(sizes["saved"] + 128, np.uint8)
        saved = saved[-saved.ctypes.data % 128 :][: sizes["saved"]]
        plan = cofuse.TrimulPlan(team, save="ab", reduce_param_grads=True, **params)
        assert f"direction={direction}" in plan.describe
        plan.set_weights(weights, check=True)
        out, dx = np.empty_like(local), np.empty_like(local)
        grads = {name: np.empty(t.shape, np.float32) for name, t in weights.items()}
        stream = cofuse.Stream(world)
        plan.forward(local, out, local_mask, local, saved=saved, stream=stream)
        plan.backward(local, local_dout, dx, grads, local_mask, saved=saved, stream=stream)
        stream.sync()
        reference.close(out, (wanted + x)[own], 1e-5)

        rng, step = np.random.default_rng(6), 1e-6
        line = rng.standard_normal(x.shape)
        ends = [reference.trimul(x + s * line, weights, mask, direction) for s in (-step, step)]
        slope = np.sum(dout * (ends[1] - ends[0])) / (2 * step)
        parts = team.allgather(np.float64(np.sum(dx * line[own])).tobytes())
        ours = sum(np.frombuffer(part)[0] for part in parts)
        assert abs(ours - slope) < 1e-4 * np.linalg.norm(dx) * np.linalg.norm(line)
        for name, weight in weights.items():
            line = rng.standard_normal(weight.shape)
            ends = [reference.trimul(x, {**weights, name: weight + s * line}, mask, direction)
                    for s in (-step, step)]
            slope = np.sum(dout * (ends[1] - ends[0])) / (2 * step)
            size_of = np.linalg.norm(grads[name]) * np.linalg.norm(line)
            assert abs(np.sum(grads[name] * line) - slope) < 1e-4 * size_of, name

        # Fewer rows on the same plan, in place; then all rows on the last ranks.
        few = trimul_slice(size, rank, 5, **params)
        local = np.ascontiguousarray(x[:1, :5, :5][few])
        plan.forward(local, local, np.ascontiguousarray(mask[:1, :5, :5][few]), n=5,
                     saved=saved)
        wanted = reference.trimul(x[:1, :5, :5], weights, mask[:1, :5, :5], direction)[few]
        if wanted.size:
            reference.close(local, wanted, 1e-5)
        columns = size // params["grid_rows"]
        params.update(shard="explicit", forward_only=True,
                      row_offsets=[0] * params["grid_rows"] + [n],
                      col_offsets=[0] * columns + [n])
        uneven = cofuse.TrimulPlan(team, **params)
        uneven.set_weights(weights)
        own = trimul_slice(size, rank, n, **params)
        result = np.empty_like(x[own])
        uneven.forward(np.ascontiguousarray(x[own]), result, np.ascontiguousarray(mask[own]))
        assert result.size == (x.size if rank == size - 1 else 0)
        if result.size:
            reference.close(result, reference.trimul(x, weights, mask, direction), 1e-5)
        for changed in (dict(row_offsets=[0]), dict(col_offsets=[0, "x"]), dict(row_offsets=3)):
            try:
                cofuse.TrimulPlan(team, **{**params, **changed})
            except (cofuse.InvalidArgument, cofuse.Mismatch, TypeError):
                continue
            raise AssertionError("no exception")
        team.barrier()


def trimul_weights_differ():
    _, _, _, weights = trimul_inputs(1, 4, 8, 8)
    with cofuse.init() as world:
        plan = cofuse.TrimulPlan(world.team, dtype="f32", n_rows=4, dim=8)
        plan.set_weights(weights, check=True)
        if world.rank == 2:
            weights["g_out"] = weights["g_out"] + 1
        try:
            plan.set_weights(weights, check=True)
        except cofuse.Mismatch as error:
            assert "rank 2" in str(error) or world.rank == 2, error
        else:
            raise AssertionError("no exception")


def trimul_torch():
    """bfloat16, beside the same formulas in torch and their gradient by autograd."""
    import torch
    from torch.nn.functional import layer_norm, linear

    n, dim = 17, 16
    x, mask, dout, weights = trimul_inputs(1, n, dim, dim)
    tensors = [torch.from_numpy(t).bfloat16() for t in (x, mask, dout)]
    weights = {name: torch.from_numpy(t).bfloat16() for name, t in weights.items()}
    with cofuse.init() as world:
        params = dict(dtype=torch.bfloat16, n_rows=n, dim=dim, reduce_param_grads=True)
        own = trimul_slice(world.size, world.rank, n, **params)
        local, local_mask, local_dout = (t[own].contiguous() for t in tensors)
        plan = cofuse.TrimulPlan(world.team, **params)
        plan.set_weights(weights)
        out, dx = torch.empty_like(local), torch.empty_like(local)
        grads = {"p_in": torch.empty(2 * dim, dim)}
        plan.forward(local, out, local_mask)
        plan.backward(local, local_dout, dx, grads, local_mask)
        world.team.barrier()
    whole, p_in = tensors[0].float().requires_grad_(), weights["p_in"].float().requires_grad_()
    w = {name: t.float() for name, t in weights.items()}
    xn = layer_norm(whole, (dim,), w["norm_in_w"], w["norm_in_b"])
    gate = torch.sigmoid(linear(xn, w["g_in"], w["g_in_b"])) * tensors[1].float()[..., None]
    a, b = (linear(xn, p_in, w["p_in_b"]) * gate).chunk(2, -1)
    tri = layer_norm(torch.einsum("bikh,bjkh->bijh", a, b), (dim,), w["norm_out_w"],
                     w["norm_out_b"])
    result = linear(tri, w["p_out"], w["p_out_b"]) * torch.sigmoid(
        linear(xn, w["g_out"], w["g_out_b"]))
    result.backward(tensors[2].float())
    reference.close(out.float(), result.detach()[own], 1e-2)
    reference.close(dx.float(), whole.grad[own], 2e-2)
    reference.close(grads["p_in"], p_in.grad, 2e-2)


def allreduce_rmsnorm_torch():
    """bfloat16 against torch, and bit by bit; a mismatch of T is an error on all ranks."""
    import torch

    with cofuse.init() as world:
        rank, size, team = world.rank, world.size, world.team

        def rounded(array):
            return torch.from_numpy(array).bfloat16().float().numpy()

        hidden = 2048
        parts = [rounded(normal(r, 2, 9, hidden)) for r in range(size)]
        residual, weight = rounded(normal(8, 2, 9, hidden)), rounded(normal(9, hidden))
        x, r, w = (torch.from_numpy(t).bfloat16() for t in (parts[rank], residual, weight))
        norm, z = cofuse.allreduce_rmsnorm(x, r, w, team=team)
        assert norm.dtype == z.dtype == torch.bfloat16 and norm.shape == z.shape == (2, 9, hidden)
        total = sum(torch.from_numpy(p).double() for p in parts).bfloat16() + r
        plain = torch.nn.functional.rms_norm(total.double(), (hidden,), w.double(), 1e-6)
        torch.testing.assert_close(z, total, rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(norm.double(), plain, rtol=2**-6, atol=2**-6)
        flat = [p.reshape(-1, hidden) for p in parts]
        wanted = reference.allreduce_rmsnorm(flat, residual.reshape(-1, hidden), weight, 1e-6,
                                             rounded)
        for ours, theirs in zip((norm, z), wanted):
            np.testing.assert_array_equal(ours.float().numpy().reshape(-1, hidden), theirs)
        if size > 1:
            try:
                cofuse.allreduce_rmsnorm(x[:1] if rank else x, r[:1] if rank else r, w, team=team)
            except (cofuse.Mismatch, cofuse.Poisoned) as error:
                assert "18" in str(error) or "poison" in str(error), error
            else:
                raise AssertionError("no exception")
        team.barrier()


def teams():
    with cofuse.init() as world:
        inner, outer = world.team.split(2)
        assert (inner.rank, inner.size, outer.rank) == (world.rank % 2, 2, world.rank // 2)
        back = world.team_from_ranks(range(world.size - 1, -1, -1), tag=3)
        assert back.rank == world.size - 1 - world.rank
        parts = back.allgather(bytes([world.rank]) * 5)
        assert parts == [bytes([r]) * 5 for r in range(world.size - 1, -1, -1)]
        arena = cofuse.Arena(back, 1 << 20, n_words=2)
        assert arena.alloc(1000) == arena.n_bytes - 1024
        view = arena.view()
        assert view["n_ranks"] == world.size and all(view["base"])
        shape = dict(dtype="f32", n_batch=1, n_rows=16, n_heads=1, head_dim_qk=8)
        plan = cofuse.AttentionPlan(back, arena=arena, **shape)
        need = cofuse.attention_workspace(back, **shape)
        assert "arena=shared" in plan.describe and need["symmetric"] <= 1 << 20
        back.query()
        arena.destroy() # takes its plan along
        assert not plan.is_open and not arena.is_open
        world.team.barrier()


def mismatch():
    """Ranks that disagree get an exception that says in what."""
    with cofuse.init() as world:
        try:
            cofuse.AttentionPlan(world.team, dtype="f32", n_batch=1, n_rows=64, n_heads=2,
                                 head_dim_qk=16 if world.rank == 0 else 32)
        except cofuse.Mismatch as error:
            assert error.status == -10 and error.name == "COF_ERR_MISMATCH"
            assert "Dqk" in str(error), error
        else:
            raise AssertionError("no exception")
        world.team.barrier()


def raises(kinds, call, *args, **keywords):
    try:
        call(*args, **keywords)
    except kinds as error:
        return error
    raise AssertionError("no exception")


def forgets():
    """Ranks that disagree end a kept plan, and no other: both go on once plans are forgotten."""
    with cofuse.init(n_threads=1) as world:
        team = world.team
        errors = cofuse.Mismatch, cofuse.Poisoned

        def call(n_tokens, hidden):
            x = np.ones((n_tokens, hidden), np.float32)
            total = cofuse.allreduce_rmsnorm(x, team=team)[1]
            np.testing.assert_array_equal(total, world.size)

        call(5, 16)
        call(5, 32)
        plans = list(team._plans.values())
        raises(errors, call, 5 + world.rank, 16)
        for _ in range(2):
            raises(errors, call, 5, 16)
            call(5, 32)
        team.barrier()  # each has got its error
        cofuse.forget_plans(team)
        assert not team._plans and not any(plan.is_open for plan in plans)
        call(5, 16)
        call(5, 32)
        assert len(team._plans) == 2
        team.barrier()


def failed_stream():
    """A stream that failed raises what ended it, and holds the streams that it waits for."""
    with cofuse.init(n_threads=1) as world:
        plan = cofuse.AllreduceRmsnormPlan(world.team, dtype="f32", hidden=8, max_tokens=8,
                                           variant="only")
        stream, other = cofuse.Stream(world), cofuse.Stream(world)
        x = np.ones((1 + world.rank, 8), np.float32)
        plan.run(x, residual_out=x.copy(), stream=stream)
        errors = cofuse.Mismatch, cofuse.Poisoned
        text = str(raises(errors, stream.sync))
        before = sys.getrefcount(other)
        for i in range(3):
            assert str(raises(errors, stream.wait, other.record())) == text
            assert sys.getrefcount(other) == before + i + 1
        other.destroy()
        assert sys.getrefcount(other) == before
        world.team.barrier()


def dies():
    """Rank 1 goes away; rank 0 is told in a barrier, well before the deadline."""
    world = cofuse.init()
    world.team.barrier()
    if world.rank == 1:
        os._exit(3)
    begin = time.monotonic()
    try:
        world.team.barrier()
    except cofuse.PeerDead:
        assert time.monotonic() - begin < 60
    else:
        raise AssertionError("no exception")
    try:
        world.team.query()
    except cofuse.PeerDead:
        pass
    else:
        raise AssertionError("no exception")


def await_file(path):
    deadline = time.monotonic() + 90
    while not os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refused(text, call, *args):
    try:
        call(*args)
    except cofuse.InvalidArgument as error:
        assert text in str(error), error
    else:
        raise AssertionError("no exception")


def gil():
    """While rank 0 waits in a barrier, another thread of it counts. Rank 1 comes when told so."""
    world = cofuse.init()
    path = sys.argv[2]
    if world.rank == 0:
        waiter = threading.Thread(target=world.team.barrier)
        waiter.start()
        for _ in range(100): # each needs the GIL
            time.sleep(0.001)
        assert waiter.is_alive()
        refused("another thread", world.team.barrier)
        refused("another thread", world.close)
        open(path, "w").close()
        waiter.join()
    else:
        await_file(path)
        world.team.barrier()
    world.team.barrier()
    world.close()


def closing(path, way):
    """While one thread of rank 0 ends a stream whose work waits for rank 1, another one cannot
    destroy what the work needs. Rank 1 comes when told so."""
    world = cofuse.init(n_threads=1)
    plan = cofuse.AttentionPlan(world.team, dtype="f32", n_batch=1, n_rows=16, n_heads=1,
                                head_dim_qk=8)
    q, v = np.ones((1, 8, 1, 8), np.float32), np.full((1, 8, 1, 8), world.rank, np.float32)
    o, lse = np.empty_like(q), np.empty((1, 1, 8), np.float32)
    if world.rank == 0:
        streams = [cofuse.Stream(world)]
        plan.forward(q, q, v, o, lse, stream=streams[0])
        event = streams[0].record() if way == "destroy" else None
        end = streams[0].destroy if way == "destroy" else streams.clear
        thread = threading.Thread(target=end)
        del end
        thread.start()
        deadline = time.monotonic() + 90
        # Either changes just before the thread lets go of the GIL.
        while (streams[0].is_open if way == "destroy" else
               any(type(x) is cofuse.Stream for x in gc.get_objects())):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for call in (plan.destroy, world.close):
            refused("stream: a call of another thread", call)
        if event:
            refused("stream: destroyed", cofuse.Stream(world).wait, event)
        assert thread.is_alive()
        open(path, "w").close()
        thread.join()
    else:
        await_file(path)
        plan.forward(q, q, v, o, lse)
    np.testing.assert_allclose(o, 0.5, rtol=1e-6)
    world.team.barrier()
    plan.destroy()
    world.close()


def exits():
    """The end of the interpreter with everything alive and work queued."""
    global kept
    world = cofuse.init()
    plan = cofuse.AttentionPlan(world.team, dtype="f32", n_batch=1, n_rows=64 * world.size,
                                n_heads=2, head_dim_qk=16)
    stream = cofuse.Stream(world)
    q, k, v, o = (np.ones((1, 64, 2, 16), np.float32) for _ in range(4))
    lse = np.empty((1, 2, 64), np.float32)
    cofuse.attention(q, k, v, team=world.team)
    for _ in range(20):
        plan.forward(q, k, v, o, lse, stream=stream)
    kept = [world, plan, stream, stream.record(), world.team]
    kept.append(kept)


def callback(folder, fails):
    """An all-gather of the caller's, here by files."""
    rank, size = int(os.environ["COFUSE_RANK"]), int(os.environ["COFUSE_SIZE"])

    def allgather(data):
        if fails == "yes":
            raise KeyError("no network today")
        with open(f"{folder}/{rank}.part", "wb") as file:
            file.write(data)
        os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}")
        parts, deadline = [], time.monotonic() + 90
        for r in range(size):
            while not os.path.exists(f"{folder}/{r}"):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with open(f"{folder}/{r}", "rb") as file:
                parts.append(file.read())
        return parts

    try:
        world = cofuse.init(rank=rank, size=size, allgather=allgather)
    except KeyError as error:
        assert fails == "yes" and "no network" in str(error)
        return
    assert fails == "no"
    assert world.team.allgather(bytes([rank])) == [bytes([r]) for r in range(size)]
    world.close()


def torch_group(port):
    """A world of a torch.distributed group; bf16 tensors against fp64."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["COFUSE_RANK"]), int(os.environ["COFUSE_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=size)
    with cofuse.init(group=dist.group.WORLD) as world:
        assert (world.rank, world.size) == (rank, size)
        n_rows = 50
        rows = cofuse.Layout(n_rows, size).global_rows(rank)
        tensors = [torch.from_numpy(t).bfloat16() for t in whole(n_rows)]
        q, k, v, dout = (t[:, rows] for t in tensors)
        options = dict(team=world.team, mask="causal", n_rows=n_rows)
        o, lse = cofuse.attention(q, k, v, **options)
        assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
        gradients = cofuse.attention_backward(q, k, v, o, lse, dout, **options)
        world.team.barrier()
    rounded = [t.float().numpy() for t in tensors]
    wanted = reference.attention(*rounded[:3], "causal", dout=rounded[3])
    reference.close(o.float(), wanted[0][:, rows], 1e-2)
    for ours, theirs in zip(gradients, wanted[2:]):
        reference.close(ours.float(), theirs[:, rows], 2e-2)
    dist.destroy_process_group()


def older_torch():
    """torch as it was before it had a C table for the exchange."""
    import torch

    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        del torch.Tensor.__dlpack_c_exchange_api__
    with cofuse.init() as world:
        q = torch.ones(1, 8, 2, 16, dtype=torch.bfloat16)
        o, _ = cofuse.attention(q, q, 2 * q, team=world.team)
        assert (o == 2).all()
        for bad in (torch.nn.Parameter(q), q.to_sparse()):
            try:
                cofuse.attention(q, bad, q, team=world.team)
            except (cofuse.InvalidArgument, RuntimeError, BufferError, NotImplementedError):
                continue
            raise AssertionError("no exception")


if __name__ == "__main__":
    globals()[sys.argv[1]](*(sys.argv[2:] if sys.argv[1] != "gil" else []))
