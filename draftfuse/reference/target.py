"""The target: a whole Llama over a paged KV cache that reads ragged batches, prompts and drafts to verify alike.

R requests, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.models import ModelConfig, load_config, load_weights, packaged_model_dir
from draftfuse.reference.llama import (
    DecoderLayer,
    Limits,
    PagedMetadata,
    Weights,
    allocate_cache,
    backbone_shapes,
    random_weights,
    rms_norm,
    rotary_table,
)


class Target:
    """A LlamaForCausalLM with ``caches`` of its own, one a layer."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        limits: Limits,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        layers = range(config.num_hidden_layers)
        self.config, self.limits, self.device = config, limits, torch.device(device)
        self.caches = [allocate_cache(config, limits, device, dtype) for _ in layers]
        self.layers = [DecoderLayer(weights, f"model.layers.{i}.", config, self.caches[i]) for i in layers]
        self.embed, self.lm_head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        self.norm = weights["model.norm.weight"]
        self.rotary = rotary_table(config, limits.max_model_len, device)

    @classmethod
    def from_packaged(
        cls, limits: Limits, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Target:
        """The trained target that ships with draftfuse."""
        folder = packaged_model_dir() / "target"
        return cls(load_config(folder), load_weights(folder, dtype, device), limits, device, dtype)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        limits: Limits,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Target:
        """Random weights of the sizes in ``config``."""
        return cls(config, random_weights(backbone_shapes(config), seed, device, dtype), limits, device, dtype)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: PagedMetadata) -> Tensor:
        """Hidden states [T, H] after the final norm: what ``lm_head`` and an EAGLE head read."""
        x, turns = F.embedding(input_ids, self.embed), self.rotary[positions]
        for layer in self.layers:
            x = layer.forward(x, turns, metadata)
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., V] from [.., H]."""
        return F.linear(hidden, self.lm_head)
