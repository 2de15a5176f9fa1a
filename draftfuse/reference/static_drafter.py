"""A position-static drafter: queries only, over the KV cache of the target.

Every draft step asks from the last verified position: it reads the token just drawn and its own last hidden state, and
attends what the target wrote up to that position. It writes no KV, and positions and lengths stay, so metadata is built
once. Drafters that share the target's KV cache (multi-token prediction heads such as Gemma 4's) work like this.

R requests, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.models import ModelConfig
from draftfuse.ops import gumbel_sample
from draftfuse.reference.llama import (
    Cache,
    Limits,
    PagedMetadata,
    QueryOnlyLayer,
    Weights,
    allocate_inputs,
    layer_shapes,
    paged_group,
    random_weights,
    rms_norm,
    rotary_table,
)
from draftfuse.speculator import DraftInputs


class StaticDrafter:
    """Layer i reads ``caches[i]``, keys and values that a layer of the target wrote."""

    advance_positions = False

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        caches: Sequence[Cache],
        limits: Limits,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_speculative_tokens = limits.num_speculative_tokens
        self.max_num_reqs, self.max_model_len = limits.max_num_reqs, limits.max_model_len
        self.config, self.inputs = config, allocate_inputs(limits, config.hidden_size, device, dtype)
        self.attn_groups = [paged_group(limits, self.inputs)]
        self.embed, self.lm_head = weights["embed_tokens"], weights["lm_head"]
        self.fc, self.norm = weights["fc.weight"], weights["norm.weight"]
        self.layers = [QueryOnlyLayer(weights, f"layers.{i}.", config, cache) for i, cache in enumerate(caches)]
        self.rotary = rotary_table(config, limits.max_model_len, device)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        caches: Sequence[Cache],
        limits: Limits,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> StaticDrafter:
        """Random weights of the sizes in ``config``, one layer for each of ``caches``."""
        table, hidden = (config.vocab_size, config.hidden_size), config.hidden_size
        shapes = {"embed_tokens": table, "lm_head": table, "fc.weight": (hidden, 2 * hidden), "norm.weight": (hidden,)}
        for i in range(len(caches)):
            shapes |= layer_shapes(config, f"layers.{i}.", kv=False)
        return cls(config, random_weights(shapes, seed, device, dtype), caches, limits, device, dtype)

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, PagedMetadata]) -> tuple[Tensor, Tensor]:
        """Normed hidden states for logits, plain ones to feed back."""
        joined = torch.cat((F.embedding(inputs.input_ids, self.embed), inputs.hidden_states), dim=-1)
        x, turns = F.linear(joined, self.fc), self.rotary[inputs.positions]
        for layer in self.layers:
            x = layer.forward(x, turns, metadata["draft"])
        return rms_norm(x, self.norm, self.config.rms_norm_eps), x

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """Keyed by (seed, place of the drawn token). The position stays, so the draft step counts the place on:
        without it every step of a request would draw with the same noise."""
        rows, inputs = hidden.shape[0], self.inputs
        logits, places = F.linear(hidden, self.lm_head), inputs.positions[:rows] + 2 + step
        return gumbel_sample(logits, inputs.temperature[:rows], inputs.seeds[:rows], places)

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        """The next step reads the drawn token and the hidden state it came from, at the same position."""
        rows, inputs = tokens.shape[0], self.inputs
        inputs.input_ids[:rows].copy_(tokens)
        inputs.hidden_states[:rows].copy_(hidden)
