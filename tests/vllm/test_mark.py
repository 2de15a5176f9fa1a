"""Marker and pass together: the draft's graph is recognised, and the marker is gone from what runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import draftfuse
from draftfuse.lowering.hook import MARKER
from draftfuse.vllm import asked, mark
from tests.vllm.processes import report_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.linear(hidden) + positions[:, None]
        return value


class Model(nn.Module):
    do_not_compile = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(positions, hidden=hidden)
        return hidden


def config(post_grad: Any = None) -> Any:
    options = {"post_grad_custom_post_pass": post_grad} if post_grad is not None else {}
    return SimpleNamespace(compilation_config=SimpleNamespace(inductor_compile_config=options))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(asked.SWITCH, raising=False)


def test_no_marker_without_the_pass_that_takes_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(asked.SWITCH, "1")
    assert mark.mark_draft(Model(), config()) == 0
    assert mark.mark_draft(Model(), config(object())) == 0


def test_first_block_is_marked_once() -> None:
    model = Model()
    assert mark.mark_draft(model, config(draftfuse.post_grad_pass)) == 1
    assert len(model.layers[0]._forward_pre_hooks) == 1
    assert len(model.layers[1]._forward_pre_hooks) == 0


def test_each_feed_forward_is_marked_where_products_may_choose_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM cuts a graph at attention: what stands behind it is a piece of its own."""
    for compiler, expected in (("none", [0, 0]), ("inductor", [1, 1])):
        monkeypatch.setenv(asked.COMPILER, compiler)
        model = Model()
        for layer in model.layers:
            layer.mlp = nn.Linear(4, 4)
        mark.mark_draft(model, config(draftfuse.post_grad_pass))
        assert [len(layer.mlp._forward_pre_hooks) for layer in model.layers] == expected


def test_what_is_not_compiled_is_not_marked() -> None:
    model = Model()
    model.do_not_compile = True
    assert mark.mark_draft(model, config(draftfuse.post_grad_pass)) == 0


@pytest.mark.slow
def test_compiled_draft_loses_its_marker_and_keeps_its_values() -> None:
    model, seen = Model(), []
    positions, hidden = torch.arange(3), torch.randn(3, 4)
    expected = model(positions, hidden)
    mark.mark_draft(model, config(draftfuse.post_grad_pass))

    class Watch(type(draftfuse.post_grad_pass)):  # type: ignore[misc]
        def __call__(self, graph: torch.fx.Graph) -> None:
            before = len(graph.find_nodes(op="call_function", target=MARKER))
            super().__call__(graph)
            seen.append((before, len(graph.find_nodes(op="call_function", target=MARKER))))

    options = {"post_grad_custom_post_pass": Watch()}
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        torch.testing.assert_close(torch.compile(model, options=options)(positions, hidden), expected)
    assert seen == [(1, 0)]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (bash .ci/vllm runs this)")
def test_pass_manager_takes_the_marker_out_and_a_warm_cache_does_not_call_the_pass(tmp_path: Path) -> None:
    caches = {"VLLM_CACHE_ROOT": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    cold, warm = (report_of("piecewise.py", **caches) for _ in range(2))
    assert cold["right"]
    assert warm["right"]
    assert sum(cold["calls"]) == 1, "one piece has the marker"
    assert len(cold["calls"]) > 1, "the piece without it was left as it is"
    assert warm["calls"] == []
