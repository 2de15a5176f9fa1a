"""What a user's code raises in a draft step: one error with the step, the phase and the line, in every mode."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import CommonMetadata, DraftInputs, validate
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
    """Returns something else from one method, in the prefill as in the decode steps."""

    def __init__(self, forward: Any = lambda pair: pair, sample: Any = lambda tokens: tokens) -> None:
        super().__init__(k=3)
        self.of_forward, self.of_sample = forward, sample

    def forward(self, inputs: DraftInputs, metadata: Any) -> Any:
        return self.of_forward(super().forward(inputs, metadata))

    def sample(self, hidden: Tensor, step: int) -> Any:
        return self.of_sample(super().sample(hidden, step))


class OwnPrefill(Returns):
    def prefill(self, inputs: DraftInputs, metadata: Any) -> Any:
        return super().forward(inputs, metadata)[0]


RESULTS: dict[str, tuple[Any, str]] = {
    "one result": (lambda: Returns(forward=lambda pair: pair[0]), "forward does not return two tensors: got Tensor"),
    "three": (
        lambda: Returns(forward=lambda pair: (*pair, None)),
        "forward does not return two tensors: got tuple of Tensor, Tensor, NoneType",
    ),
    "no feedback": (
        lambda: Returns(forward=lambda pair: (pair[0], None)),
        "forward does not return two tensors: got tuple of Tensor, NoneType",
    ),
    "no return": (lambda: Returns(forward=lambda pair: None), "forward does not return two tensors: got None"),
    "two rows": (
        lambda: Returns(forward=lambda pair: tuple(t.repeat(2, 1) for t in pair)),
        "forward returns several positions a request: parallel heads or a tree in one step: got (",
    ),
    "own prefill": (OwnPrefill, "prefill does not return two tensors: got Tensor"),
    "no tokens": (lambda: Returns(sample=lambda tokens: None), "sample does not return a tensor: got None"),
    "a list": (
        lambda: Returns(sample=lambda tokens: [1, 2, 3]),
        "sample does not return a tensor: got list of int, int",
    ),
    "a tree": (
        lambda: Returns(sample=lambda tokens: tokens.repeat(2, 1).t()),
        "sample returns several tokens a request: a tree of drafts, or parallel heads: got (3, 2)",
    ),
    "too few": (lambda: Returns(sample=lambda tokens: tokens[:1]), "sample does not return one token a request: got"),
    "a number": (
        lambda: Returns(sample=lambda tokens: tokens.sum()),
        "sample does not return one token a request: got",
    ),
    "int32": (
        lambda: Returns(sample=lambda tokens: tokens.int()),
        "sample returns tokens of another dtype: got torch.int32, expected torch.int64",
    ),
}


@pytest.mark.parametrize("mode", ["eager", "split", "auto"])
@pytest.mark.parametrize("case", RESULTS)
def test_what_a_method_must_not_return_is_named(case: str, mode: str) -> None:
    make, words = RESULTS[case]
    fused = draftfuse.compile(make(), mode=mode, compiler="none", request_capacities=[3])
    with pytest.raises(UnsafeLoopError) as caught:
        fused.propose(three_rows(fused.spec), k=1)
    assert words in str(caught.value)
    assert caught.value.source is not None
    assert caught.value.source.file == __file__


class Hooked(Small):
    """All lifecycle hooks; each raises what stands in the table, once."""

    def on_prefill_begin(self) -> None:
        stop("on_prefill_begin")

    def on_prefill_end(self) -> None:
        stop("on_prefill_end")

    def on_multi_step_decode_begin(self) -> None:
        stop("on_multi_step_decode_begin")

    def on_multi_step_decode_end(self) -> None:
        stop("on_multi_step_decode_end")


RAISED: dict[str, BaseException] = {}


def stop(name: str) -> None:
    if name in RAISED:
        raise RAISED.pop(name)


@pytest.mark.parametrize(("mode", "names"), [("eager", validate.HOOKS), ("auto", validate.HOOKS[:2])])
def test_after_a_hook_has_raised_the_drafts_are_the_same(mode: str, names: tuple[str, ...]) -> None:
    spec = Hooked(k=2)
    fused = draftfuse.compile(spec, mode=mode, compiler="none", request_capacities=[4])
    batches = (three_rows, lambda s: batch_of(s, [5, 9]))
    drafts = [draftfuse.compile(s := Small(k=2), mode="eager").propose(b(s), copy=True) for b in batches]
    assert torch.equal(fused.propose(three_rows(spec)), drafts[0])
    for name in names:
        for error, expected in ((ValueError("odd"), FailedLoopError), (KeyboardInterrupt(), KeyboardInterrupt)):
            RAISED[name] = error
            with pytest.raises(expected):
                fused.propose(batches[1](spec))
            assert all(torch.equal(fused.propose(b(spec)), d) for b, d in zip(batches, drafts, strict=True))


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
