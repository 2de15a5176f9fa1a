"""The measured speculators, as a user would write them; greedy, one attention group, weights of their own.

Shapes: R requests, T tokens, H hidden, V vocabulary, N pages, P slots a page.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.bench.attention import Backend, TritonAttention
from draftfuse.bench.layers import Attention, DecoderLayer, Maker, SwiGLU, Widths, rms_norm, rope_table
from draftfuse.speculator import AttentionGroup, DraftInputs, Speculator


@dataclass(frozen=True)
class Sizes:
    """What a speculator is allocated for."""

    max_num_reqs: int
    num_speculative_tokens: int
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    page_size: int = 16

    @property
    def pages_per_request(self) -> int:
        """Width of the block table."""
        return -(-self.max_model_len // self.page_size)


class BenchSpeculator(Speculator):
    """What all measured speculators share: buffers, pages in random order, embedding and greedy sampling."""

    feeds_back = True  # hidden states of one step are inputs of the next

    def __init__(self, widths: Widths, sizes: Sizes, backend: Backend | None = None, seed: int = 0) -> None:
        w, s = widths, sizes
        self.widths, self.sizes = w, s
        self.max_num_reqs, self.max_model_len = s.max_num_reqs, s.max_model_len
        self.num_speculative_tokens = s.num_speculative_tokens
        self.backend = backend or TritonAttention(w.head_size)
        self.make = Maker(s.device, s.dtype, seed)
        self.table = rope_table(s.max_model_len, w.head_size, s.device, s.dtype)
        self.embedding = self.make.normal(w.vocab, w.hidden)
        self.norm, self.lm_head = self.make.gain(w.hidden), self.make.weight(w.vocab, w.hidden)
        self.inputs = DraftInputs.allocate(
            s.max_num_reqs, s.num_speculative_tokens, w.hidden, dtype=s.dtype, device=s.device
        )
        self.attn_groups = [self._group()]
        self.build_layers()

    def _group(self) -> AttentionGroup:
        s, tokens = self.sizes, self.inputs.positions.shape[0]
        table = self.make.permutation(s.max_num_reqs * s.pages_per_request).to(torch.int32)
        return AttentionGroup(
            self.backend.builder,
            block_table=table.view(s.max_num_reqs, -1),
            slot_mapping=torch.full((tokens,), -1, device=s.device),
            page_size=s.page_size,
            layer_names=[f"layer{i}" for i in range(self.widths.layers)],
        )

    def attention(self, inputs: int) -> Attention:
        """An attention block that reads ``inputs`` values a token, with its KV pages."""
        pages = (self.sizes.max_num_reqs * self.sizes.pages_per_request, self.sizes.page_size)
        return Attention(self.make, self.widths, inputs, self.table, pages, self.backend)

    def build_layers(self) -> None:
        """Allocate what :meth:`forward` uses."""
        raise NotImplementedError

    def embed(self, inputs: DraftInputs) -> Tensor:
        """[T, H] of the input ids."""
        return F.embedding(inputs.input_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] in the model's dtype."""
        return F.linear(hidden, self.lm_head)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """The likeliest token of each row."""
        return self.logits(hidden).argmax(dim=-1)

    def weight_bytes(self, rows: int) -> float:
        """Bytes of weights that a step with ``rows`` requests must read."""
        return float(self.make.num_bytes)

    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        w = self.widths
        return 2 * w.layers * w.kv_heads * w.head_size * self.sizes.dtype.itemsize

    def kv_caches(self) -> list[Tensor]:
        """Every KV pool."""
        return [t for layer in self.layers for t in (layer.attention.key_cache, layer.attention.value_cache)]

    layers: list[DecoderLayer]

    def twin(self, rows: int) -> BenchSpeculator:
        """The same weights and KV pages with input buffers of exactly ``rows`` rows."""
        other = copy.copy(self)
        exact = {name: t.clone() for name, t in self.inputs.view(rows, rows).named_tensors().items()}
        other.inputs = DraftInputs(**exact)
        other.attn_groups = [
            replace(g, block_table=g.block_table[:rows].clone(), slot_mapping=g.slot_mapping[:rows].clone())
            for g in self.attn_groups
        ]
        return other


class EagleHead(BenchSpeculator):
    """EAGLE-3-shaped head: one layer whose qkv reads [norm(embedding), norm(hidden)]."""

    def build_layers(self) -> None:
        """One decoder layer."""
        w = self.widths
        self.embedding_norm, self.hidden_norm = self.make.gain(w.hidden), self.make.gain(w.hidden)
        self.layers = [DecoderLayer(self.make, self.attention(2 * w.hidden), SwiGLU(self.make, w.hidden, w.mlp))]

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Normed hidden states for logits, and the layer's own to feed back."""
        embedded = rms_norm(self.embed(inputs), self.embedding_norm)
        x = torch.cat([embedded, rms_norm(inputs.hidden_states, self.hidden_norm)], dim=-1)
        hidden = self.layers[0](x, inputs.hidden_states, inputs.positions, metadata["layer0"])
        return rms_norm(hidden, self.norm), hidden


class StandaloneDraft(BenchSpeculator):
    """A small Llama-like model that reads tokens only."""

    feeds_back = False

    def build_layers(self) -> None:
        """All decoder layers, each with its input norm."""
        w = self.widths
        self.input_norms = [self.make.gain(w.hidden) for _ in range(w.layers)]
        self.layers = [
            DecoderLayer(self.make, self.attention(w.hidden), SwiGLU(self.make, w.hidden, w.mlp))
            for _ in range(w.layers)
        ]

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Normed hidden states, twice."""
        hidden = self.embed(inputs)
        for index, layer in enumerate(self.layers):
            x = rms_norm(hidden, self.input_norms[index])
            hidden = layer(x, hidden, inputs.positions, metadata[f"layer{index}"])
        hidden = rms_norm(hidden, self.norm)
        return hidden, hidden

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        """Write the next ids, positions and lengths; hidden states are not read."""
        from draftfuse.ops import advance_positions

        rows = tokens.shape[0]
        self.inputs.input_ids[:rows].copy_(tokens)
        advance_positions(self.inputs.positions[:rows], self.inputs.seq_lens[:rows], self.max_model_len)
