# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm of Cofuse beside torch's on the CPUs of one host.

    python bench/peers/allreduce_rmsnorm_cpu.py --ranks 1,2,4 --json OUT.json

Starts the ranks itself. What is compared, and the JSON: bench/peers/README.md.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time

from comparison import compare, contenders, frame, medians_of, report, settings, table
from process_set import numbers, start, wait, write_json

EPS = 1e-6
# Relative root mean square error against fp64. A sum that lacks a rank is off by 0.4 and more.
BOUNDS = {"bf16": 1e-2, "f32": 1e-6}
SAMPLE_S = 0.02  # of calls one after the other: they keep the ranks in step


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    parser.add_argument("--tokens", type=numbers, default=[1, 16, 64, 256, 1024])
    parser.add_argument("--hidden", type=numbers, default=[4096])
    parser.add_argument("--dtype", choices=sorted(BOUNDS), default="bf16")
    parser.add_argument("--threads", type=int, default=0,
                        help="of each rank; default: cores / ranks, at least 1")
    parser.add_argument("--samples", type=int, default=7, help="of each contender in a process set")
    parser.add_argument("--processes", type=int, default=3, help="fresh process sets")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a process set")
    parser.add_argument("--json", help="where to write the document")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # what a rank is started with
    return parser


# ---- a rank ----


class _Tensors:
    def __init__(self, n_tokens, hidden, dtype, rank):
        import torch

        def drawn(seed, *shape):
            return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

        self.kept = drawn(100 + rank, n_tokens, hidden)
        self.x = self.kept.clone()  # rivals add up in place
        self.residual = drawn(1, n_tokens, hidden)
        self.weight = 1 + drawn(2, hidden) / 8
        self.residual_out = torch.empty_like(self.x)
        self.norm_out = torch.empty_like(self.x)


class _Cofuse:
    def __init__(self, team, tensors):
        import cofuse

        self.t = tensors
        n_tokens, hidden = tensors.x.shape
        self.plan = cofuse.AllreduceRmsnormPlan(
            team, dtype=tensors.x.dtype, hidden=hidden, max_tokens=n_tokens, eps=EPS)

    def __call__(self):
        t = self.t
        self.plan.run(t.x, t.residual, t.weight, t.residual_out, t.norm_out)
        return t.norm_out, t.residual_out


class _Gloo:
    """all_reduce of torch.distributed, addition, rms_norm; in the type of x, or all in float32."""

    def __init__(self, tensors, is_wide):
        self.t, self.is_wide = tensors, is_wide

    def __call__(self):
        import torch
        import torch.distributed as dist

        t = self.t
        total = t.x.float() if self.is_wide else t.x
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        if self.is_wide:
            z = total.add_(t.residual)
            norm = torch.nn.functional.rms_norm(z, t.weight.shape, t.weight.float(), EPS)
            return t.norm_out.copy_(norm), t.residual_out.copy_(z)
        torch.add(total, t.residual, out=t.residual_out)
        norm = torch.nn.functional.rms_norm(t.residual_out, t.weight.shape, t.weight, EPS)
        return norm, t.residual_out


def _largest(*values):
    """Of all ranks; a value that is no number counts as largest."""
    import torch
    import torch.distributed as dist

    word = torch.tensor([v if v == v else float("inf") for v in values], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return word.tolist()


def _exact(t):
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(t.kept) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.kept)
    z = sum(p.double() for p in parts) + t.residual.double()
    scale = torch.rsqrt(z.square().mean(1, keepdim=True) + EPS)
    return z * scale * t.weight.double(), z


def _errors(found, exact):
    return [float((f.double() - e).square().mean().sqrt() / e.square().mean().sqrt())
            for f, e in zip(found, exact)]


def _sample(call, tensors, n_calls):
    """Seconds of one call, of the slowest rank."""
    import torch.distributed as dist

    tensors.x.copy_(tensors.kept)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(n_calls):
        call()
    return _largest((time.perf_counter() - begin) / n_calls)[0]


def _case(world, options, n_tokens, hidden):
    import torch

    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[options["dtype"]]
    tensors = _Tensors(n_tokens, hidden, dtype, world.rank)
    ours = _Cofuse(world.team, tensors)
    calls = {"cofuse": ours, "torch": _Gloo(tensors, False)}
    if dtype != torch.float32:
        calls["torch-f32"] = _Gloo(tensors, True)
    case = dict(tokens=n_tokens, hidden=hidden, plan=ours.plan.describe, errors={}, failures={},
                times_s={})
    exact, n_calls = _exact(tensors), {}
    for name, call in calls.items():
        tensors.x.copy_(tensors.kept)
        case["errors"][name] = _largest(*_errors(call(), exact))
        if max(case["errors"][name]) > BOUNDS[options["dtype"]]:
            case["failures"][name] = f"errors {case['errors'][name]} against fp64"
            continue
        once = min(_sample(call, tensors, 1) for _ in range(3))
        # Sums in place grow by the number of ranks with each call, and must stay finite.
        n_calls[name] = int(min(max(SAMPLE_S / once, 1), 50))
        case["times_s"][name] = []
    for _ in range(options["samples"]):
        for name, n in n_calls.items():
            case["times_s"][name].append(_sample(calls[name], tensors, n))
    world.team.barrier()  # nobody destroys what another still reads
    ours.plan.destroy()
    return case


def _rank_main(options, rank, size, folder):
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import cofuse

    torch.set_num_threads(options["threads"])
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=size, timeout=timedelta(seconds=options["timeout"]))
    with cofuse.init(group=dist.group.WORLD, n_threads=options["threads"]) as world:
        cases = [_case(world, options, n, hidden)
                 for hidden in options["hidden"] for n in options["tokens"]]
        world.team.barrier()
    if rank == 0:
        write_json(os.path.join(folder, "set.json"), {
            "cases": cases,
            "versions": {"cofuse": cofuse.__version__, "torch": torch.__version__,
                         "python": platform.python_version()},
            "torch_isa": torch.backends.cpu.get_cpu_capability(),
        })
    dist.barrier()
    dist.destroy_process_group()


# ---- all sets ----


def _run_set(options, n_ranks):
    """(document of rank 0 or None, error or None)."""
    n_threads = str(options["threads"])
    with tempfile.TemporaryDirectory() as folder:
        words = [dict(options=options, rank=r, size=n_ranks, folder=folder) for r in range(n_ranks)]
        processes = start(__file__, words, OMP_NUM_THREADS=n_threads, MKL_NUM_THREADS=n_threads,
                          GLOO_SOCKET_IFNAME="lo")
        error = wait(processes, options["timeout"])
        if error is not None:
            return None, error
        with open(os.path.join(folder, "set.json")) as file:
            return json.load(file), None


def _result(cases, fixed):
    """One row of the table, of the same case in all process sets."""
    result = dict(fixed, **{k: cases[0][k] for k in ("tokens", "hidden", "plan", "errors")})
    result["contenders"] = contenders(cases)
    return compare(result, medians_of(result), lambda name: name == "cofuse")


def _run_ranks(options, n_ranks, document):
    given = settings(options, "ranks")
    given["threads"] = options.threads or max(1, len(os.sched_getaffinity(0)) // n_ranks)
    fixed = dict(ranks=n_ranks, threads=given["threads"], dtype=options.dtype)
    sets = []
    for number in range(options.processes):
        found, error = _run_set(given, n_ranks)
        if error is not None:
            document["failures"].append(dict(fixed, set=number, error=error))
            break
        sets.append(found["cases"])
        document["versions"] = found["versions"]
        document["machine"]["torch_isa"] = found["torch_isa"]
    for cases in zip(*sets):
        for number, case in enumerate(cases):
            for name, text in case["failures"].items():
                document["failures"].append(
                    dict(fixed, set=number, tokens=case["tokens"], contender=name, error=text))
        document["results"].append(_result(cases, fixed))


def table_of(document):
    """Markdown; ± is half the spread between process sets."""
    names, rows = ("cofuse", "torch", "torch-f32"), []
    for r in document["results"]:
        cells = [r["tokens"], r["hidden"], r["ranks"]]
        for name in names:
            found = r["contenders"].get(name)
            cells.append(f"{found['median_s'] * 1e6:.1f} ±{found['spread'] * 50:.0f}%"
                         if found else "-")
        cells.append(f"{r['ratio']:.2f} ({r['best_rival']})" if "ratio" in r else "-")
        rows.append(cells)
    return table(["T", "H", "ranks", *(f"{n} us" for n in names), "ratio"], rows)


def main():
    parser = _parser()
    options = parser.parse_args()
    if options.rank is not None:
        _rank_main(**json.loads(options.rank))
        return 0
    if options.samples < 3 or options.processes < 1 or options.threads < 0:
        parser.error("wanted --samples from 3, --processes from 1, --threads from 0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the ends of the ranks
    document = frame("allreduce_rmsnorm_cpu.py", options, versions={})
    for n_ranks in options.ranks:
        _run_ranks(options, n_ranks, document)
        if options.json:  # after each rank count, so that a long run is not lost
            write_json(options.json, document)
    return report(document, table_of(document))


if __name__ == "__main__":
    sys.exit(main())
