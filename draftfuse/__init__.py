"""draftfuse: a compiler that turns the draft loop of speculative decoding into one callable and one CUDA graph."""

from __future__ import annotations

__version__ = "0.1.0"
