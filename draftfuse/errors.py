"""Every error of draftfuse: one class each, one template, and the user's own line where the fault is theirs.

The template is: what is wrong, what came, what was expected, what to do. Internal invariants are ``assert``.
"""

from __future__ import annotations

import linecache
import re
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class SourceLine:
    """A place in a user's code: ``file:line: text``."""

    file: str
    line: int
    text: str = ""

    @classmethod
    def of(cls, file: str, line: int) -> SourceLine:
        """Read the source text of ``file:line`` through :mod:`linecache` (empty where the file cannot be read)."""
        return cls(file, line, linecache.getline(file, line).strip())

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" if self.text else f"{self.file}:{self.line}"


def without_addresses(text: str) -> str:
    """``text`` without the addresses in Python's default repr of an object: they say nothing, and change each time."""
    return re.sub(r" at 0x[0-9a-fA-F]+(?=>)", "", text)


class DraftfuseError(Exception):
    """Base of all errors that draftfuse raises on purpose."""

    def __init__(
        self, what: str, came: object, expected: object, todo: str, source: SourceLine | None = None, more: str = ""
    ) -> None:
        self.what, self.came, self.expected, self.todo, self.source = what, came, expected, todo, source
        at = f"\n  {source}" if source is not None else ""
        super().__init__(without_addresses(f"{what}: got {came}, expected {expected}. {todo}{at}{more}"))

    def as_dict(self) -> dict[str, Any]:
        """The parts of the message by name, as JSON takes them."""
        parts = {"what": self.what, "came": str(self.came), "expected": str(self.expected), "todo": self.todo}
        parts = {name: without_addresses(text) for name, text in parts.items()}
        return {"class": type(self).__name__, **parts, "source": None if self.source is None else asdict(self.source)}


class InvalidSpeculatorError(DraftfuseError):
    """The speculator lacks an attribute or method, or one has a wrong type, dtype or shape."""


class InvalidOptionError(DraftfuseError):
    """An argument of :func:`draftfuse.compile` (or of a method of its result) has no meaning."""


class InvalidBatchError(DraftfuseError):
    """A batch does not fit the speculator that it is given to."""


class UntraceableLoopError(DraftfuseError):
    """A statement of the draft loop cannot become part of a graph."""

    in_builder: bool = False  # the statement is inside a metadata builder, so the loop can still run split
    name: str = "untraceable"  # the class of findings that it belongs to


class FailedLoopError(DraftfuseError):
    """The user's code raised while a draft step ran in Python; the original is the ``__cause__``."""

    step: int | None = None  # the draft step
    phase: str = ""


class UnsafeLoopError(DraftfuseError):
    """The traced loop does something that a captured graph would freeze or lose."""

    in_builder: bool = False  # only metadata builders do it, so the loop can still run split
    finding: object = None  # the lint's finding behind it
    name: str = ""  # the class of findings that it belongs to


class UnstableMetadataError(DraftfuseError):
    """A metadata builder returns another type or other fields from one draft step to the next."""


class NotFusableError(DraftfuseError):
    """``mode="fused"`` was asked for, and a part of the loop can only run split."""


class EmissionError(DraftfuseError):
    """Generated code would clone a persistent buffer, write it late or read a stale version of it."""


class StaleAddressError(DraftfuseError):
    """A tensor that a captured graph holds has moved since capture."""


class RankMismatchError(DraftfuseError):
    """The ranks of a process group would run different collectives, so that their loops would never meet."""

    rank: int = -1  # the first one that differs
    step: int | None = None  # draft step of its first other collective


class LostRankError(DraftfuseError):
    """A rank is late or dead: a collective of the draft loop, or what ranks agree on before it, cannot be met."""

    ranks: tuple[int, ...] = ()
    step: int | None = None  # draft step of the collective that was waited for
    phase: str = ""


class ClosedError(DraftfuseError):
    """The compiled loop was closed, or has lost a rank."""


class DeviceLostError(DraftfuseError):
    """A CUDA error after which no kernel runs any more in this process; every further call is refused with it."""


class CaptureError(DraftfuseError):
    """A CUDA graph could not be captured; nothing half built is kept."""


class OutOfGraphMemoryError(CaptureError):
    """Device memory ran out while a graph was captured; nothing half built is kept, and the next call tries again."""


class ConcurrentUseError(DraftfuseError):
    """Two threads called the same compiled loop at once."""


class MissingExtraError(DraftfuseError):
    """An optional dependency is missing; the message names the extra that brings it."""


class OpArgumentError(DraftfuseError):
    """An operator of draftfuse was called with a tensor of a wrong dtype or shape."""

    step: int | None = None  # the draft step, where a loop calls it
    phase: str = ""


class UntestedVersionWarning(UserWarning):
    """A release of torch that draftfuse has not been tested with."""
