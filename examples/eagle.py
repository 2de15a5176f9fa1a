"""The trained EAGLE head that ships with draftfuse continues a Python file, verified by its target.

    python examples/eagle.py                        # the eager kernels in one callable: nothing to compile
    python examples/eagle.py --compiler inductor    # generated code
    draftfuse lint examples/eagle.py:make           # the same for audit and bisect, and for the other examples

The speculator itself is draftfuse/reference/eagle.py.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

import draftfuse
from draftfuse.reference import EagleSpeculator, Engine, Limits, Target

PROMPT = "class Counter:\n    def __init__(self) -> None:\n        self."


LIMITS = Limits(num_speculative_tokens=4, max_num_reqs=1, max_model_len=256, max_num_tokens=128)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make() -> EagleSpeculator:
    """The speculator; what ``draftfuse lint``, ``audit`` and ``bisect`` ask for."""
    return EagleSpeculator.from_packaged(LIMITS, DEVICE)


def main(compiler: Annotated[str, typer.Option(help="inductor or none")] = "none", tokens: int = 48) -> None:
    """Generate with drafts and without, and show that the text is the same."""
    target = Target.from_packaged(LIMITS, DEVICE)
    fused = draftfuse.compile(make(), compiler=compiler)

    prompt = list(PROMPT.encode())  # a token is a byte
    drafted = Engine(target, fused).generate([prompt], tokens)
    alone = Engine(target).generate([prompt], tokens)

    print(PROMPT + bytes(drafted.tokens[0]).decode(errors="replace"))
    print(f"{drafted.acceptance_length:.2f} of 4 drafts accepted a step, {len(drafted.drafts)} steps")
    print("the target alone writes the same:", drafted.tokens == alone.tokens)
    print(fused.explain())


if __name__ == "__main__":
    typer.run(main)
