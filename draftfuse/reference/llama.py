"""A small Llama over a paged KV cache: what the target and the speculators of this package are made of.

Plain objects over a dictionary of weights under transformers' names, so that trained and random ones come the same way.

R requests, T tokens, H hidden, N query heads, M KV heads, D head size, L max_model_len, P slots a page, B blocks a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.models import ModelConfig
from draftfuse.ops import paged_attention, write_kv
from draftfuse.speculator import AttentionGroup, CommonMetadata, DraftInputs

Weights = Mapping[str, Tensor]
Cache = tuple[Tensor, Tensor]  # keys and values, [R * B, P, M, D] each
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Limits:
    """The sizes that persistent memory is allocated for."""

    num_speculative_tokens: int
    max_num_reqs: int
    max_model_len: int
    max_num_tokens: int | None = None  # of draft step 0; max_num_reqs * (K + 1) by default
    page_size: int = 16

    @property
    def blocks(self) -> int:
        """Pages that one request may need."""
        return -(-self.max_model_len // self.page_size)


# ---- metadata


@dataclass
class PagedMetadata:
    """What attention and KV writes need at one step."""

    seq_lens: Tensor  # i32[R]
    block_table: Tensor  # i32[R, B]
    slot_mapping: Tensor  # i64[T]
    query_start_loc: Tensor | None  # i32[R+1]; None in decode, where every row has one token


class PagedMetadataBuilder:
    """Every field is a view of a persistent buffer, so a step needs no refresh (draftfuse finds that out)."""

    def build(self, common: CommonMetadata) -> PagedMetadata:
        starts = common.query_start_loc if common.max_query_len > 1 else None
        return PagedMetadata(common.seq_lens, common.block_table, common.slot_mapping, starts)


def allocate_inputs(limits: Limits, hidden_size: int, device: torch.device | str, dtype: torch.dtype) -> DraftInputs:
    """The persistent inputs of a draft loop."""
    return DraftInputs.allocate(
        limits.max_num_reqs,
        limits.num_speculative_tokens,
        hidden_size,
        max_num_tokens=limits.max_num_tokens,
        dtype=dtype,
        device=device,
    )


def allocate_cache(config: ModelConfig, limits: Limits, device: torch.device | str, dtype: torch.dtype) -> Cache:
    """Keys and values of one layer, room for ``max_model_len`` tokens of every request."""
    blocks = limits.max_num_reqs * limits.blocks
    shape = (blocks, limits.page_size, config.num_key_value_heads, config.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)


def paged_group(limits: Limits, inputs: DraftInputs, caches: Sequence[Cache] = ()) -> AttentionGroup:
    """One group for all layers. Row r owns pages r * B and on, until somebody writes another block table.

    The table has one row more than the largest batch, as :meth:`DraftInputs.allocate` gives every buffer.
    """
    rows, width = limits.max_num_reqs, limits.blocks
    table = torch.zeros(rows + 1, width, dtype=torch.int32, device=inputs.positions.device)
    table[:rows] = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
    slots = torch.full_like(inputs.positions, -1)
    by_layer = {f"layers.{i}": cache for i, cache in enumerate(caches)}
    return AttentionGroup(PagedMetadataBuilder(), table, slots, limits.page_size, kv_caches=by_layer)


# ---- the decoder layer


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm, in float32 whatever ``x`` is."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotary_table(config: ModelConfig, max_model_len: int, device: torch.device | str) -> Tensor:
    """Cosines, then sines, of every position: f32[L, D]."""
    half = config.head_dim // 2
    rate = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(max_model_len, dtype=torch.float32)[:, None] * rate
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(device)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding of ``x`` [T, heads, D] by ``turns`` [T, D], rows of the table."""
    cos, sin = turns.unsqueeze(1).chunk(2, dim=-1)
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class DecoderLayer:
    """Attention and SwiGLU, each behind its norm. Without ``input_layernorm`` attention reads ``x`` as it is."""

    projections: tuple[str, ...] = ("self_attn.q", "self_attn.k", "self_attn.v")

    def __init__(self, weights: Weights, prefix: str, config: ModelConfig, cache: Cache) -> None:
        def joined(*names: str) -> Tensor:
            return torch.cat([weights[f"{prefix}{name}_proj.weight"] for name in names])

        self.config, self.cache = config, cache
        self.input_norm = weights.get(f"{prefix}input_layernorm.weight")
        self.post_norm = weights[f"{prefix}post_attention_layernorm.weight"]
        self.qkv, self.o = joined(*self.projections), joined("self_attn.o")
        self.gate_up, self.down = joined("mlp.gate", "mlp.up"), joined("mlp.down")

    def forward(self, x: Tensor, turns: Tensor, metadata: PagedMetadata) -> Tensor:
        """[T, H] to [T, H]; writes the KV of its tokens, then attends."""
        normed = x if self.input_norm is None else rms_norm(x, self.input_norm, self.config.rms_norm_eps)
        return self.forward_beside(normed, x, turns, metadata)

    def forward_beside(self, x: Tensor, residual: Tensor, turns: Tensor, metadata: PagedMetadata) -> Tensor:
        """Attention reads ``x``; its result and the MLP's go onto ``residual``."""
        attended = self.attend(x, turns, metadata)
        hidden = residual + self.reduced(F.linear(attended.flatten(1), self.o))
        return hidden + self.reduced(self.mlp(rms_norm(hidden, self.post_norm, self.config.rms_norm_eps)))

    def reduced(self, x: Tensor) -> Tensor:
        """What goes onto the residual, of this rank's part of it; here the part is the whole."""
        return x

    def attend(self, x: Tensor, turns: Tensor, metadata: PagedMetadata) -> Tensor:
        heads = F.linear(x, self.qkv).unflatten(-1, (-1, self.config.head_dim))
        queries, turned = self.config.num_attention_heads, heads.shape[1] - self.config.num_key_value_heads
        rotated = rotate(heads[:, :turned], turns)
        write_kv(rotated[:, queries:], heads[:, turned:], *self.cache, metadata.slot_mapping)
        return self.look_up(rotated[:, :queries], metadata)

    def look_up(self, query: Tensor, metadata: PagedMetadata) -> Tensor:
        """Paged attention of ``query`` [T, N, D]."""
        scale = self.config.head_dim**-0.5
        return paged_attention(
            query, *self.cache, metadata.block_table, metadata.seq_lens, metadata.query_start_loc, scale
        )

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


class QueryOnlyLayer(DecoderLayer):
    """A decoder layer that writes no KV and looks up what somebody else wrote."""

    projections = ("self_attn.q",)

    def attend(self, x: Tensor, turns: Tensor, metadata: PagedMetadata) -> Tensor:
        query = F.linear(x, self.qkv).unflatten(-1, (-1, self.config.head_dim))
        return self.look_up(rotate(query, turns), metadata)


# ---- random weights, for tests and examples


def small_config(
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    intermediate_size: int = 64,
    max_model_len: int = 64,
) -> ModelConfig:
    """The sizes of a model for random weights."""
    shape = (vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size, max_model_len)
    return ModelConfig(*shape, rms_norm_eps=1e-5, rope_theta=10000.0)


def layer_shapes(config: ModelConfig, prefix: str, *, input_norm: bool = True, kv: bool = True) -> Shapes:
    """Names and shapes of one layer's weights."""
    hidden, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    heads = {"k": config.num_key_value_heads, "v": config.num_key_value_heads} if kv else {}
    shapes: Shapes = {"input_layernorm": (hidden,)} if input_norm else {}
    shapes |= {"self_attn.q_proj": (inner, hidden), "self_attn.o_proj": (hidden, inner)}
    shapes |= {f"self_attn.{name}_proj": (count * config.head_dim, hidden) for name, count in heads.items()}
    shapes |= {f"mlp.{name}_proj": (config.intermediate_size, hidden) for name in ("gate", "up")}
    shapes |= {"mlp.down_proj": (hidden, config.intermediate_size), "post_attention_layernorm": (hidden,)}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def backbone_shapes(config: ModelConfig) -> Shapes:
    """Names and shapes of a whole LlamaForCausalLM."""
    table = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": table[1:]}
    for i in range(config.num_hidden_layers):
        shapes |= layer_shapes(config, f"model.layers.{i}.")
    return shapes


def random_weights(
    shapes: Shapes, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Weights under which signals keep their size, the same on every device; embeddings are of unit size."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        size = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
        weights[name] = (1 + 0.1 * noise if len(shape) == 1 else size * noise).to(device, dtype)
    return weights
