"""Operators of draftfuse. One file an op: its checks, its meaning in plain PyTorch, its registration, its fake.

Registered (opaque to every compiler, exact mutation schema): ``write_kv``, ``paged_attention``, ``store``, ``tap``.
Composite (plain PyTorch, made to be traced and fused): ``compute_slot_mapping``, ``advance_positions``,
``gumbel_sample``.

A module and its function share a name, and the package exports the function; reach the module's other names with
``from draftfuse.lowering.ops.write_kv import reference``.
"""

from __future__ import annotations

if not __name__.startswith("draftfuse."):
    raise ImportError("import draftfuse.lowering.ops, not lowering.ops: a second copy would register every op twice")

from draftfuse.lowering.ops.advance_positions import advance_positions
from draftfuse.lowering.ops.argmax import argmax
from draftfuse.lowering.ops.compute_slot_mapping import compute_slot_mapping
from draftfuse.lowering.ops.gumbel_sample import gumbel_sample
from draftfuse.lowering.ops.linear_by_rows import linear_by_rows
from draftfuse.lowering.ops.load_rows import load_rows
from draftfuse.lowering.ops.paged_attention import paged_attention
from draftfuse.lowering.ops.small_linear import small_linear
from draftfuse.lowering.ops.small_linear_argmax import small_linear_argmax
from draftfuse.lowering.ops.small_linear_pair import small_linear_pair
from draftfuse.lowering.ops.sort import sort
from draftfuse.lowering.ops.store import store
from draftfuse.lowering.ops.tap import tap
from draftfuse.lowering.ops.write_kv import write_kv

__all__ = [
    "advance_positions",
    "argmax",
    "compute_slot_mapping",
    "gumbel_sample",
    "linear_by_rows",
    "load_rows",
    "paged_attention",
    "small_linear",
    "small_linear_argmax",
    "small_linear_pair",
    "sort",
    "store",
    "tap",
    "write_kv",
]
