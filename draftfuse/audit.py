"""Run the fused loop beside the eager one that rebuilds everything, and name the first value that differs.

Values inside the loop come from a tapped build of the same IR, fed with the tokens that the eager loop drew, so that a
near-tie of two logits does not read as a divergence. The shipped code is compared by what it leaves behind. Padded
rows, buffer tails and outputs are poisoned first; then all is done again with changed inputs, so that a frozen value
shows. Afterwards inputs, KV slots and Python state are as they were. What is poisoned, and how, is the same on every
device; :mod:`draftfuse.padding` says what a loop may assume of padded rows.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from draftfuse import batches, loop, padding, poison, python_state, validate
from draftfuse.audit_report import AuditReport, Divergence
from draftfuse.compare import Rows, differences
from draftfuse.dispatch import DECODE, Descriptor
from draftfuse.errors import UnsafeLoopError, UnstableMetadataError, UntraceableLoopError
from draftfuse.journal import Journal
from draftfuse.speculator import DraftBatch
from draftfuse.state import Saved, pad, persistent_tensors, tensors_at_risk
from draftfuse.tapped import Recording, Tapped, Values
from draftfuse.variables import refuse_disabled


def audit(fused: Any, batch: DraftBatch, k: int | None = None) -> AuditReport:
    """Compare ``fused`` with the eager loop on ``batch``; see :meth:`draftfuse.FusedDraft.audit`."""
    from draftfuse.compiler import compile

    refuse_disabled("an audit")
    k = validate.check_k(fused.ladder.max_k if k is None else k, fused.ladder.max_k)
    batches.check_batch(fused.spec, batch)
    start = time.perf_counter()
    spec, report = fused.spec, AuditReport()
    saved = Saved(tensors_at_risk(spec))
    state = python_state.of_speculator(spec)
    prefill = Journal(check_indices=False)
    try:
        with torch.no_grad():
            with prefill:
                compile(spec, mode="eager", request_capacities=[spec.max_num_reqs]).propose(batch, k=1)
            if k > 1 and batch.num_reqs > 0:
                _Audit(fused, batch.num_reqs, k, report).run()
            else:
                report.notes.append("nothing was compared: no decode step (one draft token, or no request)")
    finally:
        prefill.restore()
        saved.restore()
        state.restore()
    report.seconds = time.perf_counter() - start
    return report


def rebuild_loop(spec: Any, rows: int, k: int, tap: loop.Tap) -> None:
    """Draft steps 1..k-1 with every metadata object built anew, also where the builder offers ``refresh``."""
    inputs = spec.inputs.view(rows, rows)
    tokens: list[Tensor] = []
    for step in range(1, k):
        metadata = loop.build_metadata(spec, inputs, step, {}, tap)
        tokens.append(loop.run_step(spec, inputs, metadata, step, step == k - 1, tap))
    loop.store_tokens(inputs, tokens, k)


class _Audit:
    """The rounds of one audit at one capacity."""

    def __init__(self, fused: Any, num_reqs: int, k: int, report: AuditReport) -> None:
        self.fused, self.spec, self.k, self.report = fused, fused.spec, k, report
        self.num_reqs, self.capacity = num_reqs, fused.ladder.capacity_for(num_reqs)
        self.exact = fused.settings.compiler == "none" or fused.mode == "eager"
        self.runner = fused.runners.get(Descriptor(DECODE, self.capacity, self.capacity, k))
        self.forced = {s: torch.zeros(self.capacity, dtype=torch.int64, device=fused.device) for s in range(1, k)}
        self.tapped = self.build_tapped()

    def build_tapped(self) -> Tapped | None:
        """The tapped build; None, with a note, where the loop does not run fused."""
        if self.fused.mode in ("eager", "split") or self.runner.bare is None:
            reasons = "; ".join(f.reason for f in self.fused.report.fallbacks) or f"mode {self.fused.mode}"
            self.report.notes.append(f"values inside the loop were not compared: it does not run fused ({reasons})")
            return None
        kept = Saved(persistent_tensors(self.spec))
        try:
            return Tapped(self.fused, self.capacity, self.k, self.forced)
        except (UntraceableLoopError, UnsafeLoopError, UnstableMetadataError) as error:
            self.report.notes.append(f"values inside the loop were not compared: {error}")
            return None
        finally:
            kept.restore()

    def run(self) -> None:
        """The batch as it is, with other values, and with one row less."""
        pad(self.spec.inputs, self.num_reqs, self.capacity)
        first = Saved(persistent_tensors(self.spec))
        if not self.padding_holds():
            return
        for number, change in enumerate((poison.unchanged, poison.shifted, poison.one_row_less)):
            first.restore()
            live = change(self.spec.inputs, self.num_reqs)
            if live < 1:
                continue
            pad(self.spec.inputs, live, self.capacity)
            with padding.holding(padding.tables(self.spec, live), 0):
                poison.buffers(self.spec, live, self.capacity, self.k)
                self.round(number, live)
            self.report.rounds += 1

    def padding_holds(self) -> bool:
        """Whether the loop keeps to the contract of padded rows; what it does instead goes to the report."""
        live = min(self.num_reqs, self.capacity - 1)
        error = padding.check(self.spec, live, self.capacity)
        if error is not None:
            name = "block_table of padded rows"
            self.add(Divergence(0, 1, "padding", name, live, error.expected, error.came, error.source))
            self.report.notes.append(str(error))
        return error is None

    def round(self, number: int, live: int) -> None:
        """Eager, tapped and shipped from the same state."""
        # Not all that a run writes is journaled: an operator may write a buffer that it does not declare.
        begin = Saved(tensors_at_risk(self.spec))
        rows = Rows(live, self.capacity, self.exact)
        recording, journal = Recording(), Journal()
        with journal:
            rebuild_loop(self.spec, self.capacity, self.k, recording)
        expected = self.final(journal)
        for step, forced in self.forced.items():
            forced.copy_(recording.values["tokens", step])
        self.put_back(journal, begin)
        rounding = False
        if self.tapped is not None:
            got = self.tapped.run()
            self.put_back(journal, begin)
            rounding = self.compare_taps(number, recording.values, got, rows)
        poison.memory(self.fused.runners.workspace.chunks.values())
        self.runner.launch()
        self.compare_final(number, expected, self.final(journal), rows, rounding)
        self.put_back(journal, begin)

    def put_back(self, journal: Journal, begin: Saved) -> None:
        journal.restore()
        begin.restore()

    def final(self, journal: Journal) -> dict[str, Tensor]:
        """What a run leaves: persistent tensors that it wrote, and the KV slots."""
        reachable = python_state.of_speculator(self.spec, wide=False).tensors
        written = {
            key for key in journal.written if key not in {c.untyped_storage().data_ptr() for c, _, _ in journal.slots}
        }
        found = {p: t.clone() for p, t in reachable.items() if t.untyped_storage().data_ptr() in written}
        for index, (cache, slots, _) in enumerate(journal.slots):
            page = cache.shape[1]
            found[f"KV write {index}"] = cache[slots // page, slots % page]
        return found

    def compare_taps(self, number: int, expected: Values, got: Values, rows: Rows) -> bool:
        """Compare in the order of the loop; whether any float differs by rounding."""
        assert self.tapped is not None
        rounding = False
        for (name, step), value in expected.items():
            self.report.values += 1
            other = got.get((name, step))
            rounding = rounding or (other is not None and not torch.equal(value, other))
            for request, want, came in differences(value, other, rows):
                source = self.tapped.lines.get((name, step))
                self.add(Divergence(number, step, phase_of(name), name, request, want, came, source))
        return rounding

    def compare_final(
        self, number: int, expected: dict[str, Tensor], got: dict[str, Tensor], rows: Rows, rounding: bool
    ) -> None:
        """What the shipped code left. Rows whose tokens part after rounding are left out from there on."""
        tokens = "spec.inputs.draft_tokens"
        parted = (
            rounding and not rows.exact and not torch.equal(expected[tokens][: rows.live], got[tokens][: rows.live])
        )
        if parted:
            self.report.notes.append("tokens of the shipped code part from eager after rounding (a near-tie)")
            return
        for name, value in expected.items():
            self.report.values += 1
            for request, want, came in differences(value, got.get(name), rows):
                self.add(Divergence(number, self.k - 1, "final state", name, request, want, came, None))

    def add(self, divergence: Divergence) -> None:
        self.report.divergences.append(divergence)


def phase_of(name: str) -> str:
    """The loop phase that a tap's name belongs to."""
    if ".metadata." in name:
        return "refresh"
    if name.endswith(".slot_mapping"):
        return "slot_mapping"
    return {"hidden": "forward", "tokens": "sample"}.get(name, "advance")
