"""Class 13: weights or KV re-mapped under a captured graph. The next call raises and says how to capture again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse.errors import StaleAddressError
from tests.failures.small import Small, batch_of, both, three_rows


def test_a_replaced_kv_pool_is_named() -> None:
    pair = both(lambda: Small(k=2), three_rows)
    spec = pair.fused.spec
    spec.key = spec.key.clone()
    with pytest.raises(StaleAddressError, match=r"spec.*key.*recapture"):
        pair.fused.propose(three_rows(spec))
    pair.fused.recapture()
    pair.draft(three_rows)


def test_a_moved_storage_is_found() -> None:
    pair = both(lambda: Small(k=2), three_rows)
    spec = pair.fused.spec
    with torch.no_grad():
        spec.embed.set_(spec.embed.clone())
    with pytest.raises(StaleAddressError, match="recapture"):
        pair.fused.propose(three_rows(spec))


class TwoOfOne(Small):
    """Two weights that lie in one memory."""

    def __init__(self) -> None:
        super().__init__(k=2)
        both_weights = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
        self.first, self.second = both_weights[:8], both_weights[8:]

    def enter(self, inputs: draftfuse.DraftInputs) -> Tensor:
        return torch.tanh(super().enter(inputs) @ self.first @ self.second)


def point_elsewhere(spec: TwoOfOne) -> None:
    spec.first.data = torch.randn(8, 8)


def transpose(spec: TwoOfOne) -> None:
    spec.first.t_()


def transpose_data(spec: TwoOfOne) -> None:
    spec.second.data = spec.second.data.t()


def shift(spec: TwoOfOne) -> None:
    spec.first.as_strided_((8, 8), (8, 1), 64)


@pytest.mark.parametrize("mode", ["auto", "split"])
@pytest.mark.parametrize("change", [point_elsewhere, transpose, transpose_data, shift])
def test_a_tensor_that_lies_otherwise_is_found(change: Callable[[TwoOfOne], None], mode: str) -> None:
    pair = both(TwoOfOne, three_rows, mode=mode, request_capacities=[3])
    change(pair.fused.spec)
    with pytest.raises(StaleAddressError, match="recapture"):
        pair.fused.propose(three_rows(pair.fused.spec))


@pytest.mark.parametrize(("mode", "way"), [("auto", "ragged"), ("split", "ragged"), ("split", "moved")])
def test_nothing_is_written_before_stale_memory_is_refused(mode: str, way: str) -> None:
    """The prefill of a ragged batch runs eager: on new weights, before decode steps on old ones."""
    pair = both(lambda: Small(k=2), three_rows, mode=mode, request_capacities=[4])
    spec = pair.fused.spec
    before = [t.clone() for t in (*spec.inputs.named_tensors().values(), spec.key, spec.value)]
    if way == "moved":
        spec.embed.set_(spec.embed.flip(0).clone())
    else:
        spec.embed = spec.embed.flip(0).clone()
    for call in (lambda: pair.fused.propose(batch_of(spec, [7, 2])), lambda: pair.fused.decode(3)):
        with pytest.raises(StaleAddressError, match="recapture"):
            call()
        now = (*spec.inputs.named_tensors().values(), spec.key, spec.value)
        assert all(map(torch.equal, before, now))


class Head:
    """An object of the speculator with a tensor."""

    def __init__(self, seed: int) -> None:
        self.weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))


class Nested(Small):
    """Reads a tensor of an object, and one that stands in a list twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head(3)
        self.shifts = [torch.ones(8)] * 4

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(hidden @ self.head.weight + self.shifts[step], step)


@pytest.mark.parametrize(
    "replace", [lambda s: setattr(s, "head", Head(4)), lambda s: s.shifts.__setitem__(3, -s.embed[0])]
)
def test_an_owner_or_a_second_place_that_is_replaced_is_refused(replace: Callable[[Nested], None]) -> None:
    fused = draftfuse.compile(Nested(), compiler="none")
    fused.propose(three_rows(fused.spec))
    replace(fused.spec)
    with pytest.raises(StaleAddressError, match="was replaced by another object"):
        fused.propose(three_rows(fused.spec))
