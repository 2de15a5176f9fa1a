"""Attention backends on a GPU: each row's fused loop against per-step rebuild, and Triton against FlashAttention 3.

    FA3_LIBRARY=/path/_vllm_fa3_C.abi3.so python benchmarks/gpu_backends.py --out benchmarks/results/gpu_backends.json
    FA3_LIBRARY=... compute-sanitizer --tool memcheck python benchmarks/gpu_backends.py --sanitize

``--sanitize`` runs one small loop of each row, without graphs and without timing. ``--device cpu`` tries the script.
A row or cell that fails leaves its error in the file, and the next one runs; the exit status is 1 then.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import draftfuse
from draftfuse.bench.measure import time_launch
from draftfuse.bench.results import Results
from draftfuse.lowering.backends import get_backend
from draftfuse.lowering.backends.ops import fa3
from draftfuse.ops import paged_attention
from tests.lowering.backends.rows import ROWS, make
from tests.lowering.backends.support import Fused, Sizes, differences, load, record_rebuild

LENS = [30, 33, 64, 1, 95, 127, 16, 250, 255, 17, 3]  # page boundaries of 16 fall inside the loop
ROTATED_BYTES = 256 << 20  # KV that one timed graph walks through, more than the L2 holds


def sizes_for(device: str, sanitize: bool) -> Sizes:
    """A model with FlashAttention's head sizes; small under the sanitizer."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (64, 4, 2, 64) if sanitize or device == "cpu" else (512, 32, 8, 128)
    return Sizes(*shape, vocabulary=512, page=16, max_len=512, max_reqs=16, steps=4, dtype=dtype, device=device)


def check_row(name: str, sizes: Sizes, graph: bool, compilers: tuple[str, ...]) -> dict[str, Any]:
    """Every tap of every step, fused against rebuilt, for one row."""
    row = get_backend(name).row()
    found: dict[str, Any] = {"name": name, "kernel": row["kernel"], "status": row["status"], "reason": row["reason"]}
    if row["status"] == "split":
        return found | {"skipped": row["reason"]}
    for compiler in compilers:
        spec = make(name, sizes=sizes)
        expected = record_rebuild(spec, LENS, sizes.max_reqs)
        fused = Fused(spec, compiler).record(LENS, sizes.max_reqs, graph=graph)
        different = differences(expected, fused)
        metadata = [key for key in different if "metadata" in key[0] or "slot_mapping" in key[0]]
        found[compiler] = {
            "tensors": len(expected),
            "metadata_differences": [f"{key}@{step}" for key, step in metadata],
            "other_differences": [f"{key}@{step}" for key, step in different if (key, step) not in metadata],
            "shipped_tokens_equal": shipped_equal(name, sizes, compiler) if graph else None,
        }
    return found


def shipped_equal(name: str, sizes: Sizes, compiler: str) -> float:
    """Share of drafted tokens that ``draftfuse.compile`` draws as the loop that rebuilds does."""
    spec = make(name, sizes=sizes)
    record_rebuild(spec, LENS, sizes.max_reqs)
    expected = spec.inputs.draft_tokens[: len(LENS)].clone()
    fused = draftfuse.compile(spec, mode="fused", compiler=compiler, request_capacities=[sizes.max_reqs])
    load(spec, LENS, sizes.max_reqs)
    fused.decode(len(LENS))
    return float((spec.inputs.draft_tokens[: len(LENS)] == expected).float().mean())


def passed(found: dict[str, Any]) -> bool:
    """Metadata equal everywhere; with the eager kernels, everything equal."""
    runs = {name: run for name, run in found.items() if isinstance(run, dict)}
    exact = runs.get("none", {}).get("other_differences") in (None, [])
    shipped = all(run["shipped_tokens_equal"] in (None, 1.0) for name, run in runs.items() if name == "none")
    return "error" not in found and exact and shipped and not any(run["metadata_differences"] for run in runs.values())


Problem = tuple[list[Tensor], list[tuple[Tensor, Tensor]], Tensor, Tensor, Tensor]


def problem(rows: int, context: int, size: int, device: str) -> Problem:
    """(queries, KV pools to rotate through, block_table, seq_lens, query_start_loc), 32 / 8 heads, pages of 16."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pages = context // 16
    bytes_each = 2 * rows * context * 8 * size * 2
    count = max(1, min(16, -(-ROTATED_BYTES // bytes_each))) if device == "cuda" else 1
    pools = [
        tuple(torch.randn(2, rows * pages, 16, 8, size, device=device, dtype=dtype).unbind()) for _ in range(count)
    ]
    queries = [torch.randn(rows, 32, size, device=device, dtype=dtype) for _ in range(count)]
    table = torch.randperm(rows * pages, device=device).view(rows, pages).to(torch.int32)
    lens = torch.full((rows,), context, dtype=torch.int32, device=device)
    return queries, pools, table, lens, torch.arange(rows + 1, dtype=torch.int32, device=device)  # type: ignore[return-value]


def microseconds(run: Callable[[], object], calls: int, device: str) -> float:
    """Median device time of one call, from a CUDA graph of ``calls`` of them."""
    launch = run
    if device == "cuda":
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        launch = graph.replay
    numbers = time_launch(launch, lambda: None, torch.device(device), repeats=60 if device == "cuda" else 3).numbers()
    return numbers["gpu_ms"] * 1e3 / calls


def time_cell(rows: int, context: int, size: int, device: str) -> dict[str, Any]:
    """Decode attention of Triton and FlashAttention 3, and FlashAttention 3's schedule, in us a call."""
    queries, pools, table, lens, starts = problem(rows, context, size, device)
    scale, calls = size**-0.5, len(queries)
    schedule = torch.zeros(fa3.schedule_capacity(rows), dtype=torch.int32, device=device)
    out = torch.empty_like(queries[0])
    config = (1, context, 32, 8, size, 16, 0, 0, queries[0].dtype)

    def triton() -> list[Tensor]:
        return [paged_attention(q, *kv, table, lens, None, scale) for q, kv in zip(queries, pools, strict=True)]

    def plan() -> None:
        torch.ops.draftfuse.fa3_schedule(lens, starts, schedule, *config)

    def attend(q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        torch.ops.draftfuse.fa3_attention(q, *kv, table, lens, starts, schedule, out, scale, 1, context, 0, 0)
        return out

    found: dict[str, Any] = {"requests": rows, "context": context, "head_size": size, "calls": calls}
    found["triton_us"] = microseconds(triton, calls, device)
    if get_backend("flash_attn3").row()["status"] == "split":
        return found
    plan()
    error = (attend(queries[0], pools[0]).float() - triton()[0].float()).abs().max()
    found["fa3_us"] = microseconds(lambda: [attend(q, kv) for q, kv in zip(queries, pools, strict=True)], calls, device)
    found["fa3_schedule_us"] = microseconds(plan, 1, device)
    return found | {"triton_over_fa3": found["triton_us"] / found["fa3_us"], "max_difference": float(error)}


def guarded(run: Callable[[], dict[str, Any]], **names: Any) -> dict[str, Any]:
    """``run()``, or the error that it raised."""
    try:
        return run()
    except Exception as error:
        return names | {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def show(name: str, found: dict[str, Any]) -> None:
    """One line on the terminal."""
    text = ", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items() if k != "kernel")
    print(f"{name:<32}{text}", flush=True)


def run_rows(results: Results, arguments: argparse.Namespace) -> bool:
    """The first section."""
    sizes, good = sizes_for(arguments.device, arguments.sanitize), True
    graph = arguments.device == "cuda" and not arguments.sanitize
    compilers = ("none",) if arguments.sanitize else ("none", "inductor")
    for name in arguments.rows or ROWS:
        found = guarded(partial(check_row, name, sizes, graph, compilers), name=name)
        ok = passed(found)
        good &= ok
        results.append("rows", found | {"ok": ok})
        show(name, found | {"ok": ok})
    return good


def run_times(results: Results, device: str) -> bool:
    """The second section."""
    good = True
    contexts = (1024, 8192) if device == "cuda" else (64,)
    for rows in (1, 64) if device == "cuda" else (2,):
        for context in contexts:
            for size in (128, 64):
                cell = guarded(partial(time_cell, rows, context, size, device), requests=rows, context=context)
                good &= "error" not in cell
                results.append("decode_attention", cell)
                show("decode attention", cell)
    return good


def main() -> int:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", nargs="*", choices=list(ROWS))
    parser.add_argument("--only", choices=("rows", "times"), default=None)
    parser.add_argument("--sanitize", action="store_true")
    arguments = parser.parse_args()
    settings = {
        "sanitize": arguments.sanitize,
        "fa3": "by path" if os.environ.get("FA3_LIBRARY") else "installed or none",
    }
    results, good = Results(arguments.out, torch.device(arguments.device), settings), True
    with torch.no_grad():
        if arguments.only != "times":
            good &= run_rows(results, arguments)
        if arguments.only != "rows" and not arguments.sanitize:
            good &= run_times(results, arguments.device)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
