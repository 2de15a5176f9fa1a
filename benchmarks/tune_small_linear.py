"""Every tile of the small linear kernel against the vendor's product, for the shapes of a draft head.

python benchmarks/tune_small_linear.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from draftfuse.lowering.ops._small_linear_triton import CANDIDATES, Tile, launch
from draftfuse.lowering.tune import ROTATED_BYTES, graph_time

SHAPES = ((6144, 8192), (4096, 4096), (28672, 4096), (4096, 14336), (32000, 4096), (3072, 4096), (2048, 2048),
          (16384, 2048), (2048, 8192), (32000, 2048))  # fmt: skip


def own(x: Tensor, gain: Tensor | None, tile: Tile, weight: Tensor) -> Tensor:
    """draftfuse's kernel; with a gain also norm and SwiGLU."""
    return launch(x, weight, gain, 1e-5, gain is not None, None, tile)


def main() -> None:
    names = [f"{t.block_n}x{t.block_k}w{t.warps}" for t in CANDIDATES]
    print("outputs x inputs", "vendor us", *names, "norm+swiglu", sep="  ")
    for outputs, inputs in SHAPES:
        count = max(2, ROTATED_BYTES // (2 * outputs * inputs))
        weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        x, gain = torch.randn(1, inputs, device="cuda").bfloat16(), torch.rand(inputs, device="cuda").bfloat16()
        times = [graph_time(partial(F.linear, x), weights)]
        times += [graph_time(partial(own, x, None, t), weights) for t in CANDIDATES]
        times += [graph_time(partial(own, x, gain, t), weights) for t in CANDIDATES[:2]]
        print(f"{outputs:6d} x {inputs:5d}", *(f"{1e3 * t:7.1f}" for t in times), sep="  ", flush=True)


if __name__ == "__main__":
    main()
