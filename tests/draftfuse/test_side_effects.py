"""A build leaves what the loop writes as it was, wherever it stands; Python state is followed from part to part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import DraftBatch, DraftInputs, side_effects
from draftfuse.errors import UnsafeLoopError
from draftfuse.state import Saved
from tests.failures.small import Small, batch_of, both, three_rows

K = 4


class Recurrent(Small):
    """A state that each call moves on, and that the tokens depend on."""

    def __init__(self, k: int = K) -> None:
        super().__init__(k=k, max_model_len=48)
        self.state = self.made()

    def made(self) -> Tensor:
        return torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        self.state.add_(1)
        return super().sample(torch.sin(hidden * (1 + self.state[:1] * 0.3)), step)


class Large(Recurrent):
    def made(self) -> Tensor:
        return torch.zeros(5_000_000)


@pytest.mark.parametrize("mode", ["auto", "split"])
@pytest.mark.parametrize(("klass", "k"), [(Recurrent, K), (Large, K), (Recurrent, 6)])
def test_a_build_moves_no_state_of_the_loop(klass: type[Recurrent], k: int, mode: str) -> None:
    pair = both(lambda: klass(k), three_rows, mode=mode, request_capacities=[2, 4])
    pair.draft(three_rows)
    pair.draft(lambda spec: batch_of(spec, [5], [0]))  # builds for another capacity
    assert float(pair.fused.spec.state[0]) == float(pair.eager.spec.state[0]) == 3 * k


def test_only_what_is_kept_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saved, "add", lambda self, tensors: None)
    fused = draftfuse.compile(Recurrent(), compiler="none")
    fused.capture(progress=False)
    assert float(fused.spec.state[0]) > 0


def uniform(spec: Any) -> DraftBatch:
    batch = batch_of(spec, [9, 12, 7, 6])
    batch.max_query_len = K + 1
    return batch


class PrefillSets(Small):
    """Draft prefill leaves a number that the decode steps compute with."""

    scale = 1.0

    def prefill(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        self.scale = 3.0
        return self.forward(inputs, metadata)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(torch.sin(hidden * 5 * (self.scale if step else 1.0)), step)


@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize("batch", [uniform, three_rows])
def test_decode_steps_see_what_draft_prefill_has_set(one_launch: bool, batch: Any) -> None:
    pair = both(PrefillSets, batch, one_launch=one_launch)
    pair.draft(batch)


class DecodeSets(Small):
    """The decode steps leave a number that the next draft prefill computes with."""

    scale = 1.0

    def prefill(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        hidden, feedback = self.forward(inputs, metadata)
        return torch.sin(hidden * 5 * self.scale), feedback

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        if step:
            self.scale = 3.0
        return super().sample(hidden, step)


@pytest.mark.parametrize("mode", ["auto", "split"])
def test_what_decode_steps_leave_to_draft_prefill_is_refused(mode: str) -> None:
    with pytest.raises(UnsafeLoopError, match="computes with what it changed") as raised:
        draftfuse.compile(DecodeSets(), mode=mode, compiler="none").propose(uniform(Small()))
    assert raised.value.source is not None
    assert raised.value.source.text == "self.scale = 3.0"


class Threshold(Small):
    """Does something else after many calls: no run of a few shows it."""

    calls = 0

    def enter(self, inputs: DraftInputs) -> Tensor:
        self.calls += 1
        x = super().enter(inputs)
        return -x if self.calls > 1000 else x


def test_a_count_that_is_asked_is_refused() -> None:
    with pytest.raises(UnsafeLoopError, match="computes with what it changed"):
        draftfuse.compile(Threshold(), compiler="none").propose(three_rows(Small()))


class Counted(Small):
    """Counts its calls, in draft prefill too, and nobody asks."""

    calls = 0

    def enter(self, inputs: DraftInputs) -> Tensor:
        self.calls += 1
        return super().enter(inputs)


def test_a_count_that_nobody_asks_is_no_guard() -> None:
    pair = both(Counted, three_rows)
    for _ in range(3):
        pair.draft(three_rows)
    assert pair.fused.report.fallbacks == []
    assert len(pair.fused.report.builds) == 1
    (found,) = pair.fused.report.findings
    assert found.is_counted
    assert not any("calls" in path for path in side_effects.paths_of_counts([]))
    assert side_effects.paths_of_counts([found]) == {"spec.calls", "'calls' in spec.__dict__"}
