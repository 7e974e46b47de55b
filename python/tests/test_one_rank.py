# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""One rank: tensors, errors, lifetime, layouts."""

import gc
import os
import re
import sys
import threading
import weakref

import numpy as np
import pytest

import cofuse

SHAPE = dict(dtype="f32", n_batch=1, n_rows=8, n_heads=2, head_dim_qk=16)


def tensors():
    q, k, v, o = (np.ones((1, 8, 2, 16), np.float32) for _ in range(4))
    return q, k, v, o, np.empty((1, 2, 8), np.float32)


# ---- tensors ----


def test_read_only_input(world):
    q, k, v, o, lse = tensors()
    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this NumPy does not export read-only arrays")
    for t in (q, k, v):
        t.flags.writeable = False
    plan = cofuse.AttentionPlan(world.team, **SHAPE)
    plan.forward(q, k, v, o, lse)
    np.testing.assert_allclose(o, 1, rtol=1e-6)
    with pytest.raises(cofuse.InvalidArgument, match="o: read-only"):
        plan.forward(q, k, v, q, lse)


def test_strides(world):
    q, k, v, o, lse = tensors()
    plan = cofuse.AttentionPlan(world.team, **SHAPE)
    wide = np.full((1, 8, 2, 48), 2, np.float32)
    plan.forward(q, k, wide[..., 16:32], o, lse)
    np.testing.assert_allclose(o, 2, rtol=1e-6)
    wide[..., 16:32] = o + 1
    assert wide[0, 0, 0, 15] == 2 and wide[0, 0, 0, 16] == 3


class Old:
    """An exporter from before DLPack 1.0; it counts what is alive of its exports."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


class Future:
    def __dlpack__(self, **keywords):
        raise BufferError("not today")


def test_other_exporters(world):
    q, k, v, o, lse = tensors()
    plan = cofuse.AttentionPlan(world.team, **SHAPE)
    for _ in range(3):
        plan.forward(Old(q), k, Old(v), Old(o), lse)
    np.testing.assert_allclose(o, 1, rtol=1e-6)
    with pytest.raises(BufferError, match="k: not today"):
        plan.forward(q, Future(), v, o, lse)
    with pytest.raises(TypeError, match="v: .*is no tensor"):
        plan.forward(q, k, 3, o, lse)
    plan.forward(q, k, v, o, lse)


def test_exports_are_released(world):
    q, k, v, o, lse = tensors()
    plan = cofuse.AttentionPlan(world.team, **SHAPE)
    gone = weakref.ref(q)
    with pytest.raises(ValueError):
        plan.forward(q, k, v, o, lse[:, :, :3])
    stream = cofuse.Stream(world)
    plan.forward(q, k, v, o, lse, stream=stream)
    del q
    assert gone() is not None, "a queued call keeps its tensors"
    stream.sync()
    assert gone() is None
    gone = weakref.ref(k)
    stream.destroy()
    plan.forward(v, k, v, o, lse)
    del k
    assert gone() is None


def test_torch(world):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    q = torch.randn(1, 8, 2, 16).bfloat16()
    o, lse = cofuse.attention(q, q, q, team=world.team)
    wanted = torch.nn.functional.scaled_dot_product_attention(*(q.float().transpose(1, 2),) * 3)
    torch.testing.assert_close(o.float(), wanted.transpose(1, 2), atol=3e-2, rtol=3e-2)
    with pytest.raises(cofuse.InvalidArgument, match="k: requires a gradient"):
        cofuse.attention(q, torch.nn.Parameter(q), q, team=world.team)


# ---- errors ----


def test_error_classes(world):
    with pytest.raises(cofuse.InvalidArgument, match="n_heads = 0") as seen:
        cofuse.AttentionPlan(world.team, **{**SHAPE, "n_heads": 0})
    assert isinstance(seen.value, ValueError) and isinstance(seen.value, cofuse.Error)
    assert (seen.value.status, seen.value.name) == (-1, "COF_ERR_INVALID")
    assert issubclass(cofuse.Timeout, TimeoutError)
    assert issubclass(cofuse.OutOfMemory, MemoryError)
    with pytest.raises(cofuse.InvalidArgument, match="wanted one of none, causal"):
        cofuse.AttentionPlan(world.team, **SHAPE, mask="some")
    with pytest.raises(TypeError, match="no parameter 'maks'"):
        cofuse.AttentionPlan(world.team, **SHAPE, maks="causal")
    with pytest.raises(TypeError, match="made by a method"):
        cofuse.Team()
    with pytest.raises(TypeError, match="team: .*wanted a team"):
        cofuse.AttentionPlan(world, **SHAPE)


def test_missing_rank_times_out():
    with pytest.raises(cofuse.Timeout, match="did not arrive"):
        cofuse.init(rank=0, size=2, job=f"alone-{os.getpid()}", init_timeout=0.5)


def test_dtypes(world):
    for dtype in ("f32", "float32", np.float32, np.dtype("f4")):
        assert "dtype=f32" in cofuse.AttentionPlan(
            world.team, **{**SHAPE, "dtype": dtype}).describe
    assert "dtype=bf16" in cofuse.AttentionPlan(
        world.team, **{**SHAPE, "dtype": "bfloat16"}).describe


def test_dtypes_of_the_functions(world):
    dk, dv = np.ones((8, 1, 2, 4), np.float32), np.ones((8, 1, 2, 4), np.float32)
    for dtype in ("f16", "float16", np.float16, np.dtype("f2")):
        for out in cofuse.grad_return(dk, dv, team=world.team, dtype=dtype):
            assert out.dtype == np.float16 and np.all(out == 1)
    for out in cofuse.grad_return(dk, dv, team=world.team, dtype="f32"):
        assert out.dtype == np.float32
    with pytest.raises(ValueError, match="dtype = 'f64': wanted bfloat16, float16 or float32"):
        cofuse.grad_return(dk, dv, team=world.team, dtype="f64")


def test_allreduce_rmsnorm_errors(world):
    x = np.ones((3, 8), np.float32)
    params = dict(dtype="f32", hidden=8, max_tokens=4, eps=1e-6)
    plan = cofuse.AllreduceRmsnormPlan(world.team, **params)
    for changed, text in (
        (dict(eps=0), "eps = 0"),
        (dict(weight_bias=2), "weight_bias = 2"),
        (dict(algorithm="some"), "wanted one of auto, one_shot, two_shot"),
        (dict(hidden=0), "hidden = 0"),
    ):
        with pytest.raises(cofuse.InvalidArgument, match=text):
            cofuse.AllreduceRmsnormPlan(world.team, **{**params, **changed})
    with pytest.raises(OverflowError, match="max_ctas = 4294967297: wanted 32 bits"):
        cofuse.AllreduceRmsnormPlan(world.team, **params, max_ctas=(1 << 32) + 1)
    with pytest.raises(cofuse.InvalidArgument, match="residual"):
        plan.run(x, None, x[0], x.copy(), x.copy())
    with pytest.raises(cofuse.InvalidArgument, match="x_source = -1: wanted an offset"):
        plan.run(x, x, x[0], x.copy(), x.copy(), x_source=-1)
    with pytest.raises(TypeError, match="residual: given without a weight"):
        cofuse.allreduce_rmsnorm(x, x, team=world.team)


def test_trimul_errors(world):
    x = np.ones((1, 3, 3, 8), np.float32)
    eye = np.eye(8, dtype=np.float32)
    weights = dict(p_in=np.tile(eye, (2, 1)), g_in=np.tile(eye, (2, 1)), p_out=eye, g_out=eye)
    plan = cofuse.TrimulPlan(world.team, dtype="f32", n_rows=3, dim=8)
    with pytest.raises(cofuse.InvalidArgument, match="weights"):
        plan.forward(x, x.copy())
    with pytest.raises(TypeError, match="weights: no 'bias'; there are norm_in_w"):
        plan.set_weights(dict(weights, bias=eye))
    with pytest.raises(TypeError, match="weights: wanted a dict"):
        plan.set_weights([eye])
    with pytest.raises(cofuse.InvalidArgument, match="p_out"):
        plan.set_weights(dict(weights, p_out=None))
    plan.set_weights(weights)
    with pytest.raises(cofuse.InvalidArgument, match="n = 4"):
        plan.forward(x, x.copy(), n=4)
    with pytest.raises(cofuse.InvalidArgument, match="wanted one of outgoing, incoming"):
        cofuse.TrimulPlan(world.team, dtype="f32", n_rows=3, dim=8, direction="both")
    plan.forward(x, x)
    assert not x.any()  # equal elements: their norm is 0


@pytest.mark.parametrize("key", [1, 2**62, (1, 2), b"p_in", None, object()])
def test_keys_that_are_no_str(world, key):
    plan = cofuse.TrimulPlan(world.team, dtype="f32", n_rows=3, dim=8)
    x, text = np.ones((1, 3, 3, 8), np.float32), "no .*" + re.escape(repr(key))
    with pytest.raises(TypeError, match="weights: " + text):
        plan.set_weights({key: x})
    with pytest.raises(TypeError, match="grads: " + text):
        plan.backward(x, x, x.copy(), {key: x})
    params = {**SHAPE, key: 1}
    with pytest.raises(TypeError, match=text):
        cofuse.AttentionPlan(world.team, **params)
    with pytest.raises(TypeError, match=text):
        cofuse.attention_workspace(world.team, **params)
    with pytest.raises(TypeError, match=text):
        cofuse.trimul_block(1, 0, 3, **{key: 1})


class Twin(str):
    """A str that is another key than any other with the same text."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


def test_dict_that_changes(world):
    """While tensors are taken out of a dict, an exporter changes it; a name may be there often."""
    plan = cofuse.TrimulPlan(world.team, dtype="f32", n_rows=3, dim=8)
    eye = np.eye(8, dtype=np.float32)
    weights = {}

    class Changing:
        def __dlpack__(self, **keywords):
            weights.clear()
            weights.update({Twin("p_out"): Changing() for _ in range(30)})
            return eye.__dlpack__()

    weights.update(p_out=Changing(), g_out=eye.copy(), p_in=np.tile(eye, (2, 1)),
                   g_in=np.tile(eye, (2, 1)))
    plan.set_weights(weights)
    with pytest.raises(cofuse.InvalidArgument, match="p_out: given more than once"):
        plan.set_weights({Twin("p_out"): eye for _ in range(30)})


def test_trimul_import_rows():
    src, dst = np.arange(12, dtype=np.float32).reshape(6, 2), np.empty((6, 2), np.float32)
    cofuse.trimul_import_rows(src, dst, "interleaved")
    np.testing.assert_array_equal(dst[:, 0], [0, 4, 8, 2, 6, 10])
    cofuse.trimul_import_rows(src, dst, swap_ab=True)
    np.testing.assert_array_equal(dst[:, 0], [6, 8, 10, 0, 2, 4])
    assert cofuse.trimul_block(4, 3, 7, n_rows=7, dim=8, dtype="f32", grid_rows=2) == (3, 4, 3, 4)


class CudaStream:
    def __init__(self, handle):
        self.cuda_stream = handle


class ProtocolStream:
    def __cuda_stream__(self):
        return (0, 7)


def test_streams_that_do_not_fit(world):
    q, k, v, o, lse = tensors()
    plan = cofuse.AttentionPlan(world.team, **SHAPE)
    for stream in (CudaStream(0), CudaStream(7), ProtocolStream()):
        with pytest.raises(cofuse.InvalidArgument, match="kind = 2 on a world of engine"):
            plan.forward(q, k, v, o, lse, stream=stream)
    for stream in (3, "later", object(), CudaStream("7")):
        with pytest.raises(TypeError, match="wanted a cofuse.Stream, a CUDA stream"):
            plan.forward(q, k, v, o, lse, stream=stream)
    other = cofuse.init(rank=0, size=1)
    with pytest.raises(cofuse.InvalidArgument, match="of another world than the plan"):
        plan.forward(q, k, v, o, lse, stream=cofuse.Stream(other))
    with pytest.raises(cofuse.InvalidArgument, match="of another world than the stream"):
        cofuse.Stream(world).wait(cofuse.Stream(other).record())
    with pytest.raises(AttributeError, match="a stream of the CPU"):
        cofuse.Stream(world).cuda_stream
    plan.forward(q, k, v, o, lse, stream="now")
    np.testing.assert_allclose(o, 1, rtol=1e-6)


def test_devices_named_wrongly():
    with pytest.raises(TypeError, match="device: .*wanted a number, a UUID or None"):
        cofuse.init(rank=0, size=1, device=1.0)
    with pytest.raises(cofuse.InvalidArgument, match="wanted one of default, thread, shm, cuda"):
        cofuse.init(rank=0, size=1, engine="gpu")
    with pytest.raises((cofuse.Unsupported, cofuse.InvalidArgument), match="CUDA|cuda|device"):
        cofuse.init(rank=0, size=1, engine="cuda", device=4000)
    with cofuse.init(rank=0, size=1) as world:
        assert world.device is None


# ---- lifetime ----


def test_any_order():
    world = cofuse.init(rank=0, size=1)
    team = world.team
    arena = cofuse.Arena(team, 1 << 20)
    plan = cofuse.AttentionPlan(team, arena=arena, **SHAPE)
    stream = cofuse.Stream(world)
    event = stream.record()
    alone = world.team_from_ranks([0])
    plan.forward(*tensors(), stream=stream)
    world.close()
    world.close()
    for thing in (team, arena, plan, stream, alone, world):
        assert not thing.is_open
    for call in (team.barrier, alone.query, stream.sync, lambda: plan.forward(*tensors())):
        with pytest.raises(cofuse.InvalidArgument, match="destroyed"):
            call()
    for thing in (alone, plan, team, arena, stream):
        thing.destroy()
    del event


def test_only_the_plan_is_kept():
    plan = cofuse.AttentionPlan(cofuse.init(rank=0, size=1).team, **SHAPE)
    gc.collect()
    q, k, v, o, lse = tensors()
    plan.forward(q, k, v, o, lse)
    np.testing.assert_allclose(o, 1, rtol=1e-6)


def test_destroy_runs_what_is_queued(world):
    q, k, v, o, lse = tensors()
    plan = cofuse.AttentionPlan(world.team, **SHAPE)
    stream = cofuse.Stream(world)
    plan.forward(q, k, v, o, lse, stream=stream)
    plan.destroy()
    np.testing.assert_allclose(o, 1, rtol=1e-6)
    with pytest.raises(cofuse.InvalidArgument, match="plan: destroyed"):
        plan.forward(q, k, v, o, lse)


def test_functions_keep_the_last_plans(world):
    """Many shapes: plans do not pile up, and one that is used again and again stays."""
    from cofuse._functional import MAX_PLANS

    def call(rows):
        q = np.ones((1, rows, 1, 8), np.float32)
        o, _ = cofuse.attention(q, q, q, team=world.team)
        np.testing.assert_allclose(o, 1, rtol=1e-6)

    call(1)
    first = next(reversed(world.team._plans.values()))
    for rows in range(2, MAX_PLANS + 20):
        call(rows)
        call(1)
    plans = world.team._plans
    assert len(plans) == MAX_PLANS
    assert next(reversed(plans.values())) is first and first.is_open


def test_cycles_are_collected():
    before = len([t for t in os.listdir("/proc/self/task")])
    for _ in range(3):
        world = cofuse.init(rank=0, size=1)
        q, k, v, _, _ = tensors()
        cofuse.attention(q, k, v, team=world.team)
        del world
    gc.collect()
    assert len(os.listdir("/proc/self/task")) <= before


def test_what_the_collector_sees(world):
    plan = cofuse.AttentionPlan(world.team, **SHAPE)
    first, second = cofuse.Stream(world), cofuse.Stream(world)
    plan.forward(*tensors(), stream=first)
    event = first.record()
    second.wait(event)
    for above, below in ((event, first), (second, first), (first, plan), (plan, world.team)):
        assert below in gc.get_referents(above)
    first.sync()
    second.sync()
    assert plan not in gc.get_referents(first) and first not in gc.get_referents(second)


def n_threads():
    return len(os.listdir("/proc/self/task"))


def ring_of_streams(world, n):
    streams = [cofuse.Stream(world, 1) for _ in range(n)]
    for i, stream in enumerate(streams):
        stream.wait(streams[i - 1].record())
    return streams


def test_streams_that_wait_for_each_other(world):
    before, kept, results = n_threads(), [], []
    for i in range(4):
        plan, streams = cofuse.AttentionPlan(world.team, **SHAPE), ring_of_streams(world, 3)
        for s, stream in enumerate(streams):
            q, k, v, o, lse = tensors()
            stream.wait(streams[s - 1].record())
            plan.forward(q, k, i * v, o, lse, stream=stream)
            results.append((o, i))
            kept.append(weakref.ref(q))
        del plan, stream, streams, q, k, v, lse
    assert n_threads() > before
    gc.collect()
    assert n_threads() <= before
    for o, value in results:
        np.testing.assert_allclose(o, value, rtol=1e-6)
    assert all(q() is None for q in kept)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork(world):
    """A child as of a loader of data: inherits everything, calls nothing, ends normally."""
    plan = cofuse.AttentionPlan(world.team, **SHAPE)
    stream = cofuse.Stream(world)
    plan.forward(*tensors(), stream=stream)
    ring = [ring_of_streams(world, 2)]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(cofuse.InvalidArgument):
                plan.forward(*tensors())
            del plan
            stream.destroy()
            ring.clear()
            gc.collect()
            left = [o for o in gc.get_objects() if type(o) is cofuse.Stream]
            assert left == [stream]
            world.close()
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stream.sync()
    plan.forward(*tensors())


# ---- threads ----


def test_two_threads_on_a_stream(world):
    """One of them may be refused, but as a whole: its plan goes on."""
    stream = cofuse.Stream(world, 1)
    plans = [cofuse.AttentionPlan(world.team, **SHAPE) for _ in range(2)]
    errors, interval = set(), sys.getswitchinterval()

    def call_often(plan):
        own = tensors()
        for _ in range(3000):
            try:
                plan.forward(*own, stream=stream)
            except cofuse.Error as error:
                errors.add(type(error))

    threads = [threading.Thread(target=call_often, args=(plan,)) for plan in plans]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors <= {cofuse.InvalidArgument}
    for plan in plans:
        q, k, v, o, lse = tensors()
        plan.forward(q, k, v, o, lse, stream=stream)
        stream.sync()
        np.testing.assert_allclose(o, 1, rtol=1e-6)


# ---- layouts ----


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("chunking", ["balanced", "padded"])
def test_layout(kind, chunking):
    layout = cofuse.Layout(23, 3, kind, chunking)
    seen = []
    for rank in range(3):
        rows = layout.global_rows(rank)
        assert len(rows) == layout.local_rows(rank)
        assert [layout.global_row(rank, i) for i in range(len(rows))] == rows.tolist()
        for i, row in enumerate(rows):
            if row >= 0:
                assert (layout.owner(row), layout.local_row(row)) == (rank, i)
        assert (rows >= 0).sum() == layout.valid_rows(rank)
        seen += rows[rows >= 0].tolist()
    assert sorted(seen) == list(range(23))
    with pytest.raises(IndexError):
        layout.owner(23)
    with pytest.raises(ValueError):
        cofuse.Layout(23, 0, kind, chunking)


# ---- ranks as threads ----


def test_thread_engine():
    """Two ranks in one interpreter: neither could go on if a call kept the GIL."""
    outputs = [None, None]

    def rank_main(rank):
        world = cofuse.init(rank=rank, size=2, job=f"threads-{os.getpid()}", engine="thread")
        q, k, v, _, _ = tensors()
        outputs[rank] = cofuse.attention(q, k, v + rank, team=world.team)[0]
        world.team.barrier()
        world.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for o in outputs:
        np.testing.assert_allclose(o, 1.5, rtol=1e-6)
