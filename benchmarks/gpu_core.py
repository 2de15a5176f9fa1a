"""What issues 2 and 4 ask of a GPU, in one run: launches, equality, speed, host span, capture and memory.

    python benchmarks/gpu_core.py --out benchmarks/results/gpu_core.json

Sections (``--only`` picks some), in the order in which they run:

``span``    host span and launches of decode and propose, fused against split, k = 3 and 7, capacities 1, 16, 64
``equal``   drafts, inputs and KV after ``compiler="none"`` are those of the eager loop, bit for bit, at every capacity
``speed``   draftfuse against the whole loop compiled and the hand-fused graph, widths A and B, 1 and 64 requests
``ladder``  capture of eight capacities, memory of their pool against its largest graph
``memory``  compile and run with KV pools of half the device's memory
``engine``  decode inside a capture of the caller, and events that let the next batch be written early

A section that fails leaves its error in the file, and the next one runs. ``--device cpu`` tries the script itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import draftfuse
from draftfuse import loop
from draftfuse.bench.cells import Cell, speculator_for
from draftfuse.bench.compile_time import stages
from draftfuse.bench.measure import copy_bandwidth, profile
from draftfuse.bench.memory import measure_kv_copies
from draftfuse.bench.modes import Workbench
from draftfuse.bench.results import Results
from draftfuse.bench.runner import failure, measure_cells
from draftfuse.bench.span import Span
from draftfuse.bench.speculators import BenchSpeculator
from draftfuse.bench.workload import fill_decode, uniform_batch
from draftfuse.graphs import pool_bytes
from draftfuse.state import Saved, pad, persistent_tensors

Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to run on: full sizes on CUDA, small ones on the CPU."""

    device: torch.device
    attention: str
    results: Results
    model_len: int
    context: int
    spans: list[int]
    ladder: list[int]

    @classmethod
    def on(cls, device: torch.device, attention: str, out: Path | None) -> Plan:
        """The plan for ``device``."""
        full = device.type == "cuda"
        model_len, context = (4096, 1024) if full else (128, 64)
        spans, ladder = ([1, 16, 64], [1, 2, 4, 8, 16, 32, 64, 128]) if full else ([1, 2, 4], [1, 2, 4])
        settings = {"attention": attention, "context": context, "max_model_len": model_len}
        return cls(device, attention, Results(out, device, settings), model_len, context, spans, ladder)

    def speculator(self, cells: list[Cell], model_len: int | None = None) -> BenchSpeculator:
        """The speculator of ``cells``."""
        return speculator_for(cells, self.device, self.attention, model_len or self.model_len)


def say(text: str) -> None:
    """A line at once, with the seconds since the start."""
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def ragged(spec: BenchSpeculator, rows: int, context: int) -> None:
    """Live rows of different lengths; the last of several reaches max_model_len inside the loop."""
    fill_decode(spec, rows, context)
    lengths = context - (torch.arange(rows, device=spec.device) * 17) % (context // 2)
    if rows > 1:
        lengths[-1] = spec.max_model_len - 2
    spec.inputs.seq_lens[:rows].copy_(lengths)
    spec.inputs.positions[:rows].copy_(lengths - 1)


def state(spec: BenchSpeculator, rows: int) -> dict[str, torch.Tensor]:
    """Live rows of the inputs, and every KV pool."""
    inputs = spec.inputs.view(rows, rows).named_tensors()
    kv = {f"kv{i}": cache for i, cache in enumerate(spec.kv_caches())}
    return {name: t.clone() for name, t in (inputs | kv).items()}


def compare_once(spec: BenchSpeculator, fused: draftfuse.FusedDraft, rows: int, capacity: int, k: int) -> Record:
    """Eager at the padded capacity, then fused, from the same state: how many elements differ, by name."""
    ragged(spec, rows, spec.max_model_len // 2)
    before = Saved([*persistent_tensors(spec), *spec.kv_caches()])
    pad(spec.inputs, rows, capacity)
    loop.decode_loop(spec, capacity, k)
    expected = state(spec, rows)
    before.restore()
    fused.decode(rows, k)
    differ = {n: int((t != expected[n]).sum()) for n, t in state(spec, rows).items() if not torch.equal(t, expected[n])}
    before.restore()
    return {"requests": rows, "capacity": capacity, "k": k, "differ": differ}


def equal(plan: Plan) -> None:
    """Bit for bit, over batches and capacities."""
    k, capacities, batches = 8, [1, 2, 4, 8, 16], (1, 2, 3, 4, 5, 8, 11, 16)
    spec = plan.speculator([Cell("eagle-b", capacities[-1], k, 256)], 512)
    fused = draftfuse.compile(spec, compiler="none", mode="fused", request_capacities=capacities)
    found = []
    for rows in batches:
        capacity = next(c for c in capacities if rows <= c)
        found += [compare_once(spec, fused, rows, capacity, steps) for steps in (k, 4)]
        say(f"equal: {rows} requests at capacity {capacity}: {found[-2]['differ'] or 'equal'}")
        plan.results.put("equal", found)


def speed(plan: Plan) -> None:
    """Cells of widths A and B in the modes that matter here."""
    bandwidth = copy_bandwidth(plan.device)
    plan.results.put("copy_bandwidth", bandwidth)
    say(f"speed: copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    for name in ("eagle-a", "eagle-b"):
        cells = [Cell(name, rows, 8, plan.context) for rows in (1, plan.spans[-1])]
        bench = Workbench(plan.speculator(cells), [1, plan.spans[-1]])
        for record in measure_cells(bench, cells, ("graph", "hand", "whole", "none", "draftfuse"), bandwidth, say):
            plan.results.append("speed", record)


def span(plan: Plan) -> None:
    """Host span and launches, fused against split; launches last, because a profiler that has run slows the host."""
    bench = Workbench(plan.speculator([Cell("eagle-a", plan.spans[-1], 7, plan.context)]), plan.spans)
    spans = []
    for k in (7, 3):
        fused = draftfuse.compile(
            bench.spec, num_speculative_tokens=k, compiler="none", mode="fused", request_capacities=plan.spans
        )
        for rows in plan.spans:
            spans.append(Span(bench, fused, rows, plan.context, k))
            plan.results.append("span", spans[-1].times())
            say(f"span: {plan.results.data['span'][-1]}")
    for one, record in zip(spans, plan.results.data["span"], strict=True):
        record["launches"] = one.launches()
        say(f"span: {one.rows} requests, k = {one.k}: {record['launches']}")
    plan.results.save()


def ladder(plan: Plan) -> None:
    """Capture of eight capacities (decode and propose each), and what their graphs hold."""
    spec = plan.speculator([Cell("eagle-a", plan.ladder[-1], 8, plan.context)])
    for name, wanted in (("ladder", plan.ladder), ("largest alone", plan.ladder[-1:])):
        pool = torch.cuda.graph_pool_handle() if plan.device.type == "cuda" else None
        fused = draftfuse.compile(spec, request_capacities=wanted, pool=pool)
        start = time.perf_counter()
        fused.capture(progress=False)
        record: Record = {"what": name} | stages(fused, time.perf_counter() - start)
        record["pool_bytes"] = pool_bytes(pool) if pool is not None else 0
        say(f"ladder: {record}")
        plan.results.append("ladder", record | {"memory": fused.memory()})
        fused.close()


def memory(plan: Plan) -> None:
    """A KV pool of half the device: nothing may copy it."""
    full = plan.device.type == "cuda"
    half = torch.cuda.get_device_properties(plan.device).total_memory // 2 if full else 1 << 24
    spec = plan.speculator([Cell("eagle-b", 4, 4, plan.context)])
    plan.results.put("memory", measure_kv_copies(spec, half, 4, 4, plan.context))
    say(f"memory: {plan.results.data['memory']}")


def engine(plan: Plan) -> None:
    """What an engine does around the loop: a capture of its own, and a batch overwritten as early as allowed."""
    rows, k = plan.spans[1] - 1, 7
    spec = plan.speculator([Cell("eagle-b", plan.spans[1], k, plan.context)], 512)
    fused = draftfuse.compile(spec, compiler="none", mode="fused", request_capacities=[plan.spans[1]])
    found: Record = {"early_overwrites": overwrite_early(spec, fused, rows, k)}
    if plan.device.type == "cuda":
        found["inside_a_capture"] = inside_a_capture(spec, fused, rows, k)
    say(f"engine: {found}")
    plan.results.put("engine", found)


def inside_a_capture(spec: BenchSpeculator, fused: draftfuse.FusedDraft, rows: int, k: int) -> Record:
    """Drafts of a caller's graph that holds ``decode``, against draftfuse's own graph; and the launches of a replay."""
    ragged(spec, rows, spec.max_model_len // 2)
    before = Saved([*persistent_tensors(spec), *spec.kv_caches()])
    fused.decode(rows, k)
    expected = state(spec, rows)
    before.restore()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused.decode(rows, k)
    before.restore()
    graph.replay()
    differ = [name for name, tensor in state(spec, rows).items() if not torch.equal(tensor, expected[name])]
    before.restore()
    counted = profile(graph.replay, before.restore, spec.device)
    launches = None if counted is None else {"graphs": counted.graph_launches, "kernels": counted.kernel_launches}
    return {"requests": rows, "k": k, "differ": differ, "launches": launches}


def overwrite_early(spec: BenchSpeculator, fused: draftfuse.FusedDraft, rows: int, k: int, repeats: int = 20) -> Record:
    """How often drafts change when another stream destroys the batch right after ``batch_consumed``: never."""
    before = Saved([*persistent_tensors(spec), *spec.kv_caches()])
    expected = fused.propose(uniform_batch(spec, rows, 256, k), k, copy=True)
    cuda = spec.device.type == "cuda"
    side, wrong = torch.cuda.Stream() if cuda else None, 0
    for _ in range(repeats):
        before.restore()
        batch = uniform_batch(spec, rows, 256, k)
        consumed = fused.batch_consumed
        drafts = fused.propose(batch, k)
        with torch.cuda.stream(side):
            if side is not None:
                side.wait_event(consumed)
            for tensor in (t for t in vars(batch).values() if isinstance(t, torch.Tensor)):
                tensor.zero_()
            if side is not None:
                side.wait_event(fused.outputs_ready)
            read = drafts.clone()
        if side is not None:
            side.synchronize()
        wrong += not torch.equal(read, expected)
    return {"requests": rows, "k": k, "repeats": repeats, "wrong": wrong}


def summary(data: Record) -> list[str]:
    """The table at the end."""
    lines = []
    if "equal" in data:
        wrong = sum(bool(r["differ"]) for r in data["equal"])
        lines.append(f"equal: {len(data['equal']) - wrong} of {len(data['equal'])} states bit-exact")
    for cell in data.get("speed", []):
        lines.append(f"{cell['cell']}: floor {cell['floor_ms']:.3f} ms")
        for name, m in cell["modes"].items():
            keys = ("gpu_ms", "cpu_us", "to_floor", "hand_over", "launches", "kernels", "busy_ms", "agreement")
            cells = [f"{key} {m[key]:.4g}" for key in keys if key in m]
            lines.append(f"  {name:10} {m.get('error') or '  '.join(cells)}")
    lines += [f"memory: {data['memory']}"] if "memory" in data else []
    lines += [f"engine: {data['engine']}"] if "engine" in data else []
    lines += [f"span {r}" for r in data.get("span", [])]
    sizes = {r["what"]: r for r in data.get("ladder", [])}
    if len(sizes) == 2 and sizes["largest alone"]["pool_bytes"]:
        ratio = sizes["ladder"]["pool_bytes"] / sizes["largest alone"]["pool_bytes"]
        lines.append(f"ladder: capture {sizes['ladder']['capture_s']:.1f} s, pool {ratio:.3f} of its largest graph's")
    return lines + [f"FAILED {name}: {error['error']}" for name, error in data.get("errors", {}).items()]


SECTIONS = {"span": span, "equal": equal, "speed": speed, "ladder": ladder, "memory": memory, "engine": engine}


def main() -> None:
    """Run the sections asked for, as long as the time allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no section after this")
    options = parser.parse_args()
    device = torch.device(options.device)
    plan = Plan.on(device, options.attention, options.out)
    for name in options.only.split(","):
        if time.perf_counter() - START > options.seconds:
            say(f"{name}: left out, no time")
            continue
        say(f"{name} begins")
        try:
            with torch.no_grad():
                SECTIONS[name](plan)
        except Exception as error:
            plan.results.put("errors", plan.results.data.get("errors", {}) | {name: failure(error)})
            say(f"{name}: {failure(error)}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("\n".join(summary(plan.results.data)))


START = time.perf_counter()
if __name__ == "__main__":
    main()
