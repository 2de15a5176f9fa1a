"""Public operators that make a draft loop safe under padding; see each one's docstring.

``write_kv``, ``paged_attention`` and ``store`` are registered as ``torch.ops.draftfuse.*``; the others are plain,
traceable PyTorch.
"""

from __future__ import annotations

from draftfuse.lowering.ops import (
    advance_positions,
    compute_slot_mapping,
    gumbel_sample,
    paged_attention,
    store,
    write_kv,
)

__all__ = [
    "advance_positions",
    "compute_slot_mapping",
    "gumbel_sample",
    "paged_attention",
    "store",
    "write_kv",
]
