# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""What the programs have in common: the frame of a document, its rows, process sets on GPUs.

A rank writes {"versions": ..., "devices": number of GPUs, "left_out": [...], "cases": [...]}, the
cases always in the same order. A case has
`times_s`: {contender: seconds of its samples}, and `failures`: objects that name a contender.
"""

import argparse
import importlib
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from process_set import machine, now, start, summary, wait, write_json

# Of a program's options, those that say nothing about what it measures.
APART = ("json", "rank")


def multicast_off():
    """NVLink multicast stays off, whatever the environment says: on shared hosts it can take the
    GPUs out of service, and Cofuse does not use it either. To be called before torch is there."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"


def settings(options, *apart):
    return {k: v for k, v in vars(options).items() if k not in APART + apart}


def frame(script, options, **more):
    """A document without results; `more` comes before them."""
    return {
        "schema": 1,
        "date": now(),
        "command": shlex.join(["python", f"bench/peers/{script}", *sys.argv[1:]]),
        "machine": machine(),
        **more,
        "settings": settings(options),
        "results": [],
        "failures": [],
    }


def relative(ours, wanted):
    """Relative root mean square difference; of two zeros none."""
    size = wanted.double().square().mean().sqrt()
    error = (ours.double() - wanted.double()).square().mean().sqrt()
    return float(error / size) if float(size) else float(error)


def contenders(cases):
    """{name: summary} of the same case in all process sets."""
    found = {}
    for name in dict.fromkeys(n for c in cases for n in c["times_s"]):
        sets = [c["times_s"][name] for c in cases if c["times_s"].get(name)]
        if sets:
            samples = [t for times in sets for t in times]
            found[name] = summary(samples, [statistics.median(t) for t in sets])
    return found


def compare(result, medians, is_ours, is_apart=lambda name: False, forms=("cofuse",)):
    """Puts best_rival, ratio and ratios into a row, to the fastest of Cofuse's `forms`. Who is
    apart is no rival."""
    rivals = {n: m for n, m in medians.items() if not is_ours(n) and not is_apart(n)}
    ours = [n for n in forms if n in medians]
    if rivals and ours:
        best = min(ours, key=medians.get)
        if len(forms) > 1:
            result["best_of_cofuse"] = best
        result["best_rival"] = min(rivals, key=rivals.get)
        result["ratios"] = {n: m / medians[best] for n, m in medians.items() if n != best}
        result["ratio"] = result["ratios"][result["best_rival"]]
    return result


def medians_of(result):
    return {name: c["median_s"] for name, c in result["contenders"].items()}


def names_of(results):
    """Names of all contenders, each once."""
    return list(dict.fromkeys(n for r in results for n in r["contenders"]))


def table(head, rows):
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(c) for c in cells) + " |" for cells in rows])


def report(document, text):
    """Prints the table and the failures; the exit status."""
    print(text)
    for missing in document.get("left_out", []):
        print(f"left out: {missing['contender']}: {missing['why']}", file=sys.stderr)
    for failure in document["failures"]:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if document["failures"] else 0


def _gpus():
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split("\n")[:-1]


class Sets:
    """The document of a program for GPUs, written again whenever a rank has done a case."""

    def __init__(self, script, options, row):
        """row: makes a result of the same case in all process sets."""
        self.script, self.options, self.row = script, options, row
        self.sets = []
        self.seen = None
        self.document = frame(os.path.basename(script), options, versions={}, sets=0,
                              devices=0, left_out=[])
        self.document["machine"]["gpus"] = _gpus()

    def _look(self, path, number):
        """Takes over what rank 0 has written, when it has written more."""
        try:
            written = os.stat(path).st_mtime_ns
        except OSError:
            return
        if written == self.seen:
            return
        self.seen = written
        with open(path) as file:
            found = json.load(file)
        self.sets[number:] = [found["cases"]]
        for name in ("versions", "devices", "left_out"):
            self.document[name] = found[name]
        self._put_together()

    def _put_together(self):
        document = self.document
        document["sets"] = len(self.sets)
        by_case = itertools.zip_longest(*self.sets)
        document["results"] = [self.row([c for c in cases if c]) for cases in by_case]
        document["failures"] = [f for f in document["failures"] if "contender" not in f]
        for number, cases in enumerate(self.sets):
            document["failures"] += [dict(f, set=number) for c in cases for f in c["failures"]]
        if self.options.json:
            write_json(self.options.json, document)

    def _one_set(self, number, seconds):
        """False when it ended badly; what it had is kept."""
        self.seen = None
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "set.json")
            words = [dict(options=settings(self.options), rank=r, folder=folder, path=path)
                     for r in range(self.options.ranks)]
            processes = start(self.script, words, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="4")
            error = wait(processes, seconds, lambda: self._look(path, number))
            self._look(path, number)
        if error:
            self.document["failures"].append(dict(set=number, error=error))
            self._put_together()
        return not error

    def run(self):
        """A set is not begun if it would not be done in time; the last may be cut short."""
        begin, longest = time.monotonic(), 0.0
        for number in range(self.options.processes):
            left = self.options.seconds - (time.monotonic() - begin)
            if number and left < longest:
                break
            set_begin = time.monotonic()
            if not self._one_set(number, max(left, 10.0)):
                break
            longest = max(longest, time.monotonic() - set_begin)
        return self.document


def add_set_options(parser, samples):
    """The options that `Sets` and every program on it have."""
    parser.add_argument("--samples", type=int, default=samples,
                        help="of each contender in a process set")
    parser.add_argument("--processes", type=int, default=3, help="fresh process sets at most")
    parser.add_argument("--seconds", type=float, default=140.0,
                        help="no process set is begun that would not be done by then")
    parser.add_argument("--only", help="contenders to time, with commas; default: all")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--json", help="where to write the document, which grows as it goes")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # what a rank is started with


def main(script, parser, check, rank_module, row, make_table):
    """Of a program for GPUs: this process is a rank of it, or starts them. The exit status."""
    options = parser.parse_args()
    if options.rank is not None:
        importlib.import_module(rank_module).main(**json.loads(options.rank))
        return 0
    if options.samples < 3 or options.processes < 1:
        parser.error("wanted --samples from 3, --processes from 1")
    check(options, parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the ends of the ranks
    document = Sets(script, options, row).run()
    return report(document, make_table(document))
