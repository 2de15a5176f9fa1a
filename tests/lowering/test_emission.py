"""Emission: segments compiled once, both emissions right on the pattern that Inductor gets wrong, stores in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse.build import Settings, build
from draftfuse.dispatch import DECODE, Descriptor
from draftfuse.loop import decode_loop, graph_tap
from draftfuse.lowering import emit, whole
from draftfuse.lowering.partition import Segment, partition
from draftfuse.lowering.workspace import ROW_ALIGNMENT, Workspace
from draftfuse.passes import ir
from tests.failures.small import Small, batch_of, three_rows
from tests.passes.helpers import register

SET = register("set_to(Tensor(a!) out, Tensor value) -> ()", lambda out, value: out.copy_(value))
KEEP = register("keep(Tensor x) -> Tensor", lambda x: x.clone(), torch.empty_like)


class Stale(Small):
    """A mutating operator runs twice on one buffer, with a lazy read between that an opaque operator pins."""

    def __init__(self) -> None:
        super().__init__(k=3)
        self.scratch = torch.zeros(8)

    def forward(self, inputs: Any, metadata: Any) -> tuple[Tensor, Tensor]:
        base = torch.arange(8.0) + inputs.input_ids.sum()
        SET(self.scratch, base)
        first = self.scratch * 2  # must read what was just written, not what comes next
        pinned = KEEP(first + 1)
        SET(self.scratch, base + 100)
        hidden = inputs.hidden_states + (first + self.scratch + 0 * pinned) * 1e-3
        return hidden, hidden


def drafts(spec: Any, **options: Any) -> tuple[Tensor, Any]:
    fused = draftfuse.compile(spec, **options)
    return fused.propose(three_rows(spec), copy=True), fused


@pytest.mark.parametrize("emission", ["segments", "whole"])
def test_a_buffer_written_twice_is_read_in_program_order(emission: str) -> None:
    expected, _ = drafts(Stale(), mode="eager")
    tokens, fused = drafts(Stale(), mode="fused", emission=emission)
    assert torch.equal(tokens, expected)
    assert [b.emission for b in fused.report.builds] == [emission]
    assert not fused.report.builds[0].refused


def test_a_whole_graph_that_reads_late_is_found_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "realise_readers_first", lambda operator: None)
    monkeypatch.setattr(whole, "OPTIONS", {"force_disable_caches": True})
    for operator in [o for o in whole.lowerings if getattr(o, "namespace", "") == "draftfuse_gen"]:
        monkeypatch.delitem(whole.lowerings, operator)
    expected, _ = drafts(Stale(), mode="eager")
    tokens, fused = drafts(Stale(), mode="fused", emission="whole")
    assert torch.equal(tokens, expected)
    assert "reads version" in fused.report.builds[0].refused


def built(k: int, compiler: str = "none") -> emit.Emission:
    spec = Small(k=k)
    descriptor = Descriptor(DECODE, 3, 3, k)
    emission, _ = build(decode_loop, (spec, 3, k, graph_tap), descriptor, None, Settings(compiler=compiler))
    return emission


def keys(k: int) -> list[str]:
    emission = built(k)
    items = partition(emission.graph).items
    return [e.key for i in items if (e := emit._extract_item(i, emission.symbol)) is not None]


def test_distinct_segments_do_not_grow_with_k() -> None:
    few, many = keys(5), keys(9)
    assert len(many) == len(few) + 4  # one more a step
    assert len(set(many)) == len(set(few))
    assert len(set(many) - set(few)) == 2  # the refresh of all steps and the store of all tokens grow with k


def test_rows_are_aligned_and_their_own() -> None:
    emission = built(4)
    bound = emission.bind(3, Workspace())
    rows = [ir.value(n) for n in ir.placeholders(emission.graph) if n.meta.get("owned")]
    assert rows
    held = {t.data_ptr() for t in bound.tensors}
    first = min(p for p in held if p)
    workspace = Workspace()
    carved = workspace.start()
    taken = [carved.take([3], torch.int32, torch.device("cpu")) for _ in range(4)]
    offsets = [t.storage_offset() * t.element_size() for t in taken]
    assert offsets == [i * ROW_ALIGNMENT for i in range(4)]
    assert first


def test_stores_at_the_end_of_a_segment_are_its_own() -> None:
    items = [i for i in partition(built(4).graph).items if isinstance(i, Segment)]
    assert items[-1].stores
    assert all(ir.is_aligned(s.all_input_nodes[0]) for item in items for s in item.stores)


def test_generated_code_writes_buffers_in_place_and_drafts_the_same() -> None:
    spec, twin = Small(k=3), Small(k=3)
    fused = draftfuse.compile(spec)
    eager = draftfuse.compile(twin, mode="eager")
    pointers = {n: t.data_ptr() for n, t in spec.inputs.named_tensors().items()} | {"key": spec.key.data_ptr()}
    for lengths in ([5, 9, 3], [6, 4], [30, 31, 2, 7]):
        assert torch.equal(fused.propose(batch_of(spec, lengths)), eager.propose(batch_of(twin, lengths)))
        for name in ("positions", "seq_lens", "input_ids", "draft_tokens"):
            assert torch.equal(getattr(spec.inputs, name), getattr(twin.inputs, name)), name
        torch.testing.assert_close(spec.key, twin.key)
    now = {n: t.data_ptr() for n, t in spec.inputs.named_tensors().items()} | {"key": spec.key.data_ptr()}
    assert now == pointers
    assert [b.num_reqs for b in fused.report.builds] == [None]
    assert not any(c.findings for e in fused.runners._emissions.values() for c in e.calls.values())
