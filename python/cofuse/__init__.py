# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Cofuse: operators in which communication and computation are one thing.

    world = cofuse.init()                       # this process's membership of a job
    o, lse = cofuse.attention(q, k, v, team=world.team, mask="causal")
    hidden, residual = cofuse.allreduce_rmsnorm(x, residual, weight, team=world.team)

Tensors are torch or NumPy, or of any library with DLPack. In attention every rank passes its rows
of the sequence (`Layout`). Errors are exceptions derived from `Error`.
"""

from ._cofuse import (
    AllreduceRmsnormPlan,
    Arena,
    AttentionPlan,
    Busy,
    Error,
    Event,
    GradReturnPlan,
    InternalError,
    InvalidArgument,
    Mismatch,
    OutOfMemory,
    PeerDead,
    Poisoned,
    Stream,
    SystemFailure,
    Team,
    Timeout,
    TrimulPlan,
    Unsupported,
    World,
    __version__,
    allreduce_rmsnorm_workspace,
    attention_workspace,
    grad_return_workspace,
    trimul_block,
    trimul_import_rows,
    trimul_workspace,
)
from ._functional import (
    allreduce_rmsnorm,
    attention,
    attention_backward,
    forget_plans,
    grad_return,
)
from ._init import init
from ._layout import Layout

__all__ = [
    "AllreduceRmsnormPlan",
    "Arena",
    "AttentionPlan",
    "Busy",
    "Error",
    "Event",
    "GradReturnPlan",
    "InternalError",
    "InvalidArgument",
    "Layout",
    "Mismatch",
    "OutOfMemory",
    "PeerDead",
    "Poisoned",
    "Stream",
    "SystemFailure",
    "Team",
    "Timeout",
    "TrimulPlan",
    "Unsupported",
    "World",
    "__version__",
    "allreduce_rmsnorm",
    "allreduce_rmsnorm_workspace",
    "attention",
    "attention_backward",
    "attention_workspace",
    "forget_plans",
    "grad_return",
    "grad_return_workspace",
    "init",
    "trimul_block",
    "trimul_import_rows",
    "trimul_workspace",
]
