# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""What the comparisons share: sets of rank processes, and the frame of their documents."""

import argparse
import ctypes
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time

SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def numbers(text):
    """An option's list of numbers from 1 on."""
    found = [int(word) for word in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: wanted numbers from 1 on")
    return found


def _die_with_parent():
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def start(script, words, **variables):
    """Starts the script once for each word, which it gets as JSON behind --rank."""
    env = dict(os.environ, **variables)
    processes = []
    for word in words:
        command = [sys.executable, os.path.abspath(script), "--rank", json.dumps(word)]
        processes.append(subprocess.Popen(command, env=env, preexec_fn=_die_with_parent))
    return processes


def wait(processes, seconds, tick=None):
    """Ends all when one fails or the time is over. Returns a text about the failure, or None.

    tick() is called now and then while they run.
    """
    end = time.monotonic() + seconds
    try:
        while True:
            codes = [p.poll() for p in processes]
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    return f"rank {rank} ended with status {code}"
            if None not in codes:
                return None
            if time.monotonic() > end:
                return f"not done within {seconds:g} s"
            if tick:
                tick()
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def write_json(path, document):
    """Whole or not at all, for whoever reads it while it grows."""
    part = f"{path}.part"
    with open(part, "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    os.replace(part, path)


def summary(samples, medians):
    """Of one contender: its samples in all sets, and the median of each set."""
    middle = statistics.median(medians)
    return {
        "median_s": middle,
        "min_s": min(samples),
        "spread": (max(medians) - min(medians)) / middle,
        "calls": len(samples),
        "set_medians_s": medians,
    }


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def machine():
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }


def _cpu():
    try:
        with open("/proc/cpuinfo") as file:
            return next(l.split(":", 1)[1].strip() for l in file if l.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
