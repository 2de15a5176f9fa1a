"""Triton kernels of ``small_linear`` and its kin: each program owns a few rows of the weight and streams them once.

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

from draftfuse.lowering.ops._dependent_launch import dependent_launch


class Tile(NamedTuple):
    """Launch sizes: rows of the weight a program, inputs a step, warps."""

    block_n: int
    block_k: int
    warps: int


PICK_BLOCK, PICK_WARPS = 4096, 16  # keys at a time of the last reduction of argmax
CANDIDATES = (Tile(1, 2048, 4), Tile(2, 1024, 4), Tile(4, 512, 4), Tile(4, 1024, 8))
TILES: dict[tuple[int, int], Tile] = {}  # (N, K) -> the tile that measured best on this machine


@triton.jit  # type: ignore[untyped-decorator]
def _tile(
    weight: tl.tensor, at: tl.tensor, k: tl.tensor, lane: tl.tensor, K: tl.constexpr, EVEN: tl.constexpr
) -> tl.tensor:
    """A tile of weights, never read again: [BLOCK_N, BLOCK_K]."""
    if EVEN:
        return tl.load(weight + at + k, eviction_policy="evict_first")
    return tl.load(weight + at + k, mask=(k + lane < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def _scale(row: tl.tensor, epsilon: tl.tensor, lane: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """One over the root mean square of a row."""
    squares = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        part = tl.load(row + k + lane, mask=k + lane < K, other=0.0).to(tl.float32)
        squares += part * part
    return tl.rsqrt(tl.sum(squares) / K + epsilon)


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(
    row: tl.tensor,
    second: tl.tensor,
    gain: tl.tensor,
    second_gain: tl.tensor,
    scale: tl.tensor,
    second_scale: tl.tensor,
    k: tl.constexpr,
    lane: tl.tensor,
    FIRST: tl.constexpr,
    NORM: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """A part of one row of x, normed, rounded as the model rounds it, in float32: [1, BLOCK_K].

    The row is ``row`` for the FIRST inputs, and ``second`` behind them.
    """
    if k >= FIRST:
        source, weights, factor, at = second, second_gain, second_scale, k - FIRST + lane
    else:
        source, weights, factor, at = row, gain, scale, k + lane
    part = tl.load(source + at) if EVEN else tl.load(source + at, mask=at < FIRST, other=0.0)
    if NORM:
        gains = tl.load(weights + at) if EVEN else tl.load(weights + at, mask=at < FIRST, other=0.0)
        part = (part.to(tl.float32) * factor).to(row.dtype.element_ty) * gains
    return part.to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _keys(value: tl.tensor, feature: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Integers in the order of the values, NaN on top, of equal ones the first feature on top."""
    value = value.to(tl.float32) + 0.0  # -0.0 equals 0.0
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    key = (order.to(tl.int64) << 32) | (0xFFFFFFFF - feature.to(tl.int64))
    return tl.where(live, key, -0x8000000000000000)


@triton.jit  # type: ignore[untyped-decorator]
def _small_linear(
    x: tl.tensor,
    second: tl.tensor,
    index: tl.tensor,
    weight: tl.tensor,
    gain: tl.tensor,
    second_gain: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    epsilon: tl.tensor,
    last_row: tl.tensor,
    x_stride: tl.tensor,
    second_stride: tl.tensor,
    index_stride: tl.tensor,
    residual_stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    M: tl.constexpr,
    GATHER: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ARGMAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    FEATURES: tl.constexpr = N // 2 if SWIGLU else N
    EVEN: tl.constexpr = K % BLOCK_K == 0
    dtype: tl.constexpr = x.dtype.element_ty
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
        if GATHER:
            named = tl.load(index + m * index_stride).to(tl.int64)
            row = x + tl.minimum(tl.maximum(named, 0), last_row) * x_stride
        behind = second + m * second_stride
        scale = 1.0
        behind_scale = 1.0
        if NORM:
            scale = _scale(row, epsilon, lane, FIRST, BLOCK_K)
            if FIRST < K:
                behind_scale = _scale(behind, epsilon, lane, FIRST, BLOCK_K)
        part = _inputs(row, behind, gain, second_gain, scale, behind_scale, 0, lane, FIRST, NORM, EVEN)
        total = first.to(tl.float32) * part
        if SWIGLU:
            total_up = first_up.to(tl.float32) * part
        for k in tl.static_range(BLOCK_K, K, BLOCK_K):
            part = _inputs(row, behind, gain, second_gain, scale, behind_scale, k, lane, FIRST, NORM, EVEN)
            total += _tile(weight, at, k, lane, K, EVEN).to(tl.float32) * part
            if SWIGLU:
                total_up += _tile(weight + FEATURES * K, at, k, lane, K, EVEN).to(tl.float32) * part
        result = tl.sum(total, axis=1).to(dtype)
        if SWIGLU:
            gate = result.to(tl.float32)
            gate = (gate / (1.0 + tl.exp(-gate))).to(dtype)
            result = gate * tl.sum(total_up, axis=1).to(dtype)
        if RESIDUAL:
            result += tl.load(residual + m * residual_stride + feature, mask=live, other=0.0)
        if ARGMAX:
            tl.store(out + m * tl.num_programs(0) + tl.program_id(0), tl.max(_keys(result, feature, live)))
        else:
            tl.store(out + m * FEATURES + feature, result, mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _pick(keys: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    """The feature of the highest key of one row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -0x8000000000000000, tl.int64)
    for i in range(0, count, BLOCK):
        best = tl.maximum(
            best, tl.load(keys + row * count + i + lane, mask=i + lane < count, other=-0x8000000000000000)
        )
    tl.store(out + row, 0xFFFFFFFF - (tl.max(best) & 0xFFFFFFFF))


def launch(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    epsilon: float,
    swiglu: bool,
    residual: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """``small_linear`` on checked arguments; no sync, so safe in capture."""
    features = weight.shape[0] // 2 if swiglu else weight.shape[0]
    out = torch.empty(x.shape[0], features, dtype=x.dtype, device=x.device)
    chosen = tile or _tile_of(weight)
    if swiglu:
        chosen = chosen._replace(block_n=max(1, chosen.block_n // 2))  # two tiles are in flight
    _run(x, weight, gain, epsilon, out, chosen, features, residual=residual, SWIGLU=swiglu)
    return out


def launch_pair(
    x: Tensor, index: Tensor | None, second: Tensor, weight: Tensor, gain: Tensor, second_gain: Tensor, epsilon: float
) -> Tensor:
    """``small_linear_pair`` on checked arguments; no sync, so safe in capture."""
    out = torch.empty(second.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    tile = _tile_of(weight)
    half = x.shape[1]
    tile = tile._replace(block_k=min(tile.block_k, half & -half))  # no tile lies across both halves
    _run(x, weight, gain, epsilon, out, tile, weight.shape[0], second=second, index=index, second_gain=second_gain)
    return out


def launch_argmax(x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float) -> Tensor:
    """``small_linear_argmax`` on checked arguments: two kernels; no sync, so safe in capture."""
    rows = x.shape[0]
    tile = _tile_of(weight)
    programs = triton.cdiv(weight.shape[0], tile.block_n)
    keys = torch.empty(rows, programs, dtype=torch.int64, device=x.device)
    _run(x, weight, gain, epsilon, keys, tile, weight.shape[0], ARGMAX=True)
    return pick(keys, PICK_WARPS)


def pick(keys: Tensor, warps: int) -> Tensor:
    """The feature of the highest key of each row: int64[M] of keys [M, parts]."""
    rows, parts = keys.shape
    out = torch.empty(rows, dtype=torch.int64, device=keys.device)
    block = min(PICK_BLOCK, triton.next_power_of_2(parts))
    _pick[(rows,)](keys, out, parts, BLOCK=block, num_warps=warps, **dependent_launch(keys.device))
    return out


def _tile_of(weight: Tensor) -> Tile:
    return TILES.get((weight.shape[0], weight.shape[1]), CANDIDATES[1])


def _run(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    epsilon: float,
    out: Tensor,
    tile: Tile,
    features: int,
    *,
    second: Tensor | None = None,
    index: Tensor | None = None,
    second_gain: Tensor | None = None,
    residual: Tensor | None = None,
    SWIGLU: bool = False,
    ARGMAX: bool = False,
) -> None:
    """One launch; a tensor that its variant does not read is stood for by ``out``."""
    dense = [t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (x, second, residual)]
    x = x if dense[0] is None else dense[0]
    behind, added = (out if t is None else t for t in dense[1:])
    _small_linear[(triton.cdiv(features, tile.block_n),)](
        x,
        behind,
        out if index is None else index,
        weight,
        weight if gain is None else gain,
        weight if second_gain is None else second_gain,
        added,
        out,
        epsilon,
        x.shape[0] - 1,
        x.stride(0),
        behind.stride(0),
        0 if index is None else index.stride(0),
        added.stride(0),
        N=weight.shape[0],
        K=weight.shape[1],
        FIRST=x.shape[1],
        M=x.shape[0] if second is None else second.shape[0],
        GATHER=index is not None,
        NORM=gain is not None,
        SWIGLU=SWIGLU,
        RESIDUAL=residual is not None,
        ARGMAX=ARGMAX,
        BLOCK_N=tile.block_n,
        BLOCK_K=min(tile.block_k, triton.next_power_of_2(weight.shape[1])),
        num_warps=tile.warps,
        **dependent_launch(x.device),
    )
