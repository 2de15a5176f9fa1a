"""Device memory: what a graph pool holds, and whether compiling ever copies a KV pool."""

from __future__ import annotations

from typing import Any

import draftfuse
from draftfuse.bench.measure import PeakMemory
from draftfuse.bench.speculators import BenchSpeculator
from draftfuse.bench.workload import Workload


def grow_kv(spec: BenchSpeculator, num_bytes: int) -> int:
    """Give the one layer of ``spec`` KV pools of ``num_bytes`` together, the old pages first; returns their bytes."""
    caches = spec.kv_caches()
    pages = num_bytes // sum(c[0].numel() * c.element_size() for c in caches)
    pages = max(pages, caches[0].shape[0])
    grown = []
    for cache in caches:
        new = cache.new_empty(pages, *cache.shape[1:])
        new[: cache.shape[0]].copy_(cache)
        grown.append(new)
    spec.layers[0].cache = (grown[0], grown[1])
    spec.attn_groups[0].kv_caches = {"layers.0": tuple(grown)}
    return sum(t.numel() * t.element_size() for t in grown)


def measure_kv_copies(spec: BenchSpeculator, num_bytes: int, requests: int, k: int, context: int) -> dict[str, Any]:
    """Compile, capture and run with KV pools of ``num_bytes``; the peak beyond them shows any copy."""
    held = grow_kv(spec, num_bytes)
    work = Workload(spec, requests, context)
    fused = draftfuse.compile(spec, request_capacities=[requests])
    with PeakMemory(spec.device) as peak:
        fused.decode(requests, k)
        work.reset(spec)
        fused.decode(requests, k)
    return {"kv_bytes": held, "peak_bytes_beyond": peak.num_bytes, "copied": peak.num_bytes >= held // 2}
