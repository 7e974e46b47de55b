# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which row of a sequence."""

from __future__ import annotations

from typing import Any, Union

from ._cofuse import _layout


class Layout:
    """Rows 0 .. n_rows-1 of a sequence over n_ranks ranks.

    kind: "zigzag" (rank r holds chunks r and 2P-1-r of 2P) or "contiguous" (chunk r of P).
    chunking: "balanced" (chunks differ by one row at most) or "padded" (equal chunks; rows past
    the end are padding). Both take the numbers of the C enums too.
    """

    __slots__ = ("n_rows", "n_ranks", "kind", "chunking")

    def __init__(
        self,
        n_rows: int,
        n_ranks: int,
        kind: Union[str, int] = "zigzag",
        chunking: Union[str, int] = "balanced",
    ) -> None:
        self.n_rows = n_rows
        self.n_ranks = n_ranks
        self.kind = kind
        self.chunking = chunking
        if self._get("chunks") < 1 or self._get("local_rows", 0) < 0:
            raise ValueError(
                f"layout of {n_rows} rows over {n_ranks} ranks: wanted 0 .. 2^56 rows over "
                "1 .. 2^20 ranks, kind 0 or 1, chunking 0 or 1"
            )

    def __repr__(self) -> str:
        return f"Layout({self.n_rows}, {self.n_ranks}, {self.kind!r}, {self.chunking!r})"

    def _get(self, what: str, a: int = 0, b: int = 0) -> int:
        return _layout(what, self.kind, self.chunking, self.n_ranks, self.n_rows, a, b)

    def _row(self, what: str, a: int, b: int = 0) -> int:
        number = self._get(what, a, b)
        if number < 0:
            raise IndexError(f"{what}: {a}, {b} is out of range of {self!r}")
        return number

    @property
    def n_chunks(self) -> int:
        """2P or P."""
        return self._get("chunks")

    def local_rows(self, rank: int) -> int:
        """Rows of the rank's tensors, padding included."""
        return self._row("local_rows", rank)

    def valid_rows(self, rank: int) -> int:
        """Rows of the rank that are no padding."""
        return self._row("valid_rows", rank)

    def global_row(self, rank: int, local_row: int) -> int:
        """Global row of a local one; -1 for padding. IndexError out of range."""
        if not 0 <= local_row < self.local_rows(rank):
            raise IndexError(f"local_row = {local_row}: wanted 0 .. {self.local_rows(rank) - 1}")
        return self._get("global_row", rank, local_row)

    def global_rows(self, rank: int) -> Any:
        """Global rows of all local ones: int64 NumPy array [local_rows], -1 for padding."""
        import numpy

        rows = numpy.full(self.local_rows(rank), -1, numpy.int64)
        for half in range(self._get("halves")):
            chunk = self._get("chunk", rank, half)
            start, n = self._get("chunk_start", chunk), self._get("chunk_rows", chunk)
            first = self._get("half_start", rank, half)
            rows[first : first + n] = numpy.arange(start, start + n)
        return rows

    def owner(self, global_row: int) -> int:
        """The rank that holds the row."""
        return self._row("owner", global_row)

    def local_row(self, global_row: int) -> int:
        """Where its owner holds the row."""
        return self._row("local_row", global_row)
