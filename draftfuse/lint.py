"""The whole lint: what the graph shows, what Python does beside it, and whether tracing twice gives one graph.

:func:`lint` runs all of it, alone; :class:`draftfuse.inspector.Inspector` runs the cheap part at the first build.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftfuse import loop, python_changes, python_state, validate
from draftfuse.environment import device_lost
from draftfuse.environment_reads import watched_environment
from draftfuse.errors import (
    DraftfuseError,
    SourceLine,
    UnsafeLoopError,
    UnstableMetadataError,
    UntraceableLoopError,
)
from draftfuse.failures import ABSENT, PADDED, first_words, missing_attribute, name_of, place_in_loop
from draftfuse.groups import cuda_backend
from draftfuse.hidden_reads import HiddenReads
from draftfuse.journal import Journal
from draftfuse.passes import ir
from draftfuse.passes.capture_safety import Surroundings, capture_safety
from draftfuse.passes.collectives import collectives_of, group_of
from draftfuse.passes.findings import ERROR, WARNING, Finding, merged
from draftfuse.passes.render import canonical
from draftfuse.rank_branches import watched_ranks
from draftfuse.state import fill_dummy
from draftfuse.step_log import operators_of, repeats
from draftfuse.trace import Trace, trace, user_line
from draftfuse.validate import source_of

PROBED_STEPS = 2
_HOOKS = ("on_prefill_begin", "on_prefill_end", "on_multi_step_decode_begin", "on_multi_step_decode_end")


def lint(spec: Any, k: int | None = None, num_reqs: int = 2) -> list[Finding]:
    """Everything that is wrong, or doubtful, with the draft loop of ``spec``; errors first.

    Traces the loop twice and runs it once, eagerly, on dummy rows; inputs, KV slots and Python state are as before
    afterwards. Findings that a ``# draftfuse: allow[<class>] reason`` comment covers carry that reason.

    Raises:
        InvalidSpeculatorError: the object is no speculator.
    """
    validate.check_speculator(spec)
    k = min(k or spec.num_speculative_tokens, PROBED_STEPS + 1)
    rows = min(num_reqs, spec.max_num_reqs)
    journal, state = Journal(), python_state.of_speculator(spec)
    for tensor in [*spec.inputs.named_tensors().values(), *(g.slot_mapping for g in spec.attn_groups)]:
        journal.keep(tensor)
    try:
        with torch.no_grad():
            return merged(_everything(spec, rows, k))
    finally:
        state.restore()
        journal.restore()


def _everything(spec: Any, rows: int, k: int) -> Iterator[Finding]:
    fill_live(spec, rows)
    syncs: list[SourceLine] = []
    try:
        found = probe(spec, rows, k, reads := HiddenReads(spec), syncs)
        yield from found
        yield from reads.findings
        if k < 2:
            return
        fill_dummy(spec, rows)
        first = trace(loop.decode_loop, (spec, rows, k, loop.graph_tap))
        yield from of_graph(spec, first)
        yield from _unstable(spec, rows, k, canonical(first.graph))
    except (UntraceableLoopError, UnsafeLoopError, UnstableMetadataError) as error:
        yield (found_by := of_error(error))
        if found_by.name == "python-branch":  # Dynamo names the branch, and not where its condition came to the host
            yield from map(of_sync, syncs)


def fill_live(spec: Any, rows: int) -> None:
    """Dummy rows that are live: a few tokens of context, as far as one page and the length limit allow."""
    fill_dummy(spec, rows)
    inputs = spec.inputs
    pages = [g.page_size for g in spec.attn_groups]
    length = max(1, min([spec.max_model_len - PROBED_STEPS - 1, *pages]) // 2)
    inputs.positions[:rows].fill_(length - 1)
    inputs.seq_lens[:rows].fill_(length)
    inputs.idx_mapping[:rows].copy_(torch.arange(rows))
    inputs.query_start_loc[: rows + 1].copy_(torch.arange(rows + 1))
    for tensor in (inputs.hidden_states, inputs.seeds):
        tensor[:rows].copy_(torch.arange(1, tensor[:rows].numel() + 1).view(tensor[:rows].shape) % 7)


def probe(
    spec: Any, rows: int, k: int, reads: HiddenReads | None = None, syncs: list[SourceLine] | None = None
) -> list[Finding]:
    """Run the loop eagerly on the rows that the inputs hold; what Python state changed. All is put back.

    ``syncs`` takes the lines where the host read a value of the device.

    Raises:
        UnsafeLoopError: the loop is of another kind, or an index leaves its table.
    """
    before = python_state.of_speculator(spec)
    hooked = _after_hooks(spec, before)
    journal = Journal(on_opaque=reads)
    try:
        watches = watched_environment(), watched_ranks()
        with watches[0] as variables, watches[1] as branches, journal:
            _run(spec, rows, max(2, k))
        after = python_state.of_speculator(spec)
        changes = [of_change(c) for c in python_changes.diff(before, after) if c.path not in hooked]
        if any(not c.is_error for c in changes):
            before.restore()
            changes = changes if _repeats(spec, rows, k) else [*map(of_dependence, changes)]
        return [*map(of_branch, branches), *(of_variable(*v) for v in variables.items()), *changes]
    finally:
        journal.restore()
        before.restore()
        if syncs is not None:
            syncs += dict.fromkeys(journal.syncs)


def _run(spec: Any, rows: int, k: int) -> None:
    with named_failures():
        loop.decode_loop(spec, rows, k)


def _repeats(spec: Any, rows: int, k: int) -> bool:
    """Whether the loop does the same once more, now that the first run has changed Python state."""
    journal = Journal()
    try:
        with journal:
            return repeats(lambda: _run(spec, rows, max(2, k)))
    finally:
        journal.restore()


@contextmanager
def named_failures() -> Iterator[None]:
    """What a user's code raises on dummy rows, with the line that raises it."""
    try:
        yield
    except (DraftfuseError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if (lost := device_lost(error)) is not None:
            raise lost from error
        raise _on_dummy_rows(error) from error


def _on_dummy_rows(error: Exception) -> UnsafeLoopError:
    """The error for what a loop raised on dummy rows, or on any: an attribute that is not there."""
    place = place_in_loop(error)
    where = f" at {name_of(*place[:2])}" if place is not None else ""
    came, source = first_words(error), user_line(error)
    if (name := missing_attribute(error)) is not None:
        return UnsafeLoopError(f"{name} is missing{where}", came, "an attribute of that name", ABSENT, source)
    return UnsafeLoopError(f"the loop fails on dummy rows{where}", came, "a run without error", PADDED, source)


def _after_hooks(spec: Any, before: python_state.State) -> set[str]:
    """Paths that lifecycle hooks change: the runtime calls those at every replay, so nothing is lost."""
    hooks = [n for n in _HOOKS if hasattr(spec, n)]
    if not hooks:
        return set()
    for name in hooks:
        if operators_of(lambda n=name: loop.run_hook(spec, n)):  # type: ignore[misc]
            raise computing_hook(name, source_of(getattr(spec, name)))
    changed = {c.path for c in python_changes.diff(before, python_state.of_speculator(spec))}
    before.restore()
    return changed


def computing_hook(came: str, source: SourceLine | None) -> UnsafeLoopError:
    """The error for a lifecycle hook with operators: they would run inside a replay and, with the hook, around it."""
    todo = "Compute in forward or advance, or outside the loop."
    return UnsafeLoopError("a lifecycle hook computes with tensors", came, "Python state only", todo, source)


def of_change(change: python_changes.Change) -> Finding:
    """A change of Python state as a finding: losing a tensor is an error, losing a count is a warning."""
    phase = "refresh" if change.path.startswith("spec.attn_groups[") and ".builder" in change.path else "forward"
    if change.kind == "tensor":
        text = f"the loop binds a tensor to {change}, where no replay would bind it again"
        todo = "Allocate the tensor once, and copy_ into it."
        return Finding(ERROR, "fresh-allocation", text, todo, change.source, phase=phase)
    text = f"the loop changes Python state at {change}: a replay would not, and what was traced stays as it was"
    todo = "Count in a tensor, or in a lifecycle hook (on_multi_step_decode_end runs at every replay)."
    return Finding(WARNING, "side-effect", text, todo, change.source, phase=phase)


def of_dependence(change: Finding) -> Finding:
    """The finding of a change, where the loop does something else once Python state has changed."""
    if change.is_error:
        return change
    text = f"{change.text}; and the loop computes with what it changed"
    return replace(change, severity=ERROR, text=text)


def of_sync(source: SourceLine) -> Finding:
    """A value that Python took to the host, as a finding."""
    todo = "Keep the value in a tensor, and use torch.where instead of Python."
    return Finding(ERROR, "host-sync", "the host reads a value of the device (bool, int, float or item)", todo, source)


def of_branch(source: SourceLine) -> Finding:
    """A branch on the rank as a finding."""
    text = "Python decides by the rank of this process: each rank would capture a loop of its own"
    todo = "Let all ranks run the same statements; a number that depends on the rank (an offset, a shard) may differ."
    return Finding(ERROR, "rank-branch", text, todo, source, phase="forward")


def of_variable(source: SourceLine, name: str) -> Finding:
    """A read of an environment variable as a finding."""
    text = f"the loop reads the environment variable {name}: replays keep what it held when the loop was traced"
    return Finding(WARNING, "context-read", text, "Read it once, before the loop, into an attribute.", source)


def of_graph(spec: Any, traced: Trace) -> list[Finding]:
    """The findings of the graph rules."""
    return capture_safety(traced.graph, surroundings(spec, traced))


def surroundings(spec: Any, traced: Trace) -> Surroundings:
    """What stands behind the placeholders of ``traced``."""
    reachable = {_key(t) for t in python_state.of_speculator(spec, wide=False).tensors.values()}
    pools = {_key(t) for g in spec.attn_groups for pair in g.kv_caches.values() for t in pair}
    slots = {_key(g.slot_mapping) for g in spec.attn_groups}
    live = traced.tensors
    return Surroundings(
        owned={n for n, t in live.items() if _key(t) in reachable or _is_argument(traced, n)},
        constant={n for n, t in live.items() if isinstance(t, torch.nn.Parameter)},
        kv={n for n, t in live.items() if _key(t) in pools},
        slots={n for n, t in live.items() if _key(t) in slots},
        positions={n for n, t in live.items() if _key(t) == _key(spec.inputs.positions)},
        max_model_len=spec.max_model_len,
        front=traced.front,
        on_cuda=spec.inputs.positions.device.type == "cuda",
        backends={name: cuda_backend(name) for name in map(group_of, collectives_of(traced.graph))},
    )


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_argument(traced: Trace, name: str) -> bool:
    """Whether a tensor came in as metadata that a split step is given."""
    node = next(n for n in ir.placeholders(traced.graph) if n.name == name)
    return str(node.meta.get("source", "")).startswith("L['metadata']")


def _unstable(spec: Any, rows: int, k: int, first: str) -> Iterator[Finding]:
    """Trace again in the Python state that one eager run leaves behind."""
    before = python_state.of_speculator(spec)
    journal = Journal(check_indices=False)
    try:
        with journal:
            _run(spec, rows, k)
        second = canonical(trace(loop.decode_loop, (spec, rows, k, loop.graph_tap)).graph)
    finally:
        journal.restore()
        before.restore()
    if first != second:
        text = f"tracing again after one run gives another graph: {_difference(first, second)}"
        todo = "Keep nothing from one call to the next in Python: no memo, no flag for the first call."
        yield Finding(ERROR, "unstable-trace", text, todo)


def _difference(first: str, second: str) -> str:
    pairs = zip(first.splitlines(), second.splitlines(), strict=False)
    changed = [f"{a.strip()} became {b.strip()}" for a, b in pairs if a != b]
    return changed[0] if changed else "one is longer than the other"


def of_error(error: DraftfuseError) -> Finding:
    """An error of tracing or probing as a finding."""
    given = getattr(error, "finding", None)
    if isinstance(given, Finding):
        return given
    return Finding(
        ERROR, _name_of(error), f"{error.what}: got {error.came}, expected {error.expected}", error.todo, error.source
    )


def _name_of(error: DraftfuseError) -> str:
    text = f"{error.what} {error.came} {error.todo}"
    return next((name for part, name in _BY_TEXT.items() if part in text), "untraceable")


_BY_TEXT = {
    "compiles loops that draft one token": "loop-kind",
    "Data-dependent branching": "python-branch",
    "Could not guard on data-dependent": "python-branch",
    "ContextVar": "context-read",
    "tolist": "host-sync",
    "item()": "host-sync",
    "numpy": "host-sync",
    "Generator": "baked-rng",
    "andom": "baked-rng",
    "leaves its table": "short-table",
    "metadata changes its layout": "side-effect",
}
