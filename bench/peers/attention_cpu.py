# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Cofuse's attention beside torch's on one host: python bench/peers/attention_cpu.py --help

Starts the ranks itself. What is compared, and the JSON: bench/peers/README.md.
"""

import argparse
import platform
import sys

from comparison import compare, table
from comparison_cpu import Program, add_set_options, main
from process_set import numbers, summary

CALLS = ("forward", "both")
CONTENDERS = ("cofuse", "ring", "gather", "sdpa")


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=numbers, default=[512, 1024, 2048, 4096],
                        help="of the whole sequence; multiples of twice the ranks")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as heads")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--mask", choices=("none", "causal"), default="causal")
    parser.add_argument("--seconds", type=float, default=5.0,
                        help="for one row count in one process set, three calls at least")
    parser.add_argument("--repeat", type=int, default=30, help="calls at most")
    add_set_options(parser, 600.0)
    return parser


def _check(options, parser):
    if options.kv_heads is None:
        options.kv_heads = options.heads
    if options.heads < 1 or options.kv_heads < 1 or options.heads % options.kv_heads:
        parser.error(f"--kv-heads {options.kv_heads}: wanted a divisor of {options.heads}")
    if options.dim < 1 or options.repeat < 3:
        parser.error("wanted --dim from 1, --repeat from 3")
    for n_ranks in options.ranks:
        for n_rows in options.rows:
            if n_rows % (2 * n_ranks):
                parser.error(f"--rows {n_rows}: wanted a multiple of {2 * n_ranks}, for "
                             f"{n_ranks} ranks")


def _cases(world, options):
    import rank

    return rank.cases(world, options)


def _result(cases, call, fixed):
    """A row of the table, of the same case in all process sets."""
    result = dict(fixed, rows=cases[0]["rows"], call="forward+backward" if call == "both" else call)
    result["forms"] = [c["forms"] for c in cases]
    result["plan"] = cases[0]["plan"]
    result["differences"] = [c["differences"] for c in cases]
    result["late_starts"] = sum(c["late_starts"] for c in cases)
    medians = {}
    for name in CONTENDERS:
        key = f"{name} {call}"
        found = [c["medians_s"][key] for c in cases if key in c["medians_s"]]
        if len(found) == len(cases):
            samples = [t for c in cases for t in c["times_s"][key]]
            result[name] = summary(samples, found)
            medians[name] = result[name]["median_s"]
    return compare(result, medians, lambda name: name == "cofuse")


def _results(cases, fixed):
    return [_result(cases, call, fixed) for call in CALLS]


def _more():
    import torch

    import cofuse

    return dict(version=cofuse.__version__, torch=torch.__version__,
                python=platform.python_version(), affinity_changed=False, kernel=None)


def _take(document, found):
    document["machine"]["torch_isa"] = found["torch_isa"]
    document["affinity_changed"] |= found["affinity_changed"]
    document["kernel"] = found["cases"][0]["kernel"]


def _cell(result, name):
    if name not in result:
        return "-"
    return f"{result[name]['median_s'] * 1e3:.2f} ±{result[name]['spread'] * 50:.0f}%"


def table_of(document):
    """Markdown; ± is half the spread between process sets."""
    rows = []
    for r in document["results"]:
        cells = [r["rows"], r["ranks"], r["mask"], r["call"]]
        cells += [_cell(r, name) for name in CONTENDERS]
        cells.append(f"{r['ratio']:.2f} ({r['best_rival']})" if "ratio" in r else "-")
        rows.append(cells)
    return table(["rows", "ranks", "mask", "call", *(f"{n} ms" for n in CONTENDERS), "ratio"],
                 rows)


if __name__ == "__main__":
    sys.exit(main(Program(__file__, _cases, _results, table_of, fixed="mask", contender="rival",
                          more=_more, take=_take), _parser(), _check))
