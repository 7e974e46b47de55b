# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm of Cofuse beside NCCL's and torch's, on GPUs of one host.

    python bench/peers/allreduce_rmsnorm_cuda.py --json OUT.json

Starts the ranks itself, one to a GPU. What is compared, and the JSON: bench/peers/README.md.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time

# NVLink multicast stays off, whatever the environment says: on shared hosts it can take the GPUs
# out of service, and Cofuse does not use it either.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NVSHMEM_DISABLE_NVLS"] = "1"

from process_set import machine, now, numbers, start, summary, wait, write_json  # noqa: E402

TOKENS = [1, 16, 64, 128, 256, 512, 1024, 2048, 4096]
OURS = ("cofuse", "cofuse-eager")


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="GPUs")
    parser.add_argument("--tokens", type=numbers, default=TOKENS, help="T of each case")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16")
    parser.add_argument("--calls", type=int, default=100, help="in one graph")
    parser.add_argument("--samples", type=int, default=7, help="of each contender in a process set")
    parser.add_argument("--processes", type=int, default=3, help="fresh process sets at most")
    parser.add_argument("--seconds", type=float, default=140.0,
                        help="no process set is begun that would not be done by then")
    parser.add_argument("--algorithms", default="auto",
                        help="of Cofuse, each a contender: auto,one_shot,two_shot")
    parser.add_argument("--only", help="contenders to time, with commas; default: all")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--json", help="where to write the document, which grows as it goes")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # what a rank is started with
    return parser


def _checked(options, parser):
    if not 2 <= options.ranks <= 16 or options.hidden < 1:
        parser.error("wanted --ranks from 2 to 16, --hidden from 1")
    if options.calls < 1 or options.samples < 3 or options.processes < 1:
        parser.error("wanted --calls, --processes from 1, --samples from 3")
    return options


def _is_ours(name):
    return name.split(":")[0] in OURS


def _result(cases):
    """One row of the table, of the same case in all process sets."""
    result = {k: cases[0][k] for k in ("tokens", "bytes", "buffers", "plan", "errors", "same_bits")}
    result["contenders"] = {}
    for name in cases[0]["times_s"]:
        found = [c["times_s"][name] for c in cases if name in c["times_s"]]
        samples = [t for times in found for t in times]
        result["contenders"][name] = summary(samples, [statistics.median(t) for t in found])
    medians = {n: c["median_s"] for n, c in result["contenders"].items()}
    rivals = {n: m for n, m in medians.items() if not _is_ours(n) and not n.endswith("-alone")}
    if rivals and "cofuse" in medians:
        result["best_rival"] = min(rivals, key=rivals.get)
        result["ratios"] = {n: m / medians["cofuse"] for n, m in medians.items() if n != "cofuse"}
        result["ratio"] = result["ratios"][result["best_rival"]]
    return result


def _gpus():
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split("\n")[:-1]


class Run:
    """The document, and the process sets that fill it."""

    def __init__(self, options):
        self.options = options
        self.sets = []
        self.seen = None
        self.document = {
            "schema": 1,
            "date": now(),
            "command": shlex.join(["python", "bench/peers/allreduce_rmsnorm_cuda.py",
                                   *sys.argv[1:]]),
            "versions": {},
            "machine": dict(machine(), gpus=_gpus()),
            "settings": {k: v for k, v in vars(options).items() if k not in ("json", "rank")},
            "sets": 0,
            "results": [],
            "failures": [],
        }

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
        self.document["versions"] = found["versions"]
        self._put_together()

    def _put_together(self):
        document = self.document
        document["sets"] = len(self.sets)
        by_tokens = [[c for s in self.sets for c in s if c["tokens"] == n]
                     for n in self.options.tokens]
        document["results"] = [_result(cases) for cases in by_tokens if cases]
        document["failures"] = [f for f in document["failures"] if "contender" not in f]
        for number, cases in enumerate(self.sets):
            document["failures"] += [dict(f, set=number) for c in cases for f in c["failures"]]
        if self.options.json:
            write_json(self.options.json, document)

    def one_set(self, number, seconds):
        """False when it ended badly; what it had is kept."""
        settings = {k: v for k, v in vars(self.options).items() if k not in ("json", "rank")}
        self.seen = None
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "set.json")
            words = [dict(options=settings, rank=r, folder=folder, path=path)
                     for r in range(self.options.ranks)]
            processes = start(__file__, words, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="4")
            error = wait(processes, seconds, lambda: self._look(path, number))
            self._look(path, number)
        if error:
            self.document["failures"].append(dict(set=number, error=error))
            self._put_together()
        return not error

    def all_sets(self):
        begin, longest = time.monotonic(), 0.0
        for number in range(self.options.processes):
            left = self.options.seconds - (time.monotonic() - begin)
            if number and left < longest:
                break
            set_begin = time.monotonic()
            if not self.one_set(number, max(left, 10.0)):
                break
            longest = max(longest, time.monotonic() - set_begin)


def _table(document):
    """Markdown: microseconds a call, and each one's share of Cofuse's."""
    results = document["results"]
    names = []
    for r in results:
        names += [n for n in r["contenders"] if n not in names]
    head = ["T"] + [f"{n} us" for n in names] + ["ratio"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in results:
        cells = [str(r["tokens"])]
        for name in names:
            found = r["contenders"].get(name)
            ratio = r.get("ratios", {}).get(name)
            cell = f"{found['median_s'] * 1e6:.2f}" if found else "-"
            cells.append(cell + (f" ({ratio:.2f})" if ratio else ""))
        cells.append(f"{r['ratio']:.2f} ({r['best_rival']})" if "ratio" in r else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = _parser()
    options = parser.parse_args()
    if options.rank is not None:
        import rank_cuda

        rank_cuda.main(**json.loads(options.rank))
        return 0
    _checked(options, parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the ends of the ranks
    run = Run(options)
    run.all_sets()
    print(_table(run.document))
    for failure in run.document["failures"]:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if run.document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
