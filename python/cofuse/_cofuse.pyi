# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
from types import TracebackType
from typing import Any, Callable, Optional, Protocol, Sequence, Union, final

__version__: str

class Tensor(Protocol):
    """Anything with __dlpack__: a torch tensor, a NumPy array."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

Enum = Union[str, int]

class Error(Exception):
    status: int
    name: str

class InvalidArgument(Error, ValueError): ...
class Unsupported(Error, NotImplementedError): ...
class OutOfMemory(Error, MemoryError): ...
class Mismatch(Error): ...
class Timeout(Error, TimeoutError): ...
class Poisoned(Error): ...
class Busy(Error): ...
class PeerDead(Error): ...
class SystemFailure(Error): ...
class InternalError(Error): ...

@final
class World:
    def __new__(
        cls,
        *,
        rank: int = 0,
        size: int = 0,
        job: Optional[str] = None,
        engine: Optional[Enum] = None,
        n_threads: int = 0,
        init_timeout: float = 0.0,
        run_timeout: float = 0.0,
        allgather: Optional[Callable[[bytes], Sequence[bytes]]] = None,
    ) -> World: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def engine(self) -> str: ...
    @property
    def team(self) -> Team: ...
    @property
    def is_open(self) -> bool: ...
    def team_from_ranks(self, ranks: Sequence[int], tag: int = 0) -> Team: ...
    def close(self) -> None: ...
    def __enter__(self) -> World: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None: ...

@final
class Team:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def _plans(self) -> dict[Any, Any]: ...
    def split(self, inner: int) -> tuple[Team, Team]: ...
    def barrier(self) -> None: ...
    def allgather(self, data: bytes) -> list[bytes]: ...
    def query(self) -> None: ...
    def destroy(self) -> None: ...

@final
class Event: ...

@final
class Stream:
    def __new__(cls, world: World, n_threads: int = 0) -> Stream: ...
    @property
    def is_open(self) -> bool: ...
    def sync(self) -> None: ...
    def record(self) -> Event: ...
    def wait(self, event: Event) -> None: ...
    def destroy(self) -> None: ...

@final
class Arena:
    def __new__(cls, team: Team, n_bytes: int, n_words: int = 0) -> Arena: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    def alloc(self, n_bytes: int) -> int: ...
    def view(self) -> dict[str, Any]: ...
    def destroy(self) -> None: ...

@final
class AttentionPlan:
    def __new__(
        cls,
        team: Team,
        *,
        dtype: Any,
        n_batch: int,
        n_rows: int,
        n_heads: int,
        head_dim_qk: int,
        n_kv_heads: int = 0,
        head_dim_v: int = 0,
        format: Enum = "bshd",
        mask: Enum = "none",
        layout: Enum = "zigzag",
        chunking: Enum = "balanced",
        schedule: Enum = "default",
        scale: Optional[float] = None,
        forward_only: bool = False,
        wire_f32: bool = False,
        save_kv: bool = False,
        arena: Optional[Arena] = None,
    ) -> AttentionPlan: ...
    @property
    def describe(self) -> str: ...
    @property
    def is_open(self) -> bool: ...
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        saved_kv: Optional[Tensor] = None,
        stream: Optional[Stream] = None,
    ) -> None: ...
    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        dout: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        saved_kv: Optional[Tensor] = None,
        stream: Optional[Stream] = None,
    ) -> None: ...
    def destroy(self) -> None: ...

@final
class GradReturnPlan:
    def __new__(
        cls,
        team: Team,
        *,
        dtype: Any,
        n_batch: int,
        n_rows: int,
        n_heads: int,
        head_dim_k: int,
        head_dim_v: int = 0,
        layout: Enum = "zigzag",
        chunking: Enum = "balanced",
        transfer: Enum = "push",
        partial_f32: bool = False,
        wire_f32: bool = False,
        by_section: bool = False,
        arena: Optional[Arena] = None,
    ) -> GradReturnPlan: ...
    @property
    def describe(self) -> str: ...
    @property
    def is_open(self) -> bool: ...
    def run(
        self,
        dk: Tensor,
        dv: Tensor,
        dk_out: Optional[Tensor] = None,
        dv_out: Optional[Tensor] = None,
        writers: Optional[Enum] = None,
        writer_table: Optional[Sequence[int]] = None,
        stream: Optional[Stream] = None,
    ) -> None: ...
    def destroy(self) -> None: ...

def attention_workspace(team: Team, **params: Any) -> dict[str, int]: ...
def grad_return_workspace(team: Team, **params: Any) -> dict[str, int]: ...
def _layout(
    what: str, kind: Enum, chunking: Enum, n_ranks: int, n_rows: int, a: int = 0, b: int = 0
) -> int: ...
