"""An attention backend of your own: one builder in plain PyTorch, no refresh to write.

    python examples/custom_backend.py

Attention sinks: each token attends the first four positions of its sequence and a sliding window. Which slots those are
changes at every draft step; draftfuse derives the operator that refreshes them from ``build``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import draftfuse
from draftfuse.backends import register_backend, sparse_attention

SINKS, WINDOW, HIDDEN, HEAD, PAGE, ROWS, K = 4, 8, 64, 16, 16, 3, 5


@dataclass
class SinkMetadata:
    """Slots of the sinks and of the window, -1 where there is none."""

    slots: Tensor  # i32[T, SINKS + WINDOW]
    lens: Tensor  # i32[T]
    slot_mapping: Tensor


class SinkBuilder:
    """The whole backend: what attention reads, from what the loop holds."""

    def build(self, common: draftfuse.CommonMetadata) -> SinkMetadata:
        """Positions of both parts for each token, through the block table; draft prefill has several tokens a row."""
        tokens = torch.arange(common.num_tokens, dtype=torch.int32, device=common.positions.device)
        row = torch.searchsorted(common.query_start_loc[1:], tokens, right=True).clamp(max=common.num_reqs - 1)
        length = torch.minimum(common.positions + 1, common.seq_lens[row]).unsqueeze(1)
        sinks = torch.arange(SINKS, device=length.device).expand(length.shape[0], SINKS)
        window = (length - WINDOW).clamp(min=SINKS) + torch.arange(WINDOW, device=length.device)
        at = torch.cat([sinks, window], dim=1)
        column = (at // common.page_size).clamp(max=common.block_table.shape[1] - 1)
        slots = common.block_table[row.unsqueeze(1), column] * common.page_size + at % common.page_size
        full = torch.full_like(tokens, SINKS + WINDOW)
        return SinkMetadata(torch.where(at < length, slots, -1).to(torch.int32), full, common.slot_mapping)


register_backend("attention_sinks", builder=SinkBuilder, refreshes=("slots",), kernel="draftfuse::sparse_attention")


class Drafter(draftfuse.Speculator):
    """One attention layer with random weights."""

    def __init__(self, device: str) -> None:
        self.num_speculative_tokens, self.max_num_reqs, self.max_model_len = K, ROWS, 128
        self.inputs = draftfuse.DraftInputs.allocate(ROWS, K, HIDDEN, device=device)
        pages = self.max_model_len // PAGE
        table = torch.arange(ROWS * pages, dtype=torch.int32, device=device).view(ROWS, pages)
        slots = torch.full((self.inputs.positions.shape[0],), -1, dtype=torch.int64, device=device)
        self.attn_groups = [draftfuse.AttentionGroup(SinkBuilder(), table, slots, PAGE, ("attention",))]
        self.cache = torch.randn(2, ROWS * pages, PAGE, 1, HEAD, device=device)
        self.qkv = torch.randn(HIDDEN, 3 * HEAD, device=device) * HIDDEN**-0.5
        self.out = torch.randn(HEAD, HIDDEN, device=device) * HEAD**-0.5
        self.embedding = torch.randn(100, HIDDEN, device=device)
        self.head = torch.randn(HIDDEN, 100, device=device)

    def forward(self, inputs: draftfuse.DraftInputs, metadata: Any) -> tuple[Tensor, Tensor]:
        """Write the key and value, attend sinks and window."""
        mine: SinkMetadata = metadata["attention"]
        x = inputs.hidden_states + self.embedding[inputs.input_ids]
        q, k, v = ((x @ self.qkv)[:, i * HEAD : (i + 1) * HEAD].unsqueeze(1) for i in range(3))
        draftfuse.ops.write_kv(k, v, self.cache[0], self.cache[1], mine.slot_mapping)
        y = sparse_attention(q, self.cache[0], self.cache[1], mine.slots, mine.lens, HEAD**-0.5)
        x = x + y.squeeze(1) @ self.out
        return x, x * 0.5

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """Greedy."""
        return (hidden @ self.head).argmax(-1)


def make() -> Drafter:
    """The drafter, with the same random weights at every call."""
    torch.manual_seed(0)
    return Drafter("cuda" if torch.cuda.is_available() else "cpu")


def verified(device: torch.device) -> draftfuse.DraftBatch:
    """Three requests of 20, 15 and 3 tokens, of which the target has just verified 4, 1 and 3."""
    ends, counts = torch.tensor([20, 15, 3]), torch.tensor([4, 1, 3])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    total = int(counts.sum())
    positions = torch.cat([torch.arange(e - c, e) for e, c in zip(ends.tolist(), counts.tolist(), strict=True)])
    return draftfuse.DraftBatch(
        num_reqs=ROWS,
        num_tokens=total,
        max_seq_len=20,
        hidden_states=torch.randn(total, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device),
        input_ids=(torch.arange(total) * 7).to(device),
        positions=positions.to(device),
        query_start_loc=starts.to(device, torch.int32),
        seq_lens=ends.to(device, torch.int32),
        num_rejected=torch.zeros(ROWS, dtype=torch.int64, device=device),
        last_sampled=torch.tensor([11, 42, 73], device=device),
        temperature=torch.zeros(ROWS, device=device),
        seeds=torch.arange(ROWS, device=device),
        idx_mapping=torch.arange(ROWS, device=device),
    )


def draft(mode: str) -> tuple[list[list[int]], draftfuse.FusedDraft]:
    """Draft prefill and four decode steps."""
    spec = make()
    fused = draftfuse.compile(spec, mode=mode, compiler="none")
    drafts: list[list[int]] = fused.propose(verified(spec.inputs.positions.device)).tolist()
    return drafts, fused


def main() -> None:
    """Fused drafts are those of the loop that rebuilds its metadata at every step."""
    tokens, fused = draft("fused")
    rebuilt, _ = draft("eager")
    print(fused.explain())
    print("drafts", tokens)
    print("equal to rebuilding at every step:", tokens == rebuilt)


if __name__ == "__main__":
    main()
