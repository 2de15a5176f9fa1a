"""A build of the decode loop that records every tapped value and takes its tokens from outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftfuse import loop, passes, poison
from draftfuse.build import passes_for
from draftfuse.lowering.emit import emit
from draftfuse.lowering.workspace import Workspace
from draftfuse.passes import ir
from draftfuse.passes.erase_taps import tap_lines
from draftfuse.trace import Trace, trace

Values = dict[tuple[str, int], Tensor]


class Recording:
    """A tap that keeps a copy of every value, in the order of the loop."""

    def __init__(self) -> None:
        self.values: Values = {}

    def __call__(self, name: str, step: int, value: Tensor) -> None:
        self.values[name, step] = value.detach().clone()


class Tapped:
    """A build of the decode loop that records every tap and takes its tokens from ``forced``."""

    def __init__(self, fused: Any, capacity: int, k: int, forced: dict[int, Tensor]) -> None:
        traced = trace(loop.decode_loop, (fused.spec, capacity, k, loop.graph_tap))
        self.lines = tap_lines(traced.graph)
        force_tokens(traced, forced)
        passes.run(traced.graph, passes_for(traced, keep_taps=True), disable=fused.settings.disable)
        options, compiler = fused.settings.options, fused.settings.compiler
        emission = emit(traced.graph, traced.fake_mode, traced.tensors, compiler=compiler, options=options)
        self.recording, self.workspace = Recording(), Workspace()
        for node in filter(ir.is_tap, traced.graph.nodes):
            node.target = self.record
        self.bound = emission.bind(capacity, self.workspace)

    def record(self, value: Tensor, name: str, step: int) -> None:
        """What a tap becomes."""
        self.recording(name, step, value)

    def run(self) -> Values:
        """One run; the recorded values."""
        self.recording.values = {}
        poison.memory(self.workspace.chunks.values())
        self.bound.run()
        return self.recording.values


def force_tokens(traced: Trace, forced: dict[int, Tensor]) -> None:
    """Everything behind the tap of a step's tokens reads the given tokens instead."""
    graph = traced.graph
    for tap in [n for n in graph.nodes if ir.is_tap(n) and n.args[1] == "tokens"]:
        value, _, step = tap.args
        before = set()
        for node in graph.nodes:
            before.add(node)
            if node is tap:
                break
        with graph.inserting_after(ir.placeholders(graph)[-1]):
            given = graph.placeholder(f"forced_{step}")
        with traced.fake_mode:
            given.meta["val"] = torch.empty(forced[step].shape, dtype=torch.int64, device=forced[step].device)
        traced.tensors[given.name] = forced[step]
        value.replace_all_uses_with(given, delete_user_cb=lambda user, before=before: user not in before)
