"""Split loops: metadata in every shape that Python has reaches each step, and what cannot is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import CommonMetadata, DraftInputs
from draftfuse.errors import UnsafeLoopError, UnstableMetadataError
from tests.failures.small import Pair, Small, WindowBuilder, WindowMetadata, batch_of, both, three_rows

NAMES = ("seq_lens", "block_table", "slot_mapping", "start", "length")
CALLS = (
    three_rows,
    lambda spec: batch_of(spec, [31, 30, 8], [0, 2, 0], 3),
    lambda spec: batch_of(spec, [1, 2], seed=5),
)


class Fields(NamedTuple):
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    start: Tensor
    length: Tensor


class Plain:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slots:
    __slots__ = NAMES

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class Nested(Plain):
    """Tensors one object further down."""

    start = property(lambda self: self.window.start)
    length = property(lambda self: self.window.length)


def nested(**values: Any) -> Nested:
    window = Plain(start=values.pop("start"), length=values.pop("length"))
    return Nested(window=window, **values)


def local(**values: Any) -> Any:
    """Of a class that every call makes anew."""

    @dataclass
    class Local:
        seq_lens: Tensor
        block_table: Tensor
        slot_mapping: Tensor
        start: Tensor
        length: Tensor

    return Local(**values)


class Shaped(WindowBuilder):
    """Returns what ``make`` makes of the fields."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make = make

    def build(self, common: CommonMetadata) -> Any:
        return self.make(**vars(super().build(common)))


class Same(WindowBuilder):
    """Returns one object, with new tensors each time."""

    def __init__(self) -> None:
        super().__init__()
        self.one: Any = None

    def build(self, common: CommonMetadata) -> Any:
        made = super().build(common)
        self.one = self.one or made
        vars(self.one).update(vars(made))
        return self.one


class Rebinding(WindowBuilder):
    """A refresh that binds new tensors instead of writing them."""

    def refresh(self, metadata: WindowMetadata, common: CommonMetadata) -> None:
        vars(metadata).update(vars(self.build(common)))


@dataclass
class Aliases:
    """Two of the fields are set from outside."""

    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


def extended(start: Tensor, length: Tensor, **values: Any) -> Any:
    made = Aliases(**values)
    vars(made).update(start=start, length=length)
    return made


SHAPES: dict[str, Callable[[], Any]] = {
    "tuple": lambda: Shaped(Fields),
    "plain": lambda: Shaped(Plain),
    "slots": lambda: Shaped(Slots),
    "nested": lambda: Shaped(nested),
    "local": lambda: Shaped(local),
    "extended": lambda: Shaped(extended),
    "same": Same,
    "rebinding": Rebinding,
}


MODES = ("split", "eager")
AUTO = ("auto", "eager")


def pair_of(make: Callable[[], Small]) -> Pair:
    fused = draftfuse.compile(make(), compiler="none", mode="split", request_capacities=[4])
    return Pair(fused, draftfuse.compile(make(), mode="eager", request_capacities=[4]))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_reads_the_metadata_of_its_own(shape: str) -> None:
    pair = pair_of(lambda: Small(k=3, builder=SHAPES[shape]()))
    for call in CALLS:
        pair.draft(call)
    assert pair.fused.report.counters["compiled calls"] == 2 * len(CALLS)


@pytest.mark.parametrize("shape", ["same", "rebinding"])
def test_a_second_capacity_reads_its_own_tensors(shape: str) -> None:
    pair = Pair(*(draftfuse.compile(Small(k=2, builder=SHAPES[shape]()), compiler="none", mode=m) for m in MODES))
    for lengths in ([31, 30, 8], [31], [1, 2], [30]):
        pair.draft(lambda spec, n=lengths: batch_of(spec, n, seed=len(n)))  # type: ignore[misc]


@dataclass
class Stepped(WindowMetadata):
    draft_step: int = 0
    table: dict[str, Any] = field(default_factory=dict)


class Stepping(WindowBuilder):
    def build(self, common: CommonMetadata) -> Stepped:
        return Stepped(**vars(super().build(common)), draft_step=common.draft_step)


class Scaled(Small):
    """Reads the step from the metadata."""

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        hidden, feedback = super().forward(inputs, metadata)
        return hidden + metadata["draft"].draft_step * self.place[3], feedback


def test_the_step_may_stand_in_the_metadata() -> None:
    pair = pair_of(lambda: Scaled(k=3, builder=Stepping()))
    for call in CALLS:
        pair.draft(call)


class Deep(Stepping):
    def build(self, common: CommonMetadata) -> Stepped:
        made = super().build(common)
        made.table["scale"] = [2 * common.draft_step]
        return made


def test_a_host_value_that_changes_inside_the_loop_is_refused_wherever_it_stands() -> None:
    spec = Small(k=3, builder=Deep())
    fused = draftfuse.compile(spec, compiler="none", mode="split")
    words = r"at draft step 2: got Stepped.table.scale.0=4, expected Stepped.table.scale.0=2"
    with pytest.raises(UnstableMetadataError, match=words):
        fused.propose(three_rows(spec))


class Counting(Small):
    """A count of its own, in what it computes."""

    count = 0

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        hidden, feedback = super().forward(inputs, metadata)
        self.count += 1
        return hidden * self.count, feedback


class CountingAnew(Counting):
    """The same in every loop, so that a whole one is traced rightly; a step by itself is not."""

    def on_multi_step_decode_begin(self) -> None:
        self.count = 0

    on_prefill_begin = on_multi_step_decode_begin


class CountingForNothing(CountingAnew):
    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        self.count += 1
        return Small.forward(self, inputs, metadata)


class CountingBuilder(WindowBuilder):
    """Runs in Python at every step: what it counts is right."""

    count = 0

    def build(self, common: CommonMetadata) -> WindowMetadata:
        self.count += 1
        made = super().build(common)
        made.length.add_(self.count)
        return made


class CountingIntoMemory(CountingAnew):
    """The count reaches no draft of this loop, but memory that the next prefill reads."""

    def __init__(self) -> None:
        super().__init__()
        self.log = torch.zeros(4)

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        if inputs.positions.shape[0] == inputs.seq_lens.shape[0]:
            self.count += 1
            self.log.fill_(float(self.count))
        hidden, feedback = Small.forward(self, inputs, metadata)
        return hidden, feedback


class Iterating(CountingAnew):
    """Takes its numbers from an iterator that a hook makes anew."""

    def on_multi_step_decode_begin(self) -> None:
        self.numbers = iter([1, 2, 3])

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        hidden, feedback = Small.forward(self, inputs, metadata)
        if inputs.positions.shape[0] == inputs.seq_lens.shape[0]:
            hidden = hidden * next(self.numbers)
        return hidden, feedback


@pytest.mark.parametrize("make", [CountingIntoMemory, Iterating])
def test_state_that_reaches_memory_and_iterators_are_refused(make: Callable[[], Small]) -> None:
    with pytest.raises(UnsafeLoopError, match="side-effect"):
        draftfuse.compile(make(), mode="split", compiler="none").decode(3)


@pytest.mark.parametrize("make", [Counting, CountingAnew])
def test_a_count_that_a_step_computes_with_is_refused_at_its_line(make: Callable[[], Small]) -> None:
    with pytest.raises(UnsafeLoopError, match="side-effect") as raised:
        draftfuse.compile(make(), mode="split", compiler="none").propose(three_rows(Small()))
    assert raised.value.source is not None
    assert raised.value.source.text == "self.count += 1"


def test_counts_that_no_step_computes_with_run_split() -> None:
    both(CountingAnew, three_rows).draft(CALLS[1])
    both(CountingForNothing, three_rows, mode="split")
    pair = both(lambda: Small(builder=CountingBuilder()), three_rows, mode="split")
    pair.draft(CALLS[1])


class Table(WindowBuilder):
    """``start`` is a row of a table, which another step reads as ``length``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(80, dtype=torch.int32).view(16, 5) % 7

    def build(self, common: CommonMetadata) -> WindowMetadata:
        made, rows, step = super().build(common), common.num_reqs, common.draft_step
        made.start, made.length = self.table[step, :rows], self.table[step + 1, :rows]
        return made


class Swapping(WindowBuilder):
    """Two buffers that change places at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)

    def build(self, common: CommonMetadata) -> WindowMetadata:
        made = super().build(common)
        first, second = self.places(common)
        self.buffers[first][: common.num_reqs].copy_(made.start)
        self.buffers[second][: common.num_reqs].copy_(made.length * 3)
        made.start, made.length = self.buffers[first][: common.num_reqs], self.buffers[second][: common.num_reqs]
        return made

    def places(self, common: CommonMetadata) -> tuple[int, int]:
        return common.draft_step % 2, 1 - common.draft_step % 2


class SwappingByCall(Swapping):
    """The buffers change places at each prefill."""

    odd = 0

    def places(self, common: CommonMetadata) -> tuple[int, int]:
        self.odd = (self.odd + (common.draft_step == 0)) % 2
        return self.odd, 1 - self.odd


class Moving(WindowBuilder):
    """Two windows of one buffer, one place apart, that move on with the step."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.arange(32, dtype=torch.int32)

    def build(self, common: CommonMetadata) -> WindowMetadata:
        made, begin, end = super().build(common), common.draft_step, common.draft_step + common.num_reqs
        self.buffer[begin:end].copy_(made.length)
        made.start, made.length = self.buffer[begin:end], self.buffer[begin + 1 : end + 1]
        return made


class Lazy(WindowBuilder):
    """Makes its buffer when it is first asked; while a loop is built, that is undone."""

    buffer: Tensor | None = None

    def build(self, common: CommonMetadata) -> WindowMetadata:
        made = super().build(common)
        if self.buffer is None:
            self.buffer = torch.zeros(64, dtype=torch.int32)
        self.buffer[: common.num_reqs].copy_(made.length)
        made.length = self.buffer[: common.num_reqs]
        return made


class LengthOfInputs(WindowBuilder):
    """Is the inputs' own memory at the first step alone."""

    def build(self, common: CommonMetadata) -> WindowMetadata:
        made = super().build(common)
        made.length = common.seq_lens if common.draft_step <= 1 else made.length * 2
        return made


class TurnedTable(WindowBuilder):
    """The group's own block table at the first step alone."""

    def build(self, common: CommonMetadata) -> WindowMetadata:
        made = super().build(common)
        made.block_table = common.block_table if common.draft_step <= 1 else common.block_table.flip(1)
        return made


def memory_of(spec: Any) -> list[Tensor]:
    """What split steps must leave alone: tables and buffers of the user's."""
    own = [v for v in vars(spec.builder).values() if isinstance(v, (Tensor, tuple))]
    buffers = [t for value in own for t in (value if isinstance(value, tuple) else (value,))]
    return [spec.attn_groups[0].block_table, *buffers]


def draft_all(pair: Pair) -> None:
    """Every call drafts the same, and leaves the same in the user's memory."""
    for call in CALLS:
        pair.draft(call)
        for mine, expected in zip(memory_of(pair.fused.spec), memory_of(pair.eager.spec), strict=True):
            assert torch.equal(mine, expected)


BUILDERS = (Table, Swapping, Moving, Lazy, LengthOfInputs, TurnedTable)


@pytest.mark.parametrize("builder", BUILDERS)
def test_metadata_that_is_memory_of_the_users_is_never_written(builder: type[WindowBuilder]) -> None:
    pair = pair_of(lambda: Small(builder=builder()))
    draft_all(pair)
    assert pair.fused.report.counters["compiled calls"] == 3 * len(CALLS)
    assert not pair.fused.report.fallbacks


def planned(builder: type[WindowBuilder]) -> Any:
    made: Any = builder()
    made.refresh_kind = "host-planned"
    return made


@pytest.mark.parametrize("builder", [Table, Moving])
def test_nor_where_auto_runs_split(builder: type[WindowBuilder]) -> None:
    specs = [Small(builder=planned(builder)) for _ in AUTO]
    draft_all(Pair(*(draftfuse.compile(s, compiler="none", mode=m) for s, m in zip(specs, AUTO, strict=True))))


def test_nor_behind_a_broken_guard() -> None:
    pair = Pair(*(draftfuse.compile(Small(builder=Swapping()), compiler="none", mode=m) for m in AUTO))
    pair.draft(three_rows)
    for spec in (pair.fused.spec, pair.eager.spec):
        spec.builder.window = 3
    draft_all(pair)
    assert pair.fused.report.counters["broken guards"] == len(CALLS)


def test_memory_that_moves_later_sends_its_steps_to_python() -> None:
    pair = pair_of(lambda: Small(k=3, builder=SwappingByCall()))
    draft_all(pair)
    counters = pair.fused.report.counters
    assert (counters["eager steps"], counters["compiled calls"]) == (4, 2)
    assert "WindowMetadata.start lies in other memory than when the step was made" in pair.fused.explain()


class Clearing(Small):
    """Writes what it has read of the metadata."""

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        hidden, feedback = super().forward(inputs, metadata)
        metadata["draft"].start.zero_()
        return hidden + metadata["draft"].length[:1] * 0.1, feedback


class ClearingInputs(Small):
    """Writes what is metadata at the first step."""

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        hidden, feedback = super().forward(inputs, metadata)
        inputs.seq_lens.add_(inputs.seq_lens.clamp(max=1))
        hidden = hidden + metadata["draft"].length[:1] * 0.1
        inputs.seq_lens.sub_(inputs.seq_lens.clamp(max=1))
        return hidden, feedback


@pytest.mark.parametrize(
    ("make", "builder", "compiled"), [(Clearing, Moving, 0), (ClearingInputs, LengthOfInputs, 2 * len(CALLS))]
)
def test_a_step_that_writes_such_memory_runs_in_python(
    make: type[Small], builder: type[WindowBuilder], compiled: int
) -> None:
    pair = pair_of(lambda: make(builder=builder()))
    draft_all(pair)
    assert pair.fused.report.counters["compiled calls"] == compiled
    assert "lies in other memory from step to step" in pair.fused.explain()


class Plan:
    """A planner's, of another package."""

    def __init__(self, scale: int, length: Tensor) -> None:
        self.scale, self.length = scale, length


Plan.__module__ = "elsewhere"


class Planning(WindowBuilder):
    def __init__(self, by_step: bool, anew: bool) -> None:
        super().__init__()
        self.by_step, self.anew, self.twice = by_step, anew, torch.zeros(5, dtype=torch.int32)

    def build(self, common: CommonMetadata) -> Any:
        made, rows = super().build(common), common.num_reqs
        self.twice[:rows].copy_(made.length * 2)
        plan = Plan(common.draft_step if self.by_step else 2, self.twice[:rows].clone() if self.anew else self.twice)
        return Plain(**vars(made), plan=plan)


class ReadsPlan(Small):
    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        hidden, feedback = super().forward(inputs, metadata)
        if inputs.positions.shape[0] == inputs.seq_lens.shape[0]:
            plan = metadata["draft"].plan
            hidden = torch.sin(hidden + (plan.scale * plan.length[: hidden.shape[0]]).unsqueeze(1))
        return hidden, feedback


@pytest.mark.parametrize(("by_step", "anew", "eager"), [(False, False, 0), (True, False, 1), (False, True, 2)])
def test_what_a_planner_keeps_to_itself_is_compared(by_step: bool, anew: bool, eager: int) -> None:
    pair = pair_of(lambda: ReadsPlan(k=3, builder=Planning(by_step, anew)))
    draft_all(pair)
    assert pair.fused.report.counters["eager steps"] == eager * len(CALLS)


class AnyStepping(WindowBuilder):
    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make = make

    def build(self, common: CommonMetadata) -> Any:
        return self.make(**vars(super().build(common)), draft_step=common.draft_step)


class Steps(NamedTuple):
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    start: Tensor
    length: Tensor
    draft_step: int


@pytest.mark.parametrize("make", [Plain, Steps])
def test_the_step_may_stand_in_metadata_of_any_class(make: Callable[..., Any]) -> None:
    draft_all(pair_of(lambda: Scaled(k=3, builder=AnyStepping(make))))


class Refreshing(WindowBuilder):
    """Leaves the start as it was when the loop began."""

    def refresh(self, metadata: WindowMetadata, common: CommonMetadata) -> None:
        metadata.length.copy_(common.seq_lens - metadata.start)


def test_what_a_refresh_leaves_is_that_of_the_same_loop() -> None:
    draft_all(pair_of(lambda: Small(builder=Refreshing())))


class Stubborn(Plain):
    def __copy__(self) -> Plain:
        raise TypeError("there is only one")


def test_metadata_that_cannot_be_copied_is_refused() -> None:
    spec = Small(k=3, builder=Shaped(Stubborn))
    with pytest.raises(UnstableMetadataError, match="cannot be copied: got TypeError: there is only one"):
        draftfuse.compile(spec, compiler="none", mode="split").propose(three_rows(spec))


def test_each_step_has_its_own_title() -> None:
    fused = draftfuse.compile(Small(k=3), compiler="none", mode="split", request_capacities=[4])
    fused.decode(2)
    titles = [line for line in fused.explain().splitlines() if "segments" in line]
    assert [line.split(":")[0] for line in titles] == [f"draft step {n} of k=3, 4 requests" for n in (1, 2)]
