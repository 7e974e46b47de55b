# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""The triangle multiplicative update of Cofuse beside torch's on the CPUs of one host.

    python bench/peers/trimul_cpu.py --ranks 1,2,4 --json OUT.json

Starts the ranks itself. What is compared, and the JSON: bench/peers/README.md.
"""

import argparse
import sys

from comparison import compare, contenders, medians_of, relative, table
from comparison_cpu import Program, add_set_options, largest, main, sample
from process_set import numbers

# Largest relative root mean square difference between a rival's out, dx, dp_in and Cofuse's.
BOUNDS = {"bf16": 3e-2, "f32": 1e-4}
SAMPLE_S = 0.05  # of calls one after the other: they keep the ranks in step
CALLS = ("forward", "forward+backward")


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=numbers, default=[64, 128, 256, 384, 512],
                        help="N; multiples of the rank counts")
    parser.add_argument("--dims", type=numbers, default=[64, 128], help="D; H is the same")
    parser.add_argument("--dtype", choices=sorted(BOUNDS), default="bf16")
    parser.add_argument("--samples", type=int, default=5, help="of each contender in a process set")
    add_set_options(parser, 900.0)
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


def _case(world, options, n, dim):
    import torch

    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[options["dtype"]]
    tensors = _Tensors(n, dim, dtype, world.rank, world.size)
    updates = {"cofuse": _Cofuse(world.team, tensors), "torch": _Torch(tensors, False)}
    if dtype != torch.float32:
        updates["torch-f32"] = _Torch(tensors, True)
    case = dict(rows=n, dim=dim, plan=updates["cofuse"].plan.describe, differences={},
                failures={}, times_s={call: {} for call in CALLS})
    wanted = [t.clone() for t in updates["cofuse"].both()]
    runs = []
    for name, update in updates.items():
        case["differences"][name] = largest(*map(relative, update.both(), wanted),
                                            relative(update.forward(), wanted[0]))
        if max(case["differences"][name]) > BOUNDS[options["dtype"]]:
            case["failures"][name] = f"differs from Cofuse by {case['differences'][name]}"
            continue
        for call, run in zip(CALLS, (update.forward, update.both)):
            once = min(sample(run, 1) for _ in range(2))
            case["times_s"][call][name] = []
            runs.append((case["times_s"][call][name], run, int(max(SAMPLE_S / once, 1))))
    for _ in range(options["samples"]):
        for times, run, n_calls in runs:
            times.append(sample(run, n_calls))
    world.team.barrier()  # nobody destroys what another still reads
    updates["cofuse"].destroy()
    return case


def _cases(world, options):
    return [_case(world, options, n, dim) for dim in options["dims"] for n in options["rows"]]


# ---- all sets ----


def _result(cases, call, fixed):
    """A row of the table, of the same case in all process sets."""
    result = dict(fixed, call=call, **{k: cases[0][k] for k in ("rows", "dim", "plan",
                                                                "differences")})
    result["contenders"] = contenders([{"times_s": c["times_s"][call]} for c in cases])
    return compare(result, medians_of(result), lambda name: name == "cofuse")


def _results(cases, fixed):
    return [_result(cases, call, fixed) for call in CALLS]


def table_of(document):
    """Markdown; ± is half the spread between process sets."""
    names, rows = ("cofuse", "torch", "torch-f32"), []
    for r in document["results"]:
        cells = [r["rows"], r["dim"], r["ranks"], r["call"]]
        for name in names:
            found = r["contenders"].get(name)
            cells.append(f"{found['median_s'] * 1e3:.2f} ±{found['spread'] * 50:.0f}%"
                         if found else "-")
        cells.append(f"{r['ratio']:.2f} ({r['best_rival']})" if "ratio" in r else "-")
        rows.append(cells)
    return table(["N", "D", "ranks", "call", *(f"{n} ms" for n in names), "ratio"], rows)


def _check(options, parser):
    if options.samples < 3:
        parser.error("wanted --samples from 3")
    if any(n % p or d % p for p in options.ranks for n in options.rows for d in options.dims):
        parser.error("wanted --rows and --dims that are multiples of the --ranks: torch's have "
                     "equal parts")


if __name__ == "__main__":
    sys.exit(main(Program(__file__, _cases, _results, table_of, fixed="dtype"), _parser(), _check))
