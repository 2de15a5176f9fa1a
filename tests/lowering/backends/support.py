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
from draftfuse.graphs import capture
from draftfuse.lowering.effects import hidden_reads
from draftfuse.lowering.emit import emit
from draftfuse.lowering.generated import register_refresh
from draftfuse.lowering.workspace import Workspace
from draftfuse.ops import write_kv
from draftfuse.passes import ir
from draftfuse.speculator import AttentionGroup, DraftInputs, Speculator
from draftfuse.state import fill_dummy
from draftfuse.trace import trace

STEPS, LENS = 4, [3, 8, 15, 1]  # rows 0 to 2 cross a page boundary inside the loop, at other steps
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Any], Tensor]  # q, k, v, key_cache, value_cache, metadata
Records = dict[tuple[str, int], Tensor]
RECORDERS: list[Recorder] = []
LIBRARY = torch.library.Library("draftfuse_test", "DEF")
LIBRARY.define("record(Tensor value, str name, int step) -> ()")


@dataclass(frozen=True)
class Sizes:
    """Of a toy model and its pool."""

    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    vocabulary: int = 48
    page: int = 4
    max_len: int = 32
    max_reqs: int = 6
    steps: int = STEPS
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def max_tokens(self) -> int:
        """Of the largest prefill."""
        return self.max_reqs * (self.steps + 1)


SMALL = Sizes()


def paged_layer(attend: Callable[..., Tensor]) -> Attend:
    """A layer that writes its keys and values through the slot mapping, then attends."""

    def run(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
        write_kv(k, v, key_cache, value_cache, metadata.slot_mapping)
        return attend(q, key_cache, value_cache, metadata, q.shape[-1] ** -0.5)

    return run


@dataclass
class Layer:
    """One attention layer with a group of its own."""

    builder: Any
    attend: Attend
    page_size: int = 0  # 0: that of the sizes
    weights: dict[str, Tensor] = field(default_factory=dict)
    caches: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0), torch.empty(0)))


class Toy(Speculator):
    """Residual attention layers over an embedding, greedy sampling."""

    def __init__(self, layers: Sequence[Layer], sizes: Sizes = SMALL, *, advance: bool = True) -> None:
        self.sizes, self.generator = sizes, torch.Generator().manual_seed(7)
        self.num_speculative_tokens, self.max_num_reqs = sizes.steps, sizes.max_reqs
        self.max_model_len, self.advance_positions = sizes.max_len, advance
        shape = (sizes.max_reqs, sizes.steps, sizes.hidden)
        self.inputs = DraftInputs.allocate(*shape, dtype=sizes.dtype, device=sizes.device)
        self.embedding = self.new(sizes.vocabulary, sizes.hidden) * 4
        self.head = self.new(sizes.hidden, sizes.vocabulary)
        self.layers = list(layers)
        self.attn_groups = [self.group(layer, f"layer{i}") for i, layer in enumerate(self.layers)]

    def new(self, *shape: int, scale: float | None = None) -> Tensor:
        """Random weights."""
        made = torch.randn(*shape, generator=self.generator) * (shape[0] ** -0.5 if scale is None else scale)
        return made.to(self.sizes.device, self.sizes.dtype)

    def group(self, layer: Layer, name: str) -> AttentionGroup:
        """Weights, caches and tables of one layer."""
        z, page = self.sizes, layer.page_size or self.sizes.page
        blocks = -(-z.max_len // page)
        table = torch.randperm(z.max_reqs * blocks, generator=self.generator).view(z.max_reqs, blocks)
        wide = {"q": z.heads * z.size, "k": z.kv_heads * z.size, "v": z.kv_heads * z.size}
        layer.weights = {n: self.new(z.hidden, w) for n, w in wide.items()} | {"o": self.new(wide["q"], z.hidden)}
        shape = (z.max_reqs * blocks + 1, page, z.kv_heads, z.size)
        layer.caches = (self.new(*shape, scale=1.0), self.new(*shape, scale=1.0))
        slots = torch.full((self.inputs.positions.shape[0],), -1, dtype=torch.int64, device=z.device)
        return AttentionGroup(layer.builder, add_row(table.to(z.device, torch.int32)), slots, page, (name,))

    def forward(self, inputs: DraftInputs, metadata: Any) -> tuple[Tensor, Tensor]:
        x = inputs.hidden_states + self.embedding[inputs.input_ids]
        x = x + torch.sin(inputs.positions.unsqueeze(1).float() * 0.1).to(x.dtype)
        for i, layer in enumerate(self.layers):
            heads = {n: (x @ layer.weights[n]).view(x.shape[0], -1, self.sizes.size) for n in ("q", "k", "v")}
            out = layer.attend(heads["q"], heads["k"], heads["v"], *layer.caches, metadata[f"layer{i}"])
            x = x + out.reshape(x.shape[0], -1).to(x.dtype) @ layer.weights["o"]
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
    inputs.input_ids[:rows] = torch.randint(spec.embedding.shape[0], (rows,), generator=generator).to(torch.int32)
    hidden = torch.randn(rows, inputs.hidden_states.shape[1], generator=generator)
    inputs.hidden_states[:rows] = hidden.to(inputs.hidden_states.dtype)
    inputs.draft_tokens[:rows, 0] = inputs.input_ids[:rows]


class Recorder:
    """Keeps a copy of each tapped value; inside a CUDA graph the copies are refreshed by each replay."""

    def __init__(self) -> None:
        self.records: Records = {}

    def __call__(self, name: str, step: int, value: Tensor) -> None:
        """A tap of the eager loop."""
        self.records[name, step] = value.clone()


def record(value: Tensor, name: str, step: int) -> None:
    """A tap of the graph: the newest recorder keeps it."""
    RECORDERS[-1](name, step, value)


LIBRARY.impl("record", record, "CPU")
LIBRARY.impl("record", record, "CUDA")


def record_rebuild(spec: Any, lens: Sequence[int], capacity: int) -> Records:
    """The eager loop, metadata rebuilt at every step."""
    load(spec, lens, capacity)
    recorder = Recorder()
    loop.decode_loop(spec, capacity, spec.num_speculative_tokens, recorder)
    return recorder.records


class Fused:
    """The fused loop of a speculator (every pass), traced once for any number of rows, taps recorded."""

    def __init__(self, spec: Any, compiler: str = "none") -> None:
        self.spec, hint = spec, spec.max_num_reqs - 1
        load(spec, LENS[:hint], hint)
        traced = trace(loop.decode_loop, (spec, hint, spec.num_speculative_tokens, loop.graph_tap), "num_reqs")
        steps = passes.pipeline(register=register_refresh, hidden_reads=hidden_reads, keep_taps=True)
        passes.run(traced.graph, steps)
        for node in traced.graph.nodes:
            if ir.is_tap(node):
                node.target = torch.ops.draftfuse_test.record.default
        self.emission = emit(traced.graph, traced.fake_mode, traced.tensors, compiler=compiler)

    def record(self, lens: Sequence[int], capacity: int, graph: bool = False) -> Records:
        """Run at ``capacity`` rows, ``lens`` of them live; ``graph`` replays a CUDA graph captured on other rows."""
        assert self.emission.guards_hold(capacity)
        bound = self.emission.bind(capacity, Workspace())
        launch, recorder = bound.run, Recorder()
        RECORDERS.append(recorder)
        try:
            if graph:
                pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
                launch = capture(bound.run, lambda: fill_dummy(self.spec, capacity), bound.tensors, pool, stream).replay
            load(self.spec, lens, capacity)
            launch()
        finally:
            RECORDERS.remove(recorder)
        return {key: value.clone() for key, value in recorder.records.items()}  # a graph's copies go with the graph


def differences(a: Records, b: Records, only: str = "") -> list[tuple[str, int]]:
    """Names and steps whose values differ or are in one only (all of them, or those that contain ``only``)."""
    keys = [key for key in [*a, *(b.keys() - a.keys())] if only in key[0]]
    assert keys, f"nothing recorded has {only!r} in its name"
    return [key for key in keys if key not in a or key not in b or not same(a[key], b[key])]


def same(a: Tensor, b: Tensor) -> bool:
    """Integers exactly, floats closely."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    tolerance = 1e-4 if a.dtype == torch.float32 else 5e-2
    close = {"atol": tolerance, "rtol": tolerance, "equal_nan": True}
    return torch.allclose(a, b, **close) if a.is_floating_point() else torch.equal(a, b)  # type: ignore[arg-type]


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
