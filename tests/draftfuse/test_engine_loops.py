"""Loops as engines write them, and the reference speculators: the lint finds nothing, and drafts are those of eager."""

from __future__ import annotations

import inspect

import pytest
from torch import Tensor

import draftfuse
from draftfuse.errors import UnsafeLoopError
from draftfuse.lint import lint
from draftfuse.reference import EagleSpeculator
from tests.failures.engine_loops import InPlace, MultiStep, Proposer
from tests.failures.small import Small, batch_of, both
from tests.reference.test_reference import MAKERS, make

ENGINES = [Proposer, MultiStep, InPlace]


@pytest.mark.parametrize("klass", ENGINES)
def test_an_engines_loop_has_no_finding_at_all(klass: type[Small]) -> None:
    assert lint(klass(), k=3) == []


@pytest.mark.parametrize("klass", ENGINES)
def test_an_engines_loop_is_fused_and_drafts_as_eager(klass: type[Small]) -> None:
    pair = both(klass, lambda spec: batch_of(spec, [5, 9, 3], [0, 1, 0]))
    first = pair.draft(lambda spec: batch_of(spec, [5, 9, 3], [0, 1, 0]))
    pair.draft(lambda spec: batch_of(spec, [30, 8], [0, 2], seed=3))  # to the length limit, and fewer rows
    pair.draft(lambda spec: batch_of(spec, [31], seed=4), k=2)
    assert pair.fused.report.fallbacks == []
    assert pair.fused.report.counters["compiled calls"] == 4
    assert first.unique().numel() > 2


@pytest.mark.parametrize("kind", MAKERS)
def test_a_reference_speculator_has_no_finding_at_all(kind: str) -> None:
    spec, _ = make(kind, 3)
    assert lint(spec, k=3) == []


@pytest.mark.parametrize(("rows", "words"), [(2, "leaves its table"), (20, "a table of 20 rows")])
def test_a_mistake_in_a_reference_speculator_is_named_at_its_own_line(rows: int, words: str) -> None:
    """The reference package counts as user code, where the loop runs (two rows are found there) and in the graph."""
    spec, _ = make("eagle", 3)
    spec.rotary = spec.rotary[:rows].clone()
    (found,) = [f for f in lint(spec, k=3) if f.name == "short-table"]
    assert words in found.text
    assert found.source is not None
    assert found.source.file == inspect.getsourcefile(EagleSpeculator)
    assert "self.rotary[" in found.source.text
    if rows == 20:
        with pytest.raises(UnsafeLoopError, match=r"reference/eagle\.py:\d+: .*self\.rotary\["):
            draftfuse.compile(spec, compiler="none").decode(2)


def test_the_same_loop_with_a_mistake_is_not_clean() -> None:
    class Rebinding(Proposer):
        def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
            self.slots = self.slots + 1
            super().advance(tokens, hidden, step)

    assert "fresh-allocation" in [f.name for f in lint(Rebinding(), k=3) if f.is_error]
