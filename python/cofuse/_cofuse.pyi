# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
from types import TracebackType
from typing import Any, Callable, Literal, Optional, Protocol, Sequence, Union, final

__version__: str

class Tensor(Protocol):
    """Anything with __dlpack__: a torch tensor, a NumPy array."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

class TorchStream(Protocol):
    """torch.cuda.Stream, or anything else with the handle of a CUDA stream."""

    @property
    def cuda_stream(self) -> int: ...

class CudaStream(Protocol):
    """A stream of cuda.core, CuPy and the like."""

    def __cuda_stream__(self) -> tuple[int, int]: ...

Enum = Union[str, int]
AnyStream = Union[Stream, TorchStream, CudaStream, Literal["now"], None]

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
        device: Union[int, str, None] = None,
        max_ctas: int = 0,
    ) -> World: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def engine(self) -> str: ...
    @property
    def device(self) -> Optional[int]: ...
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
    @property
    def cuda_stream(self) -> int: ...
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
        has_window: bool = False,
        window_left: int = 0,
        window_right: int = 0,
        only_compact: bool = False,
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
        stream: AnyStream = None,
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
        stream: AnyStream = None,
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
        max_ctas: int = 0,
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
        stream: AnyStream = None,
    ) -> None: ...
    def destroy(self) -> None: ...

@final
class AllreduceRmsnormPlan:
    def __new__(
        cls,
        team: Team,
        *,
        dtype: Any,
        hidden: int,
        max_tokens: int,
        variant: Enum = "residual_norm",
        eps: float = 0.0,
        weight_dtype: Any = None,
        weight_bias: int = 0,
        rounding: Enum = "match_unfused",
        algorithm: Enum = "auto",
        one_shot_bytes: int = 0,
        max_ctas: int = 0,
        arena: Optional[Arena] = None,
    ) -> AllreduceRmsnormPlan: ...
    @property
    def describe(self) -> str: ...
    @property
    def is_open(self) -> bool: ...
    def run(
        self,
        x: Tensor,
        residual: Optional[Tensor] = None,
        weight: Optional[Tensor] = None,
        residual_out: Optional[Tensor] = None,
        norm_out: Optional[Tensor] = None,
        x_source: Optional[int] = None,
        stream: AnyStream = None,
    ) -> None: ...
    def destroy(self) -> None: ...

@final
class TrimulPlan:
    def __new__(
        cls,
        team: Team,
        *,
        dtype: Any,
        n_rows: int,
        dim: int,
        hidden: int = 0,
        n_batch: int = 1,
        direction: Enum = "outgoing",
        grid_rows: int = 0,
        grid_cols: int = 0,
        shard: Enum = "balanced",
        row_offsets: Optional[Sequence[int]] = None,
        col_offsets: Optional[Sequence[int]] = None,
        eps_in: float = 0.0,
        eps_out: float = 0.0,
        norm_dtype: Any = None,
        mask_dtype: Any = None,
        save: Enum = "none",
        forward_only: bool = False,
        reduce_param_grads: bool = False,
        chunk_features: int = 0,
        max_ctas: int = 0,
        arena: Optional[Arena] = None,
    ) -> TrimulPlan: ...
    @property
    def describe(self) -> str: ...
    @property
    def is_open(self) -> bool: ...
    def set_weights(
        self, weights: dict[str, Tensor], check: bool = False, stream: AnyStream = None
    ) -> None: ...
    def forward(
        self,
        x: Tensor,
        out: Tensor,
        mask: Optional[Tensor] = None,
        residual: Optional[Tensor] = None,
        n: int = 0,
        saved: Optional[Tensor] = None,
        stream: AnyStream = None,
    ) -> None: ...
    def backward(
        self,
        x: Tensor,
        dout: Tensor,
        dx: Tensor,
        grads: Optional[dict[str, Tensor]] = None,
        mask: Optional[Tensor] = None,
        residual: Optional[Tensor] = None,
        n: int = 0,
        saved: Optional[Tensor] = None,
        stream: AnyStream = None,
    ) -> None: ...
    def destroy(self) -> None: ...

def allreduce_rmsnorm_workspace(team: Team, **params: Any) -> dict[str, int]: ...
def attention_workspace(team: Team, **params: Any) -> dict[str, int]: ...
def grad_return_workspace(team: Team, **params: Any) -> dict[str, int]: ...
def trimul_workspace(team: Team, **params: Any) -> dict[str, int]: ...
def trimul_block(
    n_ranks: int, rank: int, n: int, /, **params: Any
) -> tuple[int, int, int, int]: ...
def trimul_import_rows(
    src: Tensor, dst: Tensor, order: Enum = "stacked", swap_ab: bool = False
) -> None: ...
def _layout(
    what: str, kind: Enum, chunking: Enum, n_ranks: int, n_rows: int, a: int = 0, b: int = 0
) -> int: ...
