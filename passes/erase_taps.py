"""Take out the markers that only name values."""

from __future__ import annotations

from typing import Any

from torch import fx

from draftfuse.errors import SourceLine
from draftfuse.passes import ir


def erase_taps(graph: fx.Graph) -> int:
    """Erase every tap, after noting its name on the value that it marks (``meta["taps"]``).

    A shipped graph must not keep a metadata field alive only because the audit would like to see it. The audit's own
    build leaves this pass out. Stands before the passes that count users.

    Before::

        draftfuse.tap.default(%low, "group0.metadata.start", 1)

    After::

        (nothing; %low.meta["taps"] == ["group0.metadata.start@1"])
    """
    erased = 0
    for node in list(graph.nodes):
        if ir.is_tap(node):
            marked, name, step = node.args
            assert isinstance(marked, fx.Node)
            marked.meta.setdefault("taps", []).append(f"{name}@{step}")
            graph.erase_node(node)
            erased += 1
    return erased


def tap_lines(graph: fx.Graph) -> dict[tuple[str, int], SourceLine | None]:
    """The user's line behind each tapped value: where it was computed, or last written."""
    writers: dict[int | None, Any] = {}
    lines: dict[tuple[str, int], SourceLine | None] = {}
    for node in graph.nodes:
        if ir.is_tap(node):
            value, name, step = node.args
            lines[name, step] = ir.source_line(writers.get(ir.storage(value), value))
        for target in ir.written(node):
            writers[ir.storage(target)] = node
    return lines
