"""Class 15: counters in the loop crash or freeze. A Python counter is reported; a tensor counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import DraftInputs
from draftfuse.errors import UnsafeLoopError
from tests.failures.small import Small, both, three_rows


class Counting(Small):
    def __init__(self) -> None:
        super().__init__(k=3)
        self.calls = 0
        self.load = torch.zeros(4, dtype=torch.int64)

    def enter(self, inputs: DraftInputs) -> Tensor:
        self.calls += 1
        self.load[:1].add_(1)
        return super().enter(inputs)


def test_a_python_counter_is_reported_and_a_tensor_counter_counts() -> None:
    pair = both(Counting, three_rows)
    pair.draft(three_rows)
    found = pair.fused.report.findings
    assert [(f.severity, f.name) for f in found] == [("warning", "side-effect")]
    assert "self.calls += 1" in str(found[0])
    assert torch.equal(pair.fused.spec.load, pair.eager.spec.load)
    assert int(pair.fused.spec.load[0]) == 2 * 3


class Reads(Small):
    """Counts its calls in Python, from a step on, and computes with the count."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.calls, self.first = 0, first

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        if step >= self.first:
            self.calls += 1
        return (super().sample(hidden, step) + self.calls) % 17


@pytest.mark.parametrize("first", [0, 3])
def test_a_loop_that_reads_what_it_counts_in_python_is_refused(first: int) -> None:
    with pytest.raises(UnsafeLoopError, match="computes with what it changed") as caught:
        draftfuse.compile(Reads(first), compiler="none").propose(three_rows(Reads(first)))
    assert caught.value.source is not None
    assert caught.value.source.text == "self.calls += 1"


class Hooks(Small):
    """A hook that writes a tensor."""

    def __init__(self, ready: bool) -> None:
        super().__init__()
        self.count, self.ready = torch.zeros(1), ready

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        self.ready = True
        return super().sample(hidden, step)

    def on_multi_step_decode_end(self) -> None:
        if self.ready:
            self.count.add_(1)


def test_hooks_that_compute_with_tensors_are_refused() -> None:
    with pytest.raises(UnsafeLoopError, match="a lifecycle hook computes with tensors"):
        draftfuse.compile(Hooks(ready=True), compiler="none").decode(2)


def test_a_hook_that_waits_for_the_loop_to_change_python_state_is_reported() -> None:
    fused = draftfuse.compile(Hooks(ready=False), compiler="none")
    fused.decode(2)
    (finding,) = fused.report.findings
    assert (finding.name, finding.source.text) == ("side-effect", "self.ready = True")
