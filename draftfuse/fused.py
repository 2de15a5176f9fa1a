"""The object that :func:`draftfuse.compile` returns: the calls, and what must be true before each of them runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftfuse import guards, loop, validate
from draftfuse.build import Settings
from draftfuse.dispatch import DECODE, PREFILL, PROPOSE, Decision, Descriptor, Ladder
from draftfuse.errors import ClosedError, ConcurrentUseError
from draftfuse.report import Report
from draftfuse.runners import Runner, Runners
from draftfuse.speculator import DraftBatch
from draftfuse.state import fill_dummy, load_batch, pad, persistent_tensors


class FusedDraft:
    """A compiled draft loop. Made by :func:`draftfuse.compile`; see there for the options.

    One call at a time: a second thread gets :class:`ConcurrentUseError`. On CUDA all work goes to the current stream.
    """

    def __init__(self, spec: Any, ladder: Ladder, mode: str, cudagraph: bool, pool: Any, settings: Settings) -> None:
        self.spec, self.ladder, self.mode, self.settings = spec, ladder, mode, settings
        self.device: torch.device = spec.inputs.positions.device
        self.cudagraph = cudagraph and self.device.type == "cuda"
        self.report = Report(mode, settings.compiler, str(self.device))
        self.runners = Runners(spec, ladder, mode, self.cudagraph, pool, settings, self.report)
        self.batch_consumed = torch.cuda.Event() if self.device.type == "cuda" else None
        self.outputs_ready = torch.cuda.Event() if self.device.type == "cuda" else None
        self.graph_memory_budget: int | None = None
        self._lock = threading.Lock()
        self._closed = False

    def propose(
        self, batch: DraftBatch, k: int | None = None, copy: bool = False, num_reqs_across_dp: Sequence[int] | None = None
    ) -> Tensor:
        """Draft ``k`` tokens for each request of ``batch``.

        Args:
            batch: the verified tokens of this scheduler step; see :class:`DraftBatch`.
            k: how many, 0..K; by default the table ``k_by_num_reqs``, else K.
            copy: return a copy. Without it the result is a view of ``spec.inputs.draft_tokens``: the caller's until the
                next call on this object.
            num_reqs_across_dp: batch sizes of all data-parallel ranks. Every rank then runs the capacity of the
                largest; a rank with no request runs dead rows, so that collectives meet.

        Returns:
            int64[num_reqs, k].

        Raises:
            InvalidBatchError, InvalidOptionError: the batch or k does not fit; nothing was written.
            StaleAddressError: memory that a captured graph holds has moved.
        """
        largest = max(num_reqs_across_dp or (batch.num_reqs,))
        k = self._check_k(self.ladder.k_for(largest) if k is None else k)
        validate.check_batch(self.spec, batch)
        decision = self.ladder.decide(batch.num_reqs, batch.num_tokens, k, batch.max_query_len, largest)
        with self._exclusive():
            if k > 0 and largest > 0:
                self._propose(batch, k, decision)
            self._record(self.outputs_ready)
            tokens = self.spec.inputs.draft_tokens[: batch.num_reqs, :k]
            return tokens.clone() if copy else tokens

    def decode(self, num_reqs: int, k: int | None = None, max_seq_len: int | None = None, capacity: int | None = None) -> None:
        """Draft steps 1..k-1 on the persistent inputs: what an engine calls that prefills by itself.

        The caller has written rows 0..num_reqs-1 as draft step 1 reads them, token 0 included (one token a row,
        ``query_start_loc`` counting rows); rows behind them are made dead here. Writes ``draft_tokens[:num_reqs, 1:k]``
        and leaves the inputs as the last step left them. Inside a CUDA graph capture of the caller it launches the
        kernels themselves, after a first call outside.

        Args:
            max_seq_len: host upper bound on seq_lens before the call, for guards; max_model_len by default.
            capacity: pad to at least this many rows (all ranks of a group must agree on it).
        """
        k = self._check_k(self.ladder.k_for(num_reqs) if k is None else k)
        rows = max(num_reqs, capacity or 0)
        with self._exclusive():
            if k > 1 and rows > 0:
                size = self.ladder.capacity_for(rows)
                host = guards.HostBatch(num_reqs, num_reqs, (max_seq_len or self.spec.max_model_len))
                self._run(Descriptor(DECODE, size, size, k), num_reqs, host)
            self._record(self.outputs_ready)

    def dispatch(self, num_reqs: int, num_tokens: int, k: int | None = None, max_query_len: int | None = None) -> Decision:
        """Which graphs a batch would use, and why. A batch is uniform where ``num_tokens == num_reqs * (K + 1)``."""
        k = self._check_k(self.ladder.k_for(num_reqs) if k is None else k)
        uniform = num_tokens == num_reqs * self.ladder.query_len
        return self.ladder.decide(num_reqs, num_tokens, k, max_query_len or (self.ladder.query_len if uniform else None))

    def capture(self, ks: Sequence[int] | None = None, progress: bool = True) -> None:
        """Build and capture ahead: every capacity, largest first, for each of ``ks`` (K by default).

        Under ``graph_memory_budget`` a capacity whose graphs would pass the budget is left out, with a line in the
        report; its batches pad to the next larger one that was captured.
        """
        from draftfuse.budget import capture_all

        wanted = [self._check_k(k) for k in ks] if ks is not None else [self.ladder.max_k]
        with self._exclusive():
            capture_all(self, wanted, progress)

    def dummy_run(self, num_reqs: int, num_tokens: int | None = None, skip_attn: bool = False) -> None:
        """One eager prefill on dead rows, as a memory profile needs it; no graph is made or used.

        With ``skip_attn`` every layer's metadata is None, as before KV caches exist.
        """
        tokens = num_tokens or num_reqs
        with self._exclusive():
            fill_dummy(self.spec, num_reqs, max(1, tokens // num_reqs))
            if skip_attn:
                layers = [name for group in self.spec.attn_groups for name in group.layer_names]
                self.spec.forward(self.spec.inputs.view(num_reqs, tokens), dict.fromkeys(layers))
            else:
                loop.prefill(self.spec, num_reqs, tokens, tokens, self.spec.max_model_len)

    def explain(self) -> str:
        """Which pass changed what, in how many places, what fell back and why, what was called how often."""
        return self.report.explain()

    def memory(self) -> dict[str, int]:
        """Bytes of each captured graph, of their pool, and of persistent buffers apart from them."""
        inputs = sum(t.numel() * t.element_size() for t in persistent_tensors(self.spec))
        graphs = {f"{d.kind} k={d.num_steps} capacity={d.num_reqs}": r.num_bytes for d, r in self.runners.made.items()}
        return {"inputs": inputs, "rows": self.runners.workspace.num_bytes, "pool": sum(graphs.values()), **graphs}

    def close(self) -> None:
        """Drop all graphs and code. Later calls raise :class:`ClosedError`."""
        with self._exclusive():
            self._closed = True
            self.runners.clear()

    def recapture(self) -> None:
        """Forget graphs and builds: the next call makes them anew, at the addresses of that time."""
        with self._exclusive():
            self.runners.clear()

    def _propose(self, batch: DraftBatch, k: int, decision: Decision) -> None:
        if batch.num_reqs > 0:
            load_batch(self.spec, batch)
        self._record(self.batch_consumed)
        host = guards.HostBatch(batch.num_reqs, batch.num_tokens, batch.max_seq_len)
        if decision.prefill is not None:
            self._run(decision.prefill, batch.num_reqs, host)
        elif batch.num_reqs > 0:
            self._ragged_prefill(batch)
        if decision.decode is not None and decision.decode is not decision.prefill:
            self._run(decision.decode, batch.num_reqs, host)

    def _ragged_prefill(self, batch: DraftBatch) -> None:
        longest = batch.max_query_len or batch.num_tokens - batch.num_reqs + 1
        loop.prefill(self.spec, batch.num_reqs, batch.num_tokens, longest, batch.max_seq_len)
        self.report.counters["eager prefills"] += 1

    def _run(self, descriptor: Descriptor, num_reqs: int, host: guards.HostBatch) -> None:
        """Pad, check, launch, count."""
        runner = self.runners.get(descriptor)
        runner.addresses.check()
        failed = guards.broken(runner.guards, host) + runner.scalars.broken()
        if failed:
            runner = self._split_instead(descriptor, failed)
        pad(self.spec.inputs, num_reqs, descriptor.num_reqs, descriptor.query_len)
        hooks = self._hooks(descriptor) if runner.bare is not None else ()
        for name in hooks[:-1]:
            loop.run_hook(self.spec, name)
        self._launch(runner)
        for name in hooks[-1:]:
            loop.run_hook(self.spec, name)
        counters = self.report.counters
        counters.update(runner.counts)
        counters[f"{descriptor.kind} capacity {descriptor.num_reqs}"] += 1
        counters["padded rows"] += descriptor.num_reqs - num_reqs

    def _launch(self, runner: Runner) -> None:
        if self.cudagraph and runner.bare is not None and torch.cuda.is_current_stream_capturing():
            runner.bare()
        else:
            runner.launch()

    def _hooks(self, descriptor: Descriptor) -> tuple[str, ...]:
        """Lifecycle hooks of a replay, the last one after the launch; the loop itself calls them where it runs in Python."""
        prefill = ("on_prefill_begin", "on_prefill_end")
        decode = ("on_multi_step_decode_begin", "on_multi_step_decode_end")
        if descriptor.kind == PROPOSE and descriptor.num_steps > 1:
            return prefill + decode
        return decode if descriptor.kind == DECODE else prefill

    def _split_instead(self, descriptor: Descriptor, failed: list[str]) -> Runner:
        self.report.fall_back(descriptor.kind, "split", f"a guard does not hold ({'; '.join(failed)})")
        self.report.counters["broken guards"] += 1
        if descriptor.kind == DECODE:
            return self.runners.split_for(descriptor, tuple(failed))
        return self.runners.chained_split(descriptor, tuple(failed))

    def _record(self, event: Any) -> None:
        if event is not None and not torch.cuda.is_current_stream_capturing():
            event.record()

    def _check_k(self, k: int) -> int:
        return validate.check_k(k, self.ladder.max_k)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            todo = "Use one compiled loop a thread, or a lock of your own."
            raise ConcurrentUseError("two threads use one compiled loop", "a second call", "one call at a time", todo)
        try:
            if self._closed:
                todo = "Compile the speculator again."
                raise ClosedError("the compiled loop is closed", "a call after close()", "no further call", todo)
            with torch.no_grad():
                yield
        finally:
            self._lock.release()


__all__ = ["PREFILL", "FusedDraft"]
