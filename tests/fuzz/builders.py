"""Metadata builders of fuzzed speculators: each keeps step-dependent values in another way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftfuse import CommonMetadata

WIDTH = 6


@dataclass
class Metadata:
    """What attention and features read; ``extra`` is whatever the builder adds, one value a row."""

    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    extra: Tensor
    parts: dict[str, Any] = field(default_factory=dict)


def of_common(common: CommonMetadata, extra: Tensor, **parts: Any) -> Metadata:
    return Metadata(common.seq_lens, common.block_table, common.slot_mapping, extra, parts)


class Aliased:
    """Views of the persistent inputs only."""

    def __init__(self, window: int, rows: int, device: str) -> None:
        self.window, self.rows = window, rows
        self.held = torch.zeros(rows + 1, dtype=torch.int64, device=device)

    def build(self, common: CommonMetadata) -> Metadata:
        return of_common(common, common.seq_lens)


class Window(Aliased):
    """Start and length of a window."""

    def build(self, common: CommonMetadata) -> Metadata:
        start = (common.seq_lens - self.window).clamp(min=0)
        return of_common(common, common.seq_lens - start, start=start)


class Filled(Aliased):
    """A table filled piece by piece."""

    def build(self, common: CommonMetadata) -> Metadata:
        device = common.seq_lens.device
        table = torch.full((common.num_reqs, WIDTH), -1, dtype=torch.int64, device=device)
        table[:, : self.window] = common.seq_lens.unsqueeze(1) - torch.arange(min(self.window, WIDTH), device=device)
        table[:, 0] += 3
        return of_common(common, table.clamp(min=0).sum(1), table=table)


class Ragged(Aliased):
    """Row pointers over window lengths, and the row of each entry."""

    def build(self, common: CommonMetadata) -> Metadata:
        lengths = common.seq_lens.clamp(max=self.window).to(torch.int64)
        pointers = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        entries = torch.arange(common.num_reqs * self.window, device=lengths.device)
        rows = torch.searchsorted(pointers[1:], entries, right=True)
        return of_common(common, pointers[1:] - pointers[:-1] + (rows == 0).sum(), pointers=pointers)


class Held(Window):
    """Refreshed in place."""

    def refresh(self, metadata: Metadata, common: CommonMetadata) -> None:
        metadata.parts["start"].copy_((common.seq_lens - self.window).clamp(min=0))
        metadata.extra.copy_(common.seq_lens - metadata.parts["start"])


class Owned(Aliased):
    """Writes a buffer of its own at every build."""

    def build(self, common: CommonMetadata) -> Metadata:
        mine = self.held[: common.num_reqs]
        mine.copy_(common.seq_lens * 2 % (self.window + 1))
        return of_common(common, mine)


class Chained(Aliased):
    """Adds to what the last step left."""

    def build(self, common: CommonMetadata) -> Metadata:
        mine = self.held[: common.num_reqs]
        mine.copy_((mine + common.seq_lens) % (self.window + 7))
        return of_common(common, mine + 1)


class Nested(Aliased):
    """Host numbers and tensors inside dictionaries and lists."""

    def build(self, common: CommonMetadata) -> Metadata:
        parts = {"scale": self.window, "both": [common.seq_lens + 1, common.seq_lens * self.window]}
        return of_common(common, (parts["both"][1] - parts["both"][0]) * parts["scale"], **parts)


class ByStep(Aliased):
    """Branches on the draft step, which is a Python number."""

    def build(self, common: CommonMetadata) -> Metadata:
        odd = common.draft_step % 2 == 1
        return of_common(common, common.seq_lens // self.window if odd else common.seq_lens % self.window)


class Planned(Window):
    """Needs the host at every step: runs split."""

    refresh_kind = "host-planned"

    def build(self, common: CommonMetadata) -> Metadata:
        metadata = super().build(common)
        longest = int(common.seq_lens.max()) if common.num_reqs else 0
        metadata.extra = metadata.extra + longest
        return metadata


KINDS: dict[str, type[Aliased]] = {
    "aliased": Aliased,
    "window": Window,
    "filled": Filled,
    "ragged": Ragged,
    "held": Held,
    "owned": Owned,
    "chained": Chained,
    "nested": Nested,
    "by_step": ByStep,
    "planned": Planned,
}
