"""A stand-alone draft model with random weights drafts for a ragged batch that is written out by hand.

    python examples/draft_model.py --compiler inductor

The speculator itself is draftfuse/reference/draft_model.py. R = 2 requests, T = 5 tokens, H = 32 hidden.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

import draftfuse
from draftfuse.reference import DraftModelSpeculator, Limits, small_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make() -> DraftModelSpeculator:
    """The speculator, with the same random weights at every call."""
    limits = Limits(num_speculative_tokens=3, max_num_reqs=2, max_model_len=64)
    return DraftModelSpeculator.random(small_config(num_layers=2), limits, device=DEVICE)


def make_batch(device: str) -> draftfuse.DraftBatch:
    """What an engine knows after a step: request 0 verified 3 tokens and rejected the last, request 1 verified 2."""
    return draftfuse.DraftBatch(
        num_reqs=2,
        num_tokens=5,
        max_seq_len=12,
        hidden_states=torch.zeros(5, 32, device=device),  # of the target; a draft model does not read them
        input_ids=torch.tensor([10, 11, 12, 20, 21], device=device),
        positions=torch.tensor([9, 10, 11, 0, 1], device=device),
        query_start_loc=torch.tensor([0, 3, 5], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([12, 2], dtype=torch.int32, device=device),
        num_rejected=torch.tensor([1, 0], device=device),
        last_sampled=torch.tensor([42, 43], device=device),
        temperature=torch.tensor([0.0, 0.8], device=device),
        seeds=torch.tensor([0, 1], device=device),
        idx_mapping=torch.tensor([0, 1], device=device),
    )


def main(compiler: Annotated[str, typer.Option(help="inductor or none")] = "none") -> None:
    """Draft in one compiled callable and step by step, and compare."""
    for mode in ("eager", "fused"):
        fused = draftfuse.compile(make(), mode=mode, compiler=compiler)
        print(mode, fused.propose(make_batch(DEVICE)).tolist())
    print(fused.explain())


if __name__ == "__main__":
    typer.run(main)
