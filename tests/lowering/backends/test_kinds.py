"""Kinds of refresh: static, host-planned, guards that break, mixed groups, and builders from outside the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import draftfuse
from draftfuse import backends as b
from draftfuse import loop, passes
from draftfuse.errors import NotFusableError
from draftfuse.lowering.effects import hidden_reads
from draftfuse.lowering.generated import NAMESPACE, register_refresh
from draftfuse.passes import ir
from draftfuse.speculator import CommonMetadata, Guard
from draftfuse.trace import trace
from tests.lowering.backends.rows import layer_of, make, planned_layer, static_layer
from tests.lowering.backends.support import (
    LENS,
    STEPS,
    Fused,
    Layer,
    Toy,
    differences,
    load,
    paged_layer,
    record_rebuild,
)


def shipped_graph(spec: Any) -> fx.Graph:
    """The fused loop as it ships, at six rows."""
    load(spec, LENS, 6)
    traced = trace(loop.decode_loop, (spec, 6, STEPS, loop.graph_tap))
    passes.run(traced.graph, passes.pipeline(register=register_refresh, hidden_reads=hidden_reads))
    return traced.graph


def refreshes(graph: fx.Graph) -> list[str]:
    """Operators of refresh phases, and generated ones."""
    calls = [n for n in graph.nodes if n.op == "call_function" and not ir.is_view(n)]
    generated = [str(n.target) for n in calls if str(n.target).startswith(NAMESPACE)]
    return generated + [str(n.target) for n in calls if ir.phase(n) in ("refresh", "slot_mapping") and ir.is_tensor(n)]


def expected_tokens(spec: Any, lens: list[int] = LENS) -> list[list[int]]:
    record_rebuild(spec, lens, 6)
    tokens: list[list[int]] = spec.inputs.draft_tokens[: len(lens)].tolist()
    return tokens


def fused_tokens(fused: Any, lens: list[int] = LENS, **options: Any) -> list[list[int]]:
    load(fused.spec, lens, 6)
    fused.decode(len(lens), **options)
    tokens: list[list[int]] = fused.spec.inputs.draft_tokens[: len(lens)].tolist()
    return tokens


def compiled(spec: Any, **options: Any) -> Any:
    return draftfuse.compile(spec, compiler="none", request_capacities=[6], **options)


def test_static_has_no_refresh_at_all() -> None:
    spec = Toy([Layer(b.StaticBuilder(), static_layer)], advance=False)
    assert refreshes(shipped_graph(spec)) == []


def test_advancing_twin_of_static_has_one() -> None:
    spec = Toy([Layer(b.PagedBuilder(), static_layer)])
    assert [name.split(".")[0] for name in refreshes(shipped_graph(spec))] != []


def test_static_equals_rebuild() -> None:
    spec = Toy([Layer(b.StaticBuilder(), static_layer)], advance=False)
    expected = record_rebuild(spec, LENS, 6)
    assert differences(expected, Fused(spec).record(LENS, 6)) == []


def test_static_metadata_that_is_computed_is_computed_once() -> None:
    spec = Toy([Layer(b.SparseSwaBuilder(6), paged_layer(b.attend_sparse_swa))], advance=False)
    graph = shipped_graph(spec)
    assert sum(str(n.target).startswith(NAMESPACE) for n in graph.nodes) == 1


def test_mixed_groups_are_all_refreshed() -> None:
    spec = make("triton_attention", "sparse_swa", "flash_attn3")
    expected = record_rebuild(spec, LENS, 6)
    assert {name.split(".")[0] for name, _ in expected if "metadata" in name} == {"group0", "group1", "group2"}
    assert differences(expected, Fused(spec).record(LENS, 6)) == []


def test_host_planned_runs_split_and_says_so() -> None:
    spec = Toy([Layer(b.PlannedFlashInferBuilder(), planned_layer)])
    expected, fused = expected_tokens(spec), compiled(spec)
    assert fused_tokens(fused) == expected
    assert "PlannedFlashInferBuilder) plans each step on the host" in str(fused.report.fallbacks[0])


def test_host_plan_equals_paged_attention() -> None:
    planned, paged = Toy([Layer(b.PlannedFlashInferBuilder(), planned_layer)]), make("triton_attention")
    assert expected_tokens(planned) == expected_tokens(paged)


def test_planner_free_equals_paged_attention() -> None:
    spec = Toy([Layer(b.PlannerFreeFlashInferBuilder(), paged_layer(b.attend_planner_free))])
    expected = record_rebuild(spec, LENS, 6)
    assert differences(expected, Fused(spec).record(LENS, 6)) == []
    assert expected_tokens(spec) == expected_tokens(make("triton_attention"))


def test_one_unsupported_group_sends_the_loop_to_split() -> None:
    spec = Toy([layer_of("sparse_swa"), Layer(b.PlannedFlashInferBuilder(), planned_layer)])
    expected, fused = expected_tokens(spec), compiled(spec)
    assert fused_tokens(fused) == expected
    assert "attn_groups[1] (PlannedFlashInferBuilder)" in fused.report.fallbacks[0].reason
    assert fused.report.counters["compiled calls"] == STEPS - 1


def test_unsupported_group_is_refused_where_fused_is_asked_for() -> None:
    spec = Toy([Layer(b.PlannedFlashInferBuilder(), planned_layer)])
    load(spec, LENS, 6)
    with pytest.raises(NotFusableError, match="PlannedFlashInferBuilder"):
        compiled(spec, mode="fused").decode(len(LENS))


class UntraceableBuilder(b.PagedBuilder):
    """Reads a length on the host."""

    def build(self, common: CommonMetadata) -> Any:
        metadata = super().build(common)
        self.longest = int(common.seq_lens.max().item())
        return metadata


def test_untraceable_builder_runs_split_with_its_line() -> None:
    spec = Toy([Layer(UntraceableBuilder(), paged_layer(b.attend_paged))])
    expected, fused = expected_tokens(spec), compiled(spec)
    assert fused_tokens(fused) == expected
    assert fused.report.fallbacks != []


class NarrowGuards(b.PagedBuilder):
    """Kernels chosen for sequences of up to 20 tokens."""

    def guards(self, metadata: Any) -> list[Guard]:
        return [Guard("max_seq_len", 20, "max_seq_len", "at_most")]


def test_broken_guard_sends_the_call_to_split() -> None:
    spec = Toy([Layer(NarrowGuards(), paged_layer(b.attend_paged))])
    expected, fused = expected_tokens(spec), compiled(spec)
    assert fused_tokens(fused, max_seq_len=16) == expected
    before = dict(fused.report.counters)
    assert fused_tokens(fused, max_seq_len=21) == expected
    assert fused.report.counters["broken guards"] == before.get("broken guards", 0) + 1


@pytest.mark.parametrize("change", ["num_splits", "window"])
def test_changed_host_decision_breaks_its_guard(change: str) -> None:
    spec = make("flash_attn3")
    fused = compiled(spec)
    fused_tokens(fused)
    setattr(spec.attn_groups[0].builder, change, 3)
    fused_tokens(fused)
    assert fused.report.counters["broken guards"] == 1


def test_derived_builder_outside_the_table() -> None:
    class Outside:
        def build(self, common: CommonMetadata) -> dict[str, Tensor]:
            first = (common.seq_lens - 3).clamp(min=0)
            return {"slot_mapping": common.slot_mapping, "first": first, "ends": first.cumsum(0)}

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, metadata: Any) -> Tensor:
        return q * (metadata["first"] + metadata["ends"]).view(-1, 1, 1) * 0.1

    spec = Toy([Layer(Outside(), attend)])
    expected = record_rebuild(spec, LENS, 6)
    assert differences(expected, Fused(spec).record(LENS, 6)) == []
    assert torch.equal(expected["group0.metadata.first", 1][:4], torch.tensor([0, 5, 12, 0]).int())
