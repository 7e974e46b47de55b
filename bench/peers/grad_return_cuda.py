# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""grad_return of Cofuse beside NCCL's reduce-scatter, on GPUs of one host.

    python bench/peers/grad_return_cuda.py --json OUT.json

Starts the ranks itself: rank r works on GPU r modulo their number. What is compared, and the JSON:
bench/peers/README.md.
"""

import argparse
import sys

from comparison import (add_set_options, compare, contenders, main, medians_of, multicast_off,
                        names_of, table)
from process_set import numbers

PAYLOADS = [64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]
ITEM = {"bf16": 2, "f16": 2, "f32": 4}


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2,
                        help="where there are fewer GPUs, several share one")
    parser.add_argument("--payloads", type=numbers, default=PAYLOADS,
                        help="bytes of dK and dV together, of an owner, of each case")
    parser.add_argument("--heads", type=int, default=8, help="Hkv")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=sorted(ITEM), default="bf16")
    parser.add_argument("--dry-run", action="store_true",
                        help="the same on CPUs, to try the program; times mean nothing")
    add_set_options(parser, 7)
    return parser


def _check(options, parser):
    if not 2 <= options.ranks <= 16 or options.heads < 1 or options.dim < 1:
        parser.error("wanted --ranks from 2 to 16, --heads, --dim from 1")
    row = 2 * 2 * options.heads * options.dim * ITEM[options.dtype]  # of both halves, dK and dV
    for payload in options.payloads:
        if payload % row:
            parser.error(f"--payloads {payload}: wanted multiples of {row}")


def _is_ours(name):
    return name.startswith("cofuse")


def _row(cases):
    """One row of the table, of the same case in all process sets."""
    keys = ("payload_bytes", "rows", "buffers", "plan", "errors", "same_bits")
    result = {k: cases[0][k] for k in keys}
    result["contenders"] = contenders(cases)
    return compare(result, medians_of(result), _is_ours, lambda name: "-alone" in name,
                   ("cofuse", "cofuse-graph"))


def table_of(document):
    """Markdown: microseconds a call, and GB/s that leave a rank."""
    names, rows = names_of(document["results"]), []
    n_peers = document["settings"]["ranks"] - 1
    for r in document["results"]:
        cells = [f"{r['payload_bytes'] / 2**20:g}"]
        for name in names:
            found = r["contenders"].get(name)
            rate = found and n_peers * r["payload_bytes"] / found["median_s"] * 1e-9
            cells.append(f"{found['median_s'] * 1e6:.1f} ({rate:.0f})" if found else "-")
        cells.append(f"{r['ratio']:.2f} ({r['best_rival']})" if "ratio" in r else "-")
        rows.append(cells)
    return table(["MiB", *(f"{n} us" for n in names), "ratio"], rows)


if __name__ == "__main__":
    multicast_off()
    sys.exit(main(__file__, _parser(), _check, "grad_return_rank_cuda", _row, table_of))
