"""What the eager loop calls at each draft step, and whether its steps are one program.

The Python of a loop sees the number of the step, so it may do something else in a step that nobody traced. This runs
all of them, on whatever rows the inputs hold, and compares step by step: the user's bytecode that ran, and the
operators with their numbers and tensors.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from draftfuse.attribute_reads import AttributeReads
from draftfuse.passes import ir
from draftfuse.path_log import NoPathLog, path_log

Entry = tuple[Any, list[Any]]  # an operator, and its arguments in words
LIBRARY = sysconfig.get_paths()["stdlib"] + "/"
INSTALLED = ("/site-packages/", "/dist-packages/")  # below the standard library on many machines; may be the user's


def is_watched(file: str) -> bool:
    """Whether code of ``file`` may be the user's: not draftfuse's, torch's or Python's own; ``<stdin>`` may."""
    in_python = file.startswith("<frozen") or (file.startswith(LIBRARY) and not any(i in file for i in INSTALLED))
    return not in_python and not ir.is_own_file(file)


class StepLog(TorchDispatchMode):
    """Operators in order; :meth:`tap` marks where a step, and its part up to the drafted tokens, ends."""

    def __init__(self, reads: AttributeReads | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = reads
        self.entries: list[Entry] = []
        self.made: Any = WeakIdKeyDictionary()
        self.path = path_log(is_watched)
        self.ends: dict[int, tuple[int, int]] = {}  # after the last tap of a step: operators, bytecodes
        self.tokens: dict[int, tuple[int, int]] = {}
        self.drawn: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        describe = _constant if func is torch.ops.aten.lift_fresh.default else self._describe
        described = [*map(describe, args), *((name, describe(value)) for name, value in kwargs.items())]
        result = func(*args, **kwargs)
        given = [item for arg in (*args, *kwargs.values()) for item in _items(arg)]
        for slot, item in enumerate(_items(result)):
            if isinstance(item, Tensor) and item not in self.made and not any(item is g for g in given):
                self.made[item] = (len(self.entries), slot)
        self.entries.append((func, described))
        return result

    def _describe(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            made = self.made.get(arg)
            return _memory(arg) if made is None else _Made(*made)
        return [*map(self._describe, arg)] if isinstance(arg, (list, tuple)) else arg

    def tap(self, name: str, step: int, value: Tensor) -> None:
        """The tap that the loop calls with each value."""
        here = len(self.entries), len(self.path.places)
        if name == "tokens":
            self.tokens[step], self.drawn[step] = here, self._describe(value)
        self.ends[step] = here
        if self.reads is not None:
            self.reads.ends[step] = len(self.reads.log)


def _items(arg: Any) -> Any:
    return arg if isinstance(arg, (list, tuple)) else (arg,)


def _memory(tensor: Tensor) -> str:
    """The place of a tensor that is older than the log."""
    return f"memory {tensor.data_ptr()} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"


def _constant(tensor: Tensor) -> str:
    """A tensor that Python just made of numbers: its value where it is small, for its address is another each time."""
    return f"constant {tensor.tolist()} {tensor.dtype}" if tensor.numel() <= 64 else f"constant {id(tensor)}"


class _Made(tuple[int, int]):
    """A tensor that operator number ``[0]`` of the log returned."""

    def __new__(cls, index: int, slot: int) -> _Made:
        return super().__new__(cls, (index, slot))


def operators_of(run: Callable[[], None]) -> int:
    """How many operators a run calls."""
    return len(logged(run))


def logged(run: Callable[[], None]) -> list[Entry]:
    """The operators of a run with their numbers and the memory that they read: equal for runs that do the same."""
    with StepLog() as log:
        run()
    entries: list[Entry] = log.entries
    return entries


def difference(
    run: Callable[[Callable[[str, int, Tensor], None]], None],
    k: int,
    reads: AttributeReads,
    codes: list[CodeType] | None = None,
) -> str | None:
    """Run the loop and compare its steps with steps 2 and 3.

    Args:
        run: runs the eager loop of ``k`` draft tokens with the tap that it is given.
        reads: takes the attributes that are read.
        codes: takes the user's code that ran.

    Returns:
        What differs; None where steps 2..k-2, and step k-1 up to its tokens, are one program.
    """
    log = StepLog(reads)
    try:
        with reads.noted(), log, log.path:
            run(log.tap)
    except NoPathLog as reason:
        return str(reason)
    if codes is not None:
        codes += log.path.watched
    if set(log.tokens) != set(range(1, k)):
        return f"tokens of steps {sorted(log.tokens)} of {k - 1}"
    for step in range(4, k):
        mine, first, second = (_Step(log, number, partly=step == k - 1) for number in (step, 2, 3))
        if not mine.follows(first, second):
            return f"step {step} does something else than steps 2 and 3"
    return None


class _Step:
    """One step of a log; ``partly`` up to its tokens only."""

    def __init__(self, log: StepLog, step: int, partly: bool) -> None:
        self.log, self.step = log, step
        self.begin, before = log.ends[step - 1]
        self.early = log.ends[step - 2][0] if step > 2 else 0
        end, stop = log.tokens[step] if partly else log.ends[step]
        self.entries, self.path = log.entries[self.begin : end], log.path.places[before:stop]

    def follows(self, first: _Step, second: _Step) -> bool:
        """Whether this is what ``first`` and ``second``, steps 2 and 3, lead to here."""
        if not self.path == first.path == second.path:
            return False
        mine, a, b = (s.log.drawn[s.step] for s in (self, first, second))
        drawn = self._follows(mine, a, b, second)
        return drawn and self._follows(self.entries, first.entries, second.entries, second)

    def _follows(self, mine: Any, a: Any, b: Any, second: _Step) -> bool:
        if isinstance(mine, _Made) and isinstance(b, _Made):
            return self._place(mine) == second._place(b)
        if not type(mine) is type(a) is type(b):
            return False
        if isinstance(mine, (list, tuple)):
            same_length = len(mine) == len(a) == len(b)
            return same_length and all(self._follows(*row, second) for row in zip(mine, a, b, strict=True))
        if isinstance(mine, int) and not isinstance(mine, bool):
            return bool(mine - b == (b - a) * (self.step - 3))
        if isinstance(mine, (float, complex)):
            return repr(mine) == repr(a) == repr(b)  # 0.0 is not -0.0
        return bool(mine == a == b)

    def _place(self, made: _Made) -> tuple[str, int, int]:
        """Where a tensor was made: in this step, in the one before, or further back."""
        index, slot = made
        if index >= self.begin:
            return "here", index - self.begin, slot
        return ("before", index - self.early, slot) if index >= self.early else ("far", index, slot)
