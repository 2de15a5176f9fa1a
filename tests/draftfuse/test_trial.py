"""The trial of a trace: what Dynamo reads otherwise than Python runs it is found before anything is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import build, trial
from draftfuse.errors import UnsafeLoopError
from draftfuse.numbering import Numbering, Table
from draftfuse.trial import Trial
from tests.failures.small import Small, both, three_rows

aten = torch.ops.aten


class OverSet(Small):
    """Python goes through the set as 0, 3, 7; Dynamo as 7, 0, 3."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        for number in set([7, 0, 3]):  # noqa: C405
            hidden = hidden * (number - 1.5) + number
        return super().sample(hidden, step)


@pytest.mark.parametrize("mode", ["auto", "fused", "split"])
def test_a_set_that_the_loop_goes_through_is_found_at_its_line(mode: str) -> None:
    with pytest.raises(UnsafeLoopError, match="computes something else than the loop") as raised:
        draftfuse.compile(OverSet(), mode=mode, compiler="none").propose(three_rows(Small()))
    assert raised.value.source is not None
    assert raised.value.source.text == "hidden = hidden * (number - 1.5) + number"


class OverSetOnLiveRows(Small):
    """Nothing of it shows on dead rows."""

    def enter(self, inputs: draftfuse.DraftInputs) -> Tensor:
        x = super().enter(inputs)
        live = (inputs.positions < inputs.seq_lens).to(x.dtype).unsqueeze(1) if x.shape[0] == 3 else 0.0
        for number in set([7, 0, 3]):  # noqa: C405
            x = torch.sin(x + number * 0.1 * live)
        return x


class OverSetBesideChance(Small):
    """What does not repeat itself hides nothing in front of it."""

    def enter(self, inputs: draftfuse.DraftInputs) -> Tensor:
        x = super().enter(inputs)
        for number in set([7, 0, 3]):  # noqa: C405
            x = torch.sin(x * 1.1 + number * 0.1)
        return x + torch.empty(x.shape[0], 4096)[:, 7:9].sum(-1, keepdim=True) * 0


class OverSetWhereItIsHot(Small):
    """Nothing of it shows on greedy rows."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        hot = (self.inputs.temperature[: hidden.shape[0]] > 0).to(hidden.dtype).unsqueeze(1)
        for number in set([7, 0, 3]):  # noqa: C405
            hidden = torch.sin(hidden + number * hot)
        return super().sample(hidden, step)


class OverSetOnLongRows(Small):
    """Nothing of it shows on rows that fit into one page."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        long = (self.inputs.seq_lens[: hidden.shape[0]] > 8).to(hidden.dtype).unsqueeze(1)
        for number in set([7, 0, 3]):  # noqa: C405
            hidden = torch.sin(hidden + number * long)
        return super().sample(hidden, step)


@pytest.mark.parametrize("make", [OverSetOnLiveRows, OverSetBesideChance, OverSetWhereItIsHot, OverSetOnLongRows])
def test_neither_dead_rows_nor_chance_hide_a_difference(make: Any) -> None:
    with pytest.raises(UnsafeLoopError, match="computes something else than the loop"):
        draftfuse.compile(make(k=3), compiler="none", request_capacities=[3]).decode(3)


class Sorted(OverSet):
    def sample(self, hidden: Tensor, step: int) -> Tensor:
        for number in sorted({7, 0, 3}):
            hidden = hidden * (number - 1.5) + number
        return Small.sample(self, hidden, step)


def test_what_the_error_advises_helps() -> None:
    assert all(b.trial == "" for b in both(Sorted, three_rows).fused.report.builds)


def test_a_trace_that_is_not_the_loops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it came from: the disk of another day, for one."""
    plain = build.traced_loop

    def changed(*args: Any) -> Any:
        traced = plain(*args)
        node = next(n for n in traced.graph.find_nodes(op="call_function", target=aten.div.Tensor))
        node.args = (node.args[0], 3.5)
        return traced

    monkeypatch.setattr(build, "traced_loop", changed)

    class Divided(Small):
        def sample(self, hidden: Tensor, step: int) -> Tensor:
            return super().sample(torch.tanh(hidden / 3.0), step)

    with pytest.raises(UnsafeLoopError) as raised:
        draftfuse.compile(Divided(k=3), compiler="none").propose(three_rows(Small()))
    assert raised.value.source is not None
    assert "hidden / 3.0" in raised.value.source.text


def tap(value: Tensor) -> None:
    torch.ops.draftfuse.tap(value, "hidden", 1)


def trial_of(loop: Callable[[Tensor], None], traced: Callable[[Tensor], None]) -> Trial:
    spec = Small()
    x = spec.inputs.hidden_states
    return Trial(spec, lambda: loop(x), lambda: traced(x), [x])


def test_equal_values_in_other_words_pass_with_a_note() -> None:
    assert "other operators" in trial_of(lambda x: tap(x * 2), lambda x: tap(x + x)).check()
    with pytest.raises(UnsafeLoopError):
        trial_of(lambda x: tap(x * 2), lambda x: tap(x * 3)).check()


def test_a_loop_that_does_not_repeat_itself_is_no_measure() -> None:
    with pytest.raises(UnsafeLoopError):  # nor can it be seen to compute the same
        trial_of(lambda x: tap(torch.rand(3)), lambda x: tap(x[0, :3].clone())).check()
    assert trial_of(lambda x: tap(torch.rand(3)), lambda x: tap(torch.rand(3))).check() == ""


def test_a_trial_leaves_the_inputs_as_they_were() -> None:
    spec = Small()
    x = spec.inputs.hidden_states
    Trial(spec, lambda: tap(x.add_(1)), lambda: tap(x.sub_(-1)), [x]).check()
    assert bool((x == 0).all())


def numbers(run: Callable[[Tensor], None], x: Tensor, table: Table) -> Any:
    with Numbering(table) as numbering:
        run(x)
    return numbering.taps, numbering.memory.get(x.untyped_storage()._cdata)


def dead_operator(x: Tensor) -> None:
    x.exp()
    tap(x + 1)


def other_order(x: Tensor) -> None:
    b = x - 2
    a = x + 1
    tap(a * b)


def by_views(x: Tensor) -> None:
    tap(x[0:4].view(4, 2).reshape(4, 2).detach() + 1)


PAIRS = {
    "a dead operator": (dead_operator, lambda x: tap(x + 1), True),
    "independent operators": (other_order, lambda x: tap((x + 1) * (x - 2)), True),
    "views of the whole": (by_views, lambda x: tap(x + 1), True),
    "views of a part": (lambda x: tap(x[1:]), lambda x: tap(x[:3]), False),
    "constants": (lambda x: tap(torch.tensor([1.0, 2.0])), lambda x: tap(torch.tensor([1.0, 2.0])), True),
    "other constants": (lambda x: tap(torch.tensor([1.0, 2.0])), lambda x: tap(torch.tensor([1.0, 3.0])), False),
    "zeros of two signs": (lambda x: tap(x + 0.0), lambda x: tap(x + -0.0), False),
    "one and True": (lambda x: tap(torch.full((2,), 1)), lambda x: tap(torch.full((2,), True)), False),
    "a write": (lambda x: tap(x.add_(1)), lambda x: tap(x + 1), False),
    "a write before and behind a read": (
        lambda x: (tap(x + 1), x.zero_())[0],
        lambda x: (x.zero_(), tap(x + 1))[1],
        False,
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_numbers_stand_for_what_was_computed(pair: str) -> None:
    first, second, same = PAIRS[pair]
    x = torch.arange(8.0).view(4, 2)
    table: Table = {}
    assert (numbers(first, x, table) == numbers(second, x, table)) is same


def test_every_build_has_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    plain = trial.Trial.agrees
    monkeypatch.setattr(trial.Trial, "agrees", lambda self: checked.append(self) or plain(self))
    pair = both(Small, three_rows)
    pair.draft(three_rows, k=3)
    builds = pair.fused.report.builds
    assert [b.k for b in builds] == [4, 3]
    assert len(checked) == 2
    assert all(b.trial == "" and b.trial_seconds > 0 for b in builds)


@torch.library.custom_op("draftfuse_tests::push", mutates_args=())
def push(x: Tensor, value: float) -> Tensor:
    """Keeps state that no argument shows."""
    return x + value


@push.register_fake
def _(x: Tensor, value: float) -> Tensor:
    return torch.empty_like(x)


def pushed_in_order(*places: int) -> Callable[[Tensor], None]:
    """A loop that pushes 0 and 1 in the order of ``places``, and adds both up as 0 and 1."""

    def loop(x: Tensor) -> None:
        made = {place: push(x, float(place)) for place in places}
        tap(made[0] + made[1])

    return loop


def test_operators_that_may_have_hidden_state_keep_their_order() -> None:
    assert trial_of(pushed_in_order(0, 1), pushed_in_order(0, 1)).agrees()
    assert not trial_of(pushed_in_order(0, 1), pushed_in_order(1, 0)).agrees()
