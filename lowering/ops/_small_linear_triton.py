"""Triton kernel of ``small_linear``: each program owns a few rows of the weight and streams them once.

With programmatic dependent launch (Hopper and later) a program fetches its first weight tile while the kernel in front
still runs, and waits for that kernel only before it reads ``x``. Weights never depend on the kernel in front.

Imported only by the CUDA implementation, and by tests under Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N, BLOCK_K, WARPS = 8, 512, 4


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(
    x: tl.tensor,
    gain: tl.tensor,
    at: tl.tensor,
    row: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    """A part of every row of x, normed, rounded as the model rounds it, in float32: [M, BLOCK_K]."""
    inside = (at < K)[None, :]
    part = tl.load(x + row[:, None] + at[None, :], mask=inside, other=0.0)
    if NORM:
        part = (part.to(tl.float32) * scale[:, None]).to(x.dtype.element_ty)
        part = part * tl.load(gain + at, mask=at < K, other=0.0)[None, :]
    return part.to(tl.float32)


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
    rows: tl.tensor,
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
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = feature < FEATURES
    lane = tl.arange(0, BLOCK_K)
    m = tl.arange(0, M)
    row = tl.where(m < rows, m, 0) * x_stride
    tile = tl.where(live, feature, 0).to(tl.int64)[:, None] * K + lane[None, :]
    edge = (lane < K)[None, :]
    w = tl.load(weight + tile, mask=edge, other=0.0)
    if SWIGLU:
        w_up = tl.load(weight + FEATURES * K + tile, mask=edge, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.full([M], 1.0, tl.float32)
    if NORM:
        squares = tl.zeros([M, BLOCK_K], tl.float32)
        for k in range(0, K, BLOCK_K):
            part = tl.load(x + row[:, None] + (k + lane)[None, :], mask=(k + lane < K)[None, :], other=0.0)
            squares += part.to(tl.float32) * part.to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares, axis=1) / K + epsilon)
    part = _inputs(x, gain, lane, row, scale, K, NORM)[:, None, :]
    total = w.to(tl.float32)[None, :, :] * part
    if SWIGLU:
        total_up = w_up.to(tl.float32)[None, :, :] * part
    for k in range(BLOCK_K, K, BLOCK_K):
        part = _inputs(x, gain, k + lane, row, scale, K, NORM)[:, None, :]
        inside = (k + lane < K)[None, :]
        w = tl.load(weight + tile + k, mask=inside, other=0.0)
        total += w.to(tl.float32)[None, :, :] * part
        if SWIGLU:
            w_up = tl.load(weight + FEATURES * K + tile + k, mask=inside, other=0.0)
            total_up += w_up.to(tl.float32)[None, :, :] * part
    result = tl.sum(total, axis=2).to(out.dtype.element_ty)
    if SWIGLU:
        gate = result.to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
        result = gate * tl.sum(total_up, axis=2).to(out.dtype.element_ty)
    keep = (m < rows)[:, None] & live[None, :]
    if RESIDUAL:
        result += tl.load(residual + m[:, None] * residual_stride + feature[None, :], mask=keep, other=0.0)
    tl.store(out + m[:, None] * FEATURES + feature[None, :], result, mask=keep)


def launch(
    x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float, swiglu: bool, residual: Tensor | None
) -> Tensor:
    """Launch on checked arguments; no sync, so safe in capture."""
    rows, inputs = x.shape
    features = weight.shape[0] // 2 if swiglu else weight.shape[0]
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    added = out if residual is None else residual if residual.stride(1) == 1 else residual.contiguous()
    block_n, block_k, warps = tile_sizes(features, inputs, rows, swiglu)
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
        rows,
        N=weight.shape[0],
        K=inputs,
        M=triton.next_power_of_2(rows),
        NORM=gain is not None,
        SWIGLU=swiglu,
        RESIDUAL=residual is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PDL=dependent,
        num_warps=warps,
        **extra,
    )
    return out


def tile_sizes(features: int, inputs: int, rows: int, swiglu: bool) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_K, warps): enough programs to fill the chip, and tiles that keep 16-byte loads in flight."""
    block_k = min(1024 if inputs % 1024 == 0 else BLOCK_K, triton.next_power_of_2(inputs))
    block_n = 4 if features <= 4096 or swiglu or rows > 2 else BLOCK_N
    return block_n, block_k, WARPS if block_n * block_k <= 4096 else 2 * WARPS


def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels may be launched before the one in front ends (compute capability 9.0 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
