"""Class 24: an op reads seq_lens through a closure; a compiler may hoist the advance above it. Also hidden writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import DraftInputs, register_effects
from draftfuse.lint import lint
from draftfuse.lowering import effects
from tests.failures.small import Small, batch_of

LIBRARY = torch.library.Library("class24", "FRAGMENT")
BOUND: dict[str, Tensor] = {}


def define(name: str, run: Callable[[Tensor], Tensor]) -> Any:
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, run, "CPU")
    LIBRARY.impl(name, torch.empty_like, "Meta")
    return getattr(torch.ops.class24, name).default


def scaled(x: Tensor) -> Tensor:
    return x * BOUND["seq_lens"][: x.shape[0]].unsqueeze(1)


def shifting(x: Tensor) -> Tensor:
    """Reads positions and moves a buffer of the speculator on."""
    BOUND["seen"][: x.shape[0]].add_(1)
    return x + BOUND["seen"][: x.shape[0]].unsqueeze(1)


SCALED, SHIFTING = define("scaled", scaled), define("shifting", shifting)


class Hidden(Small):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(self.max_num_reqs + 1)
        BOUND.update(seq_lens=self.inputs.seq_lens, seen=self.seen)

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        return SCALED(x) if inputs.positions.shape[0] == inputs.seq_lens.shape[0] else x


class HiddenWrite(Hidden):
    def enter(self, inputs: DraftInputs) -> Tensor:
        x, rows = Small.enter(self, inputs), inputs.seq_lens.shape[0]
        if x.shape[0] != rows:
            return x
        self.seen[:rows].mul_(0.5)
        return SHIFTING(x) * self.seen[:rows].unsqueeze(1)


@pytest.fixture(autouse=True)
def undeclared() -> Any:
    yield
    effects._EFFECTS.pop(SCALED, None)
    effects._EFFECTS.pop(SHIFTING, None)


def drafts(make: type[Small], **options: Any) -> Tensor:
    spec = make()
    return draftfuse.compile(spec, **options).propose(batch_of(spec, [5, 9, 3], [0, 1, 0]), copy=True)


@pytest.mark.parametrize("reads", [None, "declared"])
@pytest.mark.parametrize(("make", "op"), [(Hidden, SCALED), (HiddenWrite, SHIFTING)])
def test_drafts_equal_eager(make: type[Small], op: Any, reads: str | None) -> None:
    expected = drafts(make, mode="eager")
    if reads is not None:
        found: Callable[[], Sequence[Tensor]] = lambda: list(BOUND.values())  # noqa: E731
        register_effects(op, reads=found, writes=found if op is SHIFTING else ())
    assert torch.equal(drafts(make, compiler="none"), expected)


@pytest.mark.slow
def test_a_whole_graph_through_inductor_equals_eager() -> None:
    expected = drafts(Hidden, mode="eager")
    assert torch.equal(drafts(Hidden, emission="whole"), expected)


def test_an_undeclared_hidden_read_is_found_by_running() -> None:
    found = [f for f in lint(Hidden(), k=2) if f.name == "hidden-read"]
    assert [f.severity for f in found] == ["warning"]
    assert "spec.inputs.seq_lens" in found[0].text
    assert "return SCALED(x)" in str(found[0])


def test_a_wrong_declaration_is_an_error() -> None:
    register_effects(SCALED, reads=())
    found = [f for f in lint(Hidden(), k=2) if f.name == "hidden-read"]
    assert [f.severity for f in found] == ["error"]
    register_effects(SCALED, reads=lambda: [BOUND["seq_lens"]])
    assert not [f for f in lint(Hidden(), k=2) if f.name == "hidden-read"]
