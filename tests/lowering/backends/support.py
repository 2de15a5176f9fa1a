"""A toy draft model over any attention backends, and runs of its loop that record every metadata tensor of every step.

R rows, T tokens, H hidden, Hq query heads, Hk KV heads, D head size, V vocabulary, K draft steps.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftfuse import loop, passes
from draftfuse.lowering.effects import hidden_reads
from draftfuse.lowering.emit import emit
from draftfuse.lowering.generated import register_refresh
from draftfuse.lowering.workspace import Workspace
from draftfuse.ops import write_kv
from draftfuse.passes import ir
from draftfuse.speculator import AttentionGroup, DraftInputs, Speculator
from draftfuse.state import fill_dummy
from draftfuse.trace import trace

HIDDEN, HEADS, KV_HEADS, SIZE, VOCABULARY = 32, 4, 2, 16, 48
PAGE, MAX_LEN, MAX_REQS, STEPS = 4, 32, 6, 4
SCALE = SIZE**-0.5
LENS = [3, 8, 15, 1]  # rows 0 to 2 cross a page boundary inside the loop, at other steps
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Any], Tensor]  # q, k, v, key_cache, value_cache, metadata
Records = dict[tuple[str, int], Tensor]


def paged_layer(attend: Callable[..., Tensor]) -> Attend:
    """A layer that writes its keys and values through the slot mapping, then attends."""

    def run(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
        write_kv(k, v, key_cache, value_cache, metadata.slot_mapping)
        return attend(q, key_cache, value_cache, metadata, SCALE)

    return run


@dataclass
class Layer:
    """One attention layer with a group of its own."""

    builder: Any
    attend: Attend
    page_size: int = PAGE
    weights: dict[str, Tensor] = field(default_factory=dict)
    caches: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0), torch.empty(0)))


class Toy(Speculator):
    """Residual attention layers over an embedding, greedy sampling."""

    def __init__(
        self, layers: Sequence[Layer], *, advance: bool = True, k: int = STEPS, max_len: int = MAX_LEN
    ) -> None:
        generator = torch.Generator().manual_seed(7)

        def new(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * shape[0] ** -0.5

        self.num_speculative_tokens, self.max_num_reqs, self.max_model_len = k, MAX_REQS, max_len
        self.advance_positions = advance
        self.inputs = DraftInputs.allocate(MAX_REQS, k, HIDDEN)
        self.embedding, self.head = new(VOCABULARY, HIDDEN) * 4, new(HIDDEN, VOCABULARY)
        self.layers = list(layers)
        self.attn_groups = []
        for i, layer in enumerate(self.layers):
            blocks = -(-max_len // layer.page_size)
            table = torch.randperm(MAX_REQS * blocks, generator=generator).view(MAX_REQS, blocks)
            slots = torch.full((self.inputs.positions.shape[0],), -1, dtype=torch.int64)
            group = AttentionGroup(
                layer.builder, add_row(table.to(torch.int32)), slots, layer.page_size, (f"layer{i}",)
            )
            self.attn_groups.append(group)
            wide = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
            layer.weights = {n: new(HIDDEN, w) for n, w in wide.items()} | {"o": new(HEADS * SIZE, HIDDEN)}
            shape = (MAX_REQS * blocks + 1, layer.page_size, KV_HEADS, SIZE)
            layer.caches = (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))

    def forward(self, inputs: DraftInputs, metadata: Any) -> tuple[Tensor, Tensor]:
        x = inputs.hidden_states + self.embedding[inputs.input_ids]
        x = x + torch.sin(inputs.positions.unsqueeze(1).float() * 0.1)
        for i, layer in enumerate(self.layers):
            heads = {n: (x @ layer.weights[n]).view(x.shape[0], -1, SIZE) for n in ("q", "k", "v")}
            out = layer.attend(heads["q"], heads["k"], heads["v"], *layer.caches, metadata[f"layer{i}"])
            x = x + out.reshape(x.shape[0], -1) @ layer.weights["o"]
        return x, x * 0.5

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return (hidden @ self.head).argmax(-1)


def add_row(table: Tensor) -> Tensor:
    """One row more than the largest batch, so that one symbolic trace covers all."""
    return torch.cat([table, table[-1:]])


def load(spec: Any, lens: Sequence[int], capacity: int, seed: int = 0) -> None:
    """Rows as draft step 1 finds them: ``lens`` tokens each, the last of them new; padding behind."""
    generator = torch.Generator().manual_seed(seed)
    fill_dummy(spec, capacity)
    rows, inputs = len(lens), spec.inputs
    inputs.seq_lens[:rows] = torch.tensor(lens, dtype=torch.int32)
    inputs.positions[:rows] = torch.tensor(lens) - 1
    inputs.query_start_loc[: rows + 1] = torch.arange(rows + 1)
    inputs.idx_mapping[:rows] = torch.arange(rows)
    inputs.input_ids[:rows] = torch.randint(VOCABULARY, (rows,), generator=generator).to(torch.int32)
    inputs.hidden_states[:rows] = torch.randn(rows, HIDDEN, generator=generator)
    inputs.draft_tokens[:rows, 0] = inputs.input_ids[:rows]


class Recorder:
    """A tap that keeps a copy of each value."""

    def __init__(self) -> None:
        self.records: Records = {}

    def __call__(self, value: Tensor | str, name: str | int, step: int | Tensor) -> None:
        """``(name, step, value)`` as the eager loop calls a tap; ``(value, name, step)`` as the graph does."""
        if isinstance(value, str):
            value, name, step = step, value, name  # type: ignore[assignment]
        assert isinstance(value, Tensor)
        self.records[str(name), int(step)] = value.clone()  # type: ignore[arg-type]


def record_rebuild(spec: Any, lens: Sequence[int], capacity: int, k: int = STEPS) -> Records:
    """The eager loop, metadata rebuilt at every step."""
    load(spec, lens, capacity)
    recorder = Recorder()
    loop.decode_loop(spec, capacity, k, recorder)  # type: ignore[arg-type]
    return recorder.records


class Fused:
    """The fused loop of a speculator (every pass, no compiler), traced once for any number of rows, taps recorded."""

    def __init__(self, spec: Any, k: int = STEPS) -> None:
        self.spec, self.recorder = spec, Recorder()
        load(spec, LENS, MAX_REQS - 1)
        traced = trace(loop.decode_loop, (spec, MAX_REQS - 1, k, loop.graph_tap), "num_reqs")
        steps = passes.pipeline(register=register_refresh, hidden_reads=hidden_reads, keep_taps=True)
        passes.run(traced.graph, steps)
        self.graph = traced.graph
        for node in traced.graph.nodes:
            if ir.is_tap(node):
                node.target = self.recorder
        self.emission = emit(traced.graph, traced.fake_mode, traced.tensors, compiler="none")

    def record(self, lens: Sequence[int], capacity: int) -> Records:
        """Run at ``capacity`` rows, ``lens`` of them live."""
        assert self.emission.guards_hold(capacity)
        self.recorder.records = {}
        run = self.emission.bind(capacity, Workspace()).run
        load(self.spec, lens, capacity)
        run()
        return self.recorder.records


def differences(a: Records, b: Records, only: str = "") -> list[tuple[str, int]]:
    """Names and steps whose values differ or are in one only (all of them, or those that contain ``only``)."""
    keys = [key for key in [*a, *(b.keys() - a.keys())] if only in key[0]]
    assert keys, f"nothing recorded has {only!r} in its name"
    return [key for key in keys if key not in a or key not in b or not same(a[key], b[key])]


def same(a: Tensor, b: Tensor) -> bool:
    """Integers exactly, floats closely."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, atol=1e-4, rtol=1e-4, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)


class RefreshOff:
    """A builder whose metadata stay as draft step 1 made them."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def build(self, common: Any) -> Any:
        metadata = self.inner.build(common)
        if hasattr(self.inner, "refresh"):
            self.inner.refresh(metadata, common)
        return frozen(metadata)

    def refresh(self, metadata: Any, common: Any) -> None:
        """Nothing, which is the fault."""


def frozen(metadata: Any) -> Any:
    """The same object with a copy of every tensor; everything else is kept, lazily planned state too."""
    changes = {
        f.name: getattr(metadata, f.name).clone()
        for f in dataclasses.fields(metadata)
        if isinstance(getattr(metadata, f.name), Tensor)
    }
    return dataclasses.replace(metadata, **changes)


def without_refresh(spec: Toy, index: int = 0) -> Toy:
    """The same speculator with one group's refresh switched off."""
    other = copy.copy(spec)
    groups = list(spec.attn_groups)
    groups[index] = dataclasses.replace(groups[index], builder=RefreshOff(groups[index].builder))
    other.attn_groups = groups
    return other
