"""explicit_metadata: hidden reads and writes become arguments, of declared operators only what was declared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from draftfuse.lowering.generated import register_hidden
from draftfuse.passes import ir
from draftfuse.passes.buffers_to_values import buffers_to_values
from draftfuse.passes.explicit_metadata import explicit_metadata
from tests.passes.helpers import at, build, register, run_graph

SEEN: dict[str, Tensor] = {}
ATTEND = register(
    "attend_hidden(Tensor x) -> Tensor", lambda x: x * SEEN["lens"].unsqueeze(1), lambda x: torch.empty_like(x)
)


def two_steps(x: Tensor, lens: Tensor, out: Tensor) -> None:
    with at("forward", 1):
        y = ATTEND(x)
    with at("advance", 1):
        lens.add_(1)
    with at("forward", 2):
        out.copy_(ATTEND(y) + lens.unsqueeze(1))
    with at("advance", 2):
        lens.add_(1)


def tensors() -> list[Tensor]:
    return [torch.ones(3, 2), torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, 2)]


def declared(graph: fx.Graph, reads: Sequence[str], writes: Sequence[str] = ()) -> int:
    named = {ir.path_of(n): n for n in ir.placeholders(graph)}
    effects = [named[r] for r in reads], [named[w] for w in writes]
    return explicit_metadata(graph, effects=lambda node: effects, wrap=register_hidden)


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if ir.is_opaque(n)]


def test_a_declared_read_becomes_an_argument() -> None:
    graph = build(two_steps, *tensors())
    assert declared(graph, ["lens", "x"]) == 2
    for call in calls(graph):
        assert [ir.path_of(n) for n in ir.hidden_reads_of(call)] == ["lens"]  # the loop does not write x
        assert call.args[1] == []
    assert declared(graph, ["lens"]) == 0


def test_a_declared_write_is_a_mutation() -> None:
    graph = build(two_steps, *tensors())
    declared(graph, ["lens"], ["lens"])
    assert [[ir.path_of(n) for n in ir.written(c)] for c in calls(graph)] == [["lens"]] * 2


def test_an_undeclared_operator_may_touch_all_that_the_loop_writes() -> None:
    graph = build(two_steps, *tensors())
    assert explicit_metadata(graph, effects=lambda node: None, wrap=register_hidden) == 2
    assert {ir.path_of(n) for n in ir.written(calls(graph)[0])} == {"lens", "out"}


def test_an_operator_that_touches_its_arguments_only_is_left_alone() -> None:
    graph = build(two_steps, *tensors())
    assert explicit_metadata(graph, effects=lambda node: ([], []), wrap=register_hidden) == 0


def test_values_equal_eager_behind_forwarding() -> None:
    expected = tensors()
    SEEN["lens"] = expected[1]
    two_steps(*expected)
    graph = build(two_steps, *tensors())
    declared(graph, ["lens"])
    assert buffers_to_values(graph, hidden_reads=lambda node: ()) > 0
    given = tensors()
    SEEN["lens"] = given[1]
    run_graph(graph, given)
    for got, want in zip(given, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_forwarding_alone_would_be_wrong() -> None:
    expected = tensors()
    SEEN["lens"] = expected[1]
    two_steps(*expected)
    graph = build(two_steps, *tensors())
    buffers_to_values(graph, hidden_reads=lambda node: ())
    given = tensors()
    SEEN["lens"] = given[1]
    run_graph(graph, given)
    assert not torch.equal(given[2], expected[2])
