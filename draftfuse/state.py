"""Persistent state between calls: loading a batch, padding the tail, dummy rows, saving and restoring.

The padding contract, per buffer, for rows at and past the live ones: ``seq_lens`` 0, ``positions`` 0, ``input_ids`` 0,
``idx_mapping`` -1, ``temperature`` 0, slots -1; ``query_start_loc`` goes on counting one token a row in decode and
stays at the last token in prefill. Nothing that a padded row holds reaches a live one: other buffers, and the padded
rows of a block table, hold anything (:mod:`draftfuse.padding` checks a loop against that).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from draftfuse import python_state
from draftfuse.lowering.ops.load_rows import READ, WRITTEN, load_rows
from draftfuse.speculator import DraftBatch, DraftInputs


def load_batch(spec: Any, batch: DraftBatch, capacity: int, query_len: int) -> None:
    """Copy a batch into the persistent inputs as draft step 0 reads them, and make rows behind it dead.

    Token ids shift left by one within each request (the draft predicts what follows the token *after* a hidden
    state), and the newest verified token takes the place behind the last accepted one.

    Args:
        capacity: padded rows of a uniform batch; ``batch.num_reqs`` for a ragged one, which is padded after prefill.
        query_len: tokens of each row of a uniform batch.
    """
    inputs, rows, tokens = spec.inputs, batch.num_reqs, batch.num_tokens
    read = [getattr(batch, name) for name in READ] if rows else []
    load_rows(written_by_load(inputs), read, rows, tokens, capacity, query_len)


def written_by_load(inputs: DraftInputs) -> list[Tensor]:
    """The buffers that a load or a padding writes, in the operator's order."""
    return [getattr(inputs, name) for name in WRITTEN]


def pad(inputs: DraftInputs, num_reqs: int, capacity: int, query_len: int = 1) -> None:
    """Make rows ``num_reqs..capacity`` dead, with ``query_len`` tokens each.

    One token a row before decode steps; K+1 before the prefill of a uniform batch.
    """
    if num_reqs < capacity:
        load_rows(written_by_load(inputs), [], num_reqs, 0, capacity, query_len)


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


def tensors_at_risk(spec: Any) -> list[Tensor]:
    """What a run of the loop may write, but for KV pools and :func:`python_state.other_tensors`; once each."""
    return list({id(t): t for t in (*persistent_tensors(spec), *python_state.small_tensors(spec))}.values())


class Saved:
    """Holds copies of tensors and puts them back."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Copies of more tensors, as they are now."""
        self.pairs += [(t, t.detach().clone()) for t in tensors]

    def restore(self) -> None:
        """Write every copy back in place."""
        with torch.no_grad():
            for tensor, copy in self.pairs:
                tensor.copy_(copy)
