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
    both(CountingAnew, three_rows)
    both(CountingForNothing, three_rows, mode="split")
    pair = both(lambda: Small(builder=CountingBuilder()), three_rows, mode="split")
    pair.draft(CALLS[1])
