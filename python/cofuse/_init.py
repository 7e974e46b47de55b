# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Joining a world."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Union

from ._cofuse import World


def _gather_of(group: Any) -> tuple[int, int, Callable[[bytes], Sequence[bytes]]]:
    """Rank, size and an all-gather of bytes of a torch.distributed group."""
    import torch.distributed as dist

    size = dist.get_world_size(group)

    def allgather(data: bytes) -> list[bytes]:
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, data, group=group)
        return parts

    return dist.get_rank(group), size, allgather


def init(
    *,
    rank: Optional[int] = None,
    size: Optional[int] = None,
    job: Optional[str] = None,
    group: Any = None,
    allgather: Optional[Callable[[bytes], Sequence[bytes]]] = None,
    engine: Optional[str] = None,
    n_threads: int = 0,
    init_timeout: float = 0.0,
    run_timeout: float = 0.0,
    device: Union[int, str, None] = None,
    max_ctas: int = 0,
) -> World:
    """Joins a world. Collective over all ranks of the job, which are on one host.

    init()                         from the environment: cofuse launch, torchrun, mpirun, srun;
                                   a world of one without any of them
    init(rank=, size=, job=)       `job` is a text that is the same on all ranks and that no
                                   other world uses at the same time
    init(rank=, size=, allgather=) allgather(data: bytes) -> list of every rank's bytes, in rank
                                   order; called once, instead of a job's name
    init(group=)                   the ranks of a torch.distributed group, as
                                   torch.distributed.group.WORLD

    engine: "shm" (processes), "thread" (a world per thread of one process) or "cuda" (GPUs).
    n_threads: threads per stream. Timeouts in seconds; 0 means the default, a negative run_timeout
    none. With "cuda", device: number of the GPU in this process, or its UUID (None: COFUSE_DEVICE,
    else that of the current context, as torch.cuda.set_device makes it once CUDA is in use, else
    rank modulo their number); max_ctas: blocks that a kernel may use (0: the default).
    """
    if group is not None:
        if rank is not None or size is not None or job is not None or allgather is not None:
            raise TypeError("group: rank, size, job and allgather come from it")
        rank, size, allgather = _gather_of(group)
    elif (rank is None) != (size is None):
        raise TypeError("rank and size are given together")
    elif size is None and (job is not None or allgather is not None):
        raise TypeError("job and allgather: given with rank and size")
    elif size is not None and size < 1:
        raise ValueError(f"size = {size}: wanted 1 or more")
    return World(
        rank=rank or 0,
        size=size or 0,
        job=job,
        engine=engine,
        n_threads=n_threads,
        init_timeout=init_timeout,
        run_timeout=run_timeout,
        allgather=allgather,
        device=device,
        max_ctas=max_ctas,
    )
