"""A stand-alone draft model: a whole small Llama that drafts from tokens alone.

A batch gives the drafter the tokens that follow the target's hidden states, so token p+1 stands at draft position p and
the first token of a text is not seen. Rotary attention depends on distances only, so nothing else changes.

R requests, T tokens, H hidden of the target, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.models import ModelConfig
from draftfuse.ops import advance_positions, gumbel_sample
from draftfuse.reference.llama import (
    DecoderLayer,
    Limits,
    PagedMetadata,
    Weights,
    allocate_cache,
    allocate_inputs,
    backbone_shapes,
    paged_group,
    random_weights,
    rms_norm,
    rotary_table,
)
from draftfuse.speculator import DraftInputs


class DraftModelSpeculator:
    """Several layers with a KV cache each; ``inputs.hidden_states`` is there for the batch's sake and never read."""

    advance_positions = True

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        target_hidden_size: int,
        limits: Limits,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_speculative_tokens = limits.num_speculative_tokens
        self.max_num_reqs, self.max_model_len = limits.max_num_reqs, limits.max_model_len
        layers = range(config.num_hidden_layers)
        caches = [allocate_cache(config, limits, device, dtype) for _ in layers]
        self.config, self.inputs = config, allocate_inputs(limits, target_hidden_size, device, dtype)
        self.attn_groups = [paged_group(limits, self.inputs, caches)]
        self.embed, self.lm_head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        self.layers = [DecoderLayer(weights, f"model.layers.{i}.", config, caches[i]) for i in layers]
        self.norm = weights["model.norm.weight"]
        self.rotary = rotary_table(config, limits.max_model_len, device)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        limits: Limits,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> DraftModelSpeculator:
        """Random weights of the sizes in ``config``, for a target of the same hidden size."""
        weights = random_weights(backbone_shapes(config), seed, device, dtype)
        return cls(config, weights, config.hidden_size, limits, device, dtype)

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, PagedMetadata]) -> tuple[Tensor, Tensor]:
        """Hidden states of the draft model, twice; nothing reads the second."""
        x, turns = F.embedding(inputs.input_ids, self.embed), self.rotary[inputs.positions]
        for layer in self.layers:
            x = layer.forward(x, turns, metadata["draft"])
        hidden = rms_norm(x, self.norm, self.config.rms_norm_eps)
        return hidden, hidden

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """Keyed by (seed, place of the drawn token): the query at p reads token p+1 and draws token p+2."""
        rows, inputs = hidden.shape[0], self.inputs
        logits = F.linear(hidden, self.lm_head)
        return gumbel_sample(logits, inputs.temperature[:rows], inputs.seeds[:rows], inputs.positions[:rows] + 2)

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        """The next step reads the drawn token at the next position."""
        rows, inputs = tokens.shape[0], self.inputs
        inputs.input_ids[:rows].copy_(tokens)
        advance_positions(inputs.positions[:rows], inputs.seq_lens[:rows], self.max_model_len)
