"""The same loop with draftfuse's compiler around vLLM's kernels: slots, draw, advance and stores become fused code.

vLLM's draft forward (already compiled by vLLM), its logits and its refresh of attention metadata stay as they are and
run as one registered operator a step. ``R`` requests (padded), ``K`` speculative tokens, ``H`` hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from draftfuse.build import Settings, finish
from draftfuse.lowering.emit import Emission
from draftfuse.lowering.ops.linear_by_rows import own_kernels
from draftfuse.lowering.workspace import Workspace
from draftfuse.trace import trace
from draftfuse.vllm import ops
from draftfuse.vllm.head import plain_head
from draftfuse.vllm.record import build, update
from draftfuse.vllm.versions import Release

# vLLM's operators read its buffers, so slots and positions have to stand there step by step: rows of draftfuse's own
# would be copied there once more.
AS_STORED = ("refresh_ahead", "lower_metadata_refresh")
# Whether the greedy draw is part of the fused code; if not, it is vLLM's own argmax inside the operator.
FUSE_DRAW = True


class State:
    """vLLM's buffers under plain names, as ordinary tensors on the same memory (vLLM makes them in inference mode)."""

    def __init__(self, spec: Any, engine: int) -> None:
        inputs, tables = spec.input_buffers, spec.block_tables
        self.engine = engine
        self.input_ids = alias(inputs.input_ids)
        self.positions = alias(inputs.positions)
        self.seq_lens = alias(inputs.seq_lens)
        self.query_start_loc = alias(inputs.query_start_loc)
        self.hidden_states = alias(spec.hidden_states)
        self.draft_tokens = alias(spec.draft_tokens)
        self.idx_mapping = alias(spec.idx_mapping)
        self.current_step = alias(spec.current_draft_step)
        source = getattr(spec, "sample_src_positions", None)
        self.sample_positions = None if source is None else alias(source)
        self.tables = [alias(getattr(table, "gpu", table)) for table in tables.block_tables]
        self.page_sizes = [int(size) for size in tables.block_sizes_tensor.tolist()]
        self.slots = [alias(row) for row in tables.slot_mappings]
        self.advances = bool(spec.advance_draft_positions)
        self.max_model_len = int(spec.max_model_len)
        self.draws = spec.draft_logits is not None or not FUSE_DRAW
        self.width = int(spec.hidden_states.shape[1])
        self.hidden_like = torch.empty(1, dtype=spec.dtype, device=self.hidden_states.device)
        self.logits_like = self.hidden_like  # replaced as soon as vLLM's logits are known
        self.head: Tensor | None = None  # of one row: the output head, where product and argmax are one kernel


def alias(tensor: Tensor) -> Tensor:
    """An ordinary tensor on the memory of ``tensor``."""
    with torch.inference_mode(False):
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return plain


def loop(state: State, num_reqs: int, k: int) -> None:
    """Draft steps 1..k-1 in plain PyTorch around vLLM's operators: what is traced."""
    drafted: list[Tensor] = []
    for step in range(1, k):
        if state.advances or step == 1:
            with annotate({"phase": "slot_mapping", "draft_step": step}):
                write_slots(state, num_reqs)
        with annotate({"phase": "forward", "draft_step": step}):
            if state.draws:
                state.current_step.fill_(step)
            tokens, feedback = one_step(state, num_reqs, step)
        drafted.append(tokens)
        if step < k - 1:
            with annotate({"phase": "advance", "draft_step": step}):
                advance(state, num_reqs, tokens, feedback)
    with annotate({"phase": "store", "draft_step": k - 1}):
        rows = state.draft_tokens[:num_reqs, :k]
        rows.copy_(torch.cat([rows[:, :1], torch.stack(drafted, dim=1)], dim=1))


def write_slots(state: State, num_reqs: int) -> None:
    """vLLM's slot mapping: block of the position in the request's table row; -1 behind the last live row."""
    positions = state.positions[:num_reqs]
    index = state.idx_mapping[:num_reqs].to(torch.int64)
    rows = torch.arange(num_reqs, device=positions.device)
    live = (rows < state.query_start_loc[num_reqs]) & (index >= 0)
    for table, size, slots in zip(state.tables, state.page_sizes, state.slots, strict=True):
        blocks = table[index.clamp(min=0), positions // size].to(torch.int64)
        slots[:num_reqs].copy_(torch.where(live, blocks * size + positions % size, -1))


def one_step(state: State, num_reqs: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens, int64[R], and what is fed back, [R, H]."""
    if state.draws:
        return torch.ops.draftfuse_vllm.step_tokens(  # type: ignore[no-any-return]
            state.hidden_like, state.engine, num_reqs, step, state.width
        )
    if state.head is not None:
        last, feedback = torch.ops.draftfuse_vllm.step_hidden(
            state.hidden_like, state.engine, num_reqs, step, state.width
        )
        return torch.ops.draftfuse.small_linear_argmax(last, state.head, None, 0.0), feedback
    logits, feedback = torch.ops.draftfuse_vllm.step_logits(
        state.logits_like, state.hidden_like, state.engine, num_reqs, step, state.width
    )
    return logits.argmax(dim=-1), feedback


def advance(state: State, num_reqs: int, tokens: Tensor, feedback: Tensor) -> None:
    """vLLM's update of the inputs: every captured row moves, padded ones too; positions stop at the model's length."""
    state.input_ids[:num_reqs].copy_(tokens)
    state.hidden_states[:num_reqs].copy_(feedback)
    if state.sample_positions is not None:
        state.sample_positions[:num_reqs].add_(1)
    if state.advances:
        positions, lengths = state.positions[:num_reqs], state.seq_lens[:num_reqs]
        positions.copy_((positions + 1).clamp(max=state.max_model_len - 1))
        lengths.copy_((lengths + 1).clamp(max=state.max_model_len))


class CompiledLoop:
    """The compiled loops of one speculator, by number of rows and steps."""

    def __init__(self, spec: Any, release: Release, rebuild: bool, note: Callable[[str], None]) -> None:
        self.spec, self.release, self.rebuild = spec, release, rebuild
        self.rest: tuple[Any, ...] = ()
        self.metadata: Any = None
        self.by_layer: Any = None
        self.head: Tensor | None = None
        self.upper_bound: Any = None
        self.state = State(spec, ops.add(self))
        self.workspace = Workspace()
        self.emissions: dict[tuple[int, bool], Emission] = {}
        self.bound: dict[tuple[int, int], Any] = {}
        self.note = note

    def run(self, rows: int, k: int, metadata: Any, by_layer: Any, rest: tuple[Any, ...], bound: Any = None) -> None:
        """Draft steps 1..k-1 on ``rows`` rows; compiles on the first call of a shape (vLLM's warm-up)."""
        self.metadata, self.by_layer, self.rest, self.upper_bound = metadata, by_layer, rest, bound
        if (rows, k) not in self.bound:
            self.prepare(rows)
            with torch.inference_mode(False), torch.no_grad():
                self.bound[rows, k] = self.emission(rows, k).bind(rows, self.workspace)
        with own_kernels():  # of vLLM's forward: only where the pass let its products choose
            self.bound[rows, k].run()

    def prepare(self, rows: int) -> None:
        """Learn width and dtype of vLLM's logits, and whether they are a plain product."""
        if self.state.logits_like is self.state.hidden_like and not self.state.draws:
            logits = self.logits(self.spec.hidden_states[:rows])
            head = plain_head(self.spec, self.logits)
            with torch.inference_mode(False):
                self.state.logits_like = torch.empty(logits.shape[-1], dtype=logits.dtype, device=logits.device)
                self.head = None if head is None else alias(head.detach())

    def emission(self, rows: int, k: int) -> Emission:
        """Code for any number of rows above one where its guards allow it, else for ``rows`` alone."""
        if rows > 1:
            code = self.compiled(k, True, max(2, min(rows, self.spec.max_num_reqs)))
            if code.guards_hold(rows):
                return code
        return self.compiled(k, False, rows)

    def compiled(self, k: int, symbolic: bool, rows: int) -> Emission:
        key = (k if symbolic else -k * 4096 - rows, symbolic)
        if key not in self.emissions:
            start = time.perf_counter()
            self.state.head = self.head if rows == 1 and not symbolic else None
            traced = trace(loop, (self.state, rows, k), "num_reqs" if symbolic else None)
            seconds = time.perf_counter() - start
            code, report = finish(traced, k, None if symbolic else rows, seconds, Settings(disable=AS_STORED))
            self.emissions[key] = code
            what = "any number of" if symbolic else str(rows)
            own = "" if self.state.head is None else ", output head and argmax in one"
            self.note(
                f"compiled k={k}, {what} requests: {report.segments} segments ({report.unique_segments} distinct) "
                f"around {k - 1} steps of vLLM's{own}, {report.compile_seconds:.1f} s"
            )
        return self.emissions[key]

    def forward(self, rows: int, step: int) -> tuple[Tensor, Tensor]:
        """Refresh as vLLM does it, then the draft's forward."""
        if self.metadata is not None and (self.spec.advance_draft_positions or step == 1):
            if self.rebuild:
                self.metadata = build(self.spec, self.release, rows, rows, step, self.upper_bound)
            else:
                update(self.spec, self.metadata, rows)
        across, mode = self.rest[:2]
        hidden, feedback = self.spec._run_model(rows, self.metadata, self.by_layer, across, mode)
        return hidden, feedback

    def logits(self, hidden: Tensor) -> Tensor:
        """vLLM's logits."""
        newer = hasattr(self.spec, "compute_draft_logits")
        logits: Tensor = self.spec.compute_draft_logits(hidden, 0) if newer else self.spec.model.compute_logits(hidden)
        return logits

    def sample(self, hidden: Tensor, rows: int, step: int) -> Tensor:
        """vLLM's own draw, so that equal seeds give equal tokens."""
        spec = self.spec
        source = getattr(spec, "sample_src_positions", spec.input_buffers.positions)
        tokens: Tensor = spec.sample_draft(
            hidden,
            source[:rows],
            spec.idx_mapping[:rows],
            spec.temperature,
            spec.seeds,
            spec.current_draft_step,
            spec.draft_logits,
        )
        return tokens


def objection(spec: Any) -> str:
    """Why the compiled loop cannot stand for vLLM's ``_generate_draft``; empty if it can."""
    positions_differ = not spec.advance_draft_positions and not hasattr(spec, "sample_src_positions")
    tables = spec.block_tables
    checks = (
        (not all(getattr(tables, "_slot_mapping_enabled", [True])), "a group has no slot mapping"),
        (bool(getattr(tables, "redirect_writes_to_null_block", False)), "writes are redirected"),
        (bool(getattr(spec, "use_local_argmax_reduction", False)), "the draw is reduced across ranks"),
        (getattr(spec, "acceptance_estimator", None) is not None, "acceptance is estimated at every step"),
        (getattr(spec, "draft_watermarker", None) is not None, "drafts are watermarked"),
        (getattr(spec, "draft_logits", None) is not None and positions_differ, "the draw has positions of its own"),
    )
    return next((reason for applies, reason in checks if applies), "")
