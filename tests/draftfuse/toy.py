"""A small configurable speculator in plain PyTorch, batches for it, and snapshots of all that it keeps.

R requests, T tokens, H hidden, V vocabulary, K draft tokens, P page size, B blocks a row, L max_model_len, W window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import draftfuse
from draftfuse import AttentionGroup, CommonMetadata, DraftBatch, DraftInputs, FusedDraft, Speculator, ops

HEADS, HEAD_SIZE = 2, 4


@dataclass(frozen=True)
class Config:
    """What a :class:`Toy` is made of; ``fields`` names the metadata that its builders derive beside the aliases."""

    layers: int = 2
    hidden: int = 16
    vocab: int = 23
    page: int = 4
    k: int = 4
    rows: int = 4
    max_model_len: int = 48
    dtype: torch.dtype = torch.float32
    fields: tuple[str, ...] = ("step", "invariant")
    groups: int = 1
    window: int = 5
    gumbel: bool = False
    logits: bool = False
    advance_positions: bool = True
    seed: int = 0


@dataclass
class ToyMetadata:
    """Aliases of persistent buffers, and what a builder derived; absent fields are None."""

    seq_lens: Tensor  # aliases
    block_table: Tensor
    slot_mapping: Tensor
    start: Tensor | None = None  # depends on the step
    length: Tensor | None = None
    first_page: Tensor | None = None  # the same at all steps
    order: Tensor | None = None
    indices: Tensor | None = None  # filled piece by piece
    longest: Tensor | None = None  # one of several results of an operator
    mark: Tensor | None = None  # depends on the drafted tokens


@dataclass
class ToyBuilder:
    """Derives the fields that it is asked for, in plain PyTorch."""

    fields: Sequence[str]
    window: int

    def build(self, common: CommonMetadata) -> ToyMetadata:
        made = ToyMetadata(common.seq_lens, common.block_table, common.slot_mapping)
        for name in self.fields:
            getattr(self, name)(made, common)
        return made

    def step(self, made: ToyMetadata, common: CommonMetadata) -> None:
        made.start = (common.seq_lens - self.window).clamp(min=0)
        made.length = common.seq_lens - made.start

    def invariant(self, made: ToyMetadata, common: CommonMetadata) -> None:
        made.first_page = common.block_table[:, 0] % 7
        made.order = torch.arange(common.num_reqs, device=common.seq_lens.device) * 2

    def pieces(self, made: ToyMetadata, common: CommonMetadata) -> None:
        made.indices = torch.full((common.num_reqs, 2 * self.window), -1, device=common.seq_lens.device)
        last = common.seq_lens.unsqueeze(1) - torch.arange(self.window, device=common.seq_lens.device)
        made.indices[:, : self.window].copy_(last.clamp(min=0))
        made.indices[:, self.window :].add_(common.seq_lens.unsqueeze(1))
        made.indices[:, 1].fill_(0)

    def several(self, made: ToyMetadata, common: CommonMetadata) -> None:
        values, where = torch.sort(common.seq_lens, descending=True)
        made.longest = values + where


class TokenBuilder(ToyBuilder):
    """Adds a field that only the drafted tokens decide, so that no step's metadata is known ahead."""

    def __init__(self, fields: Sequence[str], window: int, inputs: DraftInputs) -> None:
        super().__init__(fields, window)
        self.inputs = inputs

    def build(self, common: CommonMetadata) -> ToyMetadata:
        made = super().build(common)
        made.mark = self.inputs.input_ids[: common.num_reqs] % 5 + common.seq_lens
        return made


class Toy(Speculator):
    """EAGLE in small: embedding and fed-back hidden state, a few attention layers over paged KV, tied logits."""

    def __init__(self, config: Config = Config(), builder: Any = None) -> None:
        self.config = c = config
        self.num_speculative_tokens, self.max_num_reqs, self.max_model_len = c.k, c.rows, c.max_model_len
        self.advance_positions = c.advance_positions
        self.generator = torch.Generator().manual_seed(c.seed)
        vocab = c.vocab if c.logits else None
        self.inputs = DraftInputs.allocate(c.rows, c.k, c.hidden, vocab_size=vocab, dtype=c.dtype)
        self.embed = self.weight(c.vocab, c.hidden)
        self.place = self.weight(c.max_model_len, c.hidden)
        self.mix = self.weight(c.hidden, 2 * c.hidden)
        self.taste = self.weight(c.hidden, 8) * 8
        width = HEADS * HEAD_SIZE
        self.qkv = [self.weight(3 * width, c.hidden) for _ in range(c.layers)]
        self.out = [self.weight(c.hidden, width) for _ in range(c.layers)]
        blocks = -(-c.max_model_len // c.page)
        pages = c.groups * (c.rows + 1) * blocks + 1
        self.pools = [self.weight(pages, 2, c.page, HEADS, HEAD_SIZE) for _ in range(c.layers)]
        order = torch.randperm(pages - 1, generator=self.generator) + 1
        tables = order.to(torch.int32).view(c.groups, c.rows + 1, blocks)
        self.attn_groups = [self.group(index, tables[index].clone(), builder) for index in range(c.groups)]

    def weight(self, *shape: int) -> Tensor:
        """The next weight of this speculator's own random stream."""
        return (torch.randn(*shape, generator=self.generator) * shape[-1] ** -0.5).to(self.config.dtype)

    def group(self, index: int, table: Tensor, builder: Any) -> AttentionGroup:
        """Layers index, index + groups, ...; the builders of two groups differ in their window."""
        c = self.config
        names = [str(layer) for layer in range(index, c.layers, c.groups)] or [f"none{index}"]
        window = c.window + index
        if builder is None:
            fields = [name for name in c.fields if name != "token"]
            named = TokenBuilder(fields, window, self.inputs) if "token" in c.fields else ToyBuilder(fields, window)
        else:
            named = builder
        slots = torch.full((self.inputs.positions.shape[0],), -1, dtype=torch.int64)
        caches = {name: (pool[:, 0], pool[:, 1]) for name, pool in zip(names, self.pools, strict=False)}
        return AttentionGroup(named, table, slots, c.page, names, caches)

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        ids = self.embed[inputs.input_ids] + self.place[inputs.positions]
        x = torch.cat([ids, inputs.hidden_states], dim=1) @ self.mix.t()
        ragged = inputs.positions.shape[0] != inputs.seq_lens.shape[0]
        starts = inputs.query_start_loc if ragged else None
        for layer in range(self.config.layers):
            meta = metadata[str(layer)]
            x = x + self.attend(layer, x, meta, starts)
            if not ragged:
                x = x + self.features(meta).to(x.dtype) @ self.taste.t()
        return x, torch.tanh(x)

    def attend(self, layer: int, x: Tensor, meta: ToyMetadata, starts: Tensor | None) -> Tensor:
        """Attention of one layer: keys and values of these tokens are written first."""
        query, key, value = torch.tanh(x @ self.qkv[layer].t()).view(-1, 3, HEADS, HEAD_SIZE).unbind(1)
        keys, values = self.pools[layer][:, 0], self.pools[layer][:, 1]
        ops.write_kv(key, value, keys, values, meta.slot_mapping)
        seen = ops.paged_attention(query, keys, values, meta.block_table, meta.seq_lens, starts, HEAD_SIZE**-0.5)
        return seen.flatten(1) @ self.out[layer].t()

    def features(self, meta: ToyMetadata) -> Tensor:
        """[R, 8] from every derived field, so that a stale one changes what is drafted."""
        total = meta.seq_lens.unsqueeze(1)
        for name in ("start", "length", "first_page", "order", "longest", "mark"):
            found = getattr(meta, name)
            total = total if found is None else total * 3 + found.unsqueeze(1)
        total = total if meta.indices is None else total + meta.indices.sum(1, keepdim=True)
        return torch.sin(total * torch.arange(1, 9, device=total.device))

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        logits = hidden @ self.embed.t()
        rows = hidden.shape[0]
        if self.inputs.draft_logits is not None:
            self.inputs.draft_logits[:rows, step].copy_(logits)
        if not self.config.gumbel:
            return logits.argmax(-1)
        inputs = self.inputs
        return ops.gumbel_sample(logits, inputs.temperature[:rows], inputs.seeds[:rows], inputs.positions[:rows])


def make_batch(
    spec: Any,
    num_reqs: int,
    seed: int = 0,
    *,
    lengths: Sequence[int] | None = None,
    uniform: bool = False,
    rejected: bool = True,
) -> DraftBatch:
    """Verified tokens of ``num_reqs`` requests: ragged queries of 1 to K+1 tokens, or K+1 of each with ``uniform``."""
    g = torch.Generator().manual_seed(seed)
    most = spec.num_speculative_tokens + 1
    least = most if uniform else 1
    if lengths is None:
        lengths = torch.randint(least, spec.max_model_len + 1, (num_reqs,), generator=g).tolist()
    longest = torch.tensor(lengths).clamp(max=most)
    queries = longest if uniform else torch.cat([torch.randint(1, int(n) + 1, (1,), generator=g) for n in longest])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)])
    total, hidden = int(starts[-1]), spec.inputs.hidden_states
    drop = [int(torch.randint(0, int(q), (1,), generator=g)) if rejected else 0 for q in queries]
    return DraftBatch(
        num_reqs=num_reqs,
        num_tokens=total,
        max_seq_len=max(lengths),
        max_query_len=int(queries.max()),
        hidden_states=torch.randn(total, hidden.shape[1], generator=g).to(hidden.dtype),
        input_ids=torch.randint(0, spec.config.vocab, (total,), generator=g),
        positions=torch.cat([torch.arange(n - q, n) for n, q in zip(lengths, queries.tolist(), strict=True)]),
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_rejected=torch.tensor(drop),
        last_sampled=torch.randint(0, spec.config.vocab, (num_reqs,), generator=g),
        temperature=torch.rand(num_reqs, generator=g) * (torch.arange(num_reqs) % 2),
        seeds=torch.randint(0, 1 << 40, (num_reqs,), generator=g),
        idx_mapping=torch.randperm(num_reqs, generator=g),
    )


@dataclass
class Run:
    """A compiled toy of one mode, what it drafted, and what it kept after each call."""

    fused: FusedDraft
    tokens: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    live: list[int | None] = field(default_factory=list)  # rows to compare; None: all, padded ones too

    def draft(self, batch: DraftBatch, k: int | None = None) -> Tensor:
        """One call; remembers tokens and state."""
        drafted = self.fused.propose(batch, k, copy=True)
        self.tokens.append(drafted)
        self.states.append(snapshot(self.fused.spec))
        uniform = batch.num_tokens == batch.num_reqs * (self.fused.spec.num_speculative_tokens + 1)
        self.live.append(batch.num_reqs if uniform else None)  # one launch pads once, eager steps pad twice
        return drafted


def run_mode(config: Config, mode: str, calls: Sequence[tuple[Any, int | None]], **options: Any) -> Run:
    """A new toy of ``config`` in ``mode``, run on ``calls``: pairs of (function of the spec that makes a batch, k)."""
    spec = Toy(config)
    run = Run(draftfuse.compile(spec, mode=mode, **{"compiler": "none", **options}))
    for batch, k in calls:
        run.draft(batch(spec), k)
    return run


def snapshot(spec: Any) -> dict[str, Tensor]:
    """Copies of everything that outlives a call: inputs, KV pools, slot mappings, block tables."""
    state = {f"inputs.{name}": tensor for name, tensor in spec.inputs.named_tensors().items()}
    state |= {f"pool {layer}": pool for layer, pool in enumerate(spec.pools)}
    for index, group in enumerate(spec.attn_groups):
        state |= {f"group {index} slots": group.slot_mapping, f"group {index} table": group.block_table}
    return {name: tensor.clone() for name, tensor in state.items()}


def differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor], rows: int | None = None) -> list[str]:
    """Names of the tensors that are not the same bits; with ``rows``, of the inputs and slots only so many count."""
    assert first.keys() == second.keys()

    def part(name: str, tensor: Tensor) -> Tensor:
        return tensor if name.startswith("pool") or name.endswith("table") else tensor[:rows]

    return [name for name in first if not same_bits(part(name, first[name]), part(name, second[name]))]


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits (-0.0 is not 0.0)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def assert_same_runs(first: Run, second: Run) -> None:
    """Both drafted the same tokens and left the same state after every call, bit for bit."""
    for call, (drafted, also) in enumerate(zip(first.tokens, second.tokens, strict=True)):
        assert same_bits(drafted, also), f"call {call}: {drafted.tolist()} and {also.tolist()}"
    for call, (one, other, rows) in enumerate(zip(first.states, second.states, first.live, strict=True)):
        assert differences(one, other, rows) == [], f"call {call}"


def small(config: Config = Config(), **changes: Any) -> Config:
    """The configuration that most tests start from: one layer, three draft tokens."""
    return replace(config, **{"layers": 1, "k": 3, "hidden": 8, **changes})
