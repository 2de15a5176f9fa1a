"""Class 24: an op reads seq_lens through a closure; a compiler may hoist the advance above it. Also hidden writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import DraftInputs, build, register_effects
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


class HiddenPlain(Hidden):
    """Lengths advance by plain PyTorch: the compiler keeps them as values, and stores them before a reader or last."""

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        rows, inputs = tokens.shape[0], self.inputs
        inputs.input_ids[:rows].copy_(tokens)
        inputs.hidden_states[:rows].copy_(hidden)
        live = inputs.positions[:rows] < inputs.seq_lens[:rows]
        moved = live & (inputs.positions[:rows] + 1 < self.max_model_len)
        inputs.seq_lens[:rows].copy_(torch.where(live & ~moved, 0, inputs.seq_lens[:rows] + moved))
        inputs.positions[:rows].add_(moved)


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


def drafts(make: type[Small], **options: Any) -> dict[str, Tensor]:
    """The drafts, and all that the loop leaves behind: inputs, KV, slots, the buffer of a hidden write."""
    spec = make()
    tokens = draftfuse.compile(spec, **options).propose(batch_of(spec, [5, 9, 3], [0, 1, 0]), copy=True)
    left = {**spec.inputs.named_tensors(), "slots": spec.attn_groups[0].slot_mapping, "seen": BOUND["seen"]}
    return {"tokens": tokens, "key": spec.key, "value": spec.value, **{n: t[:3] for n, t in left.items()}}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


LOOPS: list[tuple[type[Small], Any]] = [(Hidden, SCALED), (HiddenPlain, SCALED), (HiddenWrite, SHIFTING)]


@pytest.mark.parametrize("reads", [None, "declared"])
@pytest.mark.parametrize(("make", "op"), LOOPS)
def test_drafts_and_state_equal_eager(make: type[Small], op: Any, reads: str | None) -> None:
    expected = drafts(make, mode="eager")
    if reads is not None:
        found: Callable[[], Sequence[Tensor]] = lambda: list(BOUND.values())  # noqa: E731
        register_effects(op, reads=found, writes=found if op is SHIFTING else ())
    assert differing(drafts(make, compiler="none"), expected) == []


@pytest.mark.parametrize("make", [Hidden, HiddenPlain])
def test_without_the_protection_a_plain_hidden_read_is_late(make: type[Small], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drafts(make, mode="eager")
    monkeypatch.setattr(build, "hidden_reads", lambda node: ())
    monkeypatch.setattr(build, "explicit_metadata", lambda graph, **options: 0)
    assert {"key", "value"} <= set(differing(drafts(make, compiler="none"), expected))


@pytest.mark.slow
def test_a_whole_graph_through_inductor_equals_eager() -> None:
    expected, found = drafts(HiddenPlain, mode="eager"), drafts(HiddenPlain, emission="whole")
    exact = [name for name, tensor in expected.items() if not tensor.is_floating_point()]
    assert differing({n: found[n] for n in exact}, {n: expected[n] for n in exact}) == []
    assert all(torch.allclose(found[n], tensor, atol=1e-4) for n, tensor in expected.items() if n not in exact)


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
