"""Programmatic dependent launch: a kernel starts before the one in front ends, and waits before it reads its results.

A kernel that takes these options calls ``gdc_wait`` before its first access to memory that the loop writes, in every
program: the kernels behind it rely on its end alone.
"""

from __future__ import annotations

import torch


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a Triton kernel with a ``PDL`` parameter; on from compute capability 9.0."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
