"""draftfuse: a compiler that turns the draft loop of speculative decoding into one callable and one CUDA graph."""

from __future__ import annotations

__version__ = "0.1.0"

from draftfuse import environment as _environment  # first: it warns where what follows may fail
from draftfuse import errors, ops
from draftfuse.compiler import compile
from draftfuse.errors import DraftfuseError
from draftfuse.fused import FusedDraft
from draftfuse.lowering.backends import register_backend
from draftfuse.lowering.effects import register_effects
from draftfuse.lowering.hook import post_grad_pass
from draftfuse.ranks import AcrossRanks
from draftfuse.speculator import (
    AttentionGroup,
    CommonMetadata,
    DraftBatch,
    DraftInputs,
    Guard,
    MetadataBuilder,
    Speculator,
)

del _environment

__all__ = [
    "AcrossRanks",
    "AttentionGroup",
    "CommonMetadata",
    "DraftBatch",
    "DraftInputs",
    "DraftfuseError",
    "FusedDraft",
    "Guard",
    "MetadataBuilder",
    "Speculator",
    "compile",
    "errors",
    "ops",
    "post_grad_pass",
    "register_backend",
    "register_effects",
]
