# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of Cofuse beside rings, gathers and all-to-alls of torch, cuDNN and NCCL, on GPUs.

    python bench/peers/attention_cuda.py --json OUT.json

Starts the ranks itself: rank r works on GPU r modulo their number. What is compared, and the JSON:
bench/peers/README.md.
"""

import argparse
import sys

from comparison import (add_set_options, compare, contenders, main, medians_of, multicast_off,
                        names_of, table)
from process_set import numbers

ROWS = [2048, 8192, 16384, 32768, 65536]


def _heads(text):
    """H or H:Hkv, with commas: [[H, Hkv], ...]."""
    found = [numbers(word.replace(":", ",")) for word in text.split(",")]
    pairs = [(pair * 2)[:2] for pair in found]
    if any(len(pair) > 2 for pair in found) or any(h % kv for h, kv in pairs):
        raise argparse.ArgumentTypeError(f"{text}: wanted H or H:Hkv, Hkv a divisor of H")
    return pairs


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2,
                        help="where there are fewer GPUs, several share one")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="S of each case")
    parser.add_argument("--heads", type=_heads, default=[[20, 20], [32, 8]],
                        help="H or H:Hkv of each case, as 20,32:8")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bf16", "f16"), default="bf16")
    parser.add_argument("--schedules", default="default",
                        help="of Cofuse, each a contender: default,ring,gather")
    parser.add_argument("--dry-run", action="store_true",
                        help="the same on CPUs, to try the program; times mean nothing")
    add_set_options(parser, 7)
    return parser


def _check(options, parser):
    if not 2 <= options.ranks <= 16 or options.dim < 1:
        parser.error("wanted --ranks from 2 to 16, --dim from 1")
    for n_rows in options.rows:
        if n_rows % (2 * options.ranks) or n_rows < 4 * options.ranks:
            parser.error(f"--rows {n_rows}: wanted multiples of {2 * options.ranks}, for "
                         f"{options.ranks} ranks")


def _is_ours(name):
    return name.split(":")[0] in ("cofuse", "cofuse-graph")


def _row(cases):
    """One row of the table, of the same case in all process sets."""
    keys = ("rows", "heads", "kv_heads", "head_dim", "flops", "gqa", "plan", "errors")
    result = {k: cases[0][k] for k in keys}
    result["contenders"] = contenders(cases)
    medians = medians_of(result)
    result["tflops"] = {n: result["flops"] / m * 1e-12 for n, m in medians.items()}
    if "sections-alone" in medians:
        result["efficiency"] = {n: medians["sections-alone"] / m for n, m in medians.items()}
    return compare(result, medians, _is_ours, lambda name: name.endswith("-alone"),
                   ("cofuse", "cofuse-graph"))


def table_of(document):
    """Markdown: TFLOP/s of a GPU, and efficiency: time of the sections alone / time."""
    names, rows = names_of(document["results"]), []
    for r in document["results"]:
        cells = [r["rows"], f"{r['heads']}:{r['kv_heads']}"]
        for name in names:
            rate, share = r["tflops"].get(name), r.get("efficiency", {}).get(name)
            shown = share is not None and not name.endswith("-alone")
            cells.append((f"{rate:.1f}" if rate else "-") + (f" ({share:.3f})" if shown else ""))
        cells.append(f"{r['ratio']:.2f} ({r['best_rival']})" if "ratio" in r else "-")
        rows.append(cells)
    return table(["S", "H:Hkv", *names, "ratio"], rows)


if __name__ == "__main__":
    multicast_off()
    sys.exit(main(__file__, _parser(), _check, "attention_rank_cuda", _row, table_of))
