"""Persistent state between calls: loading a batch, padding the tail, dummy rows, saving and restoring.

The padding contract, per buffer, for rows at and past the live ones: ``seq_lens`` 0, ``positions`` 0, ``input_ids`` 0,
``idx_mapping`` -1, ``temperature`` 0, slots -1; ``query_start_loc`` goes on counting one token a row in decode and
stays at the last token in prefill. Nothing that a padded row holds reaches a live one, so other buffers may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from draftfuse.speculator import DraftBatch, DraftInputs


def load_batch(spec: Any, batch: DraftBatch) -> None:
    """Copy a batch into the persistent inputs, as draft step 0 reads them.

    Token ids shift left by one within each request (the draft predicts what follows the token *after* a hidden
    state), and the newest verified token takes the place behind the last accepted one.
    """
    inputs, rows, tokens = spec.inputs, batch.num_reqs, batch.num_tokens
    inputs.query_start_loc[: rows + 1].copy_(batch.query_start_loc[: rows + 1])
    last = inputs.query_start_loc[1 : rows + 1].to(torch.int64) - 1 - batch.num_rejected[:rows]
    inputs.last_token_indices[:rows].copy_(last)
    inputs.input_ids[: tokens - 1].copy_(batch.input_ids[1:tokens])
    inputs.input_ids[:tokens].index_copy_(0, last, batch.last_sampled[:rows].to(torch.int32))
    inputs.positions[:tokens].copy_(batch.positions[:tokens])
    inputs.hidden_states[:tokens].copy_(batch.hidden_states[:tokens])
    for name in ("seq_lens", "idx_mapping", "temperature", "seeds"):
        getattr(inputs, name)[:rows].copy_(getattr(batch, name)[:rows])


def pad(inputs: DraftInputs, num_reqs: int, capacity: int, query_len: int = 1) -> None:
    """Make rows ``num_reqs..capacity`` dead, with ``query_len`` tokens each.

    One token a row before decode steps; K+1 before the prefill of a uniform batch.
    """
    if num_reqs >= capacity:
        return
    rows, tokens = slice(num_reqs, capacity), slice(num_reqs * query_len, capacity * query_len)
    torch._foreach_zero_([inputs.seq_lens[rows], inputs.input_ids[tokens]])
    torch._foreach_zero_([inputs.positions[tokens], inputs.seeds[rows]])
    inputs.temperature[rows].zero_()
    inputs.idx_mapping[rows].fill_(-1)
    ends = torch.arange(num_reqs + 1, capacity + 1, device=inputs.query_start_loc.device)
    inputs.query_start_loc[num_reqs + 1 : capacity + 1].copy_(ends * query_len)
    inputs.last_token_indices[rows].copy_(ends * query_len - 1)


def fill_dummy(spec: Any, capacity: int, query_len: int = 1) -> None:
    """Fresh dummy inputs: every row dead, so that a warm-up or capture writes no KV and reads no block table."""
    inputs = spec.inputs
    for tensor in inputs.named_tensors().values():
        tensor.zero_()
    pad(inputs, 0, capacity, query_len)
    for group in spec.attn_groups:
        group.slot_mapping.fill_(-1)


def persistent_tensors(spec: Any) -> list[Tensor]:
    """What a dummy run overwrites: the inputs and the slot mappings."""
    return [*spec.inputs.named_tensors().values(), *(g.slot_mapping for g in spec.attn_groups)]


class Saved:
    """Holds copies of tensors and puts them back."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.pairs = [(t, t.clone()) for t in tensors]

    def restore(self) -> None:
        """Write every copy back in place."""
        for tensor, copy in self.pairs:
            tensor.copy_(copy)
