"""How long it takes to have a draft loop ready: several k, eight request capacities, cold and warm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import draftfuse
from draftfuse.bench.cells import Cell, speculator_for
from draftfuse.bench.workload import Workload

KS, CAPACITIES = (4, 8, 16), (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 1024


def measure_compile(
    name: str, device: torch.device, attention: str, ks: Sequence[int] = KS, capacities: Sequence[int] = CAPACITIES
) -> dict[str, Any]:
    """Build and capture the decode steps of ``name`` for every k and capacity; seconds of each stage."""
    context = CONTEXT if device.type == "cuda" else 64
    cell = Cell(name, max(capacities), max(ks), context)
    spec = speculator_for([cell], device, attention)
    fused = draftfuse.compile(spec, request_capacities=list(capacities))
    work = Workload(spec, max(capacities), context)
    start = time.perf_counter()
    for k in ks:
        for capacity in sorted(capacities, reverse=True):
            work.reset(spec)
            fused.decode(capacity, k)
    if device.type == "cuda":
        torch.cuda.synchronize()
    total = time.perf_counter() - start
    return {"speculator": name, "ks": list(ks), "capacities": list(capacities)} | stages(fused, total)


def stages(fused: draftfuse.FusedDraft, total: float) -> dict[str, Any]:
    """Where ``total`` seconds of building and capturing went."""
    builds = fused.report.builds
    traced, compiled = sum(b.trace_seconds for b in builds), sum(b.compile_seconds for b in builds)
    rest = total - traced - compiled
    stored = sorted({b.stored for b in builds if b.stored})
    seconds = {"total_s": total, "trace_s": traced, "compile_s": compiled, "capture_s": rest}
    return {**seconds, "builds": len(builds), "traces": stored}
