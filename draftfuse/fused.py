"""The object that :func:`draftfuse.compile` returns: the calls, and what must be true before each of them runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftfuse import batches, budget, guards, loop, validate
from draftfuse.audit_report import AuditReport
from draftfuse.build import Settings
from draftfuse.dispatch import DECODE, PROPOSE, Decision, Descriptor, Ladder
from draftfuse.exclusive import Exclusive, event_of_now
from draftfuse.loader import Loader
from draftfuse.meeting import wait_for
from draftfuse.ranks import AcrossRanks, check_across
from draftfuse.report import Plan, Report
from draftfuse.runners import Runner, Runners
from draftfuse.speculator import DraftBatch
from draftfuse.state import fill_dummy

Hooks = tuple[Callable[[], None], ...]

MAX_PROPOSALS = 1024


@dataclass(frozen=True)
class Proposal:
    """What one kind of batch runs: padded rows, tokens of each, and the plans (no prefill plan: eager)."""

    k: int
    rows: int
    query_len: int
    prefill: Plan | None
    decode: Plan | None


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
        self.graph_memory_budget: int | None = None
        self._batch_consumed: Any = None
        self._outputs_ready: Any = None
        self._plans: dict[tuple[Descriptor, int, int], Plan] = {}
        self._proposals: dict[tuple[int, int, int | None, int | None, AcrossRanks | None], Proposal] = {}
        self._calls: dict[tuple[int, int | None, int | None], Plan | None] = {}
        self._exclusive = Exclusive(self.runners.inspector.ranks)
        self._loader = Loader(spec)

    def propose(
        self,
        batch: DraftBatch,
        k: int | None = None,
        copy: bool = False,
        across: AcrossRanks | None = None,
    ) -> Tensor:
        """Draft ``k`` tokens for each request of ``batch``.

        Args:
            batch: the verified tokens of this scheduler step; see :class:`DraftBatch`.
            k: how many, 0..K; by default the table ``k_by_num_reqs``, else K.
            copy: return a copy. Without it the result is a view of ``spec.inputs.draft_tokens``: the caller's until the
                next call on this object.
            across: the batches of all data-parallel ranks (:meth:`AcrossRanks.gather`). Every rank then runs the
                capacity of the fullest, one kind of prefill and one number of steps; a rank with no request runs dead
                rows, so that collectives meet.

        Returns:
            int64[num_reqs, k].

        Raises:
            InvalidBatchError, InvalidOptionError: the batch or k does not fit; nothing was written.
            StaleAddressError: memory that a captured graph holds has moved.
        """
        batches.check_batch(self.spec, batch)
        if across is not None:
            check_across(across).check(batch)
        key = (batch.num_reqs, batch.num_tokens, batch.max_query_len, k, across)
        with self._exclusive:
            proposal = (batches.are_counts(k) and self._proposals.get(key)) or self._proposal(*key)
            k = proposal.k
            if k > 0 and (batch.num_reqs > 0 or (across is not None and across.largest > 0)):
                self._propose(batch, proposal)
            self._record(self._outputs_ready)
            tokens: Tensor = self.spec.inputs.draft_tokens[: batch.num_reqs, :k]
            return tokens.clone() if copy else tokens

    def decode(
        self, num_reqs: int, k: int | None = None, max_seq_len: int | None = None, capacity: int | None = None
    ) -> None:
        """Draft steps 1..k-1 on the persistent inputs: what an engine calls that prefills by itself.

        The caller has written rows 0..num_reqs-1 as draft step 1 reads them, token 0 included (one token a row,
        ``query_start_loc`` counting rows); rows behind them are made dead here. Writes ``draft_tokens[:num_reqs, 1:k]``
        and leaves the inputs as the last step left them. Inside a CUDA graph capture of the caller it launches the
        kernels themselves, after a first call outside.

        Args:
            max_seq_len: host upper bound on seq_lens before the call, for guards; max_model_len by default.
            capacity: pad to at least this many rows (all ranks of a group must agree on it).
        """
        if max_seq_len is not None:
            batches.check_length(max_seq_len, self.spec.max_model_len)
        with self._exclusive:
            key = (num_reqs, k, capacity)
            known = batches.are_counts(*key) and key in self._calls
            plan = self._calls[key] if known else self._decode_plan(*key)
            if plan is not None:
                plan.runner.addresses.check()
                if num_reqs < plan.descriptor.num_reqs:
                    self._loader.pad(num_reqs, plan.descriptor.num_reqs)
                self._run(plan, num_reqs, num_reqs, max_seq_len or self.spec.max_model_len)
            self._record(self._outputs_ready)

    def _decode_plan(self, num_reqs: int, k: int | None, capacity: int | None) -> Plan | None:
        """The plan of a decode call, None where it has nothing to do; remembered by the call's own arguments."""
        for number in (num_reqs, 0 if capacity is None else capacity):
            batches.check_rows(number, self.spec.max_num_reqs)
        steps = self._check_k(self.ladder.k_for(num_reqs) if k is None else k)
        rows = max(num_reqs, capacity or 0)
        plan = None
        if steps > 1 and rows > 0:
            size = self.ladder.capacity_for(rows)
            plan = self._plan(Descriptor(DECODE, size, size, steps), num_reqs)
        self._calls[num_reqs, k, capacity] = plan
        return plan

    def dispatch(
        self, num_reqs: int, num_tokens: int, k: int | None = None, max_query_len: int | None = None
    ) -> Decision:
        """Which graphs a batch would use, and why. A batch is uniform where ``num_tokens == num_reqs * (K + 1)``."""
        batches.check_rows(num_reqs, self.spec.max_num_reqs)
        batches.check_sizes(num_reqs, num_tokens, max_query_len)
        k = self._check_k(self.ladder.k_for(num_reqs) if k is None else k)
        uniform = num_tokens == num_reqs * self.ladder.query_len
        return self.ladder.decide(
            num_reqs, num_tokens, k, max_query_len or (self.ladder.query_len if uniform else None)
        )

    def capture(self, ks: Sequence[int] | None = None, progress: bool = True) -> None:
        """Build and capture ahead: every capacity, largest first, for each of ``ks`` (K by default).

        Under ``graph_memory_budget`` a capacity whose graphs would pass the budget is left out, with a line in the
        report; its batches pad to the next larger one.
        """
        wanted = [self.ladder.max_k] if ks is None else validate.check_ks(ks, self.ladder.max_k)
        with self._exclusive:
            budget.capture_all(self, wanted, progress)

    def dummy_run(self, num_reqs: int, num_tokens: int | None = None, skip_attn: bool = False) -> None:
        """One eager prefill on dead rows, as a memory profile needs it; no graph is made or used.

        With ``skip_attn`` every layer's metadata is None, as before KV caches exist.
        """
        tokens = num_reqs if num_tokens is None else num_tokens
        batches.check_dummy(self.spec, num_reqs, tokens)
        with self._exclusive:
            fill_dummy(self.spec, num_reqs, tokens // num_reqs)
            loop.dummy_prefill(self.spec, num_reqs, tokens, skip_attn)

    def explain(self) -> str:
        """Which pass changed what and how often, what fell back and why, what was called how often."""
        return self.report.explain()

    def audit(self, batch: DraftBatch, k: int | None = None) -> AuditReport:
        """Run the compiled loop beside the eager one on ``batch`` and compare every value that both have.

        Costs three eager loops, one eager step and one more build. The state is as before afterwards.

        Returns:
            A report: ``first`` is the first divergence (draft step, phase, tensor, request, expected, got, source
            line), ``ok`` says that there is none.
        """
        from draftfuse.audit import audit

        with self._exclusive:
            return audit(self, batch, k)

    def memory(self) -> dict[str, int]:
        """Bytes of each captured graph, of their pool, and of persistent buffers apart from them."""
        return budget.memory_of(self)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the drafts of the last call on this stream: a graph that waits for a lost rank never ends.

        Raises:
            LostRankError: not ready after ``timeout`` seconds (by default those of the process group).
        """
        with self._exclusive:
            wait_for(self, timeout)

    def close(self) -> None:
        """Drop all graphs and code. Later calls raise :class:`ClosedError`; closing twice is once."""
        if self._exclusive.is_settled:
            return
        self._exclusive.reopen(to_close=True)
        with self._exclusive:
            self._exclusive.closed = True
            self._forget()

    def recapture(self) -> None:
        """Forget graphs and builds: the next call makes them anew, at the addresses of that time."""
        self._exclusive.reopen()
        with self._exclusive:
            self._forget()

    def _forget(self) -> None:
        self._plans.clear()
        self._calls.clear()
        self._proposals.clear()
        self._loader = Loader(self.spec)
        self.runners.clear()

    def _proposal(
        self, num_reqs: int, num_tokens: int, max_query_len: int | None, k: int | None, across: AcrossRanks | None
    ) -> Proposal:
        """What a kind of batch runs. Built here: a build must fail before anything is written."""
        fullest = num_reqs if across is None else across.largest
        steps = self._check_k(self.ladder.k_for(fullest) if k is None else k)
        decision = self.ladder.decide(num_reqs, num_tokens, steps, max_query_len, across)
        first, second = decision.prefill, decision.decode
        prefill = None if first is None else self._plan(first, num_reqs)
        decode = None if second is None or second is first else self._plan(second, num_reqs)
        rows, query_len = (num_reqs, 1) if first is None else (first.num_reqs, first.query_len)
        made = Proposal(steps, rows, query_len, prefill, decode)
        if len(self._proposals) < MAX_PROPOSALS:  # ragged batches have any number of tokens
            self._proposals[num_reqs, num_tokens, max_query_len, k, across] = made
        return made

    def _propose(self, batch: DraftBatch, proposal: Proposal) -> None:
        for plan in filter(None, (proposal.prefill, proposal.decode)):
            plan.runner.addresses.check()
        self._loader.load(batch, proposal.rows, proposal.query_len)
        self._record(self._batch_consumed)
        if proposal.prefill is not None:
            self._run(proposal.prefill, batch.num_reqs, batch.num_tokens, batch.max_seq_len)
        else:
            self._ragged_prefill(batch)
        if proposal.decode is not None:
            if proposal.prefill is None:  # a uniform batch was padded as it was loaded
                self._loader.pad(batch.num_reqs, proposal.decode.descriptor.num_reqs)
            self._run(proposal.decode, batch.num_reqs, batch.num_tokens, batch.max_seq_len)

    def _ragged_prefill(self, batch: DraftBatch) -> None:
        longest = batch.max_query_len or batch.num_tokens - batch.num_reqs + 1
        if batch.num_reqs > 0:
            loop.prefill(self.spec, batch.num_reqs, batch.num_tokens, longest, batch.max_seq_len)
        else:  # for the other ranks: one dead row
            self._loader.pad(0, 1)
            loop.prefill(self.spec, 1, 1, 1, self.spec.max_model_len)
        self.report.counts["eager prefills"] += 1

    def _run(self, plan: Plan, num_reqs: int, num_tokens: int, max_seq_len: int) -> None:
        """Check guards, launch, count; addresses were checked before any write."""
        runner = plan.runner
        if failed := runner.scalars.broken():
            plan, runner = self._split_instead(plan.descriptor, num_reqs, failed)
        elif runner.guards:
            host = guards.HostBatch(num_reqs, num_tokens, max_seq_len)
            if failed := guards.broken(runner.guards, host):
                plan, runner = self._split_instead(plan.descriptor, num_reqs, failed)
        for hook in plan.before:
            hook()
        if self.cudagraph and torch.cuda.is_current_stream_capturing() and runner.bare is not None:
            runner.bare()
        else:
            runner.launch()
        for hook in plan.after:
            hook()
        plan.calls += 1

    def _plan(self, descriptor: Descriptor, num_reqs: int, split: Runner | None = None) -> Plan:
        """How a kind of call runs, built on first use."""
        key = (descriptor, num_reqs, id(split))
        if key in self._plans and (split is None or self._plans[key].runner is split):
            return self._plans[key]
        runner = split or self.runners.get(descriptor)
        extra = {f"{descriptor.kind} capacity {descriptor.num_reqs}": 1, "padded rows": descriptor.num_reqs - num_reqs}
        before, after = self._hooks(descriptor) if runner.bare is not None else ((), ())
        plan = Plan(descriptor, runner, {**runner.counts, **extra}, before, after)
        self.report.plans.append(plan)
        self._plans[key] = plan
        return plan

    def _hooks(self, descriptor: Descriptor) -> tuple[Hooks, Hooks]:
        """Lifecycle hooks around a replay; where the loop runs in Python it calls them itself."""
        prefill = ("on_prefill_begin", "on_prefill_end")
        decode = ("on_multi_step_decode_begin", "on_multi_step_decode_end")
        both = descriptor.kind == PROPOSE and descriptor.num_steps > 1
        names = prefill + decode if both else decode if descriptor.kind == DECODE else prefill
        found = [getattr(self.spec, name, None) for name in names]
        return tuple(h for h in found[:-1] if h), tuple(h for h in found[-1:] if h)

    def _split_instead(self, descriptor: Descriptor, num_reqs: int, failed: list[str]) -> tuple[Plan, Runner]:
        self.report.fall_back(descriptor.kind, "split", f"a guard does not hold ({'; '.join(failed)})")
        self.report.counts["broken guards"] += 1
        make = self.runners.split_for if descriptor.kind == DECODE else self.runners.chained_split
        runner = make(descriptor, tuple(failed))
        return self._plan(descriptor, num_reqs, runner), runner

    @property
    def batch_consumed(self) -> Any:
        """Event after which the batch given to ``propose`` may be overwritten; recorded from the first look at it on.

        None without CUDA.
        """
        if self._batch_consumed is None and self.device.type == "cuda":
            self._batch_consumed = event_of_now()
        return self._batch_consumed

    @property
    def outputs_ready(self) -> Any:
        """Event after which the drafts of the last call can be read; None without CUDA. Recorded like the other."""
        if self._outputs_ready is None and self.device.type == "cuda":
            self._outputs_ready = event_of_now()
        return self._outputs_ready

    def _record(self, event: Any) -> None:
        if event is not None and not torch.cuda.is_current_stream_capturing():
            event.record()

    def _check_k(self, k: int) -> int:
        return validate.check_k(k, self.ladder.max_k)
