"""Operators that the compiler makes from a user's own code: one for each distinct metadata refresh.

``draftfuse_gen::refresh_<hash>(Tensor[] reads, SymInt[] sizes, Tensor(a!)[] rows) -> ()`` computes the outlined body
from ``reads`` and writes its results to ``rows``. Eagerly the body runs as the ATen operators that it was traced to;
emission may compile the body instead, which is kept in the node's ``meta["body"]``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

NAMESPACE = "draftfuse_gen"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_DEFINED: dict[str, fx.GraphModule] = {}


def register_refresh(body: fx.GraphModule, text: str) -> OpOverload:
    """The operator for ``body``; equal ``text`` gives the operator that exists already.

    Args:
        body: a pure graph ``(*reads, *sizes) -> results``.
        text: its canonical text, from which the operator's name is derived.
    """
    name = f"refresh_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if name not in _DEFINED:
        _define(name, body)
    operator: OpOverload = getattr(torch.ops.draftfuse_gen, name).default
    return operator


def _define(name: str, body: fx.GraphModule) -> None:
    _LIBRARY.define(f"{name}(Tensor[] reads, SymInt[] sizes, Tensor(a!)[] rows) -> ()")

    def run(reads: Sequence[Tensor], sizes: Sequence[int], rows: Sequence[Tensor]) -> None:
        for row, result in zip(rows, body(*reads, *sizes), strict=True):
            row.copy_(result)

    def fake(reads: Sequence[Tensor], sizes: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Shapes are those of ``rows``."""

    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, run, "CUDA")
    _LIBRARY.impl(name, fake, "Meta")
    _DEFINED[name] = body


def register_hidden(operator: OpOverload) -> OpOverload:
    """``operator`` with two lists of buffers in front: what it reads and what it writes beyond its arguments."""
    schema = operator._schema
    name = f"hidden_{schema.name.replace('::', '_')}_{schema.overload_name or 'default'}"
    if not hasattr(torch.ops.draftfuse_gen, name):
        rest = str(schema)[str(schema).index("(") + 1 :]
        lists = "Tensor[] hidden_reads, Tensor(hidden!)[] hidden_writes" + ("" if rest.startswith(")") else ", ")
        _LIBRARY.define(f"{name}({lists}{rest}")

        def run(reads: Sequence[Tensor], writes: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
            return operator(*args, **kwargs)

        for key in ("CPU", "CUDA", "Meta"):
            _LIBRARY.impl(name, run, key)
    wrapped: OpOverload = getattr(torch.ops.draftfuse_gen, name).default
    return wrapped


def register_wrapper(operator: OpOverload) -> OpOverload:
    """An operator of draftfuse's own with the schema of ``operator``, which it calls."""
    schema = operator._schema
    name = f"call_{schema.name.replace('::', '_')}_{schema.overload_name or 'default'}"
    if not hasattr(torch.ops.draftfuse_gen, name):
        _LIBRARY.define(name + str(schema)[str(schema).index("(") :])
        for key in ("CPU", "CUDA", "Meta"):
            _LIBRARY.impl(name, operator, key)
    wrapper: OpOverload = getattr(torch.ops.draftfuse_gen, name).default
    return wrapper
