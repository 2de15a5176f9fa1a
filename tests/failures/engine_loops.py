"""Three draft loops as engines write them, in code of our own: what stands in front of the attention is theirs.

R requests, T tokens, H hidden, L max_model_len, K speculative tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftfuse import AttentionGroup, CommonMetadata, DraftInputs, ops
from tests.failures.small import P, Small

PADDING_SLOT_ID = -1


@dataclass
class FlashMetadata:
    """What a builder of the first loop makes of the common metadata."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    cascade: Tensor | None = None


class FlashBuilder:
    """Has a branch of its own for drafting, and reads the slots that the proposer keeps."""

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots

    def build(self, common: CommonMetadata) -> FlashMetadata:
        return self.build_for_drafting(common) if common.draft_step > 0 else self.build_general(common)

    def build_general(self, common: CommonMetadata, slots: Tensor | None = None) -> FlashMetadata:
        return FlashMetadata(
            common.num_tokens,
            common.max_query_len,
            common.max_seq_len,
            common.query_start_loc,
            common.seq_lens,
            common.block_table,
            common.slot_mapping if slots is None else slots,
        )

    def build_for_drafting(self, common: CommonMetadata) -> FlashMetadata:
        live = common.positions < common.seq_lens
        return self.build_general(common, torch.where(live, self.slots[: common.num_reqs], PADDING_SLOT_ID))


class Proposer(Small):
    """Positions, lengths and slots in persistent buffers, moved on by code of its own between two forwards."""

    def __init__(self, k: int = 4) -> None:
        super().__init__(k=k)
        self.block_size = P
        self.slots = torch.full((self.max_num_reqs + 1,), PADDING_SLOT_ID, dtype=torch.int64)
        self.arange = torch.arange(self.max_num_reqs + 2, dtype=torch.int32)
        group = self.attn_groups[0]
        self.attn_groups = [
            AttentionGroup(FlashBuilder(self.slots), group.block_table, group.slot_mapping, P, ("l.0", "l.1"))
        ]
        self.attn_groups[0].kv_caches = {"l.0": (self.key, self.value)}

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        per_layer = {name: metadata[name] for name in ("l.0", "l.1")}
        meta = per_layer["l.0"]
        assert meta.num_actual_tokens == inputs.input_ids.shape[0]
        x = self.enter(inputs)
        heads = x.view(-1, 2, 4)
        ops.write_kv(heads, heads * 0.5, self.key, self.value, meta.slot_mapping)
        starts = None if meta.max_query_len == 1 else meta.query_start_loc
        seen = ops.paged_attention(heads, self.key, self.value, meta.block_table, meta.seq_lens, starts, 0.5)
        hidden = torch.tanh(x + seen.flatten(1) @ self.mix)
        return hidden, torch.tanh(hidden)

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        rows, inputs = tokens.shape[0], self.inputs
        inputs.input_ids[:rows] = tokens.int()
        inputs.hidden_states[:rows] = hidden
        live = inputs.positions[:rows] < inputs.seq_lens[:rows]
        positions = inputs.positions[:rows] + 1
        exceeds = (positions >= self.max_model_len) | ~live
        clamped = torch.where(exceeds, 0, positions)
        inputs.positions[:rows] = clamped
        inputs.seq_lens[:rows] += 1
        inputs.seq_lens[:rows].masked_fill_(exceeds, 0)
        inputs.query_start_loc[: rows + 1] = self.arange[: rows + 1]
        block_ids = self.attn_groups[0].block_table[:rows].gather(1, (clamped // self.block_size).view(-1, 1))
        self.slots[:rows] = block_ids.view(-1).long() * self.block_size + clamped % self.block_size
        self.slots[:rows].masked_fill_(exceeds, PADDING_SLOT_ID)


@dataclass
class StepMetadata:
    """Pages of every request behind each other, as a ragged kernel reads them: one object for each draft step."""

    kv_indptr: Tensor  # i32[R+1]
    kv_indices: Tensor  # i64[R*L + 1], the last one takes what belongs to nobody
    kv_lens: Tensor  # i32[R]


class MultiStepBackend:
    """Owns the metadata of all steps; a step fills its own, from the lengths of that step."""

    def __init__(self, rows: int, k: int, length: int) -> None:
        self.length = length
        self.columns = torch.arange(length)
        self.speculative_num_steps = k
        self.forward_metadata = [
            StepMetadata(
                torch.zeros(rows + 1, dtype=torch.int32),
                torch.zeros(rows * length + 1, dtype=torch.int64),
                torch.zeros(rows, dtype=torch.int32),
            )
            for _ in range(k)
        ]

    def build(self, common: CommonMetadata) -> StepMetadata:
        meta, rows = self.forward_metadata[common.draft_step], common.num_reqs
        self.fill(meta, common, rows)
        return StepMetadata(meta.kv_indptr[: rows + 1], meta.kv_indices, meta.kv_lens[:rows])

    def fill(self, meta: StepMetadata, common: CommonMetadata, rows: int) -> None:
        """kv_indptr, then the slot of every cached token, row behind row."""
        meta.kv_lens[:rows].copy_(common.seq_lens)
        meta.kv_indptr[1 : rows + 1].copy_(torch.cumsum(common.seq_lens, 0))
        inside = self.columns < common.seq_lens.unsqueeze(1)
        pages = common.block_table[:, self.columns // common.page_size].long()
        slots = pages * common.page_size + self.columns % common.page_size
        nobody = meta.kv_indices.shape[0] - 1
        places = torch.where(inside, meta.kv_indptr[:rows].unsqueeze(1) + self.columns, nobody)
        meta.kv_indices.scatter_(0, places.flatten(), torch.where(inside, slots, 0).flatten())


class MultiStep(Small):
    """Attends through the ragged indices of its backend, indexed by the draft step."""

    def __init__(self, k: int = 4) -> None:
        super().__init__(k=k)
        group = self.attn_groups[0]
        self.backend = MultiStepBackend(self.max_num_reqs + 1, k, self.max_model_len)
        self.attn_groups = [
            AttentionGroup(
                self.backend, group.block_table, group.slot_mapping, P, ("draft",), {"draft": (self.key, self.value)}
            )
        ]

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        meta, x = metadata["draft"], self.enter(inputs)
        heads = x.view(-1, 2, 4)
        ops.write_kv(heads, heads * 0.5, self.key, self.value, self.attn_groups[0].slot_mapping[: x.shape[0]])
        if x.shape[0] != meta.kv_lens.shape[0]:
            return torch.tanh(x), torch.tanh(x)
        columns = self.backend.columns
        places = (meta.kv_indptr[:-1].unsqueeze(1) + columns).clamp(max=meta.kv_indices.shape[0] - 1)
        slots, inside = meta.kv_indices[places], columns < meta.kv_lens.unsqueeze(1)
        keys, values = (cache.view(-1, 2, 4)[slots] for cache in (self.key, self.value))
        scores = torch.einsum("rhd,rlhd->rhl", heads, keys).masked_fill(~inside.unsqueeze(1), -1e9)
        seen = torch.einsum("rhl,rlhd->rhd", scores.softmax(-1), values)
        hidden = torch.tanh(x + seen.flatten(1) @ self.mix)
        return hidden, torch.tanh(hidden)


class AttentionState:
    """One metadata object for the whole life of an engine, with counters on the device."""

    def __init__(self, rows: int, block_table: Tensor) -> None:
        self.kv_lens = torch.zeros(rows, dtype=torch.int32)
        self.host_request_types = [0] * rows
        self.block_table = block_table
        self.iterations = torch.zeros(1, dtype=torch.int64)
        self.accepted = torch.zeros(rows, dtype=torch.int64)
        self.is_spec_decoding = False
        self.num_rows = 0

    def prepare(self, common: CommonMetadata) -> None:
        self.kv_lens[: common.num_reqs].copy_(common.seq_lens)
        self.iterations.zero_()

    def update_for_spec_dec(self, live: Tensor) -> None:
        """Between two draft steps: one token more in every live row, none in the others."""
        rows = live.shape[0]
        self.kv_lens[:rows].add_(live).mul_(live)
        self.accepted[:rows].add_(live)
        self.iterations.add_(1)


@dataclass
class StateView:
    """What a layer reads of :class:`AttentionState`: views of it."""

    kv_lens: Tensor
    block_table: Tensor
    iterations: Tensor


class StateBuilder:
    """Prepares the object in front of the first draft step; later steps find it moved on."""

    def __init__(self, state: AttentionState) -> None:
        self.state = state

    def build(self, common: CommonMetadata) -> StateView:
        if common.draft_step <= 1:
            self.state.prepare(common)
        state = self.state
        return StateView(state.kv_lens[: common.num_reqs], common.block_table, state.iterations)


class InPlace(Small):
    """Advances lengths in the metadata object, in place."""

    def __init__(self, k: int = 4) -> None:
        super().__init__(k=k)
        group = self.attn_groups[0]
        self.state = AttentionState(self.max_num_reqs + 1, group.block_table)
        self.attn_groups = [
            AttentionGroup(
                StateBuilder(self.state),
                group.block_table,
                group.slot_mapping,
                P,
                ("draft",),
                {"draft": (self.key, self.value)},
            )
        ]

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        meta, x = metadata["draft"], self.enter(inputs)
        heads = x.view(-1, 2, 4)
        ops.write_kv(heads, heads * 0.5, self.key, self.value, self.attn_groups[0].slot_mapping[: x.shape[0]])
        starts = None if x.shape[0] == meta.kv_lens.shape[0] else inputs.query_start_loc
        seen = ops.paged_attention(heads, self.key, self.value, meta.block_table, meta.kv_lens, starts, 0.5)
        hidden = torch.tanh(x + seen.flatten(1) @ self.mix + meta.iterations * 0.125)
        return hidden, torch.tanh(hidden)

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        super().advance(tokens, hidden, step)
        rows = tokens.shape[0]
        if step > 0:
            self.state.update_for_spec_dec(self.inputs.positions[:rows] < self.inputs.seq_lens[:rows])
