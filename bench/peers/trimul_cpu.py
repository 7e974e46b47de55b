# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""The triangle multiplicative update of Cofuse beside torch's on the CPUs of one host.

    python bench/peers/trimul_cpu.py --ranks 1,2,4 --json OUT.json

Starts the ranks itself. What is compared, and the JSON: bench/peers/README.md.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import tempfile
import time

from process_set import machine, now, numbers, start, summary, wait, write_json

# Largest relative root mean square difference between a rival's out, dx, dp_in and Cofuse's.
BOUNDS = {"bf16": 3e-2, "f32": 1e-4}
SAMPLE_S = 0.05  # of calls one after the other: they keep the ranks in step
CALLS = ("forward", "forward+backward")


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    parser.add_argument("--rows", type=numbers, default=[64, 128, 256, 384, 512],
                        help="N; multiples of the rank counts")
    parser.add_argument("--dims", type=numbers, default=[64, 128], help="D; H is the same")
    parser.add_argument("--dtype", choices=sorted(BOUNDS), default="bf16")
    parser.add_argument("--threads", type=int, default=0,
                        help="of each rank; default: cores / ranks, at least 1")
    parser.add_argument("--samples", type=int, default=5, help="of each contender in a process set")
    parser.add_argument("--processes", type=int, default=3, help="fresh process sets")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of a process set")
    parser.add_argument("--json", help="where to write the document")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # what a rank is started with
    return parser


# ---- a rank ----


class _Tensors:
    """This rank's rows, and the weights by the names of TrimulPlan.set_weights."""

    def __init__(self, n, dim, dtype, rank, size):
        import torch

        rows = slice(rank * n // size, (rank + 1) * n // size)
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.n, self.dim = n, dim
        self.x = drawn(1, n, n, dim)[:, rows].contiguous()
        self.mask = (torch.rand(1, n, n, generator=generator) < 0.9).to(dtype)[:, rows].contiguous()
        self.dout = drawn(1, n, n, dim)[:, rows].contiguous()
        scale = dim**-0.5
        shapes = dict(p_in=(2 * dim, dim), g_in=(2 * dim, dim), p_out=(dim, dim), g_out=(dim, dim))
        self.weights = {name: drawn(*shape) * scale for name, shape in shapes.items()}
        for name, shape in shapes.items():
            self.weights[name + "_b"] = drawn(shape[0]) / 8
        for norm in ("norm_in", "norm_out"):
            self.weights[norm + "_w"] = 1 + drawn(dim) / 8
            self.weights[norm + "_b"] = drawn(dim) / 8


class _Cofuse:
    def __init__(self, team, tensors):
        import torch

        import cofuse

        self.t = t = tensors
        params = dict(dtype=t.x.dtype, n_rows=t.n, dim=t.dim)
        self.forward_plan = cofuse.TrimulPlan(team, forward_only=True, **params)
        self.plan = cofuse.TrimulPlan(team, save="ab", **params)
        for plan in (self.forward_plan, self.plan):
            plan.set_weights(t.weights)
        n_bytes = cofuse.trimul_workspace(team, save="ab", **params)["saved"]
        memory = torch.empty(n_bytes + 128, dtype=torch.uint8)
        self.saved = memory[-memory.data_ptr() % 128 :][:n_bytes]
        self.out, self.dx = torch.empty_like(t.x), torch.empty_like(t.x)
        self.grads = {name: torch.empty(w.shape) for name, w in t.weights.items()}

    def forward(self):
        self.forward_plan.forward(self.t.x, self.out, self.t.mask)
        return self.out

    def both(self):
        t = self.t
        self.plan.forward(t.x, self.out, t.mask, saved=self.saved)
        self.plan.backward(t.x, t.dout, self.dx, self.grads, t.mask, saved=self.saved)
        return self.out, self.dx, self.grads["p_in"]

    def destroy(self):
        self.forward_plan.destroy()
        self.plan.destroy()


class _Torch:
    """Rows over the ranks; a and b to the owners of features by all_to_all, one product a feature,
    and back by all_to_all. Gradients by autograd. In the type of x, or all in float32."""

    def __init__(self, tensors, is_wide):
        import torch
        import torch.distributed as dist

        class Exchange(torch.autograd.Function):
            """[P, ...]: part r goes to rank r. Its own inverse, so its own gradient."""

            @staticmethod
            def forward(ctx, parts):
                parts = parts.contiguous()
                result = torch.empty_like(parts)
                dist.all_to_all_single(result, parts)
                return result

            @staticmethod
            def backward(ctx, grads):
                return Exchange.apply(grads)

        self.t, self.size = tensors, dist.get_world_size()
        self.exchange = Exchange.apply if self.size > 1 else lambda parts: parts
        self.dtype = torch.float32 if is_wide else tensors.x.dtype
        self.leaves = {name: w.to(self.dtype).requires_grad_()
                       for name, w in tensors.weights.items()}

    def _compute(self, x):
        import torch
        from torch.nn.functional import layer_norm, linear

        t, w, size, own = self.t, self.leaves, self.size, self.t.dim // self.size
        shape = (t.dim,)
        xn = layer_norm(x, shape, w["norm_in_w"], w["norm_in_b"])
        ab = linear(xn, w["p_in"], w["p_in_b"]) * torch.sigmoid(linear(xn, w["g_in"], w["g_in_b"]))
        ab = ab * t.mask.to(self.dtype)[..., None]
        n_rows = ab.shape[1]
        # [rows, N, a|b, owner, feature] -> [owner, a|b, feature, rows, N]
        parts = ab[0].view(n_rows, t.n, 2, size, own).permute(3, 2, 4, 0, 1)
        whole = self.exchange(parts).permute(1, 2, 0, 3, 4).reshape(2, own, t.n, t.n)
        tri = whole[0] @ whole[1].transpose(1, 2)
        # [feature, owner of rows, rows, N] -> [owner of rows, ...] -> [rows, N, all features]
        parts = tri.view(own, size, n_rows, t.n).transpose(0, 1)
        tri = self.exchange(parts).reshape(t.dim, n_rows, t.n).permute(1, 2, 0)[None]
        tri = layer_norm(tri, shape, w["norm_out_w"], w["norm_out_b"])
        gate = torch.sigmoid(linear(xn, w["g_out"], w["g_out_b"]))
        return linear(tri, w["p_out"], w["p_out_b"]) * gate

    def forward(self):
        import torch

        with torch.no_grad():
            return self._compute(self.t.x.to(self.dtype)).to(self.t.x.dtype)

    def both(self):
        import torch

        with torch.enable_grad():
            x = self.t.x.detach().requires_grad_()
            out = self._compute(x.to(self.dtype)).to(x.dtype)
            grads = torch.autograd.grad(out, [x, *self.leaves.values()], self.t.dout)
        return out.detach(), grads[0], dict(zip(self.leaves, grads[1:]))["p_in"]

    def destroy(self):
        pass


def _largest(*values):
    """Of all ranks; a value that is no number counts as largest."""
    import torch
    import torch.distributed as dist

    word = torch.tensor([v if v == v else float("inf") for v in values], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return word.tolist()


def _sample(call, n_calls):
    """Seconds of one call, of the slowest rank."""
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    for _ in range(n_calls):
        call()
    return _largest((time.perf_counter() - begin) / n_calls)[0]


def _differences(found, wanted):
    return [float((f.double() - w.double()).square().mean().sqrt() /
                  w.double().square().mean().sqrt()) for f, w in zip(found, wanted)]


def _case(world, options, n, dim):
    import torch

    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[options["dtype"]]
    tensors = _Tensors(n, dim, dtype, world.rank, world.size)
    contenders = {"cofuse": _Cofuse(world.team, tensors), "torch": _Torch(tensors, False)}
    if dtype != torch.float32:
        contenders["torch-f32"] = _Torch(tensors, True)
    case = dict(rows=n, dim=dim, plan=contenders["cofuse"].plan.describe, differences={},
                failures={}, times_s={call: {} for call in CALLS})
    wanted = [t.clone() for t in contenders["cofuse"].both()]
    runs = []
    for name, contender in contenders.items():
        case["differences"][name] = _largest(*_differences(contender.both(), wanted),
                                             *_differences([contender.forward()], wanted))
        if max(case["differences"][name]) > BOUNDS[options["dtype"]]:
            case["failures"][name] = f"differs from Cofuse by {case['differences'][name]}"
            continue
        for call, run in zip(CALLS, (contender.forward, contender.both)):
            once = min(_sample(run, 1) for _ in range(2))
            case["times_s"][call][name] = []
            runs.append((case["times_s"][call][name], run, int(max(SAMPLE_S / once, 1))))
    for _ in range(options["samples"]):
        for times, run, n_calls in runs:
            times.append(_sample(run, n_calls))
    world.team.barrier()  # nobody destroys what another still reads
    contenders["cofuse"].destroy()
    return case


def _rank_main(options, rank, size, folder):
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import cofuse

    torch.set_num_threads(options["threads"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=size, timeout=timedelta(seconds=options["timeout"]))
    with cofuse.init(group=dist.group.WORLD, n_threads=options["threads"]) as world:
        cases = [_case(world, options, n, dim)
                 for dim in options["dims"] for n in options["rows"]]
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


def _result(cases, call, fixed):
    """One row of the table, of the same case in all process sets."""
    result = dict(fixed, call=call, **{k: cases[0][k] for k in ("rows", "dim", "plan",
                                                                "differences")})
    result["contenders"] = {}
    for name in cases[0]["times_s"][call]:
        found = [c["times_s"][call][name] for c in cases if name in c["times_s"][call]]
        samples = [t for times in found for t in times]
        result["contenders"][name] = summary(samples, [statistics.median(t) for t in found])
    medians = {n: c["median_s"] for n, c in result["contenders"].items()}
    rivals = {n: m for n, m in medians.items() if n != "cofuse"}
    if rivals and "cofuse" in medians:
        result["best_rival"] = min(rivals, key=rivals.get)
        result["ratio"] = rivals[result["best_rival"]] / medians["cofuse"]
    return result


def _run_ranks(options, n_ranks, document):
    settings = {k: v for k, v in vars(options).items() if k not in ("json", "rank", "ranks")}
    settings["threads"] = options.threads or max(1, len(os.sched_getaffinity(0)) // n_ranks)
    fixed = dict(ranks=n_ranks, threads=settings["threads"], dtype=options.dtype)
    sets = []
    for number in range(options.processes):
        found, error = _run_set(settings, n_ranks)
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
                    dict(fixed, set=number, rows=case["rows"], contender=name, error=text))
        for call in CALLS:
            document["results"].append(_result(cases, call, fixed))


def table_of(document):
    """Markdown; ± is half the spread between process sets."""
    names = ("cofuse", "torch", "torch-f32")
    lines = ["| N | D | ranks | call | " + " | ".join(f"{n} ms" for n in names) + " | ratio |",
             "|" + "---|" * 8]
    for r in document["results"]:
        cells = [r["rows"], r["dim"], r["ranks"], r["call"]]
        for name in names:
            found = r["contenders"].get(name)
            cells.append(f"{found['median_s'] * 1e3:.2f} ±{found['spread'] * 50:.0f}%"
                         if found else "-")
        cells.append(f"{r['ratio']:.2f} ({r['best_rival']})" if "ratio" in r else "-")
        lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    return "\n".join(lines)


def main():
    parser = _parser()
    options = parser.parse_args()
    if options.rank is not None:
        _rank_main(**json.loads(options.rank))
        return 0
    if options.samples < 3 or options.processes < 1 or options.threads < 0:
        parser.error("wanted --samples from 3, --processes from 1, --threads from 0")
    if any(n % p or d % p for p in options.ranks for n in options.rows for d in options.dims):
        parser.error("wanted --rows and --dims that are multiples of the --ranks: torch's have "
                     "equal parts")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the ends of the ranks
    document = {
        "schema": 1,
        "date": now(),
        "command": shlex.join(["python", "bench/peers/trimul_cpu.py", *sys.argv[1:]]),
        "versions": {},
        "machine": machine(),
        "settings": {k: v for k, v in vars(options).items() if k not in ("json", "rank")},
        "results": [],
        "failures": [],
    }
    for n_ranks in options.ranks:
        _run_ranks(options, n_ranks, document)
        if options.json:  # after each rank count, so that a long run is not lost
            write_json(options.json, document)
    print(table_of(document))
    for failure in document["failures"]:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
