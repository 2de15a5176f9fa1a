"""EAGLE: a one-layer draft head that reads the target's hidden states and feeds back its own.

Row p of draft step 0 reads ``cat(embed(token[p+1]), target_hidden[p])`` at position p; ``fc`` and one decoder layer
without input norm give an estimate of target_hidden[p+1], which the target's ``lm_head`` reads as it is (the target's
final norm is in it already) and which is fed back for row p+1. These are the semantics of EAGLE-1 as vLLM's ``eagle``
method runs it and ``examples/train_tiny.py`` trains it.

R requests, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.models import ModelConfig, load_config, load_weights, packaged_model_dir
from draftfuse.ops import advance_positions, gumbel_sample
from draftfuse.reference.llama import (
    DecoderLayer,
    Limits,
    PagedMetadata,
    Weights,
    allocate_cache,
    allocate_inputs,
    layer_shapes,
    paged_group,
    random_weights,
    rotary_table,
)
from draftfuse.speculator import DraftInputs


def packaged_head(device: torch.device | str, dtype: torch.dtype) -> tuple[ModelConfig, Weights, Tensor, Tensor]:
    """Configuration and weights of the packaged head, and its target's embedding and ``lm_head``."""
    folder = packaged_model_dir()
    head, target = (load_weights(folder / name, dtype, device) for name in ("eagle", "target"))
    return load_config(folder / "eagle"), head, target["model.embed_tokens.weight"], target["lm_head.weight"]


class EagleSpeculator:
    """Hidden-state feedback over a KV cache of its own. ``embed`` and ``lm_head`` [V, H] are the target's."""

    advance_positions = True

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        embed: Tensor,
        lm_head: Tensor,
        limits: Limits,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_speculative_tokens = limits.num_speculative_tokens
        self.max_num_reqs, self.max_model_len = limits.max_num_reqs, limits.max_model_len
        cache = allocate_cache(config, limits, device, dtype)
        self.inputs = allocate_inputs(limits, config.hidden_size, device, dtype)
        self.attn_groups = [paged_group(limits, self.inputs, [cache])]
        self.embed, self.lm_head, self.fc = embed, lm_head, weights["fc.weight"]
        self.layer = DecoderLayer(weights, "layers.0.", config, cache)
        self.rotary = rotary_table(config, limits.max_model_len, device)

    @classmethod
    def from_packaged(
        cls, limits: Limits, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> EagleSpeculator:
        """The trained head that ships with draftfuse, with its target's embedding and ``lm_head``."""
        return cls(*packaged_head(device, dtype), limits, device, dtype)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        limits: Limits,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> EagleSpeculator:
        """Random weights of the sizes in ``config``; it has one layer, whatever ``num_hidden_layers`` says."""
        table = (config.vocab_size, config.hidden_size)
        shapes: dict[str, tuple[int, ...]]
        shapes = {"embed_tokens": table, "lm_head": table, "fc.weight": (config.hidden_size, 2 * config.hidden_size)}
        shapes |= layer_shapes(config, "layers.0.", input_norm=False)
        weights = random_weights(shapes, seed, device, dtype)
        return cls(config, weights, weights["embed_tokens"], weights["lm_head"], limits, device, dtype)

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, PagedMetadata]) -> tuple[Tensor, Tensor]:
        """[T, H] twice: the head's hidden states serve for logits and feedback."""
        joined = torch.cat((F.embedding(inputs.input_ids, self.embed), inputs.hidden_states), dim=-1)
        turns = self.rotary[inputs.positions]
        hidden = self.layer.forward(F.linear(joined, self.fc), turns, metadata["draft"])
        return hidden, hidden

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """Keyed by (seed, place of the drawn token): the query at p reads token p+1 and draws token p+2."""
        rows, inputs = hidden.shape[0], self.inputs
        logits = F.linear(hidden, self.lm_head)
        return gumbel_sample(logits, inputs.temperature[:rows], inputs.seeds[:rows], inputs.positions[:rows] + 2)

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        """The next step reads the drawn token, the hidden state it came from, and the next position."""
        rows, inputs = tokens.shape[0], self.inputs
        inputs.input_ids[:rows].copy_(tokens)
        inputs.hidden_states[:rows].copy_(hidden)
        advance_positions(inputs.positions[:rows], inputs.seq_lens[:rows], self.max_model_len)
