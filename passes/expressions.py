"""Size expressions as plain data, and back: the symbol, whole numbers, and functions of such."""

from __future__ import annotations

from typing import Any

import sympy
from torch.utils._sympy import functions

_HEADS: dict[str, Any] = {
    **{n: getattr(sympy, n) for n in ("Add", "Mul", "Pow", "And", "Or", "Not")},
    **{h.__name__: h for h in (sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)},
    **{n: getattr(functions, n) for n in ("FloorDiv", "Mod", "PythonMod", "CleanDiv", "CeilToInt", "Max", "Min")},
}


class NotPlain(ValueError):
    """An expression holds something else; the message says what."""


def to_plain(expr: Any, symbol: Any) -> Any:
    """``expr`` in JSON's terms, ``symbol`` as "n".

    Raises:
        NotPlain: it holds another symbol, or a function that is not known here.
    """
    if isinstance(expr, int) or expr in (sympy.true, sympy.false):
        return int(expr)
    if expr == symbol:
        return "n"
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if _HEADS.get(name := type(expr).__name__) is not type(expr):
        raise NotPlain(f"a size {expr}")
    return [name, *(to_plain(a, symbol) for a in expr.args)]


def from_plain(data: Any, symbol: Any) -> Any:
    """The expression behind :func:`to_plain`."""
    if data == "n":
        return symbol
    if isinstance(data, int):
        return sympy.Integer(data)
    name, *args = data
    return _HEADS[name](*(from_plain(a, symbol) for a in args))
