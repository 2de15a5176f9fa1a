"""What the eager loop calls at each draft step, and whether its steps are one program.

The Python of a loop sees the number of the step, so it may do something else in a step that nobody traced. This runs
all of them, on whatever rows the inputs hold, and compares step by step: the user's bytecode that ran, and the
operators with their numbers and tensors.
"""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from draftfuse.passes import ir

Entry = tuple[Any, ...]
LIBRARY = sysconfig.get_paths()["stdlib"] + "/"


class Path:
    """The user's bytecode that runs inside a ``with`` block, without that of draftfuse, torch and Python itself."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self._codes: list[Any] = []  # alive, so that ids stay unique
        self._before: Any = None
        self._collects = True

    def __enter__(self) -> Path:
        self._before, self._collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # finalizers and callbacks of a collection would run anywhere
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)
        if self._collects:
            gc.enable()

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        if ir.is_own_file(code.co_filename) or code.co_filename.startswith(("<", LIBRARY)):
            return None
        self._codes.append(code)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: Any, event: str, argument: Any) -> Any:
        self.places.append((id(frame.f_code), frame.f_lasti))
        return self._opcode


class StepLog(TorchDispatchMode):
    """Operators in order; :meth:`tap` marks where a step, and its part up to the drafted tokens, ends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.made: Any = WeakIdKeyDictionary()
        self.path = Path()
        self.ends: dict[int, tuple[int, int]] = {}  # after the last tap of a step: operators, bytecodes
        self.tokens: dict[int, tuple[int, int]] = {}
        self.drawn: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        describe = _constant if func is torch.ops.aten.lift_fresh.default else self._describe
        described = tuple(map(describe, leaves))
        result = func(*args, **(kwargs or {}))
        for slot, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor) and leaf not in self.made and not any(leaf is a for a in leaves):
                self.made[leaf] = (len(self.entries), slot)
        self.entries.append((func, structure, described))
        return result

    def _describe(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf in self.made:
            return _Made(*self.made[leaf])
        return ("memory", leaf.data_ptr(), tuple(leaf.shape), leaf.stride(), leaf.dtype)

    def tap(self, name: str, step: int, value: Tensor) -> None:
        """The tap that the loop calls with each value."""
        here = len(self.entries), len(self.path.places)
        if name == "tokens":
            self.tokens[step], self.drawn[step] = here, self._describe(value)
        self.ends[step] = here


def _constant(leaf: Any) -> Any:
    """A tensor that Python just made of numbers: its value, for it is at another address each time."""
    return ("constant", repr(leaf.tolist())) if isinstance(leaf, Tensor) and leaf.numel() <= 64 else leaf


class _Made(tuple[int, int]):
    """A tensor that operator number ``[0]`` of the log returned."""

    def __new__(cls, index: int, slot: int) -> _Made:
        return super().__new__(cls, (index, slot))


def operators_of(run: Callable[[], None]) -> int:
    """How many operators a run calls."""
    with StepLog() as log:
        run()
    return len(log.entries)


def repeats(run: Callable[[], None]) -> bool:
    """Whether two runs, one after the other, call the same operators with the same numbers on the same memory."""
    logs = []
    for _ in range(2):
        log = StepLog()
        with log:
            run()
        logs.append(log.entries)
    return logs[0] == logs[1]


def difference(run: Callable[[Callable[[str, int, Tensor], None]], None], k: int) -> str | None:
    """Run the loop and compare its steps with steps 2 and 3.

    Args:
        run: runs the eager loop of ``k`` draft tokens with the tap that it is given.

    Returns:
        What differs; None where steps 2..k-2, and step k-1 up to its tokens, are one program.
    """
    log = StepLog()
    with log, log.path:
        run(log.tap)
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
        if not (len(self.entries) == len(first.entries) == len(second.entries)):
            return False
        if self.path != second.path or self.path != first.path:
            return False
        rows = zip(self.entries, first.entries, second.entries, strict=True)
        mine, a, b = (s.log.drawn[s.step] for s in (self, first, second))
        return all(self._follows(*row, second) for row in rows) and self._leaf_follows(mine, a, b, second)

    def _follows(self, mine: Entry, a: Entry, b: Entry, second: _Step) -> bool:
        if not (mine[:2] == a[:2] == b[:2]):
            return False
        return all(self._leaf_follows(m, x, y, second) for m, x, y in zip(mine[2], a[2], b[2], strict=True))

    def _leaf_follows(self, mine: Any, a: Any, b: Any, second: _Step) -> bool:
        if isinstance(mine, _Made) and isinstance(b, _Made):
            return self._place(mine) == second._place(b)
        if type(mine) is not type(b) or type(a) is not type(b):
            return False
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
