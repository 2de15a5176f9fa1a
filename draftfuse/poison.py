"""Values that no right loop reads: NaN and huge integers in padded rows, behind the rows, and where outputs go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from draftfuse.speculator import DraftInputs

HUGE = 1 << 30
UNWRITTEN = -7777


def fill(tensor: Tensor) -> None:
    """Fill with NaN, or with a huge integer."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else HUGE)


def buffers(spec: Any, live: int, capacity: int, k: int) -> None:
    """Poison tails, hidden states of padded rows, and everything that the loop has to write."""
    inputs = spec.inputs
    for name, tensor in inputs.named_tensors().items():
        fill(tensor[capacity + (name == "query_start_loc") :])
    fill(inputs.hidden_states[live:capacity])
    inputs.draft_tokens[:capacity, 1:k].fill_(UNWRITTEN)
    if inputs.draft_logits is not None:
        fill(inputs.draft_logits[:capacity, 1:k])
    for group in spec.attn_groups:
        fill(group.slot_mapping)


def memory(chunks: Iterable[Tensor]) -> None:
    """Poison the rows of generated refreshes."""
    for chunk in chunks:
        chunk.fill_(0xAB)


def unchanged(inputs: DraftInputs, num_reqs: int) -> int:
    """The batch as it is."""
    return num_reqs


def shifted(inputs: DraftInputs, num_reqs: int) -> int:
    """Every row one token shorter where it can be, with the ids and hidden states of another row."""
    rows = slice(0, num_reqs)
    shorter = (inputs.positions[rows] > 0) & (inputs.seq_lens[rows] > 1)
    inputs.positions[rows].sub_(shorter.to(torch.int64))
    inputs.seq_lens[rows].sub_(shorter.to(torch.int32))
    for tensor in (inputs.input_ids, inputs.hidden_states, inputs.seeds):
        tensor[rows].copy_(tensor[rows].flip(0).clone())
    return num_reqs


def one_row_less(inputs: DraftInputs, num_reqs: int) -> int:
    """The last row gone."""
    return num_reqs - 1
