"""Short traces kept between builds: the loop of 8 draft tokens extends the trace that was made for the loop of 4.

A kept trace is plain data (:mod:`draftfuse.trace_store`). Every build makes a graph, fake values and a shape
environment of its own from it, so that the guards of one build are none of another's, and no fake tensor is kept.
It is used only while Python holds what it was made of, and only where the trial of the extended trace agrees, which
:func:`draftfuse.build.traced_in_part` runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftfuse.paths import arguments_of
from draftfuse.scalar_guards import ScalarGuards
from draftfuse.trace import Trace
from draftfuse.trace_cache import has_modes, surroundings, without_collection
from draftfuse.trace_facts import Facts, NotCacheable, Scope
from draftfuse.trace_store import restored, sources, to_json
from draftfuse.unroll import TRACED_STEPS

MOST = 4  # traces kept at a time: symbolic and for one row, of decode and of propose


@dataclass(frozen=True)
class Short:
    """What a short trace is made for: ``function(*args)``, the symbolic argument, the draft tokens of the build."""

    function: Callable[..., None]
    args: tuple[Any, ...]
    symbolic: str | None
    k: int
    with_facts: bool  # for an entry on disk

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for builds that may share the trace: all but the draft tokens, and the state of torch."""
        with torch.no_grad():
            state = surroundings(self.args[0].inputs.positions.device)
        return self.function, *self.args[1:-1], self.symbolic, *state

    @property
    def scope(self) -> Scope:
        """Where the paths of the trace begin."""
        return Scope(arguments_of(self.function, self.args), self.function.__globals__)


@dataclass
class _Kept:
    """One trace, as it was before it was extended."""

    text: str
    tensors: dict[str, Tensor]
    baked: dict[str, Any]
    guards: ScalarGuards
    facts: Facts | None
    left: set[int]  # draft tokens of the builds that may still come


class ShortTraces:
    """The short traces of one compiled loop of up to ``max_k`` draft tokens."""

    def __init__(self, max_k: int = 0) -> None:
        self.ks = frozenset(range(TRACED_STEPS, max_k + 1))
        self._kept: dict[tuple[Any, ...], _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drop all."""
        self._kept.clear()

    def drop(self, short: Short) -> None:
        """Drop the trace of ``short``, where there is one."""
        self._kept.pop(short.key, None)

    def keep(self, short: Short, traced: Trace) -> None:
        """Keep a fresh trace, not yet extended, where another build may use it and it has a plain form."""
        left = set(self.ks - {short.k})
        if not left or has_modes():
            return
        try:
            with torch.no_grad(), without_collection():
                kept = _kept(short, traced, left)
        except Exception:  # whatever a user's object does when it is asked, the loop is built
            return
        while len(self._kept) >= MOST:
            self._kept.pop(next(iter(self._kept)))
        self._kept[short.key] = kept

    def load(self, short: Short) -> Trace | None:
        """A copy of the kept trace, where there is one and Python holds what it held."""
        if not self._kept or has_modes():
            return None
        key = short.key
        kept = self._kept.pop(key, None)
        if kept is None:
            return None
        try:
            with torch.no_grad(), without_collection():
                traced = _loaded(kept, short)
        except Exception:  # the loop is traced, as if there were none
            return None
        kept.left.discard(short.k)
        if kept.left:
            self._kept[key] = kept
        return traced


def _kept(short: Short, traced: Trace, left: set[int]) -> _Kept:
    data = to_json(traced)
    _require_places(data, traced.tensors, short)
    guards = ScalarGuards.of(traced.baked, {"spec": short.args[0]})
    facts = None if traced.facts is None else _copy(traced.facts)
    return _Kept(json.dumps(data), dict(traced.tensors), dict(traced.baked), guards, facts, left)


def _loaded(kept: _Kept, short: Short) -> Trace:
    data = json.loads(kept.text)
    _require_places(data, kept.tensors, short)
    if broken := kept.guards.broken():
        raise NotCacheable(broken[0])
    if short.with_facts and kept.facts is None:
        raise NotCacheable("nobody asked what the trace rests on")
    if kept.facts is not None and (fact := kept.facts.broken(short.scope)):
        raise NotCacheable(fact)
    traced = restored(data, kept.tensors)
    traced.baked, traced.again = dict(kept.baked), True
    traced.facts = None if kept.facts is None else _copy(kept.facts)
    return traced


def _require_places(data: dict[str, Any], tensors: dict[str, Tensor], short: Short) -> None:
    """Refuse a trace one of whose tensors does not stand where the loop read it."""
    scope = short.scope
    for name, path in sources(data).items():
        if scope.at(path) is not tensors[name]:
            raise NotCacheable(f"{path} is another tensor than the one that was traced")


def _copy(facts: Facts) -> Facts:
    """Facts that take in more without those that are kept."""
    return replace(facts, answers=dict(facts.answers), files=dict(facts.files))
