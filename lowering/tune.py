"""Choose by measurement: the tile of a small linear layer, or the vendor's product, for one shape on this machine.

Times are taken inside a CUDA graph, on weights rotated through more memory than the L2 holds, so that they are those of
a draft step and not of a warm cache. Choices are kept on disk by device and versions; several processes may write at
once (each replaces the file whole).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.lowering import kept_file
from draftfuse.lowering.file_lock import locked

ROTATED_BYTES = 160 << 20  # more than twice the L2 of a Hopper GPU
CALLS, REPEATS = 12, 7
VENDOR = "vendor"


def choose(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether draftfuse's own kernel serves one row of [outputs, inputs] best; sets its tile."""
    from draftfuse.lowering.ops._small_linear_triton import TILES, Tile

    known, key = _load(device), f"{outputs}x{inputs}x{dtype}"
    if key not in known:
        with locked(_file(device).with_suffix(".lock")):  # processes that share this cache measure in turn
            known = _load(device)  # another process may have measured this shape while this one waited
            if key not in known:
                known |= {key: measure(outputs, inputs, dtype, device)}
                _save(device, known)
    best = known[key]
    if best == VENDOR:
        return False
    TILES[outputs, inputs] = Tile(*best)
    return True


def measure(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> str | list[int]:
    """The fastest candidate: a tile, or ``"vendor"``."""
    from draftfuse.lowering.ops._small_linear_triton import CANDIDATES

    size = outputs * inputs * dtype.itemsize
    weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(max(2, ROTATED_BYTES // size))]
    x = torch.randn(1, inputs, device=device, dtype=dtype)
    times: dict[str | tuple[int, ...], float] = {VENDOR: graph_time(lambda w: F.linear(x, w), weights)}
    for tile in CANDIDATES:
        times[tile] = graph_time(partial(_own, x, tile), weights)
    best = min(times, key=lambda name: times[name])
    return best if isinstance(best, str) else list(best)


def _own(x: Tensor, tile: Any, weight: Tensor) -> Tensor:
    from draftfuse.lowering.ops._small_linear_triton import launch

    return launch(x, weight, None, 0.0, False, None, tile)


def graph_time(call: Callable[[Tensor], object], weights: Sequence[Tensor]) -> float:
    """Milliseconds of one call, the median of several replays of a graph of calls on different weights."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(CALLS):
            call(weights[i % len(weights)])
    samples = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / CALLS)
    return float(median(samples))


def _file(device: torch.device) -> Path:
    name = torch.cuda.get_device_name(device).replace(" ", "-")
    return kept_file.cached(f"small-linear-{name}-{torch.__version__}-{torch.version.cuda}.json")


def _load(device: torch.device) -> dict[str, str | list[int]]:
    """What was measured; nothing where the file is damaged, so that it is measured again."""
    try:
        found = kept_file.read(_file(device))
    except (OSError, kept_file.Damaged):
        return {}
    return {key: best for key, best in found.items() if _is_choice(best)} if isinstance(found, dict) else {}


def _is_choice(best: object) -> bool:
    from draftfuse.lowering.ops._small_linear_triton import CANDIDATES

    return best == VENDOR or (isinstance(best, list) and tuple(best) in map(tuple, CANDIDATES))


def _save(device: torch.device, known: dict[str, str | list[int]]) -> None:
    """Keep what was measured; where the disk refuses, another process measures again."""
    with suppress(OSError):
        kept_file.write(_file(device), known)
