# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_cuda.py run for attention and the return of gradients:
workers_cuda_attention.py NAME."""

import sys

import torch

import cofuse
import reference
from workers_cuda import DTYPES, open_world, refused

# Of o and lse against fp64: some roundings of the type, of probabilities too.
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}


def captured(calls):
    """The calls as a graph: what replays it."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    calls()
    graph.capture_end()
    return graph.replay


class Attention:
    """Inputs of all ranks, the own rows on the device, and what has to come out, in fp64."""

    def __init__(self, world, n_rows, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16,
                 mask="causal", seed=0, n_batch=2, window=None):
        generator = torch.Generator().manual_seed(seed)
        self.mask, self.n_rows, self.dtype = mask, n_rows, dtype
        self.rows = cofuse.Layout(n_rows, world.size).global_rows(world.rank)
        whole = [torch.randn(n_batch, n_rows, h, d, generator=generator).to(dtype)
                 for h, d in zip((heads[0], heads[1], heads[1]), (dims[0], *dims))]
        self.inputs = [t[:, torch.from_numpy(self.rows)].contiguous().cuda() for t in whole]
        self.wanted = reference.attention(*(t.float().numpy() for t in whole), mask,
                                          window=window)

    def check(self, o, lse):
        assert o.dtype == self.dtype and lse.dtype == torch.float32
        reference.close(o.float().cpu().numpy(), self.wanted[0][:, self.rows], BOUNDS[self.dtype])
        reference.close(lse.cpu().numpy(), self.wanted[1][:, :, self.rows], 1e-3)


def attention():
    """The function, on torch's current stream: the default one, and one of the caller's."""
    with open_world() as world:
        team = world.team
        for dtype in DTYPES:
            for mask in ("none", "causal"):
                for n_rows, heads, dims in ((61, (4, 2), (24, 16)), (256, (4, 4), (64, 64)),
                                            (512, (8, 2), (128, 128))):
                    case = Attention(world, n_rows, heads, dims, dtype, mask)
                    for schedule in ("ring", "gather", "default"):
                        o, lse = cofuse.attention(*case.inputs, team=team, mask=mask, n_rows=n_rows,
                                                  schedule=schedule, forward_only=True)
                        assert o.is_cuda and lse.is_cuda
                        case.check(o, lse)
        # The other format, and strides that are not compact.
        case = Attention(world, 256)
        turned = [t.transpose(0, 1).contiguous() for t in case.inputs]
        o, lse = cofuse.attention(*turned, team=team, mask="causal", n_rows=256, format="sbhd",
                                  forward_only=True)
        case.check(o.transpose(0, 1), lse)
        wide = [torch.cat([t, t], 2)[:, :, : t.shape[2]] for t in case.inputs]
        assert not wide[0].is_contiguous()
        case.check(*cofuse.attention(*wide, team=team, mask="causal", n_rows=256,
                                     forward_only=True))
        for mask, window in (("causal", (40, 0)), ("none", (100, 30))):
            case = Attention(world, 512, mask=mask, window=window)
            case.check(*cofuse.attention(*case.inputs, team=team, mask=mask, window=window,
                                         n_rows=512, forward_only=True))
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(20):  # what is free at once must not be taken by the next turn
                case = Attention(world, 512, seed=turn, n_batch=1)
                inputs, case.inputs = [t * 1 for t in case.inputs], None
                outputs = cofuse.attention(*inputs, team=team, mask="causal", n_rows=512,
                                           forward_only=True)
                del inputs
                case.check(*outputs)
        torch.cuda.synchronize()
        team.query()
        team.barrier()


def attention_graphs():
    """Captured calls: replayed with other inputs, and mixed with direct ones."""
    with open_world() as world:
        team, n_rows = world.team, 512
        for schedule in ("ring", "gather"):
            plan = cofuse.AttentionPlan(
                team, dtype="bf16", n_batch=1, n_rows=n_rows, n_heads=4, n_kv_heads=2,
                head_dim_qk=64, mask="causal", schedule=schedule, forward_only=True)
            assert "device=cuda" in plan.describe
            with torch.cuda.stream(torch.cuda.Stream()):
                case = Attention(world, n_rows, n_batch=1)
                inputs = [t.clone() for t in case.inputs]
                o = torch.empty_like(inputs[0])
                lse = torch.empty(1, 4, o.shape[1], device=o.device)

                def call():
                    plan.forward(*inputs, o, lse, stream=torch.cuda.current_stream())

                call()
                case.check(o, lse)
                replay = captured(lambda: [call() for _ in range(3)])
                for turn in range(10):
                    case = Attention(world, n_rows, seed=turn, n_batch=1)
                    for ours, given in zip(inputs, case.inputs):
                        ours.copy_(given)
                    o.fill_(float("nan"))
                    lse.fill_(float("nan"))
                    (call if turn % 3 == 2 else replay)()
                    case.check(o, lse)
                del replay
            torch.cuda.synchronize()
            plan.destroy()
        team.query()
        team.barrier()


def attention_streams():
    """Two plans on two streams at once, one of them Cofuse's own; refused calls."""
    with open_world() as world:
        team, n_rows = world.team, 256
        shape = dict(dtype="bf16", n_batch=1, n_rows=n_rows, n_heads=4, n_kv_heads=2,
                     head_dim_qk=64, mask="causal")
        refused(cofuse.Unsupported, "forward_only", lambda: cofuse.AttentionPlan(team, **shape))
        plans = [cofuse.AttentionPlan(team, forward_only=True, **shape) for _ in range(2)]
        own = cofuse.Stream(world)
        streams = (own, torch.cuda.Stream())
        kept = []
        torch.cuda.synchronize()
        for turn in range(20):
            case = Attention(world, n_rows, seed=turn, n_batch=1)
            o = torch.empty_like(case.inputs[0])
            lse = torch.empty(1, 4, o.shape[1], device=o.device)
            torch.cuda.synchronize()
            plans[turn % 2].forward(*case.inputs, o, lse, stream=streams[turn % 2])
            kept.append((case, o, lse))
        own.sync()
        torch.cuda.synchronize()
        for case, o, lse in kept:
            case.check(o, lse)
        case, o, lse = kept[0]
        q, k, v = case.inputs
        stream = torch.cuda.current_stream()
        refused(cofuse.InvalidArgument, "None on a world of CUDA devices",
                lambda: plans[0].forward(q, k, v, o, lse))
        refused(cofuse.InvalidArgument, "k: ",
                lambda: plans[0].forward(q, k.cpu(), v, o, lse, stream=stream))
        refused(cofuse.InvalidArgument, "lse: ",
                lambda: plans[0].forward(q, k, v, o, lse.half(), stream=stream))
        refused(cofuse.InvalidArgument, "v: requires a gradient",
                lambda: plans[0].forward(q, k, torch.nn.Parameter(v), o, lse, stream=stream))
        plans[0].forward(q, k, v, o, lse, stream=stream)
        case.check(o, lse)
        team.query()
        team.barrier()


HKV, DK, DV, BATCH = 2, 24, 16, 2


class Partials:
    """Small whole numbers of all ranks, whose sums have no rounding in any type."""

    def __init__(self, world, n_rows, dtype, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.from_numpy(cofuse.Layout(n_rows, world.size).global_rows(world.rank))
        self.whole = [[torch.randint(-8, 9, (n_rows, BATCH, HKV, d), generator=generator).float()
                       for d in (DK, DV)] for _ in range(world.size)]
        self.own = [t.to(dtype).cuda() for t in self.whole[world.rank]]

    def check(self, found, writers=None):
        """writers: the ranks that write; None: all."""
        whole = self.whole if writers is None else [self.whole[w] for w in writers]
        for i, ours in enumerate(found):
            wanted = sum(w[i] for w in whole)[self.rows]
            assert torch.equal(ours.float().cpu(), wanted), (i, ours, wanted)


def grad_return():
    """The function, by push and pull, in all types; partials that are wider than the outputs."""
    with open_world() as world:
        team = world.team
        for dtype in DTYPES:
            for n_rows in (0, 1, 37, 512):
                case = Partials(world, n_rows, dtype)
                for transfer in ("push", "pull"):
                    found = cofuse.grad_return(*case.own, team=team, transfer=transfer)
                    assert all(t.is_cuda and t.dtype == dtype for t in found)
                    case.check(found)
                case.check(cofuse.grad_return(*case.own, team=team, wire_f32=True))
        case = Partials(world, 37, torch.float32)
        for kind in ("bfloat16", "float16"):
            found = cofuse.grad_return(*case.own, team=team, dtype=kind)
            assert found[0].dtype == getattr(torch, kind)
            case.check(found)
        table = [1] * (2 * world.size)  # rank 0 alone writes
        case.check(cofuse.grad_return(*case.own, team=team, writers="table", writer_table=table),
                   [0])
        wide = [torch.cat([t, t], 2)[:, :, :HKV] for t in case.own]
        assert not wide[0].is_contiguous()
        case.check(cofuse.grad_return(*wide, team=team))
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(20):  # what is free at once must not be taken by the next turn
                case = Partials(world, 300, torch.bfloat16, seed=turn)
                own, case.own = [t * 1 for t in case.own], None
                found = cofuse.grad_return(*own, team=team, transfer=("push", "pull")[turn % 2])
                del own
                case.check(found)
        torch.cuda.synchronize()
        team.query()
        team.barrier()


def grad_return_graphs():
    """Captured calls: replayed with other partials, and mixed with direct ones."""
    with open_world() as world:
        team, n_rows = world.team, 200
        n_local = cofuse.Layout(n_rows, world.size).local_rows(world.rank)
        for transfer in ("push", "pull"):
            plan = cofuse.GradReturnPlan(team, dtype="bf16", n_batch=BATCH, n_rows=n_rows,
                                         n_heads=HKV, head_dim_k=DK, head_dim_v=DV,
                                         transfer=transfer)
            assert "device=cuda" in plan.describe
            with torch.cuda.stream(torch.cuda.Stream()):
                case = Partials(world, n_rows, torch.bfloat16)
                own = [t.clone() for t in case.own]
                outputs = [torch.empty(n_local, BATCH, HKV, d, dtype=torch.bfloat16,
                                       device=own[0].device) for d in (DK, DV)]

                def call():
                    plan.run(*own, *outputs, stream=torch.cuda.current_stream())

                call()
                case.check(outputs)
                replay = captured(lambda: [call() for _ in range(3)])
                for turn in range(10):
                    case = Partials(world, n_rows, torch.bfloat16, seed=turn)
                    for ours, given in zip(own, case.own):
                        ours.copy_(given)
                    for output in outputs:
                        output.fill_(float("nan"))
                    (call if turn % 3 == 2 else replay)()
                    case.check(outputs)
                del replay
            torch.cuda.synchronize()
            refused(cofuse.InvalidArgument, "dk: ",
                    lambda: plan.run(own[0].cpu(), own[1], *outputs,
                                     stream=torch.cuda.current_stream()))
            refused(cofuse.InvalidArgument, "None on a world of CUDA devices",
                    lambda: plan.run(*own, *outputs))
            plan.destroy()
        team.query()
        team.barrier()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
