"""What the eager loop calls at each draft step, and whether its steps are one program.

The Python of a loop sees the number of the step, so it may do something else in a step that nobody traced. This runs
all of them, on whatever rows the inputs hold, and compares operators, numbers and tensors step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

Entry = tuple[Any, ...]


class StepLog(TorchDispatchMode):
    """Operators in order; :meth:`tap` marks where a step, and its part up to the drafted tokens, ends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.made: Any = WeakIdKeyDictionary()
        self.ends: dict[int, int] = {}
        self.tokens: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        described = tuple(map(self._describe, leaves))
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
        if name == "tokens":
            self.tokens[step] = len(self.entries)
        self.ends[step] = len(self.entries)


class _Made(tuple[int, int]):
    """A tensor that operator number ``[0]`` of the log returned."""

    def __new__(cls, index: int, slot: int) -> _Made:
        return super().__new__(cls, (index, slot))


def difference(run: Callable[[Callable[[str, int, Tensor], None]], None], k: int) -> str | None:
    """Run the loop and compare its steps with steps 2 and 3.

    Args:
        run: runs the eager loop of ``k`` draft tokens with the tap that it is given.

    Returns:
        What differs; None where steps 2..k-2, and step k-1 up to its tokens, are one program.
    """
    log = StepLog()
    with log:
        run(log.tap)
    if set(log.tokens) != set(range(1, k)):
        return f"tokens of steps {sorted(log.tokens)} of {k - 1}"
    first, second = _Step(log, 2), _Step(log, 3)
    for step in range(4, k):
        if not _Step(log, step, step == k - 1).follows(first, second, step):
            return f"step {step} does something else than steps 2 and 3"
    return None


class _Step:
    """The entries of one step; ``partly`` up to its tokens only."""

    def __init__(self, log: StepLog, step: int, partly: bool = False) -> None:
        self.begin, self.before = log.ends[step - 1], log.ends[step - 2] if step > 2 else 0
        self.entries = log.entries[self.begin : log.tokens[step] if partly else log.ends[step]]

    def follows(self, first: _Step, second: _Step, step: int) -> bool:
        """Whether this is what ``first`` and ``second``, steps 2 and 3, lead to at ``step``."""
        if len(self.entries) > len(second.entries) or len(first.entries) != len(second.entries):
            return False
        rows = zip(self.entries, first.entries, second.entries, strict=False)
        return all(self._follows(mine, a, b, first, second, step) for mine, a, b in rows)

    def _follows(self, mine: Entry, a: Entry, b: Entry, first: _Step, second: _Step, step: int) -> bool:
        if not (mine[:2] == a[:2] == b[:2]):
            return False
        leaves = zip(mine[2], a[2], b[2], strict=True)
        return all(self._leaf_follows(m, x, y, first, second, step) for m, x, y in leaves)

    def _leaf_follows(self, mine: Any, a: Any, b: Any, first: _Step, second: _Step, step: int) -> bool:
        if isinstance(mine, _Made) and isinstance(b, _Made):
            return self._place(mine) == second._place(b)
        if type(mine) is not type(b) or type(a) is not type(b):
            return False
        if isinstance(mine, int) and not isinstance(mine, bool):
            return bool(mine - b == (b - a) * (step - 3))
        return bool(mine == a == b)

    def _place(self, made: _Made) -> tuple[str, int, int]:
        """Where a tensor was made: in this step, in the one before, or further back."""
        index, slot = made
        if index >= self.begin:
            return "here", index - self.begin, slot
        return ("before", index - self.before, slot) if index >= self.before else ("far", index, slot)
