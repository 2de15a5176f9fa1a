"""Python state that one draft step leaves to the next: a loop that runs split must not compute with it.

Each step of a split loop is traced by itself, from the state in front of the loop. A whole loop is one trace, where a
counter counts on from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftfuse import loop, python_changes, python_state
from draftfuse.journal import all_kept
from draftfuse.numbering import Numbering, Table
from draftfuse.passes.findings import ERROR, Finding

Before = Callable[[int], None]  # called with the number of a step, between its metadata and its forward
After = Callable[[], None]


def carried_state(spec: Any, rows: int, k: int) -> list[Finding]:
    """Errors for state that draft steps change and later steps of one loop compute with; all is put back."""
    before = python_state.of_speculator(spec)
    with torch.no_grad(), all_kept(before):
        changes = _changes(spec, rows, k)
        before.restore()
        moves = any(change.kind == "iterator" for change in changes)  # nothing puts an iterator back
        if not changes or (not moves and _is_independent(spec, rows, k, before)):
            return []
        return [*map(_finding, changes)]


def _changes(spec: Any, rows: int, k: int) -> list[python_changes.Change]:
    """What differs in front of a step's forward from what was in front of the first one's."""
    states: list[python_state.State] = []
    found: dict[str, python_changes.Change] = {}

    def look(step: int) -> None:
        states.append(python_state.of_speculator(spec))
        for change in python_changes.diff(states[0], states[-1]):
            if not change.is_builders:
                found.setdefault(change.path, change)

    _run(spec, rows, k, look, lambda: None)
    return list(found.values())


def _is_independent(spec: Any, rows: int, k: int, before: python_state.State) -> bool:
    """Whether every step computes the same from the state that was in front of the first one."""
    table: Table = {}
    whole, apart = Numbering(table), Numbering(table)
    with whole:
        _run(spec, rows, k, lambda step: None, lambda: None)
    before.restore()
    first: list[python_state.State] = []
    here: list[python_state.State] = []

    def go_back(step: int) -> None:
        here.append(python_state.of_speculator(spec))
        first.append(here[-1])
        first[0].restore()

    with apart:
        _run(spec, rows, k, go_back, lambda: here[-1].restore())  # builders go on from what they left
    tensors = before.tensors.values()
    return whole.taps == apart.taps and whole.left(tensors) == apart.left(tensors)


def _run(spec: Any, rows: int, k: int, before: Before, after: After) -> None:
    """The eager loop of decode steps, with a call around the forward, sample and advance of each."""
    loop.run_hook(spec, "on_multi_step_decode_begin")
    inputs = spec.inputs.view(rows, rows)
    held: dict[int, Any] = {}
    for step in range(1, k):
        metadata = loop.build_metadata(spec, inputs, step, held)
        before(step)
        tokens = loop.run_step(spec, inputs, metadata, step, step == k - 1, loop.graph_tap)
        inputs.draft_tokens[:, step].copy_(tokens)
        after()
    loop.run_hook(spec, "on_multi_step_decode_end")


def _finding(change: python_changes.Change) -> Finding:
    text = f"a draft step changes Python state that a later one computes with ({change}): split steps are traced apart"
    todo = "Compute it from the step that sample and advance are given, or keep it in a tensor."
    return Finding(ERROR, "side-effect", text, todo, change.source, phase="forward")
