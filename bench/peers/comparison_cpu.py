# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""What the programs for the CPUs of one host have in common: ranks on a gloo group, process sets.

A rank makes the cases of its set, always in the same order. A case has `failures`, texts by
contender.
"""

import argparse
import json
import math
import os
import platform
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Callable

from comparison import frame, report, settings
from process_set import numbers, start, wait, write_json


def _take_versions(document, found):
    document["versions"] = found["versions"]
    document["machine"]["torch_isa"] = found["torch_isa"]


@dataclass
class Program:
    file: str
    cases: Callable     # (world, options): those of a set, on a rank
    results: Callable   # (the same case of all sets, fields of every result): rows of the table
    table_of: Callable  # (document): Markdown
    fixed: str          # the option that every result names, beside ranks and threads
    case: str = "rows"  # the field of a case that a failure names
    contender: str = "contender"  # the name in failures of who failed
    more: Callable = lambda: {"versions": {}}  # fields of the document, before the settings
    take: Callable = _take_versions  # (document, what rank 0 wrote): into those


def add_set_options(parser, seconds):
    """The options that every program has; seconds: of a process set, by default."""
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    parser.add_argument("--threads", type=int, default=0,
                        help="of each rank; default: cores / ranks, at least 1")
    parser.add_argument("--processes", type=int, default=3, help="fresh process sets")
    parser.add_argument("--timeout", type=float, default=seconds, help="seconds of a process set")
    parser.add_argument("--json", help="where to write the document")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # what a rank is started with


# ---- a rank ----


def largest(*values):
    """Of all ranks; a value that is no number counts as largest."""
    import torch
    import torch.distributed as dist

    word = torch.tensor([v if v == v else math.inf for v in values], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return word.tolist()


def sample(call, n_calls, before=None):
    """Seconds of one call, of the slowest rank."""
    import torch.distributed as dist

    if before:
        before()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(n_calls):
        call()
    return largest((time.perf_counter() - begin) / n_calls)[0]


def _rank_main(program, options, rank, size, folder):
    """Rank 0 writes what came of it into the folder."""
    import torch
    import torch.distributed as dist

    import cofuse

    torch.set_num_threads(options["threads"])
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=size, timeout=timedelta(seconds=options["timeout"]))
    cores = os.sched_getaffinity(0)
    with cofuse.init(group=dist.group.WORLD, n_threads=options["threads"]) as world:
        cases = program.cases(world, options)
        world.team.barrier()
    if rank == 0:
        write_json(os.path.join(folder, "set.json"), {
            "cases": cases,
            "versions": {"cofuse": cofuse.__version__, "torch": torch.__version__,
                         "python": platform.python_version()},
            "torch_isa": torch.backends.cpu.get_cpu_capability(),
            "affinity_changed": os.sched_getaffinity(0) != cores,
        })
    dist.barrier()
    dist.destroy_process_group()


# ---- all sets ----


def _run_set(file, options, n_ranks):
    """(what rank 0 wrote or None, error or None)."""
    n_threads = str(options["threads"])
    with tempfile.TemporaryDirectory() as folder:
        words = [dict(options=options, rank=r, size=n_ranks, folder=folder) for r in range(n_ranks)]
        processes = start(file, words, OMP_NUM_THREADS=n_threads, MKL_NUM_THREADS=n_threads,
                          GLOO_SOCKET_IFNAME="lo")
        error = wait(processes, options["timeout"])
        if error is not None:
            return None, error
        with open(os.path.join(folder, "set.json")) as written:
            return json.load(written), None


def _run_ranks(program, options, n_ranks, document):
    """All sets of so many ranks, until one fails: their results and failures into the document."""
    given = settings(options, "ranks")
    given["threads"] = options.threads or max(1, len(os.sched_getaffinity(0)) // n_ranks)
    fixed = {"ranks": n_ranks, "threads": given["threads"], program.fixed: given[program.fixed]}
    sets = []
    for number in range(options.processes):
        found, error = _run_set(program.file, given, n_ranks)
        if error is not None:
            document["failures"].append(dict(fixed, set=number, error=error))
            break
        sets.append(found["cases"])
        program.take(document, found)
    for cases in zip(*sets):
        for number, case in enumerate(cases):
            document["failures"] += [
                {**fixed, "set": number, program.case: case[program.case],
                 program.contender: name, "error": text}
                for name, text in case["failures"].items()]
        document["results"] += program.results(cases, fixed)


def main(program, parser, check):
    """This process is a rank, or starts them. The exit status. check(options, parser): of what not
    all programs have."""
    options = parser.parse_args()
    if options.rank is not None:
        _rank_main(program, **json.loads(options.rank))
        return 0
    if options.processes < 1 or options.threads < 0:
        parser.error("wanted --processes from 1, --threads from 0")
    check(options, parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the ends of the ranks
    document = frame(os.path.basename(program.file), options, **program.more())
    for n_ranks in options.ranks:
        _run_ranks(program, options, n_ranks, document)
        if options.json:  # after each rank count, so that a long run is not lost
            write_json(options.json, document)
    return report(document, program.table_of(document))
