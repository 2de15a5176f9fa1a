"""A small draft loop with a paged KV cache and a builder of step-dependent metadata; tests override one method each.

R requests, H hidden, V vocabulary, P page size, L max_model_len, W window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import draftfuse
from draftfuse import AttentionGroup, CommonMetadata, DraftBatch, DraftInputs, Speculator, ops

V, H, P = 17, 8, 4


@dataclass
class WindowMetadata:
    """What the attention of :class:`Small` reads; ``start`` and ``length`` depend on the draft step."""

    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    start: Tensor
    length: Tensor


class WindowBuilder:
    """Derived metadata: the first position of each row's window, and the window's length."""

    def __init__(self, window: int = 5) -> None:
        self.window = window

    def build(self, common: CommonMetadata) -> WindowMetadata:
        start = (common.seq_lens - self.window).clamp(min=0)
        length = common.seq_lens - start
        return WindowMetadata(common.seq_lens, common.block_table, common.slot_mapping, start, length)


class Small(Speculator):
    """One layer: embedding plus fed-back hidden state, KV write, paged attention, a feature of the window."""

    def __init__(self, max_num_reqs: int = 4, k: int = 4, max_model_len: int = 32, builder: Any = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.num_speculative_tokens, self.max_num_reqs, self.max_model_len = k, max_num_reqs, max_model_len
        self.inputs = DraftInputs.allocate(max_num_reqs, k, H)
        columns = -(-max_model_len // P)
        table = torch.arange((max_num_reqs + 1) * columns, dtype=torch.int32).view(max_num_reqs + 1, columns) + 1
        pages = (max_num_reqs + 1) * columns + 2
        self.key = torch.randn(pages, P, 2, 4, generator=generator)
        self.value = torch.randn(pages, P, 2, 4, generator=generator)
        self.builder = builder or WindowBuilder()
        slots = torch.full((self.inputs.positions.shape[0],), -1, dtype=torch.int64)
        group = AttentionGroup(self.builder, table, slots, P, ("draft",), {"draft": (self.key, self.value)})
        self.attn_groups = [group]
        self.embed = torch.randn(V, H, generator=generator)
        self.place = torch.randn(max_model_len, H, generator=generator)
        self.mix = torch.randn(H, H, generator=generator) / 3

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        meta = metadata["draft"]
        x = self.enter(inputs)
        heads = x.view(-1, 2, 4)
        ops.write_kv(heads, heads * 0.5, self.key, self.value, meta.slot_mapping)
        starts = None if x.shape[0] == meta.seq_lens.shape[0] else inputs.query_start_loc
        seen = ops.paged_attention(heads, self.key, self.value, meta.block_table, meta.seq_lens, starts, 0.5)
        hidden = torch.tanh(x + seen.flatten(1) @ self.mix)
        if starts is None:
            hidden = hidden + (meta.start * 0.01 + meta.length * 0.1).unsqueeze(1).to(hidden.dtype)
        return hidden, torch.tanh(hidden)

    def enter(self, inputs: DraftInputs) -> Tensor:
        """The input of the layer."""
        return self.embed[inputs.input_ids] + inputs.hidden_states + self.place[inputs.positions]

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return (hidden @ self.embed.t()).argmax(-1)


def batch_of(spec: Any, lengths: list[int], rejected: list[int] | None = None, seed: int = 0) -> DraftBatch:
    """A batch with one row for each of ``lengths``; the last ``query`` tokens of each row were verified."""
    generator = torch.Generator().manual_seed(seed)
    rejected = rejected or [0] * len(lengths)
    queries = [min(length, spec.num_speculative_tokens + 1) for length in lengths]
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    total = int(starts[-1])
    positions = torch.cat([torch.arange(length - q, length) for length, q in zip(lengths, queries, strict=True)])
    rows = len(lengths)
    return DraftBatch(
        num_reqs=rows,
        num_tokens=total,
        max_seq_len=max(lengths),
        hidden_states=torch.randn(total, H, generator=generator),
        input_ids=torch.randint(V, (total,), generator=generator),
        positions=positions,
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_rejected=torch.tensor(rejected),
        last_sampled=torch.randint(V, (rows,), generator=generator),
        temperature=torch.zeros(rows),
        seeds=torch.arange(rows),
        idx_mapping=torch.arange(rows),
    )


def both(make: Callable[[], Any], batch: Callable[[Any], DraftBatch], k: int | None = None, **options: Any) -> Pair:
    """Draft the same batch compiled and eagerly, each on a speculator of its own."""
    spec, twin = make(), make()
    fused = draftfuse.compile(spec, **{"compiler": "none", **options})
    eager = draftfuse.compile(twin, mode="eager", request_capacities=fused.ladder.capacities)
    pair = Pair(fused, eager)
    pair.draft(batch, k)
    return pair


class Pair:
    """A compiled loop and an eager one over equal speculators."""

    def __init__(self, fused: draftfuse.FusedDraft, eager: draftfuse.FusedDraft) -> None:
        self.fused, self.eager = fused, eager

    def draft(self, batch: Callable[[Any], DraftBatch], k: int | None = None) -> Tensor:
        """Draft with both; tokens, inputs and KV must be equal."""
        tokens = self.fused.propose(batch(self.fused.spec), k, copy=True)
        expected = self.eager.propose(batch(self.eager.spec), k, copy=True)
        assert torch.equal(tokens, expected)
        rows = tokens.shape[0]
        for name, tensor in self.fused.spec.inputs.named_tensors().items():
            other = self.eager.spec.inputs.named_tensors()[name]
            assert torch.equal(tensor[:rows], other[:rows]), name
        assert torch.equal(self.fused.spec.key, self.eager.spec.key)
        return tokens


def three_rows(spec: Any) -> DraftBatch:
    """Rows of several lengths, one with a rejected token."""
    return batch_of(spec, [5, 9, 3], [0, 1, 0])


def runner_of(fused: draftfuse.FusedDraft) -> Any:
    """The only runner of a compiled loop."""
    (runner,) = fused.runners.made.values()
    return runner
