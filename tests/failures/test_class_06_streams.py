"""Class 6: draft noise equal to verifier noise biases acceptance. The two streams are independent."""

from __future__ import annotations

import torch

from draftfuse.ops import gumbel_sample


def drawn(stream: str, rows: int = 4000, vocabulary: int = 16) -> torch.Tensor:
    seeds, positions = torch.arange(rows), torch.full((rows,), 3)
    return gumbel_sample(torch.zeros(rows, vocabulary), torch.ones(rows), seeds, positions, stream=stream)


def test_draft_and_verify_streams_agree_by_chance_only() -> None:
    draft, verify = drawn("draft"), drawn("verify")
    agreement = (draft == verify).float().mean().item()
    assert abs(agreement - 1 / 16) < 5 * (1 / 16 * 15 / 16 / 4000) ** 0.5
    assert torch.equal(draft, drawn("draft"))
