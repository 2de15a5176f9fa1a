"""gumbel_sample: a frozen function of seed, position and stream that draws from the softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftfuse.errors import OpArgumentError
from draftfuse.ops import gumbel_sample

LOGITS = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, float("-inf"), 0.0, 1.5])


def rows(count: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = LOGITS.expand(count, -1)
    return logits, torch.full((count,), temperature), torch.full((count,), 42), torch.arange(count)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vary", ["positions", "seeds"])
def test_draws_from_the_softmax(temperature: float, vary: str) -> None:
    logits, temperatures, seeds, positions = rows(20000, temperature)
    if vary == "seeds":
        seeds, positions = positions, seeds
    counts = torch.bincount(gumbel_sample(logits, temperatures, seeds, positions), minlength=8).double()
    assert counts[5] == 0
    possible = torch.arange(8) != 5
    expected = (LOGITS / temperature).softmax(0).double() * 20000
    assert chi_square(counts[possible], expected[possible]) < 27.9  # 6 degrees of freedom, p = 1e-4


def test_streams_are_independent() -> None:
    arguments = rows(20000)
    draft, verify = (gumbel_sample(*arguments, stream) for stream in ("draft", "verify"))
    joint = torch.bincount(draft * 8 + verify, minlength=64).double().view(8, 8)
    possible = torch.arange(8) != 5
    joint = joint[possible][:, possible]
    expected = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True) / joint.sum()
    assert chi_square(joint, expected) < 76.4  # 36 degrees of freedom, p = 1e-4


def test_noise_has_the_gumbel_moments_and_no_infinity() -> None:
    from draftfuse.lowering.ops.gumbel_sample import gumbel_noise

    noise = gumbel_noise(torch.arange(32), torch.arange(32), 10000)
    assert bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(1.6449, abs=0.03)
    assert float(torch.corrcoef(noise).triu(1).abs().max()) < 0.05


def test_noise_is_frozen() -> None:
    """The formula may not change silently: a seed must give the same text in the next release."""
    from draftfuse.lowering.ops.gumbel_sample import gumbel_noise

    noise = gumbel_noise(torch.tensor([0, 1, -1, 2**40 + 5]), torch.tensor([0, 7, 7, 2**33]), 3)
    expected = [
        [0.265541792, -0.813846648, 1.515285254],
        [-0.737169504, 1.528149247, -0.437091589],
        [-0.840526700, -0.064227946, 4.175018311],
        [0.880236745, 1.073946357, 1.252023339],
    ]
    torch.testing.assert_close(noise, torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_every_part_of_the_key_counts() -> None:
    from draftfuse.lowering.ops.gumbel_sample import gumbel_noise

    keys = [(0, 0, 0), (1, 0, 0), (1 << 32, 0, 0), (0, 1, 0), (0, 1 << 32, 0), (0, 0, 1), (1, 1, 0), (-1, 0, 0)]
    noise = [gumbel_noise(torch.tensor([s]), torch.tensor([p]), 64, salt).squeeze(0) for s, p, salt in keys]
    noise += [gumbel_noise(torch.tensor([0]), torch.tensor([0]), 64, stream)[0] for stream in ("draft", "verify")]
    for i, one in enumerate(noise):
        assert all(not torch.isin(one, other).any() for other in noise[:i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_reference_and_is_greedy_at_zero(dtype: torch.dtype) -> None:
    from draftfuse.lowering.ops.gumbel_sample import reference

    logits = torch.randn(6, 50).to(dtype)
    temperature = torch.tensor([0.0, 0.5, 1.0, 0.0, 2.0, 0.01])
    arguments = logits, temperature, torch.arange(6), torch.arange(6) * 5
    tokens = gumbel_sample(*arguments)
    assert torch.equal(tokens, reference(*arguments))
    assert torch.equal(tokens[[0, 3]], logits[[0, 3]].argmax(1))
    assert tokens.dtype == torch.int64


def test_a_row_does_not_depend_on_its_company() -> None:
    logits, temperature, seeds, positions = rows(16)
    together = gumbel_sample(logits, temperature, seeds, positions)
    alone = [gumbel_sample(logits[i : i + 1], temperature[:1], seeds[:1], positions[i : i + 1]) for i in range(16)]
    assert torch.equal(together, torch.cat(alone))


def test_traces_to_the_same_tokens() -> None:
    compiled = torch.compile(gumbel_sample, backend="eager", fullgraph=True, dynamic=True)
    arguments = rows(64, 0.7)
    for stream in ("draft", "verify", 7):
        assert torch.equal(compiled(*arguments, stream), gumbel_sample(*arguments, stream))


@pytest.mark.parametrize(
    ("index", "value", "what", "came", "expected"),
    [
        (0, LOGITS, "logits has 1 dims", (8,), "[R, V]"),
        (0, LOGITS.long()[None], "logits has a wrong dtype", torch.int64, "a floating dtype"),
        (1, torch.ones(1).double(), "temperature has a wrong dtype", torch.float64, "torch.float32"),
        (2, torch.ones(1).int(), "seeds has a wrong dtype", torch.int32, "torch.int64"),
        (3, torch.ones(2).long(), "positions has other rows than logits", 2, 1),
        (4, "target", "unknown stream", "'target'", "one of ['draft', 'verify'] or an integer salt"),
    ],
)
def test_errors(index: int, value: Any, what: str, came: object, expected: object) -> None:
    arguments: list[Any] = [*rows(1), "draft"]
    arguments[index] = value
    with pytest.raises(OpArgumentError) as caught:
        gumbel_sample(*arguments)
    assert caught.value.what == f"draftfuse.ops.gumbel_sample: {what}"
    assert (caught.value.came, caught.value.expected) == (came, expected)
