# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm of Cofuse beside NCCL's and torch's, on GPUs of one host.

    python bench/peers/allreduce_rmsnorm_cuda.py --json OUT.json

Starts the ranks itself: rank r works on GPU r modulo their number. What is compared, and the JSON:
bench/peers/README.md.
"""

import argparse
import sys

from comparison import (add_set_options, compare, contenders, main, medians_of, multicast_off,
                        names_of, table)
from process_set import numbers

TOKENS = [1, 16, 64, 128, 256, 512, 1024, 2048, 4096]
OURS = ("cofuse", "cofuse-eager")


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2,
                        help="where there are fewer GPUs, several share one")
    parser.add_argument("--tokens", type=numbers, default=TOKENS, help="T of each case")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16")
    parser.add_argument("--calls", type=int, default=100, help="in one graph")
    parser.add_argument("--algorithms", default="auto",
                        help="of Cofuse, each a contender: auto,one_shot,two_shot")
    parser.add_argument("--dry-run", action="store_true",
                        help="the same on CPUs, to try the program; times mean nothing")
    add_set_options(parser, 7)
    return parser


def _check(options, parser):
    if not 2 <= options.ranks <= 16 or options.hidden < 1 or options.calls < 1:
        parser.error("wanted --ranks from 2 to 16, --hidden, --calls from 1")
    options.no_compile |= options.dry_run


def _is_ours(name):
    return name.split(":")[0] in OURS


def _row(cases):
    """One row of the table, of the same case in all process sets."""
    result = {k: cases[0][k] for k in ("tokens", "bytes", "buffers", "plan", "errors", "same_bits")}
    result["contenders"] = contenders(cases)
    return compare(result, medians_of(result), _is_ours, lambda name: name.endswith("-alone"))


def table_of(document):
    """Markdown: microseconds a call, and each one's share of Cofuse's."""
    names, rows = names_of(document["results"]), []
    for r in document["results"]:
        cells = [r["tokens"]]
        for name in names:
            found = r["contenders"].get(name)
            ratio = r.get("ratios", {}).get(name)
            cell = f"{found['median_s'] * 1e6:.2f}" if found else "-"
            cells.append(cell + (f" ({ratio:.2f})" if ratio else ""))
        cells.append(f"{r['ratio']:.2f} ({r['best_rival']})" if "ratio" in r else "-")
        rows.append(cells)
    return table(["T"] + [f"{n} us" for n in names] + ["ratio"], rows)


if __name__ == "__main__":
    multicast_off()
    sys.exit(main(__file__, _parser(), _check, "rank_cuda", _row, table_of))
