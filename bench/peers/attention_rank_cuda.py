# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a process set of attention_cuda.py: makes the tensors, checks all, times them."""

import math

import torch

import cofuse
from attention_rivals_cuda import Inputs, make_contenders
from comparison import relative
from device_rank import DeviceRank, text_of
from sections_cuda import Sections

# Largest relative root mean square error of sampled rows against float32 sums, and the largest
# difference of all rows to Cofuse's; both are some roundings.
BOUND, BOUND_TO_OURS = {"bf16": 1e-2, "f16": 2e-3}, {"bf16": 2e-2, "f16": 4e-3}
N_SAMPLED = 32


class Rank(DeviceRank):
    def __init__(self, options, rank, folder):
        super().__init__(options, rank, folder)
        self.sections = Sections(self.device, self.dtype)

    def sampled(self, inputs):
        """(local rows, o [rows, H, D], lse [H, rows]) in float32, by the formula."""
        t, size = inputs, self.size
        whole = []
        for x in (t.k, t.v):
            halves = [p[0].split(t.half) for p in self.gathered(x)]
            whole.append(torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)]))
        layout = cofuse.Layout(t.n_rows, size)
        generator = torch.Generator().manual_seed(self.rank)
        rows = torch.randint(t.n_local, (N_SAMPLED,), generator=generator)
        rows[:4] = torch.tensor([0, t.half - 1, t.half, t.n_local - 1])
        at = torch.tensor([layout.global_row(self.rank, int(r)) for r in rows], device=self.device)
        rows = rows.to(self.device)
        group = t.q.shape[2] // t.k.shape[2]
        q = t.q[0, rows].float().unflatten(1, (-1, group))  # [rows, Hkv, g, D]
        score = torch.einsum("nkgd,skd->kgns", q, whole[0].float()) / math.sqrt(q.shape[3])
        hidden = torch.arange(t.n_rows, device=self.device)[None] > at[:, None]
        score.masked_fill_(hidden, -math.inf)
        lse = score.logsumexp(3)
        p = (score - lse[..., None]).exp_()
        o = torch.einsum("kgns,skd->nkgd", p, whole[1].float())
        return rows, o.flatten(1, 2), lse.flatten(0, 1)

    def check(self, contender, exact, ours):
        """Errors of o and lse on sampled rows, and differences to ours, the largest of all ranks;
        with a text where one of them is too large, or the call failed."""
        text, found = "", [math.inf] * 4
        try:
            contender.call(0)
            self.finish()
            o, lse = contender.outputs(0)
            rows, wanted, wanted_lse = exact
            found = [relative(o[rows], wanted), relative(lse[:, rows], wanted_lse)]
            found += [relative(a, b) for a, b in zip((o, lse), ours)] if ours else [0.0, 0.0]
        except (RuntimeError, cofuse.Error) as error:
            text = text_of(error)
        text = self.trouble(text)
        found = self.largest(*found)
        kind = self.options["dtype"]
        if not text and (max(found[:2]) > BOUND[kind] or max(found[2:]) > BOUND_TO_OURS[kind]):
            text = (f"o, lse differ from the formula by {found[0]:.1e}, {found[1]:.1e} (allowed "
                    f"{BOUND[kind]:.0e}), from Cofuse's by {found[2]:.1e}, {found[3]:.1e} (allowed "
                    f"{BOUND_TO_OURS[kind]:.0e})")
        return found, text

    def checked(self, contenders, inputs, case):
        """Those whose results are right; errors of all go into the case."""
        exact, good, ours = self.sampled(inputs), {}, None
        for name, contender in contenders.items():
            if name == "sections-alone":
                good[name] = contender
                continue
            found, text = self.check(contender, exact, ours)
            if text:
                case["failures"].append(dict(contender=name, error=text))
                continue
            case["errors"][name] = dict(zip(("o", "lse", "o_to_cofuse", "lse_to_cofuse"), found))
            good[name] = contender
            if name == "cofuse":
                ours = [t.clone() for t in contender.outputs(0)]
        return good

    def case(self, key):
        n_rows, n_heads, n_kv_heads = key
        head_dim = self.options["dim"]
        inputs = Inputs(self, n_rows, n_heads, n_kv_heads, head_dim)
        case = dict(rows=n_rows, heads=n_heads, kv_heads=n_kv_heads, head_dim=head_dim,
                    gqa=self.sections.gqa, errors={}, failures=[], plan=None,
                    flops=2.0 * n_rows * (n_rows + 1) * n_heads * head_dim / self.size)
        makers = self.chosen(make_contenders(inputs, self.options))
        contenders = self.made(makers, case["failures"])
        if "cofuse" in contenders:
            case["plan"] = contenders["cofuse"].plan.describe
        good = self.checked(contenders, inputs, case)
        ready = self.rounds(good, 1, case["failures"])
        case["times_s"] = self.times(ready)
        return self.ended(case, contenders, ready, rows=n_rows, heads=n_heads, kv_heads=n_kv_heads)


def main(options, rank, folder, path):
    own = Rank(options, rank, folder)
    own.run([(n, *heads) for heads in options["heads"] for n in options["rows"]], path)
