"""The pass object: identity, pickling, and that it leaves graphs without the marker alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import draftfuse
from draftfuse.lowering import hook
from draftfuse.lowering.ops.marker import marker, reference


def graph_of(marked: bool) -> fx.Graph:
    graph = fx.Graph()
    value = graph.placeholder("value")
    value.meta["val"] = torch.empty(2, 3, device="meta")
    inner = graph.call_function(hook.MARKER, (value,)) if marked else value
    first = graph.call_function(torch.ops.aten.relu.default, (inner,))
    second = graph.call_function(torch.ops.aten.relu.default, (inner,))
    total = graph.call_function(torch.ops.aten.add.Tensor, (first, second))
    for node in graph.nodes:
        node.meta.setdefault("val", torch.empty(2, 3, device="meta"))
    graph.output((total,))
    return graph


def test_it_is_an_attribute_of_the_package_that_vllm_can_name() -> None:
    assert vars(__import__("draftfuse"))["post_grad_pass"] is draftfuse.post_grad_pass
    assert isinstance(draftfuse.post_grad_pass, CustomGraphPass)


def test_it_pickles_and_copies_to_an_equal_object() -> None:
    for other in (pickle.loads(pickle.dumps(draftfuse.post_grad_pass)), copy.deepcopy(draftfuse.post_grad_pass)):
        assert other == draftfuse.post_grad_pass
        assert hash(other) == hash(draftfuse.post_grad_pass)
        assert other.uuid() == draftfuse.post_grad_pass.uuid()


def test_uuid_covers_sources_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    before = draftfuse.post_grad_pass.uuid()
    assert hook.sources_hash() in before
    monkeypatch.setenv("DRAFTFUSE_CHECK", "0" if "True" in before else "1")
    assert draftfuse.post_grad_pass.uuid() != before


def test_a_graph_without_the_marker_stays_as_it_is() -> None:
    graph = graph_of(marked=False)
    before = str(graph)
    draftfuse.post_grad_pass(graph)
    assert str(graph) == before


def test_a_marked_graph_loses_the_marker_and_is_cleaned_up() -> None:
    graph = graph_of(marked=True)
    draftfuse.post_grad_pass(graph)
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.relu.default, torch.ops.aten.add.Tensor]


def test_hidden_writes_keep_values_apart() -> None:
    graph = graph_of(marked=True)
    assert len(hook.passes_for(graph)) == 3
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.higher_order.auto_functionalized, (torch.ops.aten.relu_.default,))
    assert len(hook.passes_for(graph)) == 1


def test_products_choose_their_kernel_only_where_the_plug_in_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = draftfuse.post_grad_pass.uuid()
    monkeypatch.setenv(hook.VLLM_COMPILER, "inductor")
    assert len(hook.passes_for(graph_of(marked=True))) == 4
    assert draftfuse.post_grad_pass.uuid() != plain


def test_marker_is_a_copy() -> None:
    value = torch.randn(3)
    marked = marker(value)
    torch.testing.assert_close(marked, reference(value))
    assert marked.data_ptr() != value.data_ptr()
    torch.library.opcheck(hook.MARKER, (value,))
