# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm of Cofuse beside torch's on the CPUs of one host.

    python bench/peers/allreduce_rmsnorm_cpu.py --ranks 1,2,4 --json OUT.json

Starts the ranks itself. What is compared, and the JSON: bench/peers/README.md.
"""

import argparse
import sys

from comparison import compare, contenders, medians_of, relative, table
from comparison_cpu import Program, add_set_options, largest, main, sample
from process_set import numbers

EPS = 1e-6
# Relative root mean square error against fp64. A sum that lacks a rank is off by 0.4 and more.
BOUNDS = {"bf16": 1e-2, "f32": 1e-6}
SAMPLE_S = 0.02  # of calls one after the other: they keep the ranks in step


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=numbers, default=[1, 16, 64, 256, 1024])
    parser.add_argument("--hidden", type=numbers, default=[4096])
    parser.add_argument("--dtype", choices=sorted(BOUNDS), default="bf16")
    parser.add_argument("--samples", type=int, default=7, help="of each contender in a process set")
    add_set_options(parser, 600.0)
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


def _exact(t):
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(t.kept) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.kept)
    z = sum(p.double() for p in parts) + t.residual.double()
    scale = torch.rsqrt(z.square().mean(1, keepdim=True) + EPS)
    return z * scale * t.weight.double(), z


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

    def restore():
        tensors.x.copy_(tensors.kept)

    for name, call in calls.items():
        restore()
        case["errors"][name] = largest(*map(relative, call(), exact))
        if max(case["errors"][name]) > BOUNDS[options["dtype"]]:
            case["failures"][name] = f"errors {case['errors'][name]} against fp64"
            continue
        once = min(sample(call, 1, restore) for _ in range(3))
        # Sums in place grow by the number of ranks with each call, and must stay finite.
        n_calls[name] = int(min(max(SAMPLE_S / once, 1), 50))
        case["times_s"][name] = []
    for _ in range(options["samples"]):
        for name, n in n_calls.items():
            case["times_s"][name].append(sample(calls[name], n, restore))
    world.team.barrier()  # nobody destroys what another still reads
    ours.plan.destroy()
    return case


def _cases(world, options):
    return [_case(world, options, n, hidden)
            for hidden in options["hidden"] for n in options["tokens"]]


# ---- all sets ----


def _results(cases, fixed):
    """A row of the table, of the same case in all process sets."""
    result = dict(fixed, **{k: cases[0][k] for k in ("tokens", "hidden", "plan", "errors")})
    result["contenders"] = contenders(cases)
    return [compare(result, medians_of(result), lambda name: name == "cofuse")]


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


def _check(options, parser):
    if options.samples < 3:
        parser.error("wanted --samples from 3")


if __name__ == "__main__":
    sys.exit(main(Program(__file__, _cases, _results, table_of, fixed="dtype", case="tokens"),
                  _parser(), _check))
