"""The contract of padded rows: what breaks it is in the audit's report, with the line, the same way on every device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import CommonMetadata, DraftInputs, loop, padding, python_state
from draftfuse.state import pad
from tests.failures.small import Small, WindowBuilder, WindowMetadata, three_rows

SEEN: list[int] = []
FORWARDS: list[int] = []


class Ages(WindowBuilder):
    """Looks something up by block: with a mask, or without."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.ages = how, torch.arange(60)

    def build(self, common: CommonMetadata) -> WindowMetadata:
        made = super().build(common)
        blocks = common.block_table[:, 0]
        if self.how == "masked":
            blocks = torch.where(common.seq_lens > 0, blocks, 0)
        made.start = made.start + getattr(self, "gather" if self.how == "gather" else "index")(blocks)
        return made

    def index(self, blocks: Tensor) -> Tensor:
        return self.ages[blocks]  # by index

    def gather(self, blocks: Tensor) -> Tensor:
        return self.ages.gather(0, blocks.long())  # by gather


def line_of(method: Any, mark: str) -> int:
    lines, start = inspect.getsourcelines(method)
    return start + next(i for i, line in enumerate(lines) if mark in line)


@pytest.mark.parametrize("how", ["index", "gather"])
def test_a_builder_that_indexes_with_a_padded_row_is_named(how: str) -> None:
    fused = draftfuse.compile(Small(k=2, builder=Ages(how)), compiler="none")
    before = {p: t.clone() for p, t in python_state.of_speculator(fused.spec, wide=False).tensors.items()}
    report = fused.audit(three_rows(fused.spec))
    after = python_state.of_speculator(fused.spec, wide=False).tensors
    assert all(torch.equal(before[p], after[p]) for p in before)
    first = report.first
    assert first is not None
    assert (first.step, first.phase, first.tensor) == (1, "padding", "block_table of padded rows")
    assert (first.request, first.got) == (3, padding.HUGE)
    assert first.source is not None
    assert (first.source.file, first.source.line) == (__file__, line_of(getattr(Ages, how), f"by {how}"))
    assert "a padded row (seq_len 0) has any block table" in report.notes[0]


def test_a_builder_that_masks_padded_rows_has_no_divergence() -> None:
    fused = draftfuse.compile(Small(k=2, builder=Ages("masked")), compiler="none")
    report = fused.audit(three_rows(fused.spec))
    assert report.ok, str(report)
    assert report.rounds == 3


@torch.library.custom_op("draftfuse_test::first_block", mutates_args=())
def first_block(table: Tensor, slots: Tensor) -> Tensor:
    SEEN.append(int(table[-1, 0]))
    return table[:, 0] + 0 * slots


@first_block.register_fake
def _(table: Tensor, slots: Tensor) -> Tensor:
    return table.new_empty(table.shape[0])


class Opaque(Small):
    """An operator of its own on the block table, then on what was computed from it."""

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        FORWARDS.append(1)
        table = metadata["draft"].block_table
        first_block(table, inputs.seq_lens)
        first_block(table, table[:, 0] * 4)
        FORWARDS.append(2)
        return super().forward(inputs, metadata)


def test_other_operators_see_a_block_and_never_what_was_computed_from_no_block() -> None:
    SEEN.clear()
    FORWARDS.clear()
    spec = Opaque(k=2)
    spec.inputs.seq_lens[:3], spec.inputs.positions[:3] = 5, 4
    tables = [g.block_table.clone() for g in spec.attn_groups]
    with torch.no_grad():
        assert padding.check(spec, 3, 4) is None
    assert SEEN == [0]
    assert FORWARDS == [1]  # ended before the second call
    assert all(torch.equal(t, g.block_table) for t, g in zip(tables, spec.attn_groups, strict=True))


def test_the_check_leaves_everything_as_it_was() -> None:
    spec = Small(k=3)
    spec.inputs.seq_lens[:3], spec.inputs.positions[:3] = 5, 4
    pad(spec.inputs, 3, 4)
    before = {p: t.clone() for p, t in python_state.of_speculator(spec, wide=False).tensors.items()}
    with torch.no_grad():
        assert padding.check(spec, 3, 4) is None
    after = python_state.of_speculator(spec, wide=False).tensors
    assert [p for p in before if not torch.equal(before[p], after[p])] == []


@pytest.mark.parametrize("page", [1, 2, 4, 16, 64, 256])
def test_no_page_size_makes_a_block_of_the_poison(page: int) -> None:
    table = torch.full((1,), padding.HUGE, dtype=torch.int32)
    assert int((table * page).abs()) >= padding.LARGE


def test_padded_rows_are_as_the_contract_says() -> None:
    spec = Small(k=2)
    for tensor in spec.inputs.named_tensors().values():
        tensor.fill_(9)
    spec.inputs.query_start_loc[:3] = torch.arange(3)
    pad(spec.inputs, 2, 4)
    loop.build_metadata(spec, spec.inputs.view(4, 4), 1, {})
    inputs = spec.inputs
    assert [inputs.seq_lens[2:4].tolist(), inputs.positions[2:4].tolist()] == [[0, 0], [0, 0]]
    assert [inputs.idx_mapping[2:4].tolist(), spec.attn_groups[0].slot_mapping[2:4].tolist()] == [[-1, -1], [-1, -1]]
    assert inputs.query_start_loc[:5].tolist() == [0, 1, 2, 3, 4]
