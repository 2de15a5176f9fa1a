"""A position-static drafter: it reads the target's KV cache, writes none, and its metadata is built once.

    python examples/static_drafter.py --compiler inductor

The speculator itself is draftfuse/reference/static_drafter.py. Weights are random, so hardly a draft is accepted; the
text is the target's all the same.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

import draftfuse
from draftfuse.reference import Engine, Limits, StaticDrafter, Target, small_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG, LIMITS = small_config(), Limits(num_speculative_tokens=3, max_num_reqs=2, max_model_len=64)


def make(target: Target | None = None) -> StaticDrafter:
    """The drafter of ``target``, or of a new one: its layer reads the cache of the target's last layer."""
    target = target or Target.random(CONFIG, LIMITS, device=DEVICE)
    return StaticDrafter.random(CONFIG, target.caches[-1:], LIMITS, device=DEVICE)


def main(compiler: Annotated[str, typer.Option(help="inductor or none")] = "none") -> None:
    """Generate two texts with seeded noise, drafted and alone."""
    target = Target.random(CONFIG, LIMITS, device=DEVICE)
    fused = draftfuse.compile(make(target), compiler=compiler, request_capacities=[2])

    prompts = [[1, 2, 3], [4, 5]]
    drafted = Engine(target, fused).generate(prompts, 12, temperature=1.0, seed=7)
    alone = Engine(target).generate(prompts, 12, temperature=1.0, seed=7)
    print(f"{drafted.acceptance_length:.2f} of 3 drafts accepted a step")
    print("the target alone writes the same:", drafted.tokens == alone.tokens)
    print(fused.explain())


if __name__ == "__main__":
    typer.run(main)
