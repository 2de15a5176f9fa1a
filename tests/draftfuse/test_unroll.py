"""Long loops are traced in part; a loop whose later steps do something else is traced in full, or drafts it wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from draftfuse import loop
from draftfuse.attribute_reads import AttributeReads
from draftfuse.lowering.segment import canonical
from draftfuse.passes import ir
from draftfuse.step_log import difference
from draftfuse.trace import trace
from draftfuse.unroll import TRACED_STEPS, Irregular, extend
from tests.failures.small import Small, batch_of, both

K = 8


def three_rows(spec: Any) -> Any:
    return batch_of(spec, [5, 12, 3], [0, 1, 0])


@pytest.mark.parametrize("function", [loop.decode_loop, loop.propose_loop])
@pytest.mark.parametrize(("symbolic", "k"), [("num_reqs", K), (None, K), ("num_reqs", TRACED_STEPS)])
def test_a_short_trace_extends_to_the_long_one(function: Callable[..., None], symbolic: str | None, k: int) -> None:
    spec = Small(k=K + 1)
    front = (spec, 3) if function is loop.decode_loop else (spec, 3, K + 2)
    short = trace(function, (*front, TRACED_STEPS, loop.graph_tap, True), symbolic)
    extend(short, k)
    full = trace(function, (*front, k, loop.graph_tap), symbolic)
    assert canonical(short.graph) == canonical(full.graph)
    assert [n.meta.get("draft_step") for n in short.graph.nodes] == [n.meta.get("draft_step") for n in full.graph.nodes]
    assert shared_memory(short.graph) == shared_memory(full.graph)


def shared_memory(graph: fx.Graph) -> list[int]:
    """For each tensor the first node that lies in the same memory."""
    first: dict[int, int] = {}
    keys = [ir.storage(n) for n in graph.nodes]
    return [first.setdefault(key, i) for i, key in enumerate(keys) if key is not None]


class Columns(Small):
    """Writes a column of its own in each step: a number that grows evenly."""

    def __init__(self) -> None:
        super().__init__(k=K)
        self.seen = torch.zeros(5, K, dtype=torch.int64)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        tokens = super().sample(hidden, step)
        self.seen[: tokens.shape[0], step].copy_(tokens)
        return tokens


def test_numbers_may_grow_evenly() -> None:
    pair = both(Columns, three_rows)
    build = pair.fused.report.builds[0]
    assert build.copied_steps == K - TRACED_STEPS
    assert not build.irregular
    assert torch.equal(pair.fused.spec.seen, pair.eager.spec.seen)
    assert pair.fused.spec.seen[:3].any(0).all()
    assert "of its steps copied" in pair.fused.explain()


class FirstStep(Small):
    """Does more in step 1 than in the others, so that its token stands elsewhere among its operators."""

    def __init__(self) -> None:
        super().__init__(k=K)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(torch.sin(hidden) * 2 if step == 1 else hidden, step)


def test_step_1_may_be_another_program() -> None:
    pair = both(FirstStep, three_rows)
    assert pair.fused.report.builds[0].copied_steps == K - TRACED_STEPS


class LateBranch(Small):
    """Does something else from a step on that a short trace never reaches."""

    def __init__(self) -> None:
        super().__init__(k=K)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(-hidden if step >= 6 else hidden, step)


class LastBranch(LateBranch):
    """The same in the last step alone."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return Small.sample(self, -hidden if step == self.num_speculative_tokens - 1 else hidden, step)


class Uneven(LateBranch):
    """A number that is a square, and agrees with an even one in steps 2 and 3."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return (Small.sample(self, hidden, step) + step * step) % 17


class Scaled(LateBranch):
    """A float of the step's own."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return Small.sample(self, hidden + 0.1 * step, step)


class Tables(LateBranch):
    """A tensor of the step's own, from a list; those of steps 2 and 3 are one."""

    def __init__(self) -> None:
        super().__init__()
        drawn = [torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in range(K)]
        self.shifts = [drawn[min(i, 3)] if i < 4 else drawn[i] for i in range(K)]
        self.shifts[2] = self.shifts[3]

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return Small.sample(self, hidden + self.shifts[step], step)


class Carried(LateBranch):
    """Step 7 reads what step 4 computed, through an attribute."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        kept = hidden if step <= 4 else self.kept
        self.kept: Tensor = kept
        tokens = Small.sample(self, hidden + kept, step)
        if step == self.num_speculative_tokens - 1:
            del self.kept
        return tokens


class ShorterLast(LateBranch):
    """The last step leaves out what stands at the end of the others."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        tokens = Small.sample(self, hidden, step)
        return tokens if step == self.num_speculative_tokens - 1 else (tokens + 3) % 17


class ShorterAdvance(LateBranch):
    """Late steps leave out the end of their advance."""

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        super().advance(tokens, hidden, step)
        if step < 6:
            self.inputs.hidden_states[: tokens.shape[0]].mul_(-2)


class SignOfZero(LateBranch):
    """A float of which only the sign differs, and it is zero."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        zeros = torch.zeros_like(hidden) * (-0.0 if step >= 6 else 0.0)
        return Small.sample(self, torch.copysign(hidden, zeros), step)


class Rows(Small):
    """Compares the number of rows with the step: another program at few rows only."""

    def __init__(self) -> None:
        super().__init__(k=K, max_num_reqs=16)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return Small.sample(self, -hidden if hidden.shape[0] < step else hidden, step)


def test_rows_that_meet_the_step_are_traced_for_themselves() -> None:
    many = [5, 12, 3, 6, 7, 4, 8, 5, 9]
    pair = both(Rows, lambda spec: batch_of(spec, many, [0] * len(many)))
    pair.draft(three_rows)
    builds = pair.fused.report.builds
    assert [(b.num_reqs, b.copied_steps > 0) for b in builds] == [(None, True), (4, False)]


def test_rows_are_compared_with_the_step_at_the_first_capacity_too() -> None:
    builds = both(Rows, three_rows).fused.report.builds
    assert [(b.num_reqs, b.copied_steps > 0) for b in builds] == [(None, False), (4, False)]


class Listed(LateBranch):
    """A number of the step's own, equal in all steps when the loop is built."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0] * K

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return Small.sample(self, hidden * self.scales[step], step)


def test_numbers_of_steps_that_were_not_traced_are_guarded() -> None:
    pair = both(Listed, three_rows)
    assert pair.fused.report.builds[0].copied_steps
    for spec in (pair.fused.spec, pair.eager.spec):
        spec.scales[6] = -1.0
    pair.draft(three_rows)
    assert any("spec.scales[6]: traced with 1.0, now -1.0" in f.reason for f in pair.fused.report.fallbacks)


IRREGULAR = [LateBranch, LastBranch, Uneven, Scaled, Tables, ShorterLast, ShorterAdvance, SignOfZero]


IN_CI = (LateBranch, Uneven, Tables, ShorterAdvance)


@pytest.mark.parametrize("klass", [k if k in IN_CI else pytest.param(k, marks=pytest.mark.slow) for k in IRREGULAR])
def test_irregular_loops_are_traced_in_full(klass: type[Small]) -> None:
    pair = both(klass, three_rows)
    build = pair.fused.report.builds[0]
    assert build.copied_steps == 0
    assert build.irregular
    assert build.irregular in pair.fused.explain()


def test_the_log_sees_a_value_from_another_step() -> None:
    spec = Carried()
    spec.kept = torch.zeros(3, 8)
    assert difference(lambda tap: loop.decode_loop(spec, 3, K, tap), K, AttributeReads(spec)) is not None
    regular = Small(k=K)
    assert difference(lambda tap: loop.decode_loop(regular, 3, K, tap), K, AttributeReads(regular)) is None


def test_a_trace_that_cannot_be_extended_stays_as_it_was() -> None:
    traced = trace(loop.decode_loop, (Scaled(), 3, TRACED_STEPS, loop.graph_tap, True))
    before = canonical(traced.graph)
    with pytest.raises(Irregular, match="an argument is"):
        extend(traced, K)
    assert canonical(traced.graph) == before
