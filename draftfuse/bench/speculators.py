"""The measured speculators, as a user would write them: greedy, one attention group, random weights.

Shapes: R requests, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.bench.attention import Backend
from draftfuse.bench.layers import BenchLayer, ExpertLayer, Experts, Maker
from draftfuse.models import ModelConfig
from draftfuse.ops import advance_positions
from draftfuse.reference.llama import (
    Limits,
    Shapes,
    allocate_inputs,
    layer_shapes,
    paged_group,
    rms_norm,
    rotary_table,
)
from draftfuse.speculator import DraftInputs, Speculator

Metadata = Mapping[str, Any]


class BenchSpeculator(Speculator):
    """What all measured speculators share: buffers, pages in random order, embedding and greedy sampling."""

    def __init__(
        self, config: ModelConfig, limits: Limits, backend: Backend, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self.limits, self.backend, self.device, self.dtype = config, limits, backend, device, dtype
        self.max_num_reqs, self.max_model_len = limits.max_num_reqs, limits.max_model_len
        self.num_speculative_tokens = limits.num_speculative_tokens
        self.make = Maker(device, dtype)
        self.rotary = rotary_table(config, limits.max_model_len, device)
        self.embedding = self.make.normal(config.vocab_size, config.hidden_size)
        self.norm = self.make.weight(config.hidden_size)
        self.lm_head = self.make.weight(config.vocab_size, config.hidden_size)
        self.inputs = allocate_inputs(limits, config.hidden_size, device, dtype)
        self.layers = self.build_layers()
        group = replace(
            paged_group(limits, self.inputs, [layer.cache for layer in self.layers]), builder=backend.builder
        )
        pages = self.make.permutation(limits.max_num_reqs * limits.blocks)
        group.block_table[: limits.max_num_reqs].copy_(pages.view(limits.max_num_reqs, -1))
        self.attn_groups = [group]

    def build_layers(self) -> list[BenchLayer]:
        """Allocate what :meth:`forward` uses."""
        raise NotImplementedError

    def gains(self) -> Tensor:
        """The weight of one more norm."""
        return self.make.weight(self.config.hidden_size)

    def normed(self, x: Tensor, gains: Tensor) -> Tensor:
        """RMS norm."""
        return rms_norm(x, gains, self.config.rms_norm_eps)

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
        return sum(t[0, 0].numel() * t.element_size() for t in self.kv_caches())

    def kv_caches(self) -> list[Tensor]:
        """Every KV pool."""
        return [cache for layer in self.layers for cache in layer.cache]

    def twin(self, rows: int) -> BenchSpeculator:
        """The same weights and KV pages with input buffers of exactly ``rows`` rows."""
        other = copy.copy(self)
        other.inputs = DraftInputs(**{n: t.clone() for n, t in self.inputs.view(rows, rows).named_tensors().items()})
        other.attn_groups = [
            replace(g, block_table=g.block_table[:rows].clone(), slot_mapping=g.slot_mapping[:rows].clone())
            for g in self.attn_groups
        ]
        return other


class EagleHead(BenchSpeculator):
    """EAGLE-3-shaped head: one layer whose qkv reads [norm(embedding), norm(hidden)]."""

    def build_layers(self) -> list[BenchLayer]:
        """One decoder layer."""
        self.embedding_norm, self.hidden_norm = self.gains(), self.gains()
        weights = self.make.weights(self.layer_shapes())
        cache = self.make.cache(self.config, self.limits)
        return [BenchLayer(weights, "", self.config, cache, self.backend)]

    def layer_shapes(self) -> Shapes:
        """Of the one layer: query, key and value read twice the hidden size."""
        shapes = layer_shapes(self.config, "", input_norm=False)
        for name in ("q", "k", "v"):
            rows, _ = shapes[f"self_attn.{name}_proj.weight"]
            shapes[f"self_attn.{name}_proj.weight"] = (rows, 2 * self.config.hidden_size)
        return shapes

    def forward(self, inputs: DraftInputs, metadata: Metadata) -> tuple[Tensor, Tensor]:
        """Normed hidden states for logits, and the layer's own to feed back."""
        embedded = self.normed(self.embed(inputs), self.embedding_norm)
        x = torch.cat([embedded, self.normed(inputs.hidden_states, self.hidden_norm)], dim=-1)
        turns = self.rotary[inputs.positions]
        hidden = self.layers[0].forward_beside(x, inputs.hidden_states, turns, metadata["draft"])
        return self.normed(hidden, self.norm), hidden


class StandaloneDraft(BenchSpeculator):
    """A small Llama-like model that reads tokens only."""

    def build_layers(self) -> list[BenchLayer]:
        """All decoder layers."""
        shapes = layer_shapes(self.config, "")
        return [
            BenchLayer(
                self.make.weights(shapes), "", self.config, self.make.cache(self.config, self.limits), self.backend
            )
            for _ in range(self.config.num_hidden_layers)
        ]

    def forward(self, inputs: DraftInputs, metadata: Metadata) -> tuple[Tensor, Tensor]:
        """Normed hidden states, twice."""
        hidden, turns = self.embed(inputs), self.rotary[inputs.positions]
        for layer in self.layers:
            hidden = layer.forward(hidden, turns, metadata["draft"])
        hidden = self.normed(hidden, self.norm)
        return hidden, hidden

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        """Write the next ids, positions and lengths; hidden states are not read."""
        rows = tokens.shape[0]
        self.inputs.input_ids[:rows].copy_(tokens)
        advance_positions(self.inputs.positions[:rows], self.inputs.seq_lens[:rows], self.max_model_len)


class MtpBlock(BenchSpeculator):
    """MTP block: a projection of [norm(embedding), norm(hidden)], then one layer with routed experts."""

    experts = Experts()

    def build_layers(self) -> list[BenchLayer]:
        """One decoder layer; ``intermediate_size`` is the shared expert's."""
        self.embedding_norm, self.hidden_norm = self.gains(), self.gains()
        self.project = self.make.weight(self.config.hidden_size, 2 * self.config.hidden_size)
        weights = self.make.weights(layer_shapes(self.config, ""))
        cache = self.make.cache(self.config, self.limits)
        self.layer = ExpertLayer(self.make, weights, self.config, cache, self.backend, self.experts)
        return [self.layer]

    def forward(self, inputs: DraftInputs, metadata: Metadata) -> tuple[Tensor, Tensor]:
        """Normed hidden states for logits, and the layer's own to feed back."""
        embedded = self.normed(self.embed(inputs), self.embedding_norm)
        x = torch.cat([embedded, self.normed(inputs.hidden_states, self.hidden_norm)], dim=-1)
        turns = self.rotary[inputs.positions]
        hidden = self.layer.forward(F.linear(x, self.project), turns, metadata["draft"])
        return self.normed(hidden, self.norm), hidden

    def weight_bytes(self, rows: int) -> float:
        """Bytes of weights of a step: of the routed experts, as many as ``rows`` tokens use together on average."""
        return self.make.num_bytes + self.experts.distinct(rows) * self.layer.expert_bytes


class SmallMtpBlock(MtpBlock):
    """The same with few and narrow experts, for the CPU."""

    experts = Experts(count=8, active=2, width=32)
