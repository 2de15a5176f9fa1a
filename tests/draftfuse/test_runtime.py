"""The runtime as an engine uses it: counts, dispatch, one launch, k, padding, budgets, hooks, events, threads."""

from __future__ import annotations

import threading
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import draftfuse
from draftfuse import DraftBatch
from draftfuse.build import refuse_higher_order
from draftfuse.dispatch import DECODE, PREFILL, PROPOSE, Descriptor
from draftfuse.errors import (
    ClosedError,
    ConcurrentUseError,
    InvalidBatchError,
    InvalidOptionError,
    StaleAddressError,
    UnsafeLoopError,
)
from draftfuse.trace import trace
from tests.failures.small import Pair, Small, batch_of, three_rows

K = 4


def compiled(spec: Any, **options: Any) -> draftfuse.FusedDraft:
    return draftfuse.compile(spec, **{"compiler": "none", **options})


def uniform(spec: Any, lengths: list[int], seed: int = 0) -> DraftBatch:
    """Every request with K + 1 query tokens, and the host integer that says so."""
    batch = batch_of(spec, lengths, [seed % 2] * len(lengths), seed)
    batch.max_query_len = spec.num_speculative_tokens + 1
    assert batch.num_tokens == batch.num_reqs * batch.max_query_len
    return batch


@pytest.mark.parametrize(
    ("mode", "counter", "times"),
    [("fused", "compiled calls", 1), ("split", "compiled calls", K - 1), ("eager", "eager steps", K - 1)],
)
def test_counts_of_a_ragged_batch(mode: str, counter: str, times: int) -> None:
    spec = Small(k=K)
    fused = compiled(spec, mode=mode)
    fused.propose(three_rows(spec))
    assert fused.report.counters[counter] == times
    others = {"compiled calls", "eager steps", "graph replays"} - {counter}
    assert all(fused.report.counters[name] == 0 for name in others)
    fused.propose(three_rows(spec), k=1)
    assert fused.report.counters[counter] == times  # K = 1 needs no decode at all


def test_a_uniform_batch_is_one_call() -> None:
    spec = Small(k=2, max_num_reqs=4)
    fused = compiled(spec)
    fused.propose(uniform(spec, [7, 9, 5]))
    assert fused.report.counters["compiled calls"] == 1
    assert fused.report.counters["eager prefills"] == 0
    assert fused.report.counters["propose capacity 4"] == 1
    assert fused.report.counters["padded rows"] == 1


@pytest.mark.parametrize("one_launch", [True, False])
def test_uniform_batches_equal_eager(one_launch: bool) -> None:
    spec, twin = Small(k=3), Small(k=3)
    pair = Pair(compiled(spec, one_launch=one_launch), compiled(twin, mode="eager"))
    for seed, lengths in enumerate(([7, 9, 5], [8], [9, 12, 31, 6], [20, 4])):
        for k in (3, 2, 1):
            pair.draft(lambda s, n=lengths, x=seed: uniform(s, n, x), k)


def test_dispatch_names_the_graphs_of_the_ladder() -> None:
    spec = Small(max_num_reqs=32, k=5)
    fused = compiled(spec)
    assert fused.ladder.capacities == [1, 2, 4, 8, 16, 32]
    tokens = [fused.dispatch(n, n * 6).prefill.num_tokens for n in fused.ladder.capacities]  # type: ignore[union-attr]
    assert tokens == [6, 12, 24, 48, 96, 192]
    both = fused.dispatch(3, 18, 5)
    assert both.prefill is both.decode
    assert both.prefill == Descriptor(PROPOSE, 4, 24, 5)
    assert both.launches == 1
    ragged = fused.dispatch(3, 17, 5)
    assert ragged.prefill is None
    assert ragged.decode == Descriptor(DECODE, 4, 4, 5)
    assert "ragged" in ragged.reason
    apart = compiled(Small(max_num_reqs=4, k=5), one_launch=False).dispatch(3, 18, 5)
    assert apart.prefill == Descriptor(PREFILL, 4, 24, 1)
    assert apart.launches == 2


def test_k_from_a_table_by_batch_size() -> None:
    spec = Small(k=K)
    fused = compiled(spec, k_by_num_reqs={1: 4, 2: 2, 4: 1})
    shapes = [fused.propose(batch_of(spec, [5] * n)).shape for n in (1, 2, 3)]
    assert [tuple(s) for s in shapes] == [(1, 4), (2, 2), (3, 1)]
    assert fused.propose(batch_of(spec, [5]), k=0).shape == (1, 0)


def test_an_empty_batch_drafts_nothing() -> None:
    spec = Small(k=K)
    fused = compiled(spec)
    batch = batch_of(spec, [5])
    batch.num_reqs = batch.num_tokens = 0
    assert fused.propose(batch).shape == (0, K)
    fused.decode(0)
    assert not fused.report.builds


def test_building_in_the_middle_of_serving_changes_nothing() -> None:
    pair = Pair(compiled(Small(k=K)), compiled(Small(k=K), mode="eager"))
    pair.draft(three_rows)
    before = [t.clone() for t in (pair.fused.spec.key, *pair.fused.spec.inputs.named_tensors().values())]
    pair.fused.capture(ks=[2, 4], progress=False)
    after = [pair.fused.spec.key, *pair.fused.spec.inputs.named_tensors().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    made = len(pair.fused.report.builds)
    pair.draft(three_rows, 2)
    assert len(pair.fused.report.builds) == made


def test_budget_drops_the_largest_capacity_and_says_so() -> None:
    spec = Small(k=3)
    fused = compiled(spec, graph_memory_budget=1)
    with pytest.raises(InvalidOptionError, match="too small for the smallest capacity: got 1, expected >= "):
        fused.capture(progress=False)
    assert any("budget of 1" in f.reason for f in fused.report.fallbacks)
    roomy = compiled(Small(k=3), graph_memory_budget=1 << 30)
    roomy.capture(progress=False)
    assert roomy.ladder.capacities == [1, 2, 4]
    assert roomy.memory()["rows"] > 0


class Hooked(Small):
    """Records when each lifecycle hook runs, beside the steps of the loop."""

    def __init__(self) -> None:
        super().__init__(k=3)
        self.calls: list[str] = []


for _name in ("on_prefill_begin", "on_prefill_end", "on_multi_step_decode_begin", "on_multi_step_decode_end"):
    setattr(Hooked, _name, torch.compiler.disable(lambda self, name=_name: self.calls.append(name)))


class Switched(Small):
    """A hook that changes what the traced forward does: prefill without, decode with a bias."""

    def __init__(self) -> None:
        super().__init__(k=3)
        self.bias = 0.0

    def on_multi_step_decode_begin(self) -> None:
        self.bias = 0.25

    def on_multi_step_decode_end(self) -> None:
        self.bias = 0.0

    def enter(self, inputs: Any) -> torch.Tensor:
        return super().enter(inputs) + self.bias


@pytest.mark.parametrize("options", [{}, {"one_launch": False}, {"mode": "eager"}, {"mode": "split"}])
def test_hooks_act_at_capture_and_at_replay_alike(options: dict[str, Any]) -> None:
    pair = Pair(compiled(Switched(), **options), compiled(Switched(), mode="eager"))
    for seed in range(3):
        pair.draft(lambda s, x=seed: uniform(s, [7, 9], x))
        assert pair.fused.spec.bias == 0.0


def test_dummy_runs_stay_eager() -> None:
    spec = Small(k=3)
    fused = compiled(spec)
    key = spec.key.clone()
    fused.dummy_run(4, 8)
    assert torch.equal(spec.key, key)  # dead rows write no KV
    assert not fused.report.builds
    assert fused.report.counters["compiled calls"] == 0


def test_moved_memory_is_refused_until_recapture() -> None:
    pair = Pair(compiled(Small(k=3)), compiled(Small(k=3), mode="eager"))
    pair.draft(three_rows)
    for spec in (pair.fused.spec, pair.eager.spec):
        spec.mix = torch.eye(8) / 3
    with pytest.raises(StaleAddressError, match=r"spec.*mix.*recapture\(\)"):
        pair.fused.propose(three_rows(pair.fused.spec))
    pair.fused.recapture()
    pair.draft(three_rows)


def test_copies_belong_to_the_caller_and_views_do_not() -> None:
    spec = Small(k=3)
    fused = compiled(spec)
    view, copy = fused.propose(three_rows(spec)), fused.propose(three_rows(spec), copy=True)
    kept = copy.clone()
    fused.propose(batch_of(spec, [11, 2, 6], seed=5))
    assert torch.equal(copy, kept)
    assert view.untyped_storage().data_ptr() == spec.inputs.draft_tokens.untyped_storage().data_ptr()


@pytest.mark.parametrize(("rows", "capacity"), [(-1, None), (9, None), (2.0, None), (True, None), (2, -1), (2, 9)])
def test_rows_that_cannot_be_are_refused(rows: Any, capacity: Any) -> None:
    with pytest.raises(InvalidBatchError, match="num_reqs is out of range"):
        compiled(Small(k=K)).decode(rows, capacity=capacity)


def test_hidden_states_of_another_width_are_refused_and_nothing_is_written() -> None:
    spec = Small(k=K)
    batch = three_rows(spec)
    batch.hidden_states = batch.hidden_states[:, :1].contiguous()
    before = [t.clone() for t in spec.inputs.named_tensors().values()]
    with pytest.raises(InvalidBatchError, match="hidden_states has a wrong shape"):
        compiled(spec).propose(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, spec.inputs.named_tensors().values(), strict=True))


def test_a_second_thread_is_refused_by_name() -> None:
    spec = Small(k=3)
    fused = compiled(spec)
    fused.propose(three_rows(spec))
    errors: list[BaseException] = []

    def other() -> None:
        try:
            fused.decode(2)
        except ConcurrentUseError as error:
            errors.append(error)

    with fused._exclusive:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(errors) == 1
    fused.decode(2)  # the lock is free again


def test_closed_loops_say_so() -> None:
    spec = Small(k=3)
    fused = compiled(spec)
    fused.close()
    with pytest.raises(ClosedError, match=r"after close\(\)"):
        fused.propose(three_rows(spec))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"request_capacities": [0, 2]}, "bad entries: got \\[0, 2\\]"),
        ({"request_capacities": [2, 2]}, "bad entries"),
        ({"request_capacities": [8]}, "1..max_num_reqs=4"),
        ({"request_capacities": []}, "unknown request_capacities"),
        ({"mode": "fast"}, "unknown mode: got 'fast'"),
        ({"compiler": "gcc"}, "unknown compiler"),
        ({"emission": "tiles"}, "unknown emission"),
        ({"disable": ("hoist",)}, "unknown passes: got \\['hoist'\\]"),
        ({"num_speculative_tokens": 9}, "1 <= k <= 4"),
        ({"graph_memory_budget": 0}, "graph_memory_budget is no size"),
        ({"k_by_num_reqs": {2: 7}}, "0 <= k <= 4"),
    ],
)
def test_options_without_meaning_are_refused_before_anything_is_built(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOptionError, match=words):
        compiled(Small(k=K), **options)


def test_batches_that_do_not_fit_are_refused() -> None:
    spec = Small(k=3, max_num_reqs=2)
    fused = compiled(spec, request_capacities=[1])
    with pytest.raises(InvalidBatchError, match=r"num_reqs is out of range: got 3, expected 0..max_num_reqs=2"):
        fused.propose(batch_of(spec, [4, 4, 4]))
    with pytest.raises(InvalidBatchError, match="no request capacity holds the batch: got 2, expected at most 1"):
        fused.propose(batch_of(spec, [4, 4]))
    with pytest.raises(InvalidOptionError, match="0 <= k <= 3"):
        fused.propose(batch_of(spec, [4]), k=4)


class Serving(RuleBasedStateMachine):
    """Random batches, values of k and capacities against an eager loop, request by request as an engine has them."""

    @initialize()
    def start(self) -> None:
        self.pair = Pair(_SHARED[0], _SHARED[1])
        for fused in _SHARED:
            fused.spec.key.copy_(_KEY)
            fused.spec.value.copy_(_VALUE)
        self.lengths: dict[int, int] = {}

    @rule(length=st.integers(1, 31))
    def admit(self, length: int) -> None:
        if len(self.lengths) < 4:
            self.lengths[min(set(range(4)) - set(self.lengths))] = length

    @rule(slot=st.integers(0, 3))
    def finish(self, slot: int) -> None:
        self.lengths.pop(slot, None)

    @rule(k=st.integers(0, K), seed=st.integers(0, 9), grow=st.integers(1, K + 1))
    def step(self, k: int, seed: int, grow: int) -> None:
        if not self.lengths:
            return
        lengths = list(self.lengths.values())
        rejected = [(seed + i) % 2 if n > 1 else 0 for i, n in enumerate(lengths)]
        self.pair.draft(lambda spec: batch_of(spec, lengths, rejected, seed), k)
        self.lengths = {slot: min(n + grow, 32) for slot, n in self.lengths.items()}

    @rule(k=st.integers(0, K), seed=st.integers(0, 9))
    def uniform_step(self, k: int, seed: int) -> None:
        lengths = [max(n, K + 1) for n in self.lengths.values()]
        if lengths:
            self.pair.draft(lambda spec: uniform(spec, lengths, seed), k)

    @invariant()
    def dead_rows_stay_dead(self) -> None:
        rows = len(self.lengths)
        inputs = self.pair.fused.spec.inputs
        if self.pair.fused.report.counters["compiled calls"] and rows:
            assert bool((inputs.seq_lens >= 0).all())


_SHARED = (compiled(Small(k=K)), compiled(Small(k=K), mode="eager"))  # one set of builds for all examples
_KEY, _VALUE = _SHARED[0].spec.key.clone(), _SHARED[0].spec.value.clone()
TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)


def branching(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)))


def test_sub_graphs_and_raw_kernels_are_refused_at_the_users_line() -> None:
    traced = trace(branching, (torch.ones(3), torch.zeros(3)))
    with pytest.raises(UnsafeLoopError, match=r"raw kernel or a sub-graph(?s:.*)torch\.cond\(x\.sum\(\) > 0"):
        refuse_higher_order(traced)


class Counting(Small):
    """Counts its loops where the lint says that one may."""

    def __init__(self, k: int) -> None:
        super().__init__(k=k)
        self.loops = 0

    def on_multi_step_decode_end(self) -> None:
        self.loops += 1


@pytest.mark.parametrize("k", [3, 7])
def test_a_count_kept_in_the_last_hook_is_no_guard(k: int) -> None:
    pair = Pair(compiled(Counting(k)), compiled(Counting(k), mode="eager"))
    for seed in range(3):
        pair.draft(lambda s, x=seed: uniform(s, [11, 12], x))
    pair.fused.spec.loops = before = 10
    for seed in range(3):
        pair.fused.propose(uniform(pair.fused.spec, [11, 12], seed))
    assert pair.fused.spec.loops == before + 3
    assert not pair.fused.report.fallbacks
    assert pair.fused.report.counters["compiled calls"] == 6
