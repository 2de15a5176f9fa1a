"""The lint at the first build: errors stop it, warnings go to the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from draftfuse.carried_state import carried_state
from draftfuse.dispatch import DECODE, Descriptor
from draftfuse.errors import UnsafeLoopError
from draftfuse.groups import is_parallel
from draftfuse.lint import of_graph
from draftfuse.meeting import Ranks
from draftfuse.passes.findings import ERROR, Finding, key_of, merged
from draftfuse.probe import fill_live, probe, probe_prefill, with_fusion
from draftfuse.python_state import other_tensors
from draftfuse.state import Saved, fill_dummy, persistent_tensors
from draftfuse.trace import Trace

BUILDERS = ("slot_mapping", "refresh")  # phases that run in Python, between the steps of a split loop


def raise_errors(findings: list[Finding]) -> None:
    """Raise :class:`UnsafeLoopError` for the first error, naming the others."""
    errors = [f for f in findings if f.is_error]
    if not errors:
        return
    first = errors[0]
    others = "".join(f"\n  also {f}" for f in errors[1:6])
    error = UnsafeLoopError(
        "the draft loop cannot be captured safely",
        f"[{first.name}] {first.text}",
        "none",
        first.todo,
        first.source,
        others,
    )
    error.finding, error.name = first, first.name
    error.in_builder = all(f.phase in BUILDERS for f in errors)
    raise error


@dataclass
class Inspector:
    """The lint of one compiled loop: :meth:`before` anything is traced, :meth:`after` each trace."""

    spec: Any
    findings: list[Any]
    probed: int = 0  # draft tokens of the longest loop whose decode steps were run
    prefilled: bool = False  # whether draft prefill was run
    ranks: Ranks = field(default_factory=Ranks)
    written: dict[int, Tensor] = field(default_factory=dict)  # tensors that the loop writes, of those copied on demand
    keep: Callable[[Iterable[Tensor]], None] = lambda tensors: None  # copies them, before anything else writes them
    # Of a probe that waits for a trace: collectives run only once all ranks agree on them.
    _pending: Callable[[], None] | None = None
    _split: int = 0  # draft tokens of the longest loop that was run for split

    def before(self, descriptor: Descriptor) -> None:
        """Run what the descriptor stands for once, eagerly, on dead rows, unless that was done."""
        self._pending = lambda: self._probe(descriptor)
        self._probe_if_alone()

    def before_split(self, descriptor: Descriptor) -> None:
        """The same for a loop whose metadata Python builds at every step: what builders change is theirs."""
        if descriptor.num_steps > max(1, self._split):
            self._pending = lambda: self._probe_split(descriptor.num_reqs, descriptor.num_steps)
            self._probe_if_alone()

    def _probe_if_alone(self) -> None:
        if self._pending is not None and not is_parallel():
            self._run_pending()

    def _run_pending(self) -> None:
        assert self._pending is not None
        run, self._pending = self._pending, None
        run()

    def _probe(self, descriptor: Descriptor) -> None:
        rows, k, query_len = descriptor.num_reqs, descriptor.num_steps, descriptor.query_len
        if descriptor.kind != DECODE and not self.prefilled:
            self._look(rows, query_len, lambda live: probe_prefill(self.spec, rows, query_len, live=live))
            self.prefilled = True
        if k > max(1, self.probed):
            self._look(rows, 1, lambda live: probe(self.spec, rows, k, live=live))
            self.probed = k  # a loop that was refused, or interrupted, is probed again at the next build

    def _probe_split(self, rows: int, k: int) -> None:
        def look(live: bool) -> list[Finding]:
            found = [f for f in probe(self.spec, rows, k, live=live) if f.phase not in BUILDERS]
            return found + carried_state(self.spec, rows, k)

        self._look(rows, 1, look)
        self._split = k

    def _look(self, rows: int, query_len: int, look: Callable[[bool], list[Finding]]) -> None:
        kept = Saved(persistent_tensors(self.spec))
        others = [(tensor, tensor._version) for tensor in other_tensors(self.spec)]
        fill_dummy(self.spec, rows, query_len)
        try:
            self.finish(look(False))
        except UnsafeLoopError as error:
            pages = [group.page_size for group in self.spec.attn_groups]  # further ones may be nobody's
            if error.name == "failure" and query_len <= min(pages, default=query_len) and not is_parallel():
                fill_live(self.spec, rows, query_len)
                look(True)  # raises where padded rows are not to blame
            raise
        finally:
            kept.restore()
            written = {id(tensor): tensor for tensor, version in others if tensor._version != version}
            self.written |= written
            self.keep(written.values())

    def after(self, traced: Trace) -> None:
        """Look at a traced graph, and compare its collectives with those of other ranks."""
        with self.ranks.comparing(traced):
            self.finish(of_graph(self.spec, traced))
        if self._pending is not None:
            self._run_pending()
        self.findings[:] = [with_fusion(f, traced.baked) for f in self.findings]

    def finish(self, findings: list[Finding]) -> None:
        """Record what was found, and raise for errors."""
        found = merged(findings)
        known = {key_of(f): f.severity for f in self.findings}
        new = [f for f in found if known.get(key_of(f)) not in (f.severity, ERROR)]
        replaced = {key_of(f) for f in new}
        self.findings[:] = [*(f for f in self.findings if key_of(f) not in replaced), *new]
        raise_errors(found)
