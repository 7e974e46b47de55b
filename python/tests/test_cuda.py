# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks on CUDA devices, with torch; skipped where there is none of either.

    python -m pytest python/tests/test_cuda.py

Two ranks, each on a GPU of its own where there are two; else they take turns on one, slowly.
"""

import importlib.util
import subprocess
import sys

import pytest

PROBE = "import cofuse; cofuse.init(rank=0, size=1, engine='cuda').close()"


@pytest.fixture(scope="module", autouse=True)
def device():
    """In a process of its own: one that has used CUDA cannot fork, as another test does."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    found = subprocess.run([sys.executable, "-c", PROBE], stderr=subprocess.PIPE, text=True)
    if found.returncode:
        assert "cofuse.Unsupported" in found.stderr, found.stderr
        pytest.skip(found.stderr.strip().splitlines()[-1])


@pytest.fixture
def cuda_ranks(ranks):
    return lambda worker, n, script="workers_cuda.py": ranks(worker, n, script=script)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_allreduce_rmsnorm(cuda_ranks, n_ranks):
    cuda_ranks("allreduce_rmsnorm", n_ranks)


def test_streams(cuda_ranks):
    cuda_ranks("streams", 2)


def test_graphs(cuda_ranks):
    cuda_ranks("graphs", 2)


def test_errors(cuda_ranks):
    cuda_ranks("errors", 2)


def test_cycles_are_collected(cuda_ranks):
    cuda_ranks("cycles", 2)


def test_exit_with_live_objects(cuda_ranks):
    cuda_ranks("exits", 2)


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("worker", ["attention", "attention_graphs", "attention_streams",
                                    "grad_return", "grad_return_graphs"])
def test_attention_and_grad_return(cuda_ranks, worker, n_ranks):
    cuda_ranks(worker, n_ranks, "workers_cuda_attention.py")
