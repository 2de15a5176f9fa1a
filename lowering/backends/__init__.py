"""Attention backends: metadata builders, what attends by their metadata, and the table that lists them.

Each module holds one family: its metadata, its builders (derived from ``build``, or registered with a ``refresh``), and
``attend_*``, which a model's layer calls with the metadata of its group.
"""

from __future__ import annotations

if not __name__.startswith("draftfuse."):
    raise ImportError("import draftfuse.lowering.backends: a second copy would register every op twice")

from draftfuse.lowering.backends.registry import Backend, backends, get_backend, register_backend, unregister_backend
from draftfuse.lowering.backends.table import register_all

register_all()

__all__ = ["Backend", "backends", "get_backend", "register_backend", "unregister_backend"]
