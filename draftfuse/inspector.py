"""The lint at the first build: errors stop it, warnings go to the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from draftfuse.carried_state import carried_state
from draftfuse.dispatch import Descriptor
from draftfuse.errors import UnsafeLoopError
from draftfuse.groups import is_parallel
from draftfuse.lint import of_graph, probe
from draftfuse.meeting import Ranks
from draftfuse.passes.findings import Finding, merged
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
        first.todo + others,
        first.source,
    )
    error.finding, error.in_builder = first, all(f.phase in BUILDERS for f in errors)
    raise error


@dataclass
class Inspector:
    """The lint of one compiled loop: :meth:`before` anything is traced, :meth:`after` each trace."""

    spec: Any
    findings: list[Any]
    probed: int = 0  # draft tokens of the longest loop that was run
    ranks: Ranks = field(default_factory=Ranks)
    # Of a probe that waits for a trace: collectives run only once all ranks agree on them.
    _pending: Callable[[], None] | None = None
    _split: int = 0  # draft tokens of the longest loop that was run for split

    def before(self, descriptor: Descriptor) -> None:
        """Run the decode loop once, eagerly, on the dead rows that the inputs hold."""
        if descriptor.num_steps > max(1, self.probed):
            self._pending = lambda: self._probe(descriptor.num_reqs, descriptor.num_steps)
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

    def _probe(self, rows: int, k: int) -> None:
        with self._on_dummies(rows):
            self.finish(probe(self.spec, rows, k))
        self.probed = k  # a loop that was refused, or interrupted, is probed again at the next build

    def _probe_split(self, rows: int, k: int) -> None:
        with self._on_dummies(rows):
            self.finish([f for f in probe(self.spec, rows, k) if f.phase not in BUILDERS])
            self.finish(carried_state(self.spec, rows, k))
        self._split = k

    @contextmanager
    def _on_dummies(self, rows: int) -> Iterator[None]:
        kept = Saved(persistent_tensors(self.spec))
        fill_dummy(self.spec, rows)
        try:
            yield
        finally:
            kept.restore()

    def after(self, traced: Trace) -> None:
        """Look at a traced graph, and compare its collectives with those of other ranks."""
        with self.ranks.comparing(traced):
            self.finish(of_graph(self.spec, traced))
        if self._pending is not None:
            self._run_pending()

    def finish(self, findings: list[Finding]) -> None:
        """Record what was found, and raise for errors."""
        found = merged(findings)
        self.findings += [f for f in found if f not in self.findings]
        raise_errors(found)
