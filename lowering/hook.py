"""``draftfuse.post_grad_pass``: the object that goes into Inductor's (and vLLM's) pass hooks.

Its ``uuid()`` covers every source file of draftfuse's passes and lowering, so that no cache ever serves code of
another version. It changes a graph only where it finds draftfuse's marker operator.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass


@cache
def sources_hash() -> str:
    """A hash of all Python sources that decide what code is generated, and of the torch version."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in ("lowering", "passes"):
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


class PostGradPass(CustomGraphPass):
    """Inductor's post-grad pass of draftfuse; picklable, and equal by its settings."""

    def __call__(self, graph: fx.Graph) -> None:
        """Leave graphs without the marker operator as they are."""

    def uuid(self) -> Any:
        """What Inductor puts into its cache key."""
        return f"draftfuse-{sources_hash()}"


post_grad_pass = PostGradPass()
