"""Triton kernel of ``small_linear``: each program owns a few rows of the weight and streams them once.

With programmatic dependent launch (Hopper and later) a program fetches its first weight tile while the kernel in front
still runs, and waits for that kernel only before it reads ``x``. Weights never depend on the kernel in front.

Imported only by the CUDA implementation, and by tests under Triton's interpreter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """Launch sizes: rows of the weight a program, inputs a step, warps."""

    block_n: int
    block_k: int
    warps: int


CANDIDATES = (Tile(1, 2048, 4), Tile(2, 1024, 4), Tile(4, 512, 4), Tile(4, 1024, 8))
TILES: dict[tuple[int, int], Tile] = {}  # (N, K) -> the tile that measured best on this machine


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(
    x: tl.tensor,
    gain: tl.tensor,
    at: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    NORM: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """A part of one row of x, normed, rounded as the model rounds it, in float32: [BLOCK_K]."""
    part = tl.load(x + at) if EVEN else tl.load(x + at, mask=at < K, other=0.0)
    if NORM:
        weights = tl.load(gain + at, mask=at < K, other=0.0)
        part = (part.to(tl.float32) * scale).to(x.dtype.element_ty) * weights
    return part.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(
    weight: tl.tensor, at: tl.tensor, k: tl.tensor, lane: tl.tensor, K: tl.constexpr, EVEN: tl.constexpr
) -> tl.tensor:
    """A tile of weights, never read again: [BLOCK_N, BLOCK_K]."""
    if EVEN:
        return tl.load(weight + at + k, eviction_policy="evict_first")
    return tl.load(weight + at + k, mask=(k + lane < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def _small_linear(
    x: tl.tensor,
    weight: tl.tensor,
    gain: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    epsilon: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    FEATURES: tl.constexpr = N // 2 if SWIGLU else N
    EVEN: tl.constexpr = K % BLOCK_K == 0
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = feature < FEATURES
    lane = tl.arange(0, BLOCK_K)
    at = tl.where(live, feature, 0).to(tl.int64)[:, None] * K + lane[None, :]
    first = _tile(weight, at, 0, lane, K, EVEN)
    if SWIGLU:
        first_up = _tile(weight + FEATURES * K, at, 0, lane, K, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for m in tl.static_range(M):
        row = x + m * x_stride
        scale = 1.0
        if NORM:
            squares = tl.zeros([BLOCK_K], tl.float32)
            for k in tl.static_range(0, K, BLOCK_K):
                part = tl.load(row + k + lane, mask=k + lane < K, other=0.0).to(tl.float32)
                squares += part * part
            scale = tl.rsqrt(tl.sum(squares) / K + epsilon)
        part = _inputs(row, gain, lane, scale, K, NORM, EVEN)[None, :]
        total = first.to(tl.float32) * part
        if SWIGLU:
            total_up = first_up.to(tl.float32) * part
        for k in tl.static_range(BLOCK_K, K, BLOCK_K):
            part = _inputs(row, gain, k + lane, scale, K, NORM, EVEN)[None, :]
            total += _tile(weight, at, k, lane, K, EVEN).to(tl.float32) * part
            if SWIGLU:
                total_up += _tile(weight + FEATURES * K, at, k, lane, K, EVEN).to(tl.float32) * part
        result = tl.sum(total, axis=1).to(out.dtype.element_ty)
        if SWIGLU:
            gate = result.to(tl.float32)
            gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
            result = gate * tl.sum(total_up, axis=1).to(out.dtype.element_ty)
        if RESIDUAL:
            result += tl.load(residual + m * residual_stride + feature, mask=live, other=0.0)
        tl.store(out + m * FEATURES + feature, result, mask=live)


def launch(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    epsilon: float,
    swiglu: bool,
    residual: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """Launch on checked arguments; no sync, so safe in capture."""
    rows, inputs = x.shape
    features = weight.shape[0] // 2 if swiglu else weight.shape[0]
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    added = out if residual is None else residual if residual.stride(1) == 1 else residual.contiguous()
    chosen = tile or TILES.get((weight.shape[0], inputs), CANDIDATES[1])
    block_n = max(1, chosen.block_n // 2) if swiglu else chosen.block_n  # two tiles are in flight
    dependent = has_dependent_launch(x.device)
    extra = {"launch_pdl": True} if dependent else {}
    _small_linear[(triton.cdiv(features, block_n),)](
        x,
        weight,
        weight if gain is None else gain,
        added,
        out,
        epsilon,
        x.stride(0),
        added.stride(0),
        N=weight.shape[0],
        K=inputs,
        M=rows,
        NORM=gain is not None,
        SWIGLU=swiglu,
        RESIDUAL=residual is not None,
        BLOCK_N=block_n,
        BLOCK_K=min(chosen.block_k, triton.next_power_of_2(inputs)),
        PDL=dependent,
        num_warps=chosen.warps,
        **extra,
    )
    return out


def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels may be launched before the one in front ends (compute capability 9.0 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
