"""Stateless sampling: the noise of a token is a function of (stream, seed, position, token id).

Shape letters: R requests (rows), V vocabulary.

The hash, on 32-bit words held in int64, ``^`` xor and every sum and product taken modulo 2**32::

    mix(h)    = h ^= h >> 16; h *= 0x21F0AAAD; h ^= h >> 15; h *= 0x735A2D97; h ^= h >> 15
    absorb(h, w) = mix((h ^ w) + 0x9E3779B9)
    key(h)    = h after absorbing the stream's salt, seed low, seed high, position low, position high
    hash(v)   = mix(mix(v ^ key(0)) + key(0x85EBCA6B))

Both multipliers are below 2**31, so no product leaves int64: the bits are the same in eager, in Inductor, on the CPU
and on CUDA. Then ``u = 1 - min((hash + 0.5) / 2**32, 1 - 2**-24)`` lies in (0, 1), and
``noise = -log(-log(u))``, evaluated as ``-log(-log1p(u - 1))`` so that the upper tail keeps its precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import check_floating, check_size, check_tensor, fail

STREAMS = {"draft": 0x64726166, "verify": 0x76657269}
_MASK = 0xFFFFFFFF


def _check(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, stream: str | int) -> None:
    op = "gumbel_sample"
    check_floating(op, "logits", logits, "R, V")
    check_tensor(op, "temperature", temperature, "R", torch.float32)
    check_tensor(op, "seeds", seeds, "R", torch.int64)
    check_tensor(op, "positions", positions, "R", torch.int64)
    for name, tensor in (("temperature", temperature), ("seeds", seeds), ("positions", positions)):
        what = f"{name} has other rows than logits"
        check_size(op, what, tensor.shape[0], logits.shape[0], f"Slice {name} to one entry a row of logits.")
    _salt(stream)


def _salt(stream: str | int) -> int:
    if isinstance(stream, int):
        return stream & _MASK
    if stream not in STREAMS:
        todo = "Use the same stream name for draft or verify everywhere."
        fail("gumbel_sample", "unknown stream", repr(stream), f"one of {sorted(STREAMS)} or an integer salt", todo)
    return STREAMS[stream]


def _mix(h: Any) -> Any:
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & _MASK
    h = ((h ^ (h >> 15)) * 0x735A2D97) & _MASK
    return h ^ (h >> 15)


def _key(start: int, salt: int, seeds: Tensor, positions: Tensor) -> Tensor:
    """[R, 1], from tensors and integers alike."""
    key: Any = start
    for word in (salt, seeds & _MASK, (seeds >> 32) & _MASK, positions & _MASK, (positions >> 32) & _MASK):
        key = _mix(((key ^ word) + 0x9E3779B9) & _MASK)
    row_key: Tensor = key.unsqueeze(1)
    return row_key


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int, stream: str | int = "draft") -> Tensor:
    """Gumbel noise f32[R, V] of the stream, from ``seeds`` i64[R] and ``positions`` i64[R] (formula: module docs)."""
    salt = _salt(stream)
    first, second = (_key(start, salt, seeds, positions) for start in (0, 0x85EBCA6B))
    tokens = torch.arange(vocab_size, device=seeds.device)
    bits = _mix((_mix(tokens ^ first) + second) & _MASK)
    below_one = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-below_one))


def reference(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, stream: str | int = "draft"
) -> Tensor:
    """The meaning, a row at a time."""
    noise = gumbel_noise(seeds, positions, logits.shape[1], stream)
    tokens = []
    for row, t in enumerate(temperature.tolist()):
        scores = logits[row].float()
        tokens.append(scores.argmax() if t == 0 else (scores / t + noise[row]).argmax())
    return torch.stack(tokens)


def gumbel_sample(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, stream: str | int = "draft"
) -> Tensor:
    """Draw one token a row: ``argmax(logits / temperature + noise)``, or ``argmax(logits)`` at temperature 0.

    Exact sampling from ``softmax(logits / temperature)`` (the Gumbel-max trick) without a generator: the same seed,
    position and stream give the same token in any batch, at any padding, eager or compiled or replayed.

    A composite: plain PyTorch without a registered op, made to be traced into the draft loop and fused.

    Args:
        logits: floating[R, V]; scores are computed in float32.
        temperature: f32[R], >= 0; 0 is greedy.
        seeds: i64[R], all 64 bits count.
        positions: i64[R] of the token being drawn.
        stream: ``"draft"`` or ``"verify"``, whose noises are independent, or an integer of which the low 32 bits are
            the salt.

    Returns:
        i64[R].

    Raises:
        OpArgumentError: a dtype, dim or size is wrong, or the stream is unknown.
    """
    _check(logits, temperature, seeds, positions, stream)
    scores = logits.to(torch.float32)
    greedy = (temperature == 0).unsqueeze(1)
    scaled = scores / torch.where(greedy, 1.0, temperature.unsqueeze(1))
    noise = gumbel_noise(seeds, positions, logits.shape[1], stream)
    return torch.where(greedy, scores, scaled + noise).argmax(dim=1)
