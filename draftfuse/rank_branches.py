"""Branches on the rank, found while the loop runs in Python: the rank it is given notes where its truth is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from draftfuse.errors import SourceLine
from draftfuse.passes import ir

_COMPARED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_COMPUTED = ("__add__", "__sub__", "__mul__", "__floordiv__", "__mod__", "__and__", "__or__", "__xor__", "__rshift__")
_REFLECTED = ("__radd__", "__rsub__", "__rmul__", "__rfloordiv__", "__rmod__")


class WatchedRank(int):
    """A rank, or a number made of one. Used as a number it is one; where Python branches on it, that line is noted."""

    branches: list[SourceLine]

    @classmethod
    def of(cls, value: int, branches: list[SourceLine]) -> WatchedRank:
        """``value``, with the list that its branches go to."""
        made = cls(value)
        made.branches = branches
        return made

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        if not ir.is_own_file(frame.f_code.co_filename):
            self.branches.append(SourceLine.of(frame.f_code.co_filename, frame.f_lineno))
        return int(self) != 0

    __hash__ = int.__hash__


def _watched(name: str) -> Callable[[WatchedRank, Any], Any]:
    plain = getattr(int, name)

    def method(self: WatchedRank, other: Any) -> Any:
        found = plain(int(self), other)
        return found if found is NotImplemented else WatchedRank.of(int(found), self.branches)

    return method


for _name in (*_COMPARED, *_COMPUTED, *_REFLECTED):
    setattr(WatchedRank, _name, _watched(_name))


@contextmanager
def watched_ranks() -> Iterator[list[SourceLine]]:
    """Inside, ``get_rank()`` and ``group.rank()`` give watched ranks; yields the lines that branch on one."""
    branches: list[SourceLine] = []
    if not dist.is_available() or not dist.is_initialized():
        yield branches
        return
    plain, method, kept = dist.get_rank, dist.ProcessGroup.rank, vars(dist.ProcessGroup)["rank"]
    # A function that a module imported by name is another reference to it.
    holders = [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get("get_rank") is plain]

    def get_rank(group: Any = None) -> int:
        return WatchedRank.of(plain(group), branches)

    def rank(group: Any) -> int:
        return WatchedRank.of(method(group), branches)

    try:
        _set(holders, get_rank, rank)
        yield branches
    finally:
        _set(holders, plain, kept)


def _set(holders: list[Any], function: Any, method: Any) -> None:
    for module in holders:
        module.get_rank = function
    dist.ProcessGroup.rank = method  # type: ignore[method-assign]
