"""Complete small speculators, a target and an engine: what the examples show, the demo runs and the tests compare.

``llama`` is the model code that all share. ``eagle``, ``draft_model`` and ``static_drafter`` are plain classes with the
names of :class:`draftfuse.Speculator`, one for each way that drafters work. ``engine`` generates text with them.
"""

from __future__ import annotations

from draftfuse.reference.draft_model import DraftModelSpeculator
from draftfuse.reference.eagle import EagleSpeculator
from draftfuse.reference.engine import Engine, Generation
from draftfuse.reference.llama import Limits, small_config
from draftfuse.reference.static_drafter import StaticDrafter
from draftfuse.reference.target import Target

__all__ = [
    "DraftModelSpeculator",
    "EagleSpeculator",
    "Engine",
    "Generation",
    "Limits",
    "StaticDrafter",
    "Target",
    "small_config",
]
