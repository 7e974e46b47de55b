# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: each test that needs them names a function of workers.py, or of another."""

import itertools
import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent
LAUNCHERS = ("COFUSE_", "MASTER_", "TORCHELASTIC", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE")
jobs = itertools.count()


def environment(**variables):
    """Ours, less what a launcher that runs the tests has set."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return {**ours, "COFUSE_INIT_TIMEOUT": "100", "COFUSE_TIMEOUT": "100", **variables}


def start(script, worker, rank, size, job, *args):
    variables = environment(COFUSE_RANK=str(rank), COFUSE_SIZE=str(size), COFUSE_JOB=job)
    return subprocess.Popen(
        [sys.executable, str(FOLDER / script), worker, *map(str, args)],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def ranks():
    """ranks(worker, n, *args): runs it on n ranks and returns what they printed."""
    started = []

    def run(worker, n, *args, exits=None, script="workers.py"):
        job = f"pytest-{os.getpid()}-{next(jobs)}"
        processes = [start(script, worker, r, n, job, *args) for r in range(n)]
        started.extend(processes)
        outputs = [p.communicate(timeout=200)[0] for p in processes]
        seen = [p.returncode for p in processes]
        assert seen == (exits or [0] * n), f"{worker}: exits {seen}\n" + "\n".join(outputs)
        return outputs

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()


@pytest.fixture
def world(monkeypatch):
    """A world of one in this process."""
    import cofuse

    for name in [k for k in os.environ if k.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    with cofuse.init() as made:
        yield made
