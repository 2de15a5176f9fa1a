"""A trial of every trace: the loop, run by Python, and its trace must be one program.

Dynamo is a second implementation of Python, and a stored trace is one of an earlier day. Where either differs from the
loop as Python runs it, drafts would be wrong from the first call on; so both run once on dead rows, and their values
are numbered by how they were computed (:mod:`draftfuse.numbering`). Values themselves are compared only where that
does not agree: two operators may compute one thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from draftfuse import loop, python_state
from draftfuse.compare import Rows, differences
from draftfuse.errors import SourceLine, UnsafeLoopError
from draftfuse.groups import is_parallel
from draftfuse.journal import all_kept
from draftfuse.lowering.segment import holds
from draftfuse.numbering import LARGEST, TAP, Call, Numbering, Table, reachable
from draftfuse.passes import ir
from draftfuse.passes.erase_taps import tap_lines
from draftfuse.probe import fill_live, named_failures
from draftfuse.state import Saved, fill_dummy, persistent_tensors
from draftfuse.trace import Trace

Run = Callable[[], None]
Fill = Callable[[], object]
DRAWN = 4  # sets of drawn rows, half of them greedy
EVERYTHING = Rows(live=0, capacity=-1, exact=True)


@dataclass
class Trial:
    """One loop and its trace, on the rows that the inputs hold."""

    spec: Any
    loop: Run
    traced: Run
    tensors: list[Tensor]  # that the trace reads or writes
    fill: Callable[[], object] = lambda: None  # makes the rows dead ones
    fills: tuple[Fill, ...] = ()  # that make live rows of some of them
    lines: dict[tuple[str, int], SourceLine | None] = field(default_factory=dict)

    def check(self) -> str:
        """Compare both; a note where they are equal in other words.

        Raises:
            UnsafeLoopError: the trace computes something else.
        """
        if is_parallel() or self.agrees():  # ranks would have to meet in each run
            return ""
        kept = Saved(persistent_tensors(self.spec))
        try:
            for fill in (self.fill, *self.fills):
                fill()
                with _dummy_states(self.spec), torch.no_grad():
                    if (found := self._first_difference()) is not None:
                        raise found
        finally:
            kept.restore()
        return "the trace calls other operators than the loop, with equal values on dead and on live rows"

    def agrees(self) -> bool:
        """Whether both compute the same in the same words."""
        table: Table = {}
        kept = Saved(persistent_tensors(self.spec))
        try:
            self.fill()
            with torch.no_grad():
                return bool(self._number(self.loop, table) == self._number(self.traced, table))
        finally:
            kept.restore()

    def _number(self, run: Run, table: Table) -> Any:
        with self._all_kept(), Numbering(table) as numbering:
            run()
        return numbering.taps, numbering.left(self.tensors), numbering.effects

    def _first_difference(self) -> UnsafeLoopError | None:
        first, again, traced = (self._values(run) for run in (self.loop, self.loop, self.traced))
        call = self._parting()
        for place, expected in first.items():
            if _differ(expected, again.get(place)) is not None:
                continue  # not even the loop repeats it: its operators are what counts
            if (different := _differ(expected, traced.get(place))) is not None:
                source = self.lines.get(place) if call is None else call.source
                return _error(f"{place[0]} of draft step {place[1]}", *different, source)
        if call is not None:
            return _error(call.name, "the value that the loop computes", "no such value", call.source)
        return None

    def _parting(self) -> Call | None:
        """The loop's first operator whose results the trace computes nowhere, and that is not in vain.

        Results that not even the loop repeats are none that the trace could be seen to compute.
        """
        table: Table = {}
        mine, again, its = (Numbering(table, calls=True) for _ in range(3))
        for numbering, run in ((mine, self.loop), (again, self.loop), (its, self.traced)):
            with self._all_kept(), numbering:
                run()
        needed = reachable(table, [*mine.taps.values(), *mine.left(self.tensors).values()])
        known = {call.number for call in its.calls}
        values = {value for call in its.calls for value in call.values}
        for call, other in zip_longest(mine.calls, again.calls):
            if call is None or call.number not in needed or call.number in known:
                continue
            if other is None or call.values != other.values or not values.issuperset(call.values):
                found: Call = call
                return found
        return None

    def _values(self, run: Run) -> dict[tuple[str, int], Tensor]:
        with self._all_kept(), _Taps() as taps:
            run()
        return dict[tuple[str, int], Tensor](taps.values)

    @contextmanager
    def _all_kept(self) -> Iterator[None]:
        """Python state and memory, also what no build copies: parameters, what is large, KV pools."""
        with all_kept(python_state.of_speculator(self.spec)), named_failures():
            yield


class _Taps(TorchDispatchMode):
    """Keeps every tapped value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: dict[tuple[str, int], Tensor] = {}

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is TAP:
            value, name, step = args
            if value.nbytes <= LARGEST:
                self.values[name, step] = value.clone()
            return None
        return func(*args, **(kwargs or {}))


@contextmanager
def _dummy_states(spec: Any) -> Iterator[None]:
    """Hidden states other than zero, so that a factor shows."""
    states = spec.inputs.hidden_states
    kept = states.clone()
    drawn = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
    states.copy_(drawn)
    try:
        yield
    finally:
        states.copy_(kept)


def _error(what: str, expected: object, came: object, source: SourceLine | None) -> UnsafeLoopError:
    todo = (
        "Dynamo reads some Python otherwise than Python runs it: a set that the loop makes and goes through (take a "
        "list, or sorted(...)), a closure that is bound late, a metaclass, an iterator that is kept. Write it plainly."
    )
    what = f"the trace of the loop computes something else than the loop: {what}"
    return UnsafeLoopError(what, came, expected, todo, source)


def _differ(expected: Tensor, got: Tensor | None) -> tuple[object, object] | None:
    return next(((e, g) for _, e, g in differences(expected, got, EVERYTHING)), None)


def of_trace(function: Callable[..., None], args: tuple[Any, ...], traced: Trace, num_reqs: int) -> Trial:
    """The trial of ``traced``, which is that of ``function(spec, num_reqs, *rest)``, at ``num_reqs`` rows.

    At the rows of ``args`` where its guards refuse those: it serves others.
    """
    environment: Any = traced.fake_mode.shape_env
    if traced.symbol is not None and not holds([guard.expr for guard in environment.guards], num_reqs):
        num_reqs = args[1]
    given = [_value(node, traced, num_reqs) for node in ir.placeholders(traced.graph)]
    run = fx.Interpreter(traced.module).run
    whole = (args[0], num_reqs, *args[2:])
    query_len = args[2] if function in (loop.propose_loop, loop.prefill_loop) else 1
    return Trial(
        args[0],
        lambda: function(*whole),
        lambda: run(*given),
        [*traced.tensors.values()],
        lambda: fill_dummy(args[0], num_reqs, query_len),
        (
            lambda: fill_live_row(args[0], num_reqs, query_len),
            *(partial(fill_drawn, args[0], num_reqs, query_len, seed) for seed in range(DRAWN)),
        ),
        tap_lines(traced.graph),
    )


def fill_live_row(spec: Any, num_reqs: int, query_len: int) -> None:
    """Rows of which the first one is live, where its tokens fit into one page: tables of others may name the same."""
    if query_len <= min((group.page_size for group in spec.attn_groups), default=query_len):
        fill_live(spec, num_reqs, query_len)
        spec.inputs.seq_lens[1:num_reqs].zero_()
        spec.inputs.positions[query_len:].zero_()
        spec.inputs.idx_mapping[1:num_reqs].fill_(-1)


def fill_drawn(spec: Any, num_reqs: int, query_len: int, seed: int) -> None:
    """Live rows of drawn lengths, temperatures and seeds, where there is room for them."""
    fill_live_row(spec, num_reqs, query_len)
    longest = spec.max_model_len - spec.num_speculative_tokens
    if not _tables_have_pages(spec, num_reqs):
        longest = min([longest, *(group.page_size for group in spec.attn_groups)])
    if longest < query_len:
        return
    draw, inputs, tokens = torch.Generator().manual_seed(seed), spec.inputs, num_reqs * query_len
    lengths = torch.randint(query_len, longest + 1, (num_reqs,), generator=draw)
    fill_live(spec, num_reqs, query_len)
    inputs.seq_lens[:num_reqs].copy_(lengths)
    ends = (lengths.unsqueeze(1) - query_len + torch.arange(query_len)).flatten()
    inputs.positions[:tokens].copy_(ends)
    inputs.temperature[:num_reqs].copy_(torch.rand(num_reqs, generator=draw) * 2 * (seed % 2))
    inputs.seeds[:num_reqs].copy_(torch.randint(1 << 31, (num_reqs,), generator=draw))


def _tables_have_pages(spec: Any, num_reqs: int) -> bool:
    """Whether the block tables, as they are, name pages that there are: rows longer than a page read those."""
    for group in spec.attn_groups:
        pages = min((cache.shape[0] for pair in group.kv_caches.values() for cache in pair), default=0)
        table = group.block_table[:num_reqs]
        if not bool(((table >= 0) & (table < pages)).all()):
            return False
    return True


def _value(node: fx.Node, traced: Trace, num_reqs: int) -> Any:
    return traced.tensors.get(node.name, num_reqs)


def no_trial() -> str:
    """The trial of a loop that is draftfuse's own."""
    return ""
