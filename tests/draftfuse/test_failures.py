"""What a user's code raises in a draft step: one error with the step, the phase and the line, in every mode."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import CommonMetadata, DraftInputs
from draftfuse.errors import (
    DraftfuseError,
    FailedLoopError,
    InvalidOptionError,
    InvalidSpeculatorError,
    OpArgumentError,
    UnsafeLoopError,
)
from draftfuse.validate import source_of
from tests.failures.small import Small, WindowBuilder, batch_of, three_rows

TABLE = [torch.ones(1), torch.ones(1)]


class Faulty(Small):
    """Raises in one method, once it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__(k=3, builder=FaultyBuilder())
        self.where, self.wrong = where, False

    def forward(self, inputs: DraftInputs, metadata: Any) -> tuple[Tensor, Tensor]:
        ragged = inputs.positions.shape[0] != inputs.seq_lens.shape[0]
        if self.wrong and self.where == ("prefill" if ragged else "forward"):
            raise ValueError("odd layer")
        return super().forward(inputs, metadata)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        if self.wrong and self.where == f"sample {step}":
            raise ValueError("odd token")
        return super().sample(hidden, step)

    def on_prefill_end(self) -> None:
        if self.wrong and self.where == "on_prefill_end":
            raise ValueError("odd hook")


class FaultyBuilder(WindowBuilder):
    wrong = False

    def build(self, common: CommonMetadata) -> Any:
        if self.wrong and common.draft_step == 2:
            raise ValueError("odd metadata")
        return super().build(common)


CASES = [
    ("eager", "prefill", "draft step 0, prefill", 0, 'raise ValueError("odd layer")'),
    ("eager", "forward", "draft step 1, forward", 1, 'raise ValueError("odd layer")'),
    ("eager", "sample 0", "draft step 0, sample", 0, 'raise ValueError("odd token")'),
    ("eager", "sample 2", "draft step 2, sample", 2, 'raise ValueError("odd token")'),
    ("eager", "on_prefill_end", "on_prefill_end", None, 'raise ValueError("odd hook")'),
    ("eager", "build", "draft step 2, refresh", 2, 'raise ValueError("odd metadata")'),
    ("split", "build", "draft step 2, refresh", 2, 'raise ValueError("odd metadata")'),
    ("split", "prefill", "draft step 0, prefill", 0, 'raise ValueError("odd layer")'),
    ("auto", "prefill", "draft step 0, prefill", 0, 'raise ValueError("odd layer")'),
]


@pytest.mark.parametrize(("mode", "where", "named", "step", "text"), CASES)
def test_the_step_the_phase_and_the_line_are_named(
    mode: str, where: str, named: str, step: int | None, text: str
) -> None:
    spec = Faulty(where)
    fused = draftfuse.compile(spec, mode=mode, compiler="none", request_capacities=[4])
    fused.propose(three_rows(spec))
    spec.wrong = True
    spec.builder.wrong = where == "build"
    with pytest.raises(FailedLoopError, match=f"the draft loop fails at {named}: got ValueError: odd ") as caught:
        fused.propose(three_rows(spec))
    assert (caught.value.step, type(caught.value.__cause__)) == (step, ValueError)
    assert caught.value.source is not None
    assert caught.value.source.file == __file__
    assert caught.value.source.text == text
    spec.wrong = spec.builder.wrong = False
    assert fused.propose(three_rows(spec)).shape == (3, 3)


class Misspelt(Small):
    def __init__(self, ragged: bool) -> None:
        super().__init__(k=3)
        self.ragged = ragged

    def enter(self, inputs: DraftInputs) -> Tensor:
        if (inputs.positions.shape[0] != inputs.seq_lens.shape[0]) == self.ragged:
            return self.embedding[inputs.input_ids]  # type: ignore[attr-defined,no-any-return]
        return super().enter(inputs)


@pytest.mark.parametrize(("ragged", "error", "step"), [(False, UnsafeLoopError, 1), (True, FailedLoopError, 0)])
def test_a_missing_attribute_is_named(ragged: bool, error: type[DraftfuseError], step: int) -> None:
    fused = draftfuse.compile(Misspelt(ragged), compiler="none")
    words = rf"attribute Misspelt\.embedding is missing at draft step {step}, .*return self\.embedding\["
    with pytest.raises(error, match=r"(?s)" + words):
        fused.propose(batch_of(fused.spec, [5, 9, 2]))


def test_a_class_without_a_class_statement_names_the_users_line() -> None:
    made = dataclasses.make_dataclass("Made", [("window", int)], namespace={"build": lambda self, common: common})
    source = source_of(made(3))
    assert source is not None
    assert source.file == __file__
    assert "make_dataclass" in source.text
    assert source_of(dataclasses.make_dataclass("Bare", ["window"])) is None


class OfModule(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) * TABLE[0]


def test_a_tensor_of_a_module_has_a_plain_name() -> None:
    with pytest.raises(UnsafeLoopError, match=r"the loop reads tests\.draftfuse\.test_failures\.TABLE\[0\], which"):
        draftfuse.compile(OfModule(k=3), compiler="none").decode(3)


def test_ranks_that_are_none_are_refused() -> None:
    fused = draftfuse.compile(Small(k=3), compiler="none")
    with pytest.raises(InvalidOptionError, match=r"across does not describe ranks: got \(1, 2\)"):
        fused.propose(three_rows(fused.spec), across=(1, 2))  # type: ignore[arg-type]


class Returns(Small):
    """One method returns something else."""

    def __init__(self, where: str, what: Any) -> None:
        super().__init__(k=2)
        self.where, self.what = where, what

    def forward(self, inputs: DraftInputs, metadata: Any) -> tuple[Tensor, Tensor]:
        hidden, feedback = super().forward(inputs, metadata)
        if self.where == "forward":
            return (hidden, None) if self.what == "half" else self.what  # type: ignore[return-value]
        return hidden, feedback

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        tokens = super().sample(hidden, step)
        return self.what if self.where == "sample" else tokens


@pytest.mark.parametrize("mode", ["auto", "split", "eager"])
@pytest.mark.parametrize(
    ("where", "what", "words"),
    [
        ("sample", None, "sample does not return a tensor: got None, expected int64, one token a request"),
        ("forward", None, r"forward does not return two tensors: got None, expected \(hidden for logits, hidden to"),
        ("forward", "half", r"forward does not return two tensors: got \(Tensor, NoneType\), expected"),
    ],
)
def test_a_method_that_returns_something_else_is_named(mode: str, where: str, what: Any, words: str) -> None:
    fused = draftfuse.compile(Returns(where, what), compiler="none", mode=mode)
    with pytest.raises(UnsafeLoopError, match=words) as caught:
        fused.decode(3)
    assert caught.value.source is not None
    assert caught.value.source.text.startswith(f"def {where}(")


class Wrong(WindowBuilder):
    """Metadata with one field that is wrong."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    def build(self, common: CommonMetadata) -> Any:
        made = super().build(common)
        if self.wrong == "nothing":
            return None
        if self.wrong == "field":
            return dataclasses.replace(made, length=None)  # type: ignore[arg-type]
        return dataclasses.replace(made, slot_mapping=made.slot_mapping.to(torch.int32))


@pytest.mark.parametrize("mode", ["auto", "split", "eager"])
@pytest.mark.parametrize(
    ("wrong", "words", "line"),
    [
        ("nothing", "None stands where an object with .slot_mapping is read at draft step 1, forward", "ops.write_kv("),
        ("field", "a statement computes with None at draft step 1, forward", "hidden = hidden + (meta.start"),
        ("dtype", "write_kv: slot_mapping has a wrong dtype at draft step 1, forward", "ops.write_kv("),
    ],
)
def test_metadata_that_is_wrong_is_not_blamed_on_padding(mode: str, wrong: str, words: str, line: str) -> None:
    fused = draftfuse.compile(Small(k=2, builder=Wrong(wrong)), compiler="none", mode=mode)
    with pytest.raises((UnsafeLoopError, FailedLoopError, OpArgumentError), match=words) as caught:
        fused.decode(3)
    assert "Padded rows" not in str(caught.value)
    assert caught.value.source is not None
    assert caught.value.source.text.startswith(line)


class Fails(Small):
    """Fails on any rows, or on padded ones."""

    def __init__(self, padded: bool) -> None:
        super().__init__(k=2)
        self.padded = padded

    def enter(self, inputs: DraftInputs) -> Tensor:
        if not self.padded or int(inputs.seq_lens[0]) == 0:
            raise IndexError("odd index")
        return super().enter(inputs)


@pytest.mark.parametrize("padded", [False, True])
def test_padding_is_blamed_for_what_live_rows_do_not_raise(padded: bool) -> None:
    with pytest.raises(UnsafeLoopError, match="odd index") as caught:
        draftfuse.compile(Fails(padded), compiler="none").decode(3)
    assert ("on dummy rows" in str(caught.value)) == ("Padded rows" in str(caught.value)) == padded


def test_an_operator_that_refuses_its_arguments_names_the_step_and_the_line() -> None:
    for mode in ("auto", "eager"):
        fused = draftfuse.compile(Small(k=2, builder=Wrong("dtype")), compiler="none", mode=mode)
        with pytest.raises(OpArgumentError, match="slot_mapping has a wrong dtype at draft step 0, prefill") as caught:
            fused.propose(dataclasses.replace(batch_of(fused.spec, [5, 9, 7]), max_query_len=3))
        assert (caught.value.step, caught.value.phase) == (0, "prefill")
        assert "small.py" in str(caught.value)


@pytest.mark.parametrize("given", [None, Small, "model.py:make"], ids=["None", "class", "text"])
def test_what_is_no_speculator_is_refused_by_what_it_is(given: Any) -> None:
    came = "None" if given is None else re.escape(repr(given))
    with pytest.raises(InvalidSpeculatorError, match=rf"this is no speculator: got {came}.*Return the speculator from"):
        draftfuse.compile(given)
