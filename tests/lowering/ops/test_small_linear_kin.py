"""small_linear_pair and small_linear_argmax: what they compute, and what they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from draftfuse.errors import OpArgumentError
from draftfuse.lowering.ops.small_linear_argmax import small_linear_argmax
from draftfuse.lowering.ops.small_linear_pair import small_linear_pair

GAINS = torch.rand(8), torch.rand(8)


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * gain


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pair_is_a_linear_layer_of_both_halves(dtype: torch.dtype) -> None:
    table, second, weight = torch.randn(9, 8), torch.randn(3, 8), torch.randn(5, 16)
    index = torch.tensor([4, 0, 4], dtype=dtype)
    expected = F.linear(torch.cat([norm(table[index.long()], GAINS[0]), norm(second, GAINS[1])], -1), weight)
    torch.testing.assert_close(small_linear_pair(table, index, second, weight, *GAINS, 1e-5), expected)
    out = small_linear_pair(table[index.long()], None, second, weight, *GAINS, 1e-5)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("gain", [None, GAINS[0]])
def test_argmax_is_that_of_the_logits(gain: torch.Tensor | None) -> None:
    x, weight = torch.randn(4, 8), torch.randn(30, 8)
    expected = F.linear(x if gain is None else norm(x, gain), weight).argmax(-1)
    assert torch.equal(small_linear_argmax(x, weight, gain, 1e-5), expected)


def test_opcheck() -> None:
    ops, x, weight = torch.ops.draftfuse, torch.randn(2, 8), torch.randn(6, 16)
    torch.library.opcheck(ops.small_linear_argmax.default, (x, torch.randn(6, 8), GAINS[0], 1e-5))
    index = torch.tensor([1, 0])
    torch.library.opcheck(ops.small_linear_pair.default, (torch.randn(3, 8), index, x, weight, *GAINS, 1e-5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.randn(8)}, "x has 1 dims"),
        ({"index": torch.tensor([0.5, 1.0])}, "index has a wrong dtype"),
        ({"index": torch.tensor([0])}, "the halves differ in M: got 1, expected 2"),
        ({"second": torch.randn(2, 9)}, "the halves differ in H: got 8, expected 9"),
        ({"second": torch.randn(2, 8).half()}, "second and x differ in dtype"),
        ({"weight": torch.randn(5, 15)}, "weight does not fit: got 15, expected 16"),
        ({"gain": torch.rand(7)}, "gain does not fit: got 7, expected 8"),
    ],
)
def test_pair_refuses(change: dict[str, torch.Tensor], words: str) -> None:
    given = {"x": torch.randn(9, 8), "index": torch.tensor([0, 1]), "second": torch.randn(2, 8)}
    given |= {"weight": torch.randn(5, 16), "gain": GAINS[0], "second_gain": GAINS[1], **change}
    with pytest.raises(OpArgumentError, match=words):
        small_linear_pair(**given)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.randn(8), torch.randn(5, 8)), "x has 1 dims"),
        ((torch.randn(2, 8), torch.randn(5, 7)), "x and weight differ in K: got 8, expected 7"),
        ((torch.randn(2, 8), torch.randn(5, 8).half()), "weight and x differ in dtype"),
        ((torch.randn(2, 8), torch.randn(5, 8), torch.rand(7)), "gain does not fit x: got 7, expected 8"),
        ((torch.randn(2, 8), torch.randn(5, 8), torch.rand(1, 8)), "gain has 2 dims"),
        ((torch.randn(2, 8), torch.randn(5, 8), torch.ones(8, dtype=torch.int64)), "gain has a wrong dtype"),
    ],
)
def test_argmax_refuses(args: tuple[torch.Tensor, ...], words: str) -> None:
    with pytest.raises(OpArgumentError, match=words):
        small_linear_argmax(*args)  # type: ignore[arg-type]
