"""The passes: one literal tuple, one reason a line, and :func:`run`, which alone lints, times, diffs and dumps them."""

from __future__ import annotations

if not __name__.startswith("draftfuse."):
    raise ImportError("import draftfuse.passes, not passes: a second copy of its operators would shadow the first")

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import fx
from torch._logging._internal import trace_structured

from draftfuse.errors import InvalidOptionError
from draftfuse.passes.buffers_to_values import buffers_to_values
from draftfuse.passes.drop_dead_refresh import drop_dead_refresh
from draftfuse.passes.erase_taps import erase_taps
from draftfuse.passes.fuse_small_linears import Applies as Applies
from draftfuse.passes.fuse_small_linears import fuse_small_linears
from draftfuse.passes.fuse_small_linears import never as never
from draftfuse.passes.hoist_invariants import hoist_invariants
from draftfuse.passes.locals_to_values import locals_to_values
from draftfuse.passes.lower_metadata_refresh import Register, lower_metadata_refresh
from draftfuse.passes.refresh_ahead import refresh_ahead
from draftfuse.passes.render import render
from draftfuse.passes.switch import CHECK, is_on
from draftfuse.passes.verify import verify

Pass = Callable[[fx.Graph], int]
HiddenReads = Callable[[fx.Node], Collection[int] | None]


@dataclass(frozen=True)
class PassReport:
    """What one pass did."""

    name: str
    rewrites: int
    seconds: float
    nodes: int


def pipeline(
    *,
    register: Register,
    hidden_reads: HiddenReads,
    small: Applies = never,
    explicit: Pass | None = None,
    keep_taps: bool = False,
) -> tuple[Pass, ...]:
    """All passes in order.

    ``explicit`` is explicit_metadata with the graph's effects bound; ``small`` says which products have a kernel of
    draftfuse's own.
    """
    return (
        *(() if explicit is None else (explicit,)),  # from here an operator touches its arguments only
        *(() if keep_taps else (erase_taps,)),  # what only names a value must not keep it alive
        locals_to_values,  # before all others: they compare values, and a local is written piece by piece
        partial(buffers_to_values, hidden_reads=hidden_reads),  # from here a value has one name in all steps
        hoist_invariants,  # equal names, so equal work is visible
        drop_dead_refresh,  # what is merged or unread must not move ahead or get rows
        refresh_ahead,  # all that tokens do not decide, before step 1
        partial(lower_metadata_refresh, register=register),  # the regions that are left become operators
        partial(fuse_small_linears, applies=small),  # last: nothing after it reads the shapes that it looks for
    )


def name_of(one: Pass) -> str:
    """The name of a pass, bound settings or not."""
    return one.func.__name__ if isinstance(one, partial) else one.__name__


def run(
    graph: fx.Graph, passes: Sequence[Pass], *, disable: Collection[str] = (), dump: str | Path | None = None
) -> list[PassReport]:
    """Run ``passes`` in order on ``graph`` in place.

    Args:
        disable: names of passes to leave out.
        dump: a folder for ``00_traced.py``, ``01_<pass>.py``, ...; the same texts go to ``trace_structured``.

    Returns:
        One report a pass. Under ``DRAFTFUSE_CHECK=1`` the IR is verified after each.
    """
    check = is_on(CHECK)
    _write(graph, "00_traced", dump)
    reports = []
    for index, one in enumerate((p for p in passes if name_of(p) not in disable), start=1):
        start = time.perf_counter()
        rewrites = one(graph)
        seconds = time.perf_counter() - start
        graph.lint()
        if check:
            verify(graph, after=name_of(one))
        reports.append(PassReport(name_of(one), rewrites, seconds, len(graph.nodes)))
        _write(graph, f"{index:02d}_{name_of(one)}", dump)
    return reports


def _write(graph: fx.Graph, name: str, dump: str | Path | None) -> None:
    def payload() -> str:
        return render(graph)

    trace_structured("artifact", lambda: {"name": f"draftfuse_{name}", "encoding": "string"}, payload_fn=payload)
    if dump is not None:
        try:
            Path(dump).mkdir(parents=True, exist_ok=True)
            Path(dump, f"{name}.py").write_text(payload(), encoding="utf-8")
        except OSError as error:
            todo = "Pass another folder as dump, or make room there."
            raise InvalidOptionError("the dump cannot be written", error, "a folder to write into", todo) from error
