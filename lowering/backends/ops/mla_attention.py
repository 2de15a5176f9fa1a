"""Decode attention over a paged latent cache (multi-head latent attention with the up-projections absorbed).

Shape letters: R requests (rows, one token each), Hq query heads, C latent size, E rope size, N blocks (pages),
P slots a page, B blocks a row of the block table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import (
    check_floating,
    check_same_device,
    check_same_dtype,
    check_size,
    check_tensor,
    define,
    fake,
    implement,
    require_triton,
)
from draftfuse.lowering.ops.paged_attention import paged_attention

_OP = "mla_attention"


def _check(q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> None:
    check_floating(_OP, "q_nope", q_nope, "R, Hq, C")
    check_floating(_OP, "q_rope", q_rope, "R, Hq, E")
    check_floating(_OP, "latent_cache", latent_cache, "N, P, C + E")
    check_same_dtype(_OP, "q_rope", q_rope, "q_nope", q_nope)
    check_same_dtype(_OP, "latent_cache", latent_cache, "q_nope", q_nope)
    check_tensor(_OP, "block_table", block_table, "R, B", torch.int32)
    check_tensor(_OP, "seq_lens", seq_lens, "R", torch.int32)


def _check_sizes(q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> None:
    rows = seq_lens.shape[0]
    for name, tensor in (("q_nope", q_nope), ("q_rope", q_rope), ("block_table", block_table)):
        check_size(_OP, f"{name} has other rows than seq_lens", tensor.shape[0], rows, f"Slice {name}[:R].")
    check_size(_OP, "q_rope has other heads than q_nope", q_rope.shape[1], q_nope.shape[1], "Pass one head count.")
    width = q_nope.shape[2] + q_rope.shape[2]
    todo = "Store the latent and the rope key of a token side by side."
    check_size(_OP, "latent_cache has another row size", latent_cache.shape[2], width, todo)
    check_same_device(
        _OP, q_nope=q_nope, q_rope=q_rope, latent_cache=latent_cache, block_table=block_table, seq_lens=seq_lens
    )


def reference(
    q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """The meaning, a row at a time, in float32."""
    page, latent = latent_cache.shape[1], q_nope.shape[2]
    out = torch.zeros_like(q_nope)
    for row, length in enumerate(seq_lens.tolist()):
        slots = torch.tensor([int(block_table[row, p // page]) * page + p % page for p in range(length)])
        if length:
            tokens = latent_cache[slots // page, slots % page].float()
            scores = q_nope[row].float() @ tokens[:, :latent].T + q_rope[row].float() @ tokens[:, latent:].T
            out[row] = ((scores * scale).softmax(-1) @ tokens[:, :latent]).to(out.dtype)
    return out


def _cpu(
    q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """One KV head whose keys are whole cache rows; of its values only the latent part is wanted."""
    _check(q_nope, q_rope, latent_cache, block_table, seq_lens)
    _check_sizes(q_nope, q_rope, latent_cache, block_table, seq_lens)
    query, cache = torch.cat([q_nope, q_rope], dim=-1), latent_cache.unsqueeze(2)
    out = paged_attention(query, cache, cache, block_table, seq_lens, None, scale)
    return out[..., : q_nope.shape[2]].contiguous()


def _cuda(
    q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    _check(q_nope, q_rope, latent_cache, block_table, seq_lens)
    _check_sizes(q_nope, q_rope, latent_cache, block_table, seq_lens)
    require_triton(_OP)
    from draftfuse.lowering.backends.ops._mla_attention_triton import launch

    return launch(q_nope, q_rope, latent_cache, block_table, seq_lens, scale)


def _fake(
    q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    _check(q_nope, q_rope, latent_cache, block_table, seq_lens)
    return q_nope.new_empty(q_nope.shape)


define(
    "mla_attention(Tensor q_nope, Tensor q_rope, Tensor latent_cache, Tensor block_table, Tensor seq_lens, "
    "float scale) -> Tensor"
)
implement(_OP, _cpu, "CPU")
implement(_OP, _cuda, "CUDA")
fake(_OP, _fake)


def mla_attention(
    q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """Attend one query token a row to its latent cache; the result stays in the latent space.

    A cache row is ``[latent | rope key]``. Scores are ``q_nope . latent + q_rope . rope key``, values are the latents.
    The caller has absorbed the key up-projection into ``q_nope`` and applies the value up-projection to the result.
    A padded row (``seq_len`` 0) gives zeros.

    Args:
        q_nope: floating[R, Hq, C].
        q_rope: [R, Hq, E] of the same dtype.
        latent_cache: [N, P, C + E] of the same dtype, any strides.
        block_table: i32[R, B].
        seq_lens: i32[R], the query token included.
        scale: factor of the scores.

    Returns:
        [R, Hq, C], contiguous.

    Raises:
        OpArgumentError: a dtype, dim, size or device is wrong.
    """
    out: Tensor = torch.ops.draftfuse.mla_attention(q_nope, q_rope, latent_cache, block_table, seq_lens, scale)
    return out
