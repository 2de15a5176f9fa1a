"""What becomes of a draft loop once it has changed Python state: a replay changes none, so nothing may compute with it.

Draft prefill and the decode steps are two parts that may leave state to each other, also where each alone repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

from draftfuse import python_state
from draftfuse.errors import DraftfuseError
from draftfuse.journal import all_kept
from draftfuse.passes.findings import Finding
from draftfuse.python_changes import Change
from draftfuse.step_log import logged

Run = Callable[[], None]
INDEPENDENT, COUNTED, USED = "independent", "counted", "used"


def kind_of(changes: Collection[Change], before: python_state.State, run: Run, other: Run | None) -> str:
    """What the loop does with what ``run`` changes; Python state and tensors are put back.

    Args:
        other: the other part of the loop, None where it has none that runs by itself.

    Returns:
        ``"counted"``: nothing reads it but what counts on; ``"used"``: the parts do something else after it, or read a
        count; ``"independent"``: it is read, and they do the same.
    """
    before.restore()
    if _runs_with_counts(changes, before, run, other):
        return COUNTED
    counts = [c for c in changes if _is_count(c)]
    if counts and not _runs_with_counts(counts, before, run, other):
        return USED  # at which number it does something else, no run shows
    return INDEPENDENT if _repeat(before, run, other) else USED


def _is_count(change: Change) -> bool:
    return change.kind == "value" and all(text.lstrip("-").isdigit() for text in (change.before, change.after))


def _runs_with_counts(changes: Iterable[Change], before: python_state.State, run: Run, other: Run | None) -> bool:
    """Whether both parts run where a :class:`Count` stands for what is changed."""
    try:
        with all_kept(before):
            for part in filter(None, (run, other)):
                for change in changes:
                    owner, name = before.owners.get(change.path, (None, ""))
                    if change.kind != "value" or owner is None or not name or not change.path.endswith(f".{name}"):
                        return False
                    setattr(owner, name, Count())
                part()
                before.restore()
    except Exception:  # whatever reading it leads to
        return False
    return True


def _repeat(before: python_state.State, run: Run, other: Run | None) -> bool:
    """Whether each part does the same before and after either of them."""
    with all_kept(before):
        fresh = None if other is None else logged(other)
        before.restore()
        first, second = logged(run), logged(run)
        if other is None:
            return first == second
        return first == second and fresh == logged(other) and first == logged(run)


def alone(part: Run, before: python_state.State) -> Run | None:
    """``part``, unless it does not run by itself: that is another finding's business."""
    try:
        with all_kept(before):
            part()
    except DraftfuseError:
        return None
    return part


def paths_of_counts(findings: Iterable[Finding]) -> set[str]:
    """What a trace may have read of the counts among ``findings``: nothing depends on them, so nothing guards them."""
    paths = [f.path for f in findings if f.is_counted]
    parts = [path.rpartition(".") for path in paths]
    return {*paths, *(f"{name!r} in {owner}.__dict__" for owner, _, name in parts)}


def _refuse(*args: Any) -> NoReturn:
    raise TypeError("a count that the loop keeps is used")


class Count:
    """Stands for a number that may be counted on, and asked nothing."""

    def __add__(self, other: Any) -> Count:
        return self if type(other) in (int, float, Count) else _refuse()

    __radd__ = __sub__ = __add__
    __eq__ = __ne__ = __bool__ = __str__ = __repr__ = __format__ = _refuse
    __hash__ = None  # type: ignore[assignment]
