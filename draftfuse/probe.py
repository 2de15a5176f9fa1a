"""One eager run of a part of the loop: what it raises, and what it does in Python beside its operators.

The part is draft step 0 (:func:`probe_prefill`) or the decode steps (:func:`probe`). All is put back afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from draftfuse import loop, python_changes, python_state
from draftfuse.environment import device_lost
from draftfuse.environment_reads import watched_environment
from draftfuse.errors import DraftfuseError, OpArgumentError, SourceLine, UnsafeLoopError
from draftfuse.failures import PADDED, first_words, in_words, name_of, place_in_loop, placed
from draftfuse.groups import is_parallel
from draftfuse.hidden_reads import HiddenReads
from draftfuse.journal import Journal
from draftfuse.passes.capture_safety import UNBOUND, UNKNOWN
from draftfuse.passes.findings import ERROR, WARNING, Finding
from draftfuse.paths import plain
from draftfuse.rank_branches import watched_ranks
from draftfuse.side_effects import COUNTED, USED, Run, alone, kind_of
from draftfuse.state import fill_dummy
from draftfuse.step_log import operators_of
from draftfuse.untraceable import KEEP, user_line
from draftfuse.validate import source_of

PROBED_STEPS = 2
STAYS_FUSED = "; the loop runs fused all the same"
LOSES_FUSION = (
    "; the trace holds for the value before, so calls run split once a ragged prefill or a split step changes it"
)
_HOOKS = ("on_prefill_begin", "on_prefill_end", "on_multi_step_decode_begin", "on_multi_step_decode_end")


def fill_live(spec: Any, rows: int, query_len: int = 1) -> None:
    """Dummy rows that are live: a few tokens of context, as far as one page and the length limit allow."""
    fill_dummy(spec, rows, query_len)
    inputs = spec.inputs
    pages = [g.page_size for g in spec.attn_groups]
    length = max(query_len, min([spec.max_model_len - PROBED_STEPS - 1, *pages]) // 2)
    length, tokens = min(length, spec.max_model_len), rows * query_len
    inputs.positions[:tokens].copy_(torch.arange(length - query_len, length).clamp(min=0).repeat(rows))
    inputs.seq_lens[:rows].fill_(length)
    inputs.idx_mapping[:rows].copy_(torch.arange(rows))
    inputs.query_start_loc[: rows + 1].copy_(torch.arange(rows + 1) * query_len)
    inputs.last_token_indices[:rows].copy_(torch.arange(1, rows + 1) * query_len - 1)
    for tensor, size in ((inputs.hidden_states, tokens), (inputs.seeds, rows)):
        tensor[:size].copy_(torch.arange(1, tensor[:size].numel() + 1).view(tensor[:size].shape) % 7)


def probe(
    spec: Any,
    rows: int,
    k: int,
    reads: HiddenReads | None = None,
    syncs: list[SourceLine] | None = None,
    live: bool = False,
) -> list[Finding]:
    """Run the decode steps eagerly on the rows that the inputs hold; what Python state changed. All is put back.

    Args:
        reads: called with each opaque operator.
        syncs: takes the lines where the host read a value of the device.
        live: whether the rows are live ones, so that padding is not to blame for what fails.

    Raises:
        UnsafeLoopError: the loop fails or is of another kind, or an index leaves its table.
        OpArgumentError: an operator of draftfuse refuses what it is given.
    """
    parts = (lambda: loop.decode_loop(spec, rows, max(2, k))), (lambda: loop.prefill_loop(spec, rows, 1))
    return _observed(spec, parts, reads, syncs, live)


def probe_prefill(
    spec: Any,
    rows: int,
    query_len: int,
    reads: HiddenReads | None = None,
    syncs: list[SourceLine] | None = None,
    live: bool = False,
) -> list[Finding]:
    """The same of draft step 0, with ``query_len`` tokens a row."""
    k = min(PROBED_STEPS + 1, spec.num_speculative_tokens)
    parts = (lambda: loop.prefill_loop(spec, rows, query_len)), (lambda: loop.decode_loop(spec, rows, k))
    return _observed(spec, parts, reads, syncs, live)


def _observed(
    spec: Any,
    parts: tuple[Run, Run],
    reads: HiddenReads | None,
    syncs: list[SourceLine] | None,
    live: bool,
) -> list[Finding]:
    before = python_state.of_speculator(spec)
    hooked = _after_hooks(spec, before)
    journal = Journal(on_opaque=reads)
    try:
        watches = watched_environment(), watched_ranks()
        with watches[0] as variables, watches[1] as branches, journal, named_failures(live):
            parts[0]()
        after = python_state.of_speculator(spec)
        differing = [c for c in python_changes.diff(before, after) if c.path not in hooked]
        changes = [*map(of_change, differing)]
        if any(not c.is_error for c in changes):
            changes = [*_with_use(changes, differing, before, *(_named(part, live) for part in parts))]
        return [*map(of_branch, branches), *(of_variable(*v) for v in variables.items()), *changes]
    finally:
        journal.restore()
        before.restore()
        if syncs is not None:
            syncs += dict.fromkeys(journal.syncs)


def _named(run: Run, live: bool) -> Run:
    def named() -> None:
        with named_failures(live):
            run()

    return named


def _with_use(
    findings: list[Finding], changes: list[python_changes.Change], before: python_state.State, run: Run, other: Run
) -> Iterator[Finding]:
    """The findings of ``changes``, now that it is known what the loop does with what it changes."""
    used = kind_of(changes, before, run, None if is_parallel() else alone(other, before))
    for finding in findings:
        if used == USED:
            yield of_dependence(finding)
        else:
            yield replace(finding, is_counted=used == COUNTED and bool(finding.path))


@contextmanager
def named_failures(live: bool = False) -> Iterator[None]:
    """What a user's code raises on dummy rows, with the line that raises it."""
    try:
        yield
    except OpArgumentError as error:
        if (found := placed(error)) is error:
            raise
        raise found from error
    except (DraftfuseError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if (lost := device_lost(error)) is not None:
            raise lost from error
        raise _on_dummy_rows(error, live) from error


def _on_dummy_rows(error: Exception, live: bool) -> UnsafeLoopError:
    """The error for what a loop raised on dummy rows, or on any: an attribute that is not there, a None."""
    place = place_in_loop(error)
    where = f" at {name_of(*place[:2])}" if place is not None else ""
    came, source = first_words(error), user_line(error)
    if (words := in_words(error)) is not None:
        what, expected, todo = words
    elif live:
        what, expected, todo = "the loop fails", "a run without error", "Correct the statement."
    else:
        what, expected, todo = "the loop fails on dummy rows", "a run without error", PADDED
    made = UnsafeLoopError(f"{what}{where}", came, expected, todo, source)
    made.name = "failure"
    return made


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
    phase = "refresh" if change.is_builders else "forward"
    if change.kind == "tensor":
        text = f"the loop binds a tensor to {change}, where no replay would bind it again"
        todo = "Allocate the tensor once, and copy_ into it."
        return Finding(ERROR, "fresh-allocation", text, todo, change.source, phase=phase, needed=UNBOUND)
    if change.kind == "iterator":
        text = f"the loop moves the iterator at {change.path}, which nothing can put back"
        todo = "Index a list with the step that sample and advance are given, or with a count of your own."
        return Finding(ERROR, "side-effect", text, todo, change.source, phase="forward", needed=text)
    text = f"the loop changes Python state at {change}: a replay would not, and what was traced stays as it was"
    todo = "Count in a tensor, or in a lifecycle hook (on_multi_step_decode_end runs at every replay)."
    return Finding(WARNING, "side-effect", text, todo, change.source, phase=phase, path=change.path)


def of_dependence(change: Finding) -> Finding:
    """The finding of a change, where the loop does something else once Python state has changed."""
    if change.is_error:
        return change
    text = f"{change.text}; and the loop computes with what it changed"
    return replace(change, severity=ERROR, text=text, path="", needed="a replay would draft other tokens than the loop")


def with_fusion(finding: Finding, baked: Mapping[str, Any]) -> Finding:
    """A finding on Python state with what it means for fusion, once it is known what a trace took from Python."""
    if not finding.path or LOSES_FUSION in finding.text:
        return finding
    if finding.is_counted:
        return replace(finding, text=finding.text.removesuffix(STAYS_FUSED) + STAYS_FUSED)
    name = finding.path.removeprefix("<global ").removeprefix("<closure ").rstrip(">")
    whole_name = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    text = LOSES_FUSION if any(whole_name.search(plain(path)) for path in baked) else STAYS_FUSED
    return replace(finding, text=finding.text.removesuffix(STAYS_FUSED) + text)


def of_sync(source: SourceLine) -> Finding:
    """A value that Python took to the host, as a finding."""
    text = "the host reads a value of the device (bool, int, float or item)"
    return Finding(ERROR, "host-sync", text, KEEP, source, needed=UNKNOWN)


def of_branch(source: SourceLine) -> Finding:
    """A branch on the rank as a finding."""
    text = "Python decides by the rank of this process: each rank would capture a loop of its own"
    todo = "Let all ranks run the same statements; a number that depends on the rank (an offset, a shard) may differ."
    return Finding(ERROR, "rank-branch", text, todo, source, phase="forward")


def of_variable(source: SourceLine, name: str) -> Finding:
    """A read of an environment variable as a finding."""
    text = f"the loop reads the environment variable {name}: replays keep what it held when the loop was traced"
    return Finding(WARNING, "context-read", text, "Read it once, before the loop, into an attribute.", source)
