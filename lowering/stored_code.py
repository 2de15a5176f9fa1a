"""Where in Inductor's cache the code of a segment is, so that a second process need not decompose it to find it.

Inductor names cached code by a hash of the decomposed graph, and to decompose and to hash take longer than to load. A
note on disk leads from the segment as it stands to that name. Its own name covers the text of the segment, the sources
of draftfuse, all that Inductor's names cover beside the graph, and the state of torch. There are notes only of code
that passed the check, with the guards that it needs; a note that leads nowhere is a miss.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard

from draftfuse.lowering import kept_file
from draftfuse.lowering.hook import sources_hash
from draftfuse.lowering.inductor import decomposition_table, load_graph, name_of, surroundings
from draftfuse.passes import ir
from draftfuse.passes.expressions import NotPlain, from_plain, to_plain

Run = Callable[[list[Any]], Sequence[Any]]
# A vector and a scalar version of each of many short loops take g++ three times as long as the scalar ones alone.
SCALAR_OPTIONS: dict[str, Any] = {"cpp.simdlen": 1}
_OURS = ("torch", "draftfuse")


class StoredCode:
    """Notes on the segments of one graph."""

    def __init__(self, fake_mode: Any, symbol: Any, options: dict[str, Any]) -> None:
        self.env, self.options = fake_mode.shape_env, options
        self.symbol = ir.expression(symbol)  # None without a symbolic number of requests
        self.known = len(self.env.guards) if self.env is not None else 0
        self.facts = str(self.env.var_to_range.get(self.symbol)) if self.symbol is not None else ""
        self._around: dict[bool, str] = {}

    def note_of(self, key: str, inputs: Sequence[Any]) -> Path | None:
        """The file of the segment ``key``, whose inputs are ``inputs``; None if it cannot have one."""
        if has_foreign_decompositions():
            return None
        numbers = [str(ir.expression(v)) for v in inputs if not isinstance(v, Tensor)]
        parts = [key, self.facts, numbers, self._surroundings(inputs)]
        return kept_file.cached("code", f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:40]}.json")

    def load(self, note: Path, inputs: Sequence[Any]) -> tuple[Run, list[Any]] | None:
        """The code behind ``note`` and its guards."""
        try:
            found = kept_file.read(note)
            guards = [from_plain(g, self.symbol) for g in found["guards"]]
            known = len(self.env.guards) if self.env is not None else 0
            run = load_graph(found["name"], inputs, self.with_scalars(found["scalar"]))
            guards += [g.expr for g in self.env.guards[known:]] if self.env is not None else []
        except Exception:  # no note, or a damaged one, or one of code that is gone: it is compiled
            return None
        return None if run is None else (run, guards)

    def with_scalars(self, scalar: bool) -> dict[str, Any]:
        """The options, for arithmetic on rows too: kernels are compiled, and found again, under all of them."""
        return (SCALAR_OPTIONS if scalar else {}) | self.options

    def save(self, note: Path, run: Run, scalar: bool) -> None:
        """Note where Inductor has put ``run``, if it has."""
        name = name_of(run)
        if name is None:
            return
        try:
            kept_file.write(note, {"name": name, "scalar": scalar, "guards": self._guards()})
        except (NotPlain, OSError):  # it is compiled the next time
            return

    def _guards(self) -> list[Any]:
        """Everything that was known of the symbol when the code was made: it may rest on any of it."""
        if self.env is None:
            return []
        if self.symbol is None and len(self.env.guards) > self.known:
            raise NotPlain("a guard without a symbol")
        return [to_plain(g.expr, self.symbol) for g in self.env.guards] if self.symbol is not None else []

    def _surroundings(self, inputs: Sequence[Any]) -> str:
        on_cpu = all(v.device.type == "cpu" for v in inputs if isinstance(v, Tensor))
        if on_cpu not in self._around:
            state = str(GlobalStateGuard().__getstate__())
            self._around[on_cpu] = f"{sources_hash()} {surroundings(inputs, self.options)} {state}"
        return self._around[on_cpu]


def has_foreign_decompositions() -> bool:
    """Whether somebody else's code decomposes operators of PyTorch: the names know nothing of that."""
    table: dict[Any, Any] = decomposition_table()
    return any(_is_foreign(f) for op, f in table.items() if getattr(op, "namespace", "") in ("aten", "prims"))


def _is_foreign(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch._ops.OpOverload):
        return False
    return str(getattr(function, "__module__", "")).split(".")[0] not in _OURS
