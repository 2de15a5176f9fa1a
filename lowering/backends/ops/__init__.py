"""Operators of single backends: attention over other layouts, and refreshes that a vendor's or own kernel makes.

One file an operator, as in ``draftfuse.lowering.ops``: legend, checks, ``reference``, registration, fake.
"""

from __future__ import annotations

if not __name__.startswith("draftfuse."):
    raise ImportError("import draftfuse.lowering.backends.ops: a second copy would register every op twice")
