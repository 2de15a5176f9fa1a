"""Differential fuzzing: whole programs drawn from seeds draft the same compiled and eagerly."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.fuzz.programs import Program, draw, shrink
from tests.fuzz.speculators import mismatch

CHUNK = 1  # files with many tests begin first, and this is the longest
CHUNKS = int(os.environ.get("DRAFTFUSE_FUZZ_PROGRAMS", "200")) // CHUNK
# Programs that once drafted something else, shrunk; each names its fault.
KEPT = [
    # The first run of generated code, on dummy rows, moved on state that the loop keeps between calls.
    Program(builders=("chained",), memory="counted", rows=4, k=3, ks=(3,), batches=((3, 5, 4), (4, 4))),
    # Dead rows of a uniform batch were padded anew behind a prefill of its own, but not inside one launch.
    Program(memory="indexed", rows=4, batches=((14, 11, 5),), uniform=True),
    # The token of step 1 was looked for where later steps have theirs.
    Program(k=6, ks=(6,), rows=3, builders=("ragged",), layers=0, batches=((2, 5),)),
]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs_draft_the_same_with_eager_kernels(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        assert mismatch(draw(seed)) is None, f"seed {seed}: {draw(seed)}"


def test_a_few_programs_draft_the_same() -> None:
    for seed in (1, 2, 3):
        assert mismatch(draw(seed)) is None, f"seed {seed}"


@pytest.mark.parametrize("seed", range(8))
def test_programs_draft_the_same_with_inductor(seed: int) -> None:
    program = replace(draw(100_000 + seed), k=2, ks=(2,), uniform=False)
    assert mismatch(program, "inductor") is None, f"seed {100_000 + seed}: {program}"


@pytest.mark.parametrize("program", KEPT, ids=str)
def test_faults_of_the_past_stay_fixed(program: Program) -> None:
    assert mismatch(program) is None


def test_a_failing_program_shrinks_to_what_matters() -> None:
    def fails(program: Program) -> bool:
        return program.memory == "indexed" and program.k >= 3

    small = shrink(replace(draw(7), memory="indexed", k=4), fails)
    assert small == replace(Program(), memory="indexed", k=3)


def test_every_kind_is_drawn() -> None:
    drawn = [draw(seed) for seed in range(300)]
    assert {b for p in drawn for b in p.builders} >= {"window", "held", "chained", "ragged", "planned"}
    assert {p.memory for p in drawn} == {"none", "decayed", "indexed", "counted", "opaque"}
    assert {p.uniform for p in drawn} == {True, False}
