# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_cuda.py run: workers_cuda.py NAME."""

import gc
import os
import sys

import numpy as np
import torch

import cofuse
import reference

EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def open_world():
    """This rank's world, on a device of its own where there are enough; torch works there too."""
    device = int(os.environ["COFUSE_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(device)
    world = cofuse.init(engine="cuda", device=device)
    assert (world.engine, world.device) == ("cuda", device)
    return world


def params(hidden, max_tokens=64, dtype=torch.bfloat16):
    return dict(dtype=dtype, hidden=hidden, max_tokens=max_tokens, eps=EPS)


class Case:
    """Inputs of all ranks, the own ones on the device, and what has to come out, bit by bit."""

    def __init__(self, world, n_tokens, hidden, dtype=torch.bfloat16, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        parts = [drawn(n_tokens, hidden) for _ in range(world.size)]
        residual, weight = drawn(n_tokens, hidden), drawn(hidden)
        self.inputs = [t.cuda() for t in (parts[world.rank], residual, weight)]

        def rounded(array):
            return torch.from_numpy(array).to(dtype).float().numpy()

        wide = [t.float().numpy() for t in (*parts, residual, weight)]
        self.wanted = reference.allreduce_rmsnorm(wide[:-2], *wide[-2:], EPS, rounded)

    def check(self, norm_out, residual_out):
        for ours, wanted in zip((norm_out, residual_out), self.wanted):
            np.testing.assert_array_equal(ours.float().cpu().numpy(), wanted)


def allreduce_rmsnorm():
    """The function, on torch's current stream: the default one, and one of the caller's."""
    with open_world() as world:
        for dtype in DTYPES:
            for hidden in (33, 2048):
                for n_tokens in (0, 1, 3, 64, 500, 7):
                    case = Case(world, n_tokens, hidden, dtype)
                    norm_out, residual_out = cofuse.allreduce_rmsnorm(*case.inputs,
                                                                      team=world.team)
                    assert norm_out.is_cuda and norm_out.dtype == dtype
                    case.check(norm_out, residual_out)
        x, residual, weight = case.inputs
        norm_out, residual_out = cofuse.allreduce_rmsnorm(x, weight=weight, team=world.team)
        nothing, total = cofuse.allreduce_rmsnorm(x, team=world.team)
        assert nothing is None and torch.equal(total, residual_out)
        again = cofuse.allreduce_rmsnorm(total / world.size, residual, weight, team=world.team)
        plain = torch.nn.functional.rms_norm((total + residual).double(), weight.shape,
                                             weight.double(), EPS)
        torch.testing.assert_close(again[0].double(), plain, rtol=1e-5, atol=1e-5)
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(20):  # what is free at once must not be taken by the next turn
                case = Case(world, 300, 2048, seed=turn)
                x, residual, weight = case.inputs
                case.inputs = None
                outputs = cofuse.allreduce_rmsnorm(x * 1, residual * 1, weight * 1,
                                                   team=world.team)
                del x, residual, weight
                case.check(*outputs)
        torch.cuda.synchronize()
        world.team.query()
        world.team.barrier()


class Protocol:
    """A stream of a library with the protocol of cuda.core."""

    def __init__(self, stream):
        self.stream = stream

    def __cuda_stream__(self):
        return (0, self.stream.cuda_stream)


class Exporter:
    """A tensor of a library that has __dlpack__ alone."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None):
        assert stream == -1, "no order with another stream, which a capture would not allow"
        return self.tensor.__dlpack__(stream=stream)


def streams():
    """Every kind of stream; work that is under way when its plan goes; in place; the arena."""
    with open_world() as world:
        team, hidden = world.team, 1024
        arena = cofuse.Arena(team, 32 << 20)
        plan = cofuse.AllreduceRmsnormPlan(team, arena=arena, **params(hidden))
        assert "engine=cuda" in plan.describe
        own, theirs = cofuse.Stream(world), torch.cuda.Stream()
        same = torch.cuda.ExternalStream(own.cuda_stream)
        torch.cuda.synchronize()
        for turn, stream in enumerate((own, theirs, Protocol(theirs), same, "now",
                                       torch.cuda.default_stream())):
            case = Case(world, 100, hidden, seed=turn)  # more rows than there is room for
            x, residual, weight = case.inputs
            torch.cuda.synchronize()
            given = x if turn else Exporter(x)
            plan.run(given, residual, weight, residual, x, stream=stream)  # in place
            if stream is own:
                own.sync()
            torch.cuda.synchronize()
            case.check(x, residual)
        case = Case(world, 64, hidden)
        outputs = [torch.empty_like(case.inputs[0]) for _ in range(2)]
        torch.cuda.synchronize()
        with torch.cuda.stream(same):
            torch.cuda._sleep(200_000_000)
        plan.run(*case.inputs, *outputs[::-1], stream=own)
        inputs, case.inputs = case.inputs, None
        addresses = {t.data_ptr() for t in inputs}
        del inputs
        fresh = [torch.zeros(64, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
        assert not addresses & {t.data_ptr() for t in fresh}, "a queued call keeps its tensors"
        own.destroy()  # after the work
        case.check(*outputs)
        theirs.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(theirs):
            case = Case(world, 64, hidden)
            outputs = [torch.empty_like(case.inputs[0]) for _ in range(2)]
            torch.cuda._sleep(200_000_000)  # a tenth of a second
            plan.run(*case.inputs, *outputs[::-1], stream=torch.cuda.current_stream())
            plan.destroy()  # after the work
            assert theirs.query()
        case.check(*outputs)
        team.query()
        team.barrier()


class Owner:
    """Goes by the garbage collector alone."""

    def __init__(self, *owned):
        self.owned, self.itself = owned, self


def cycles():
    """What the collector takes waits for the device: plans in cycles, whose calls are on the
    caller's stream, and streams that wait for each other."""
    with open_world() as world:
        theirs = torch.cuda.Stream()
        plan = cofuse.AllreduceRmsnormPlan(world.team, **params(1024))
        case = Case(world, 64, 1024)
        outputs = [torch.empty_like(case.inputs[0]) for _ in range(2)]
        torch.cuda.synchronize()
        with torch.cuda.stream(theirs):
            torch.cuda._sleep(200_000_000)
        plan.run(*case.inputs, *outputs[::-1], stream=theirs)
        owner = Owner(plan)
        del plan, owner
        gc.collect()
        assert theirs.query()
        case.check(*outputs)
        world.team.barrier()

        plan = cofuse.AllreduceRmsnormPlan(world.team, **params(1024))
        first, second = cofuse.Stream(world), cofuse.Stream(world)
        plan.run(*case.inputs, *outputs[::-1], stream=first)
        second.wait(first.record())
        first.wait(second.record())
        del first, second
        gc.collect()
        assert not any(type(o) is cofuse.Stream for o in gc.get_objects())
        case.check(*outputs)
        world.team.query()
        world.team.barrier()


def graphs():
    """Captured calls: replayed with other inputs, and mixed with direct ones."""
    with open_world() as world:
        team, hidden = world.team, 2048
        plan = cofuse.AllreduceRmsnormPlan(team, **params(hidden))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            case = Case(world, 48, hidden)
            inputs = [t.clone() for t in case.inputs]
            outputs = [torch.empty_like(inputs[0]) for _ in range(2)]

            def call():
                plan.run(*inputs, *outputs[::-1], stream=torch.cuda.current_stream())

            call()
            case.check(*outputs)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(3):
                call()
            graph.capture_end()
            for turn in range(10):
                case = Case(world, 48, hidden, seed=turn)
                for ours, given in zip(inputs, case.inputs):
                    ours.copy_(given)
                for output in outputs:
                    output.fill_(float("nan"))
                (call if turn % 3 == 2 else graph.replay)()
                case.check(*outputs)
        torch.cuda.synchronize()
        team.query()
        team.barrier()
        del graph


def refused(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def errors():
    """Refused calls change nothing; a mismatch ends the arena and leaves NaN."""
    with open_world() as world:
        team, hidden = world.team, 256
        plan = cofuse.AllreduceRmsnormPlan(team, **params(hidden))
        case = Case(world, 10, hidden)
        x, residual, weight = case.inputs
        norm_out, residual_out = torch.empty_like(x), torch.empty_like(x)
        stream = torch.cuda.current_stream()
        rest = (residual, weight, residual_out, norm_out)
        refused(cofuse.InvalidArgument, "None on a world of CUDA devices",
                lambda: plan.run(x, *rest))
        refused(cofuse.InvalidArgument, "x: ", lambda: plan.run(x.cpu(), *rest, stream=stream))
        refused(cofuse.InvalidArgument, "x: ", lambda: plan.run(x.float(), *rest, stream=stream))
        refused(cofuse.InvalidArgument, "weight: ",
                lambda: plan.run(x, residual, weight[:-1], residual_out, norm_out, stream=stream))
        refused(TypeError, "wanted a cofuse.Stream", lambda: plan.run(x, *rest, stream=5))
        refused(cofuse.InvalidArgument, "requires a gradient",
                lambda: plan.run(torch.nn.Parameter(x), *rest, stream=stream))
        if torch.cuda.device_count() > 1:
            with torch.cuda.device((world.device + 1) % torch.cuda.device_count()):
                elsewhere = torch.cuda.Stream()
                away = x.to(elsewhere.device)
            refused(cofuse.InvalidArgument, "stream", lambda: plan.run(x, *rest, stream=elsewhere))
            refused(cofuse.InvalidArgument, "x: ", lambda: plan.run(away, *rest, stream=stream))
        refused(cofuse.Unsupported, "",
                lambda: cofuse.AttentionPlan(team, dtype="bf16", n_batch=1, n_rows=8 * team.size,
                                             n_heads=1, head_dim_qk=64))
        plan.run(x, *rest, stream=stream)
        case.check(norm_out, residual_out)
        team.barrier()
        n = 10 - world.rank
        plan.run(*(t[:n] for t in (x, residual)), weight, *(t[:n] for t in rest[2:]),
                 stream=stream)
        torch.cuda.synchronize()
        refused(cofuse.Error, "", team.query)
        assert norm_out[:n].isnan().all() and residual_out[:n].isnan().all()
        refused(cofuse.Error, "", lambda: plan.run(x, *rest, stream=stream))
        plan.destroy()
        team.barrier()


def exits():
    """The end of the interpreter with everything alive and work under way."""
    global kept
    world = open_world()
    case = Case(world, 32, 512)
    stream, own = torch.cuda.current_stream(), cofuse.Stream(world)
    plan = cofuse.AllreduceRmsnormPlan(world.team, **params(512))
    outputs = [torch.empty_like(case.inputs[0]) for _ in range(2)]
    torch.cuda.synchronize()
    for turn in range(20):
        plan.run(*case.inputs, *outputs, stream=stream if turn < 10 else own)
        torch.cuda.synchronize()
    kept = [world, plan, own, case]
    kept.append(kept)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
