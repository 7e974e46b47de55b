# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""What the ranks of process sets on GPUs have in common: world and groups, meeting, timing.

With fewer devices than ranks some share one. NCCL and torch's symmetric memory refuse that: their
contenders are left out, and what Cofuse's are checked with goes through the host.
With `dry_run` among the options the same is done on the CPU: gloo, Cofuse's processes, a clock.
"""

import contextlib
import math
import platform
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import cofuse
from process_set import write_json

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
LIMIT = timedelta(seconds=120)
SAMPLE_S = 0.02  # of calls one after the other: they keep the ranks in step
MAX_CALLS = 100


def text_of(error):
    return f"{type(error).__name__}: {error}"[:300]


class DeviceRank:
    def __init__(self, options, rank, folder):
        self.options, self.rank, self.size = options, rank, options["ranks"]
        self.is_dry = options.get("dry_run", False)
        self.n_devices = 0 if self.is_dry else min(torch.cuda.device_count(), self.size)
        if not self.is_dry and self.n_devices == 0:
            raise RuntimeError("torch sees no CUDA device")
        self.shares = 0 < self.n_devices < self.size
        self.device = (torch.device("cpu") if self.is_dry else
                       torch.device("cuda", rank % self.n_devices))
        torch.set_grad_enabled(False)
        if self.is_dry:
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(self.device)
        by_host = self.is_dry or self.shares
        dist.init_process_group("gloo" if by_host else "nccl", rank=rank, timeout=LIMIT,
                                init_method=f"file://{folder}/store", world_size=self.size)
        self.group = dist.group.WORLD
        self.host = dist.new_group(backend="gloo", timeout=LIMIT)
        self.world = (cofuse.init(group=self.host, n_threads=1) if self.is_dry else
                      cofuse.init(group=self.host, engine="cuda",
                                  device=self.device.index))
        self.stream = None if self.is_dry else torch.cuda.Stream()
        self.dtype = DTYPES[options["dtype"]]
        self.left_out = {}

    # ---- over the ranks, on the host ----

    def largest(self, *values):
        """Of all ranks; a value that is no number counts as largest."""
        word = torch.tensor([v if v == v else math.inf for v in values], dtype=torch.float64)
        dist.all_reduce(word, dist.ReduceOp.MAX, group=self.host)
        return word.tolist()

    def trouble(self, text):
        """The first rank's text that is not empty, on all ranks."""
        if text:
            print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)
        texts = [None] * self.size
        dist.all_gather_object(texts, text, group=self.host)
        return next((t for t in texts if t), "")

    # ---- over the ranks, tensors of the device ----

    def _for_group(self, tensor):
        """A compact one where the group takes it: of shared devices on the host."""
        return tensor.cpu().contiguous() if self.shares else tensor.contiguous()

    def gathered(self, tensor):
        """Every rank's."""
        own = self._for_group(tensor)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own)
        return [p.to(self.device) for p in parts]

    def sent(self, tensor, writer):
        """That of the rank `writer`."""
        theirs = self._for_group(tensor).clone()
        dist.broadcast(theirs, writer)
        return theirs.to(self.device)

    def finish(self):
        """Until what is enqueued here is done."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def meet(self):
        self.finish()
        dist.barrier(group=self.host)

    def say(self, text):
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    # ---- contenders ----

    def made(self, makers, failures):
        """{name: contender}. One that some rank cannot make is a failure, and dropped by all.

        Where a contender has prepare(), it does there what may fail on one rank alone, and sends
        nothing."""
        good = {}
        for name, make in makers.items():
            text, contender = "", None
            try:
                contender = make()
                if hasattr(contender, "prepare"):
                    contender.prepare()
            except Exception as error:  # of the compiler's too
                text = text_of(error)
            text = self.trouble(text)
            if text:
                failures.append(dict(contender=name, error=text))
            else:
                good[name] = contender
        return good

    def _reason(self, name):
        """Why this contender cannot be here; None: it can."""
        if name.startswith("cofuse") or name == "sections-alone":
            return None
        if self.shares:
            return (f"{self.size} ranks share {self.n_devices} devices; NCCL and symmetric memory "
                    "want a device for each")
        if self.is_dry and name.startswith(("one-shot", "two-shot")):
            return "dry run: torch has symmetric memory on devices alone"
        return None

    def chosen(self, makers):
        """Those that the options name and that can be here; the others are in left_out."""
        only, without = self.options["only"], self.options["no_compile"]
        names = only.split(",") if only else list(makers)
        names = [n for n in names if not (without and "compiled" in n)]
        self.left_out.update((n, why) for n in names if (why := self._reason(n)))
        return {n: makers[n] for n in names if n not in self.left_out}

    # ---- timing ----

    def captured(self, calls):
        """What enqueues the calls: a graph of them; as they are where there are no graphs."""
        if self.is_dry:
            return calls
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            calls()
        except Exception:
            with contextlib.suppress(RuntimeError):  # the stream is of use again
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay

    def sample(self, enqueue, n_calls, before=None):
        """Seconds of one call, of the slowest rank, where enqueue() makes n_calls. All calls wait
        for the other ranks, so those of a first round line the ranks up for the second."""
        if before:
            before()
        self.meet()
        enqueue()
        if self.is_dry:
            begin = time.perf_counter()
            enqueue()
            return self.largest((time.perf_counter() - begin) / n_calls)[0]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        enqueue()
        end.record()
        end.synchronize()
        return self.largest(begin.elapsed_time(end) * 1e-3 / n_calls)[0]

    def rounds(self, contenders, n_sets, failures):
        """{name: what enqueues some calls, and their number}. contender.call(i) is for the i-th of
        n_sets sets of buffers; a contender with is_graph is replayed."""
        ready = {}
        for name, contender in contenders.items():
            once = min(self.sample(lambda c=contender: c.call(0), 1) for _ in range(2))
            n_calls = int(min(max(SAMPLE_S / once, 1), MAX_CALLS))

            def calls(contender=contender, n_calls=n_calls):
                for i in range(n_calls):
                    contender.call(i % n_sets)

            text = ""
            try:
                enqueue = self.captured(calls) if getattr(contender, "is_graph", False) else calls
            except Exception as error:
                text = text_of(error)
            text = self.trouble(text)
            if text:
                failures.append(dict(contender=name, error=text))
            else:
                ready[name] = enqueue, n_calls
        return ready

    def times(self, ready, before=None):
        """{name: seconds of each sample}, of what `rounds` returns; contenders take turns."""
        found = {name: [] for name in ready}
        for turn in range(1 + self.options["samples"]):
            for name, (enqueue, n_calls) in ready.items():
                seconds = self.sample(enqueue, n_calls, before)
                if turn:
                    found[name].append(seconds)
        return found

    # ---- the end of a case ----

    def ended(self, case, contenders, ready, **key):
        """The case, in whose failures is `key` now; its plans are gone. ready: as for `times`."""
        for failure in case["failures"]:
            failure.update(key)
        self.meet()
        ready.clear()  # graphs before the plans in them
        for contender in contenders.values():
            if getattr(contender, "plan", None):
                contender.plan.destroy()
        self.world.team.query()  # waits that failed tell it here
        return case

    # ---- the whole ----

    def versions(self):
        found = {
            "cofuse": cofuse.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        }
        if not self.is_dry:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            found["cudnn"] = torch.backends.cudnn.version()
        return found

    def run(self, keys, path):
        """self.case(key) of all keys; rank 0 writes what there is to the path after each."""
        cases = []
        for key in keys:
            begin = time.monotonic()
            if self.is_dry:
                cases.append(self.case(key))
            else:
                with torch.cuda.stream(self.stream):
                    cases.append(self.case(key))
            self.say(f"case {key}: {time.monotonic() - begin:.1f} s")
            if self.rank == 0:
                left_out = [dict(contender=n, why=why) for n, why in self.left_out.items()]
                write_json(path, {"versions": self.versions(), "devices": self.n_devices,
                                  "left_out": left_out, "cases": cases})
        self.meet()
        self.world.close()
        dist.destroy_process_group()
