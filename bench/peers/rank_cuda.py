# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a process set on GPUs: makes the buffers, checks all contenders, times them."""

import math
import platform
from datetime import timedelta

import torch
import torch.distributed as dist

import cofuse
from process_set import write_json
from rivals_cuda import EPS, Buffers, Eager, make_contenders, symmetric_memory

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
# Relative root mean square error of results against fp64, for two ranks: some roundings of each
# element. A sum that lacks a rank is off by 0.5 and more.
BOUNDS = {"bf16": 5e-3, "f16": 7e-4, "f32": 1e-6}
ROTATE_BYTES = 256 << 20  # of x and residual, several times an H200's second-level cache
MAX_SETS = 16
LIMIT = timedelta(seconds=120)


class Rank:
    def __init__(self, options, rank, folder):
        self.options, self.rank, self.size = options, rank, options["ranks"]
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        torch.set_grad_enabled(False)
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank,
                                world_size=self.size, timeout=LIMIT)
        self.group = dist.group.WORLD
        self.host = dist.new_group(backend="gloo", timeout=LIMIT)
        self.world = cofuse.init(group=self.host, engine="cuda", device=rank)
        self.stream = torch.cuda.Stream()
        self.dtype = DTYPES[options["dtype"]]
        self.symmetric = symmetric_memory(
            max(self._sets(n) * n for n in options["tokens"]) * options["hidden"], self.dtype,
            self.device, self.group)

    def _sets(self, n_tokens):
        """Sets of buffers that calls take in turn."""
        one = 2 * n_tokens * self.options["hidden"] * self.dtype.itemsize
        return max(4, min(MAX_SETS, math.ceil(ROTATE_BYTES / one)))

    # ---- over the ranks, on the host ----

    def largest(self, *values):
        """Of all ranks; a value that is no number counts as largest."""
        word = torch.tensor([v if v == v else math.inf for v in values], dtype=torch.float64)
        dist.all_reduce(word, dist.ReduceOp.MAX, group=self.host)
        return word.tolist()

    def meet(self):
        torch.cuda.synchronize()
        dist.barrier(group=self.host)

    # ---- checking ----

    def exact(self, buffers, i):
        """(norm_out, residual_out, sum) in fp64."""
        parts = [torch.empty_like(buffers.kept[i]) for _ in range(self.size)]
        dist.all_gather(parts, buffers.kept[i].contiguous())
        total = sum(p.double() for p in parts)
        z = total + buffers.residual[i].double()
        scale = torch.rsqrt(z.square().mean(1, keepdim=True) + EPS)
        return z * scale * buffers.weight.double(), z, total

    def error(self, ours, wanted):
        if ours is None:
            return 0.0
        return float((ours.double() - wanted).square().mean().sqrt() /
                     wanted.square().mean().sqrt())

    def same_bits(self, ours):
        """Whether rank 0 has the same."""
        if ours is None:
            return True
        theirs = ours.clone()
        dist.broadcast(theirs, 0)
        return torch.equal(theirs.view(torch.uint8), ours.contiguous().view(torch.uint8))

    def check(self, contender, buffers, exact):
        """(largest errors of norm_out and residual_out, same bits on all ranks) of one call."""
        i = buffers.n_sets - 1
        buffers.restore()
        buffers.norm_out[i].fill_(math.nan)
        buffers.residual_out[i].fill_(math.nan)
        self.meet()
        contender.call(i)
        norm_out, residual_out = contender.outputs(i)
        wanted = exact[1] if norm_out is not None else exact[2]
        errors = self.error(norm_out, exact[0]), self.error(residual_out, wanted)
        same = self.same_bits(norm_out) and self.same_bits(residual_out)
        found = self.largest(*errors, 0.0 if same else 1.0)
        return found[:2], found[2] == 0

    def checked(self, contenders, buffers, case):
        """Those whose results are right; errors of all go into the case."""
        exact, good = self.exact(buffers, buffers.n_sets - 1), {}
        bound = BOUNDS[self.options["dtype"]] * math.sqrt(self.size / 2)
        for name, contender in contenders.items():
            trouble = ""
            try:
                errors, same = self.check(contender, buffers, exact)
            except (RuntimeError, cofuse.Error) as error:  # alike on all ranks, or the set ends
                trouble, errors, same = f"{type(error).__name__}: {error}"[:300], None, None
            else:
                if max(errors) > bound:
                    trouble = f"errors {errors} against fp64, allowed {bound:.1e}"
                case["errors"][name], case["same_bits"][name] = errors, same
            if trouble:
                case["failures"].append(
                    dict(tokens=case["tokens"], contender=name, error=trouble))
            else:
                good[name] = contender
        return good

    # ---- timing ----

    def captured(self, contender, n_sets):
        """What enqueues all calls of a sample."""
        n_calls = self.options["calls"]

        def calls():
            for i in range(n_calls):
                contender.call(i % n_sets)

        if isinstance(contender, Eager):
            return calls
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        calls()
        graph.capture_end()
        return graph.replay

    def sample(self, enqueue, buffers):
        """Seconds of one call, of the slowest rank. All calls wait for the other ranks, so those of
        a first round line the ranks up for the second."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        buffers.restore()
        self.meet()
        enqueue()
        begin.record()
        enqueue()
        end.record()
        end.synchronize()
        return self.largest(begin.elapsed_time(end) * 1e-3 / self.options["calls"])[0]

    def case(self, n_tokens):
        n_sets, item = self._sets(n_tokens), self.dtype.itemsize
        buffers = Buffers(self.symmetric, n_tokens, n_sets, self.options["hidden"], self.rank)
        contenders = make_contenders(self.world.team, self.group, buffers, self.options)
        case = dict(tokens=n_tokens, bytes=n_tokens * self.options["hidden"] * item,
                    buffers=n_sets, errors={}, same_bits={}, failures=[], plan=None)
        plans = [p for c in contenders.values() if (p := getattr(c, "plan", None))]
        if plans:
            case["plan"] = plans[0].describe
        good = self.checked(contenders, buffers, case)
        ready = {name: self.captured(c, n_sets) for name, c in good.items()}
        times = {name: [] for name in ready}
        for turn in range(1 + self.options["samples"]):
            for name, enqueue in ready.items():
                seconds = self.sample(enqueue, buffers)
                if turn:
                    times[name].append(seconds)
        case["times_s"] = times
        self.meet()
        ready.clear()  # graphs before the plans in them
        for plan in plans:
            plan.destroy()
        self.world.team.query()  # waits that failed tell it here
        return case

    def versions(self):
        return {
            "cofuse": cofuse.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "python": platform.python_version(),
        }


def main(options, rank, folder, path):
    """Runs all token counts; rank 0 writes what there is to the path after each."""
    own = Rank(options, rank, folder)
    cases = []
    with torch.cuda.stream(own.stream):
        for n_tokens in options["tokens"]:
            cases.append(own.case(n_tokens))
            if rank == 0:
                write_json(path, {"versions": own.versions(), "cases": cases})
    own.meet()
    own.world.close()
    dist.destroy_process_group()
