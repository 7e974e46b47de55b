# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Cofuse's attention beside torch's on one host: python bench/peers/attention_cpu.py --help

Starts the ranks itself. What is compared, and the JSON: bench/peers/README.md.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile

from comparison import compare, frame, report, settings, table
from process_set import numbers, start, summary, wait, write_json

CALLS = ("forward", "both")
CONTENDERS = ("cofuse", "ring", "gather", "sdpa")


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    parser.add_argument("--rows", type=numbers, default=[512, 1024, 2048, 4096],
                        help="of the whole sequence; multiples of twice the ranks")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as heads")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--mask", choices=("none", "causal"), default="causal")
    parser.add_argument("--threads", type=int, default=0,
                        help="of each rank; default: cores / ranks, at least 1")
    parser.add_argument("--seconds", type=float, default=5.0,
                        help="for one row count in one process set, three calls at least")
    parser.add_argument("--repeat", type=int, default=30, help="calls at most")
    parser.add_argument("--processes", type=int, default=3, help="fresh process sets")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a process set")
    parser.add_argument("--json", help="where to write the document")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # what a rank is started with
    return parser


def _checked(options, parser):
    if options.kv_heads is None:
        options.kv_heads = options.heads
    if options.heads < 1 or options.kv_heads < 1 or options.heads % options.kv_heads:
        parser.error(f"--kv-heads {options.kv_heads}: wanted a divisor of {options.heads}")
    if options.dim < 1 or options.repeat < 3 or options.processes < 1 or options.threads < 0:
        parser.error("wanted --dim, --processes from 1, --repeat from 3, --threads from 0")
    for n_ranks in options.ranks:
        for n_rows in options.rows:
            if n_rows % (2 * n_ranks):
                parser.error(f"--rows {n_rows}: wanted a multiple of {2 * n_ranks}, for "
                             f"{n_ranks} ranks")
    return options


def _start(options, n_ranks, port, path):
    """The processes of a set."""
    n_threads = str(options["threads"])
    words = [dict(options=options, rank=r, size=n_ranks, port=port, path=path)
             for r in range(n_ranks)]
    return start(__file__, words, OMP_NUM_THREADS=n_threads, MKL_NUM_THREADS=n_threads)


def _run_set(options, n_ranks):
    """(document of rank 0 or None, error or None)."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "set.json")
        error = wait(_start(options, n_ranks, store.port, path), options["timeout"])
        if error is not None:
            return None, error
        with open(path) as file:
            return json.load(file), None


def _result(cases, call, fixed):
    """One row of the table, of the same case in all process sets."""
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


def _run_ranks(options, n_ranks, document):
    given = settings(options, "ranks")
    given["threads"] = options.threads or max(1, len(os.sched_getaffinity(0)) // n_ranks)
    fixed = dict(ranks=n_ranks, threads=given["threads"], mask=options.mask)
    sets = []
    for number in range(options.processes):
        found, error = _run_set(given, n_ranks)
        if error is not None:
            document["failures"].append(dict(fixed, set=number, error=error))
            break
        sets.append(found)
    document["kernel"] = sets[0]["kernel"] if sets else document.get("kernel")
    document["affinity_changed"] |= any(s["affinity_changed"] for s in sets)
    for cases in zip(*(s["cases"] for s in sets)):
        for number, case in enumerate(cases):
            for name, text in case["failures"].items():
                document["failures"].append(
                    dict(fixed, set=number, rows=case["rows"], rival=name, error=text))
        for call in CALLS:
            document["results"].append(_result(cases, call, fixed))


def _document(options):
    import torch

    import cofuse

    document = frame("attention_cpu.py", options, version=cofuse.__version__,
                     torch=torch.__version__, python=platform.python_version(),
                     affinity_changed=False)
    document["machine"]["torch_isa"] = torch.backends.cpu.get_cpu_capability()
    return document


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


def main():
    parser = _parser()
    options = parser.parse_args()
    if options.rank is not None:
        import rank

        rank.main(**json.loads(options.rank))
        return 0
    _checked(options, parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the ends of the ranks
    document = _document(options)
    for n_ranks in options.ranks:
        _run_ranks(options, n_ranks, document)
        if options.json:  # after each rank count, so that a long run is not lost
            write_json(options.json, document)
    return report(document, table_of(document))


if __name__ == "__main__":
    sys.exit(main())
