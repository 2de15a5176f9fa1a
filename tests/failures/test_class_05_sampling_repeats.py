"""Class 5: seed and offset by value repeat at every replay. Seeds are tensors; baked state is an error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import DraftBatch, ops
from draftfuse.errors import UnsafeLoopError
from tests.failures.small import Small, V, both, three_rows

LIBRARY = torch.library.Library("class05", "FRAGMENT")
LIBRARY.define("draw(Tensor logits, int philox_seed, int philox_offset) -> Tensor")
LIBRARY.impl("draw", lambda logits, philox_seed, philox_offset: logits.argmax(-1), "CPU")
LIBRARY.impl("draw", lambda logits, philox_seed, philox_offset: logits.argmax(-1), "Meta")


class Keyed(Small):
    def sample(self, hidden: Tensor, step: int) -> Tensor:
        rows = hidden.shape[0]
        inputs = self.inputs
        return ops.gumbel_sample(
            hidden @ self.embed.t(), inputs.temperature[:rows], inputs.seeds[:rows], inputs.positions[:rows]
        )


class ByValue(Small):
    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return torch.ops.class05.draw(hidden @ self.embed.t(), 7, step)  # here


class Multinomial(Small):
    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return torch.multinomial((hidden @ self.embed.t()).softmax(-1), 1).squeeze(1)


def seeded(seed: int) -> object:
    def make(spec: Small) -> DraftBatch:
        batch = three_rows(spec)
        return replace(batch, temperature=torch.full((3,), 5.0), seeds=torch.arange(3) + seed)

    return make


def test_replays_follow_the_seeds() -> None:
    pair = both(lambda: Keyed(k=3), seeded(0))
    first, again = pair.draft(seeded(0)), pair.draft(seeded(0))
    others = [pair.draft(seeded(seed)) for seed in (10, 20, 30)]
    assert torch.equal(first, again)
    assert any(not torch.equal(first, other) for other in others)
    assert int(first.max()) < V


@pytest.mark.parametrize(("klass", "words"), [(ByValue, "philox_seed=7 by value"), (Multinomial, "multinomial")])
def test_baked_generator_state_is_refused(klass: type[Small], words: str) -> None:
    with pytest.raises(UnsafeLoopError, match=words):
        draftfuse.compile(klass(k=3), compiler="none").decode(2)
