"""A loop of another length extends the short trace of an earlier build, and never one that is no longer its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftfuse import build, loop, trace_cache
from draftfuse.build import Settings, keep, traced_loop
from draftfuse.dispatch import DECODE, Descriptor
from draftfuse.scalar_guards import ScalarGuards
from draftfuse.short_traces import ShortTraces
from draftfuse.state import fill_dummy
from draftfuse.trace import Trace
from draftfuse.trace_cache import FROM_DISK, SWITCH
from draftfuse.trial import Trial
from draftfuse.unroll import TRACED_STEPS
from tests.failures.small import H, Small, batch_of, both

ROWS, FIRST, LARGEST = 4, TRACED_STEPS, 9


class Scaled(Small):
    """Reads a number and a tensor; from step 5 on it may do something else."""

    late = False

    def __init__(self) -> None:
        super().__init__(k=LARGEST)
        self.scale, self.shift = 2.0, torch.full((H,), 0.5)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """A number, a tensor, and a step."""
        hidden = hidden * self.scale + self.shift
        return super().sample(-hidden if self.late and step > FIRST else hidden, step)


class Traced(Exception):
    """The loop was traced; of how many draft tokens."""


def refuse(function: Callable[..., None], args: tuple[Any, ...], *rest: Any, **options: Any) -> Trace:
    raise Traced([a for a in args if type(a) is int][-1])


def trace_of(spec: Scaled, k: int, shorts: ShortTraces, **settings: Any) -> Trace:
    """What a build of ``k`` draft tokens makes code of."""
    descriptor, settings = Descriptor(DECODE, ROWS, ROWS, k), {"shorts": shorts, **settings}
    return traced_loop(loop.decode_loop, (spec, 3, k, loop.graph_tap), "num_reqs", descriptor, Settings(**settings))


@pytest.fixture(scope="module")
def first() -> tuple[Scaled, ShortTraces]:
    """A speculator, and what its first build kept."""
    spec, shorts = Scaled(), ShortTraces(LARGEST)
    fill_dummy(spec, ROWS, 1)
    assert not trace_of(spec, FIRST, shorts).again
    assert len(shorts) == 1
    return spec, shorts


@pytest.fixture
def kept(first: tuple[Scaled, ShortTraces], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Scaled, ShortTraces]]:
    """The same for each test anew, in which a trace raises."""
    spec, shorts = first
    mine = ShortTraces(LARGEST)
    mine._kept = {key: copy.copy(value) for key, value in shorts._kept.items()}
    for one in mine._kept.values():
        one.left = set(one.left)
    monkeypatch.setattr(build, "trace", refuse)
    before = vars(spec).copy()
    yield spec, mine
    vars(spec).clear()
    vars(spec).update(before)


def test_the_trace_is_used_for_every_length_and_then_dropped(kept: tuple[Scaled, ShortTraces]) -> None:
    modes = []
    for k in range(FIRST + 1, LARGEST + 1):
        assert len(kept[1]) == 1
        traced = trace_of(kept[0], k, kept[1])
        modes.append(traced.fake_mode)
        assert traced.again
        assert traced.copied_steps == k - TRACED_STEPS
    assert len(kept[1]) == 0
    assert len({id(mode.shape_env) for mode in modes}) == len(modes)  # guards of one length are none of another's


def as_it_is(patch: pytest.MonkeyPatch) -> None:
    """All protections."""


def no_guards(patch: pytest.MonkeyPatch) -> None:
    """Leave the trial alone to see a change."""
    patch.setattr(ScalarGuards, "broken", lambda self: [])
    patch.setattr("draftfuse.short_traces._require_places", lambda *args: None)


def no_trial(patch: pytest.MonkeyPatch) -> None:
    """Leave the comparison of values and places alone to see it."""
    patch.setattr(Trial, "agrees", lambda self: True)


@pytest.mark.parametrize("without", [as_it_is, no_guards, no_trial])
@pytest.mark.parametrize(("name", "value"), [("scale", -3.0), ("shift", torch.linspace(-9, 9, H))])
def test_a_change_between_builds_is_traced(
    kept: tuple[Scaled, ShortTraces], name: str, value: Any, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setattr(kept[0], name, value)
    without(monkeypatch)
    with pytest.raises(Traced, match=f"{TRACED_STEPS}"):
        trace_of(kept[0], FIRST + 1, kept[1])
    assert len(kept[1]) == 0


def test_later_steps_that_differ_are_traced_in_full(
    kept: tuple[Scaled, ShortTraces], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scaled, "late", True)
    no_guards(monkeypatch)
    with pytest.raises(Traced, match=f"{LARGEST}"):
        trace_of(kept[0], LARGEST, kept[1])


def test_with_findings_all_is_traced(kept: tuple[Scaled, ShortTraces]) -> None:
    with pytest.raises(Traced):
        trace_of(kept[0], FIRST + 1, kept[1], is_clean=lambda: False)


def test_another_state_of_torch_is_traced(kept: tuple[Scaled, ShortTraces]) -> None:
    with torch.autocast("cpu"), pytest.raises(Traced):
        trace_of(kept[0], FIRST + 1, kept[1])


def test_facts_of_a_copy_are_those_of_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(trace_cache, "folder", lambda: tmp_path / "traces")
    spec, shorts = Scaled(), ShortTraces(LARGEST)
    fill_dummy(spec, ROWS, 1)
    whole = trace_of(spec, FIRST + 1, shorts)
    monkeypatch.setattr(build, "trace", refuse)
    copied = trace_of(spec, LARGEST, shorts)
    assert copied.again
    assert copied.entry.facts.to_json() == whole.entry.facts.to_json()
    keep(copied, Settings())
    assert copied.entry.said == ""
    assert trace_of(spec, LARGEST, ShortTraces()).entry.said == FROM_DISK
    monkeypatch.setattr(ScalarGuards, "broken", lambda self: [])
    no_trial(monkeypatch)
    spec.scale = -3.0
    with pytest.raises(Traced):
        trace_of(spec, FIRST + 2, shorts)


def test_drafts_are_those_of_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def three_rows(spec: Any) -> Any:
        return batch_of(spec, [5, 12, 3], [0, 1, 0])

    pair = both(Scaled, three_rows, FIRST, request_capacities=[ROWS])
    with monkeypatch.context() as patch:
        patch.setattr(build, "trace", refuse)
        pair.draft(three_rows, LARGEST)
    for spec in (pair.fused.spec, pair.eager.spec):
        spec.scale, spec.shift = -3.0, torch.linspace(-9, 9, H)
    pair.draft(three_rows, FIRST + 1)
    assert [b.again for b in pair.fused.report.builds] == [False, True, False]
    assert pair.fused.explain().count("nothing traced: the trace of an earlier build was used again") == 1
    assert len(pair.fused.runners.settings.shorts) == 1
    pair.fused.recapture()
    assert len(pair.fused.runners.settings.shorts) == 0
