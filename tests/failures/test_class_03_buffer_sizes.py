"""Class 3: buffers sized by the context, not by context + K. An advance that runs past the limit is found at build."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse.errors import UnsafeLoopError
from draftfuse.journal import Journal
from draftfuse.lint import lint
from tests.failures.small import Small


class Unclamped(Small):
    """Moves every row on, whatever the limit."""

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        rows = tokens.shape[0]
        self.inputs.input_ids[:rows].copy_(tokens)
        self.inputs.hidden_states[:rows].copy_(hidden)
        self.inputs.positions[:rows].add_(1)
        self.inputs.seq_lens[:rows].add_(1)


class Roomy(Unclamped):
    """The same with a table that has room for K more positions."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.cat([self.place, self.place[: self.num_speculative_tokens]])


def test_a_table_without_room_for_the_draft_steps_is_refused() -> None:
    with pytest.raises(UnsafeLoopError, match="a table of 32 rows is read at positions up to 32"):
        draftfuse.compile(Unclamped(k=3), compiler="none").decode(2)


def test_a_table_with_room_is_not() -> None:
    assert not [f for f in lint(Roomy(), k=3) if f.name == "short-table"]


def test_an_index_past_its_table_is_named_before_it_is_used() -> None:
    table = torch.zeros(4)
    with pytest.raises(UnsafeLoopError, match="an index leaves its table") as caught, Journal():
        table[torch.tensor([1, 4])]
    assert "table[torch.tensor([1, 4])]" in str(caught.value)
