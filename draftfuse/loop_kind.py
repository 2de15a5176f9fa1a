"""Loops of another kind than one token a request a draft step are refused by name, in whatever mode they run.

The eager loop asks it of every result of the user's methods; a trace needs not, as the loop was run before.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from draftfuse.errors import UnsafeLoopError
from draftfuse.validate import source_of

CHAIN = (
    "draftfuse compiles loops that draft one token a request a step. Draft a chain (the best token of each head "
    "fed to the next step), or keep this drafter out of draftfuse."
)
RETURN = (
    "Return that: draftfuse compiles loops that draft one token a request a step, with the results that "
    "draftfuse.Speculator documents."
)


def check_hidden(result: Any, rows: int, method: Any) -> None:
    """Raise unless ``result`` of a forward (or prefill) is two tensors with one row a position."""
    name = getattr(method, "__name__", "forward")
    if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(h, Tensor) for h in result):
        expected = "(hidden for logits, hidden to feed back)"
        refuse(f"{name} does not return two tensors", _kind_of(result), expected, method, RETURN)
    for hidden in result:
        if hidden.dim() == 0 or hidden.shape[0] != rows:
            what = f"{name} returns several positions a request: parallel heads or a tree in one step"
            refuse(what, tuple(hidden.shape), f"{rows} rows, one a position", method)


def check_tokens(tokens: Any, rows: int, method: Any) -> None:
    """Raise unless ``tokens`` of a sample is one token a request."""
    if not isinstance(tokens, Tensor):
        refuse("sample does not return a tensor", _kind_of(tokens), f"int64[{rows}]", method, RETURN)
    if tokens.dim() > 1:
        what = "sample returns several tokens a request: a tree of drafts, or parallel heads"
        refuse(what, tuple(tokens.shape), f"int64[{rows}]", method)
    if tokens.dim() == 1 and tokens.shape[0] == rows and tokens.dtype != torch.int64:
        refuse("sample returns tokens of another dtype", tokens.dtype, "torch.int64", method, "Convert with .long().")
    if tokens.dim() == 0 or tokens.shape[0] != rows:
        came = f"{tokens.dtype}{list(tokens.shape)}"
        refuse("sample does not return one token a request", came, f"int64[{rows}]", method, RETURN)


def _kind_of(value: Any) -> str:
    """``None``, ``Tensor``, or ``tuple of Tensor, NoneType``."""
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    return "None" if value is None else type(value).__name__


def refuse(what: str, came: object, expected: object, method: Any, todo: str = CHAIN) -> NoReturn:
    """Raise :class:`UnsafeLoopError` for a loop that draftfuse does not compile."""
    error = UnsafeLoopError(what, came, expected, todo, source_of(getattr(method, "__func__", method)))
    error.name = "loop-kind"
    raise error
