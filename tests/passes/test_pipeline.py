"""The questions that all passes share, asked of the whole pipeline: values, order, repetition, dumps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import draftfuse
from draftfuse import loop, passes
from draftfuse.lowering.effects import hidden_reads
from draftfuse.lowering.emit import emit
from draftfuse.lowering.generated import register_refresh
from draftfuse.lowering.workspace import Workspace
from draftfuse.passes import ir
from draftfuse.passes.render import render
from draftfuse.trace import Trace, trace
from tests.draftfuse.toy import Toy, differences, make_batch, small, snapshot
from tests.passes import programs
from tests.passes.helpers import all_passes, assert_equal_eager, build, copies, run_emitted

ROWS, K = 3, 4
NAMES = [passes.name_of(one) for one in all_passes()]
FIELDS = {"ahead": ("step", "invariant", "pieces", "several"), "a step": ("token", "step", "invariant")}


@pytest.fixture(autouse=True)
def _check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTFUSE_CHECK", "1")


class Loop:
    """A toy whose rows stand before draft step 1, the graph of its loop, and what the loop leaves when it runs eagerly."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        self.traces: dict[bool, Trace] = {}
        self.spec = Toy(small(fields=fields, k=K, layers=2, logits=True, gumbel=True, groups=2))
        prefill = draftfuse.compile(self.spec, mode="eager", compiler="none", request_capacities=[ROWS])
        prefill.propose(make_batch(self.spec, ROWS, seed=3), k=1)
        self.start = snapshot(self.spec)
        with torch.no_grad():
            loop.decode_loop(self.spec, ROWS, K)
        self.expected = snapshot(self.spec)
        assert len(differences(self.start, self.expected)) > 5

    def rewind(self) -> None:
        """The state before draft step 1."""
        tensors = {f"inputs.{n}": t for n, t in self.spec.inputs.named_tensors().items()}
        tensors |= {f"pool {i}": pool for i, pool in enumerate(self.spec.pools)}
        for i, group in enumerate(self.spec.attn_groups):
            tensors |= {f"group {i} slots": group.slot_mapping, f"group {i} table": group.block_table}
        for name, tensor in tensors.items():
            tensor.copy_(self.start[name])

    def traced(self, symbolic: bool = False) -> Trace:
        """The loop's graph, traced once; each test gets a copy of its own."""
        if symbolic not in self.traces:
            self.rewind()
            arguments = (self.spec, ROWS, K, loop.graph_tap)
            self.traces[symbolic] = trace(loop.decode_loop, arguments, "num_reqs" if symbolic else None)
        first = self.traces[symbolic]
        graph = fx.Graph()
        graph.output(graph.graph_copy(first.graph, {}))
        return replace(first, module=fx.GraphModule(first.module, graph))

    def assert_right(self, traced: Trace) -> None:
        """The graph as it is now does what the eager loop does, bit for bit."""
        self.rewind()
        emission = emit(traced.graph, traced.fake_mode, traced.tensors, compiler="none")
        with torch.no_grad():
            emission.bind(ROWS, Workspace()).run()
        assert differences(self.expected, snapshot(self.spec)) == []


@pytest.fixture(scope="module", params=FIELDS)
def loops(request: pytest.FixtureRequest) -> Iterator[Loop]:
    return Loop(FIELDS[request.param])


def pipeline() -> tuple[passes.Pass, ...]:
    return passes.pipeline(register=register_refresh, hidden_reads=hidden_reads)


@pytest.mark.parametrize("symbolic", [pytest.param(False, marks=pytest.mark.slow), True], ids=["static", "symbolic"])
def test_each_pass_keeps_values(loops: Loop, symbolic: bool) -> None:
    traced = loops.traced(symbolic)
    loops.assert_right(traced)
    for one in pipeline():
        passes.run(traced.graph, [one])
        loops.assert_right(traced)


@pytest.mark.parametrize("name", NAMES)
def test_no_pass_is_needed_for_right_results(loops: Loop, name: str) -> None:
    traced = loops.traced()
    reports = passes.run(traced.graph, pipeline(), disable=(name,))
    assert [r.name for r in reports] == [n for n in NAMES if n != name]
    loops.assert_right(traced)


def test_the_whole_pipeline_a_second_time_changes_nothing(loops: Loop) -> None:
    traced = loops.traced()
    first = passes.run(traced.graph, pipeline())
    operators = _operators(traced)
    second = passes.run(traced.graph, pipeline())
    assert [r.rewrites for r in second] == [0] * len(NAMES)
    assert second[-1].nodes == first[-1].nodes
    assert _operators(traced) == operators
    loops.assert_right(traced)


def _operators(traced: Trace) -> list[str]:
    return sorted(str(n.target) for n in traced.graph.nodes if n.op == "call_function")


def test_what_the_passes_find_in_a_loop(loops: Loop, request: pytest.FixtureRequest) -> None:
    traced = loops.traced()
    found = {r.name: r.rewrites for r in passes.run(traced.graph, pipeline())}
    calls = [n for n in traced.graph.nodes if "body" in n.meta]
    assert found["erase_taps"] > 20
    assert found["buffers_to_values"] >= 2 * (K - 1)
    assert found["lower_metadata_refresh"] == len(calls)
    assert found["hoist_invariants"] > 0
    assert found["refresh_ahead"] > 0
    ahead = "ahead" in request.node.callspec.id
    assert len(calls) == (
        1 if ahead else K - 1
    )  # a field that tokens decide: what they decide is one a step from step 2


def test_run_reports_and_dumps_each_pass(tmp_path: Path) -> None:
    def plain(a: Tensor, out: Tensor) -> None:
        out.copy_(a * 2)

    graph = build(plain, torch.zeros(2), torch.zeros(2))
    before = render(graph)
    reports = passes.run(graph, all_passes(), dump=tmp_path / "dump", disable=("hoist_invariants",))
    names = [n for n in NAMES if n != "hoist_invariants"]
    files = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert files == ["00_traced.py", *(f"{i:02d}_{name}.py" for i, name in enumerate(names, 1))]
    assert (tmp_path / "dump" / "00_traced.py").read_text() == before
    assert (tmp_path / "dump" / files[-1]).read_text() == render(graph)
    assert [r.name for r in reports] == names
    assert all(r.seconds >= 0 and r.nodes == 5 for r in reports)


def test_taps_are_kept_where_the_audit_asks() -> None:
    steps = passes.pipeline(register=register_refresh, hidden_reads=hidden_reads, keep_taps=True)
    assert [passes.name_of(one) for one in steps] == [n for n in NAMES if n != "erase_taps"]


@settings(max_examples=int(os.environ.get("DRAFTFUSE_RANDOM_PROGRAMS", "50")), deadline=None)
@given(seed=st.integers(0, 1 << 32), length=st.integers(4, 14), disable=st.sampled_from(["", *NAMES]))
def test_random_programs_keep_values(seed: int, length: int, disable: str) -> None:
    program = programs.draw(seed, length)
    function = bound(program)
    tensors = programs.buffers()
    try:
        function(*copies(tensors))
    except RuntimeError as error:  # PyTorch refuses some overlapping writes
        if "single memory location" in str(error) or "can't be cast" in str(error):
            return
        raise
    graph = build(function, *tensors)
    passes.run(graph, all_passes(), disable=(disable,))
    assert_equal_eager(function, graph, *tensors)
    assert_equal_eager(function, graph, *tensors, run=run_emitted)


def bound(program: list[programs.Statement]) -> Callable[..., Any]:
    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> None:
        programs.run(program, a, b, c, d, e, f)

    return function


def test_programs_contain_every_statement() -> None:
    """Nothing in the table of statements is refused by PyTorch on plain operands."""
    for kind in range(programs.KINDS):
        programs.run([programs.Statement(kind, "refresh", 1, seed) for seed in range(3)], *programs.buffers())
    assert ir.ALIGNMENT == 16
