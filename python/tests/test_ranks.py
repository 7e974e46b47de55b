# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Several ranks: results, teams, errors, the GIL, the end of the process."""

import pytest


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_attention(ranks, n_ranks, mask):
    ranks("attention", n_ranks, 61, mask, "zigzag", "balanced")


@pytest.mark.parametrize("mask, window", [("causal", (9, 0)), ("causal", (0, -1)),
                                          ("none", (3, 20)), ("none", (-1, 0))])
def test_attention_window(ranks, mask, window):
    ranks("attention", 3, 61, mask, "zigzag", "balanced", *window)


def test_attention_contiguous_padded(ranks):
    ranks("attention", 3, 61, "causal", "contiguous", "padded")


@pytest.mark.parametrize("transfer", ["push", "pull"])
def test_grad_return(ranks, transfer):
    ranks("grad_return", 3, transfer)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_allreduce_rmsnorm(ranks, n_ranks, dtype):
    ranks("allreduce_rmsnorm", n_ranks, dtype)


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_allreduce_rmsnorm_plan(ranks, n_ranks):
    ranks("allreduce_rmsnorm_plan", n_ranks)


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_allreduce_rmsnorm_torch(ranks, n_ranks):
    pytest.importorskip("torch", reason="torch is not installed")
    ranks("allreduce_rmsnorm_torch", n_ranks)


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_trimul(ranks, n_ranks, direction):
    ranks("trimul", n_ranks, direction)


def test_trimul_weights_differ(ranks):
    ranks("trimul_weights_differ", 3)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_trimul_torch(ranks, n_ranks):
    pytest.importorskip("torch", reason="torch is not installed")
    ranks("trimul_torch", n_ranks)


def test_streams_keep_tensors(ranks):
    ranks("streams", 2)


def test_calls_within_calls(ranks):
    ranks("nested_calls", 1)


def test_teams_and_arenas(ranks):
    ranks("teams", 4)


def test_mismatch(ranks):
    ranks("mismatch", 2)


def test_functions_go_on_after_a_failure(ranks):
    ranks("forgets", 2)


def test_a_stream_that_failed_holds(ranks):
    ranks("failed_stream", 2)


def test_a_rank_dies(ranks):
    ranks("dies", 2, exits=[0, 3])


def test_gil_is_released(ranks, tmp_path):
    ranks("gil", 2, tmp_path / "go")


@pytest.mark.parametrize("way", ["destroy", "drop"])
def test_closing_in_two_threads(ranks, tmp_path, way):
    ranks("closing", 2, tmp_path / "go", way)


def test_exit_with_live_objects(ranks):
    ranks("exits", 2)


def test_allgather_of_the_caller(ranks, tmp_path):
    ranks("callback", 3, tmp_path, "no")


def test_allgather_that_raises(ranks, tmp_path):
    ranks("callback", 2, tmp_path, "yes")


def test_torch_distributed_group(ranks, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    ranks("torch_group", 2, tmp_path / "store")


def test_older_torch(ranks):
    pytest.importorskip("torch", reason="torch is not installed")
    ranks("older_torch", 1)
