"""The object that :func:`draftfuse.compile` returns: builds, captured graphs, dispatch and the calls that use them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftfuse import loop, validate
from draftfuse.build import Settings, build_decode
from draftfuse.errors import (
    ClosedError,
    ConcurrentUseError,
    DraftfuseError,
    NotFusableError,
    UnstableMetadataError,
    UntraceableLoopError,
)
from draftfuse.graphs import Captured, capture
from draftfuse.lowering.emit import Bound, Emission
from draftfuse.lowering.workspace import Workspace
from draftfuse.report import Report
from draftfuse.speculator import DraftBatch
from draftfuse.split import SplitLoop
from draftfuse.state import Saved, fill_dummy, load_batch, pad_decode, persistent_tensors

Runner = Callable[[], None]


class FusedDraft:
    """A compiled draft loop. Made by :func:`draftfuse.compile`; see there for the options."""

    def __init__(
        self, spec: Any, capacities: list[int], mode: str, cudagraph: bool, pool: Any, settings: Settings, largest_k: int
    ) -> None:
        self.num_speculative_tokens = largest_k
        self.spec, self.capacities, self.mode, self.settings = spec, capacities, mode, settings
        self.device = spec.inputs.positions.device
        self.cudagraph = cudagraph and self.device.type == "cuda"
        self.report = Report(mode, settings.compiler, str(self.device))
        self._pool = pool
        self._workspace = Workspace()
        self._emissions: dict[tuple[int, int | None], Emission] = {}
        self._runners: dict[tuple[int, int], Runner] = {}
        self._kept: dict[tuple[int, int], Captured | Bound | SplitLoop] = {}
        self._lock = threading.Lock()
        self._closed = False

    def propose(self, batch: DraftBatch, k: int | None = None, copy: bool = False) -> Tensor:
        """Draft ``k`` tokens for each request of ``batch``.

        Args:
            batch: the verified tokens of this scheduler step; see :class:`DraftBatch`.
            k: how many, 0..K; K by default.
            copy: return a copy. Without it the result is a view of ``spec.inputs.draft_tokens``, the caller's until
                the next call on this object.

        Returns:
            int64[num_reqs, k].

        Raises:
            InvalidBatchError, InvalidOptionError: the batch or k does not fit; nothing was written.
        """
        k = self._check_k(k)
        validate.check_batch(self.spec, batch)
        with self._exclusive():
            if k > 0 and batch.num_reqs > 0:
                load_batch(self.spec, batch)
                query_len = batch.num_tokens - batch.num_reqs + 1
                loop.prefill(self.spec, batch.num_reqs, batch.num_tokens, query_len, batch.max_seq_len)
                self.report.counters["eager prefills"] += 1
                self._decode(batch.num_reqs, k)
            tokens = self.spec.inputs.draft_tokens[: batch.num_reqs, :k]
            return tokens.clone() if copy else tokens

    def decode(self, num_reqs: int, k: int | None = None) -> None:
        """Draft steps 1..k-1 on the persistent inputs: what an engine calls that prefills by itself.

        The caller has written rows 0..num_reqs-1 as draft step 1 reads them, token 0 included; rows behind them are
        made dead here. Writes ``draft_tokens[:num_reqs, 1:k]`` and leaves the inputs as the last step left them.
        """
        k = self._check_k(k)
        with self._exclusive():
            self._decode(num_reqs, k)

    def capture(self, ks: list[int] | None = None, progress: bool = True) -> None:
        """Build and capture ahead: every capacity, largest first, for each of ``ks`` (K by default)."""
        from draftfuse.progress import bar

        pairs = [(k, c) for k in ks or [self.num_speculative_tokens] for c in reversed(self.capacities)]
        with self._exclusive(), bar(pairs, "capture", progress) as items:
            for k, capacity in items:
                if self._check_k(k) > 1:
                    self._runner(k, capacity)

    def explain(self) -> str:
        """Which pass changed what, in how many places, what fell back and why."""
        return self.report.explain()

    def memory(self) -> dict[str, int]:
        """Bytes of persistent rows, of persistent inputs, and of each captured graph."""
        inputs = sum(t.numel() * t.element_size() for t in persistent_tensors(self.spec))
        sizes = {"rows": self._workspace.num_bytes, "inputs": inputs}
        graphs = {f"graph k={k} capacity={c}": g for (k, c), g in self._kept.items()}
        return sizes | {name: g.num_bytes for name, g in graphs.items() if isinstance(g, Captured)}

    def close(self) -> None:
        """Drop all graphs and code. Later calls raise :class:`ClosedError`."""
        self._closed = True
        self._drop()

    def recapture(self) -> None:
        """Forget graphs and builds: the next call makes them anew, at the addresses of that time."""
        with self._exclusive():
            self._drop()

    def _drop(self) -> None:
        self._runners.clear()
        self._kept.clear()
        self._emissions.clear()

    def _check_k(self, k: int | None) -> int:
        return validate.check_k(self.num_speculative_tokens if k is None else k, self.num_speculative_tokens)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._closed:
            todo = "Compile the speculator again."
            raise ClosedError("the compiled loop is closed", "a call after close()", "no further call", todo)
        if not self._lock.acquire(blocking=False):
            todo = "Use one compiled loop a thread, or a lock of your own."
            raise ConcurrentUseError("two threads use one compiled loop", "a second call", "one call at a time", todo)
        try:
            with torch.no_grad():
                yield
        finally:
            self._lock.release()

    def _decode(self, num_reqs: int, k: int) -> None:
        if k <= 1 or num_reqs < 1:
            return
        capacity = self.capacity_for(num_reqs)
        run = self._runner(k, capacity)
        pad_decode(self.spec.inputs, num_reqs, capacity)
        self.report.counters["padded rows"] += capacity - num_reqs
        self.report.counters[f"decode capacity {capacity}"] += 1
        run()

    def capacity_for(self, num_reqs: int) -> int:
        """The smallest request capacity that holds ``num_reqs`` rows.

        Raises:
            InvalidBatchError: no capacity is large enough.
        """
        for capacity in self.capacities:
            if num_reqs <= capacity:
                return capacity
        from draftfuse.errors import InvalidBatchError

        todo = "Split the batch, or compile with a larger request capacity."
        raise InvalidBatchError("no capacity holds the batch", num_reqs, f"at most {self.capacities[-1]} requests", todo)

    def _runner(self, k: int, capacity: int) -> Runner:
        """The callable for one (k, capacity), made on first use; the live inputs are kept while it is made."""
        key = (k, capacity)
        if key not in self._runners:
            saved = Saved(persistent_tensors(self.spec))
            try:
                fill_dummy(self.spec, capacity)
                self._runners[key] = self._make(k, capacity)
            finally:
                saved.restore()
        return self._runners[key]

    def _make(self, k: int, capacity: int) -> Runner:
        if self.mode == "eager":
            return self._eager(k, capacity)
        if self.mode == "split":
            return self._split(k, capacity)
        reason = self._host_planned()
        if reason is None:
            try:
                return self._fused(k, capacity)
            except (UntraceableLoopError, UnstableMetadataError) as error:
                if not getattr(error, "in_builder", isinstance(error, UnstableMetadataError)):
                    raise
                reason, cause = f"its build cannot be traced ({error.came})", error
                return self._fall_back(k, capacity, reason, cause)
        return self._fall_back(k, capacity, reason, None)

    def _fall_back(self, k: int, capacity: int, reason: str, cause: DraftfuseError | None) -> Runner:
        if self.mode == "fused":
            todo = "Offer refresh() made of registered operators, or use mode='auto'."
            raise NotFusableError("the loop cannot be fused", reason, "traceable metadata", todo) from cause
        self.report.fall_back("decode", "split", reason)
        return self._split(k, capacity)

    def _host_planned(self) -> str | None:
        for index, group in enumerate(self.spec.attn_groups):
            if getattr(group.builder, "refresh_kind", None) == "host-planned":
                return f"attn_groups[{index}] ({type(group.builder).__name__}) plans each step on the host"
        return None

    def _eager(self, k: int, capacity: int) -> Runner:
        def run() -> None:
            loop.decode_loop(self.spec, capacity, k)
            self.report.counters["eager steps"] += k - 1

        return run

    def _split(self, k: int, capacity: int) -> Runner:
        split = SplitLoop(self.spec, k, capacity, self.settings)
        self.report.builds += split.reports
        self._kept[k, capacity] = split
        if self.cudagraph:
            split.launch = [self._captured(bound, capacity).replay for bound in split.steps]
        counter = "graph replays" if self.cudagraph else "compiled calls"

        def run() -> None:
            split.run()
            self.report.counters[counter] += k - 1

        return run

    def _fused(self, k: int, capacity: int) -> Runner:
        bound = self._emission(k, capacity).bind(capacity, self._workspace)
        launch, counter = bound.run, "compiled calls"
        self._kept[k, capacity] = bound
        if self.cudagraph:
            captured = self._captured(bound, capacity)
            self._kept[k, capacity] = captured
            launch, counter = captured.replay, "graph replays"
        else:
            launch()  # the first call of generated code loads it

        def run() -> None:
            launch()
            self.report.counters[counter] += 1

        return run

    def _captured(self, bound: Bound, capacity: int) -> Captured:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return capture(bound.run, lambda: fill_dummy(self.spec, capacity), bound.tensors, self._pool)

    def _emission(self, k: int, capacity: int) -> Emission:
        """Code for ``capacity`` rows: symbolic above one row where its guards allow it, else for this capacity alone."""
        if capacity > 1:
            emission = self._build(k, None, hint=max(2, self.capacities[-1] - 1))
            if emission.guards_hold(capacity):
                return emission
        return self._build(k, capacity, hint=capacity)

    def _build(self, k: int, num_reqs: int | None, hint: int) -> Emission:
        key = (k, num_reqs)
        if key not in self._emissions:
            emission, report = build_decode(self.spec, k, hint, num_reqs is None, self.settings)
            self._emissions[key] = emission
            self.report.builds.append(report)
        return self._emissions[key]
