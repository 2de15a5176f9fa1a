"""Run cells: build every mode of a cell in one process, measure all of them in turn, twice, and note what came.

R requests. A mode that fails is a line in the result; the others go on.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from draftfuse.bench.cells import SPECULATORS, Cell, step_bytes
from draftfuse.bench.measure import REPEATS, Timing, floor_ms, profile, time_launch
from draftfuse.bench.modes import Ready, Workbench, build
from draftfuse.bench.speculators import BenchSpeculator

Say = Callable[[str], None]
Record = dict[str, Any]
ROUNDS = 2
EAGER_REPEATS = 10  # a round: 28 layers written in Python take a tenth of a second a time
COUNTS = ("launches", "graph_launches", "kernel_launches", "kernels", "copies", "busy_ms")


@dataclass
class Group:
    """Cells that differ in context alone, and every mode built for them."""

    rows: int
    k: int
    cells: list[Cell]
    built: dict[str, Ready] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)


def grouped(cells: Sequence[Cell]) -> list[Group]:
    """Cells by requests and k, in their order."""
    return [Group(*key, list(found)) for key, found in groupby(cells, key=lambda c: (c.requests, c.k))]


def build_groups(bench: Workbench, cells: Sequence[Cell], modes: Sequence[str], say: Say) -> list[Group]:
    """Every mode of every group, built and kept."""
    groups = grouped(cells)
    for group in groups:
        bench.load(group.rows, group.cells[0].context)
        left_out = SPECULATORS[group.cells[0].speculator].left_out
        group.built, group.records = build_all(bench, group.rows, group.k, [m for m in modes if m not in left_out], say)
        group.records |= {mode: {"error": why} for mode, why in left_out.items() if mode in modes}
    return groups


def measure_groups(
    bench: Workbench,
    groups: Sequence[Group],
    bandwidth: float,
    keep: Callable[[Record], None] = lambda record: None,
    repeats: int = REPEATS,
) -> list[Record]:
    """One record a cell; ``keep`` gets each without its profiles, which come last: a profiler slows the host."""
    measured = [(group, list[Record]()) for group in groups]
    with torch.no_grad():
        for group, records in measured:
            for cell in group.cells:
                records.append(measure_cell(bench, cell, group.built, group.records, bandwidth, repeats))
                keep(records[-1])
        for group, records in measured:
            bench.load(group.rows, group.cells[-1].context)
            counts, top = profile_all(bench, group.built)
            for record in records:
                record["profiles"] = top
                for name, mode in record["modes"].items():
                    mode |= counts.get(name, {})
    return [record for _, records in measured for record in records]


def measure_cells(
    bench: Workbench, cells: Sequence[Cell], modes: Sequence[str], bandwidth: float, say: Say, repeats: int = REPEATS
) -> Iterator[Record]:
    """One record a cell, group by group, with no more than one group built at a time."""
    for group in grouped(cells):
        built = build_groups(bench, group.cells, modes, say)
        yield from measure_groups(bench, built, bandwidth, repeats=repeats)
        built[0].built.clear()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def build_all(
    bench: Workbench, rows: int, k: int, modes: Sequence[str], say: Say
) -> tuple[dict[str, Ready], dict[str, Record]]:
    """Every mode, or the error that it raised."""
    built, records = dict[str, Ready](), dict[str, Record]()
    for name in modes:
        start = time.perf_counter()
        try:
            built[name] = build(name, bench, rows, k)
            records[name] = {"build_s": built[name].build_seconds, "peak_mb": built[name].peak_bytes / 2**20}
        except Exception as error:
            records[name] = failure(error)
        say(f"r{rows} k{k} {name}: {records[name].get('error', 'built')}, {time.perf_counter() - start:.1f} s")
    return built, records


def failure(error: Exception) -> Record:
    """What a failed mode leaves in the result."""
    text = str(error).splitlines()[0] if str(error) else ""
    return {"error": f"{type(error).__name__}: {text}"[:400], "traceback": traceback.format_exc()[-2000:]}


def profile_all(bench: Workbench, built: dict[str, Ready]) -> tuple[Record, Record]:
    """Launches and kernels of each mode, and its longest kernels."""
    counts: Record = {}
    top: Record = {}
    for name, ready in built.items():
        try:
            found = profile(ready.launch, partial(bench.reset, ready.spec), bench.device)
        except Exception as error:
            counts[name] = {"profile_error": failure(error)["error"]}
            continue
        if found is not None:
            counts[name] = {n: getattr(found, n) for n in COUNTS}
            top[name] = found.top
    return counts, top


def measure_cell(
    bench: Workbench, cell: Cell, built: dict[str, Ready], records: dict[str, Record], bandwidth: float, repeats: int
) -> Record:
    """Times, agreement and ratios of every mode in one cell."""
    bench.load(cell.requests, cell.context)
    each, kv_share = step_bytes(bench.spec, cell)
    modes = {name: dict(record) for name, record in records.items()}
    expected = reference_tokens(bench, cell)
    timings = {name: Timing() for name in built}
    for _ in range(ROUNDS):
        for name, ready in built.items():
            often = repeats // ROUNDS if name != "eager" else min(EAGER_REPEATS, repeats // ROUNDS)
            measure_round(bench, ready, timings[name], modes[name], often)
    for name, ready in built.items():
        if "error" not in modes[name]:
            modes[name] |= timings[name].numbers() | {"agreement": agreement(bench, ready, cell, expected)}
    floor = floor_ms(each, bandwidth)
    add_ratios(modes, floor)
    return {"cell": cell.name, **vars(cell), "floor_ms": floor, "kv_share": kv_share, "modes": modes}


def measure_round(bench: Workbench, ready: Ready, timing: Timing, record: Record, repeats: int) -> None:
    """One round of one mode; a fault is noted and ends the mode."""
    if "error" in record:
        return
    try:
        found = time_launch(ready.launch, partial(bench.reset, ready.spec), bench.device, repeats)
    except Exception as error:
        record |= failure(error)
        return
    record.setdefault("rounds_ms", []).append(found.numbers()["gpu_ms"])
    timing.add(found)


def drafts(bench: Workbench, launch: Callable[[], object], spec: BenchSpeculator, cell: Cell) -> Tensor:
    """What ``launch`` drafts from the current work, [R, k-1]."""
    bench.reset(spec)
    spec.inputs.draft_tokens[: cell.requests, 1:].fill_(-1)
    launch()
    return spec.inputs.draft_tokens[: cell.requests, 1 : cell.k].clone()


def reference_tokens(bench: Workbench, cell: Cell) -> Tensor:
    """The eager loop's drafts."""
    from draftfuse import loop

    return drafts(bench, lambda: loop.decode_loop(bench.spec, cell.requests, cell.k), bench.spec, cell)


def agreement(bench: Workbench, ready: Ready, cell: Cell, expected: Tensor) -> float:
    """Share of drafted tokens that equal the eager loop's."""
    return float((drafts(bench, ready.launch, ready.spec, cell) == expected).float().mean())


def add_ratios(modes: dict[str, Record], floor: float) -> None:
    """Ratios to the floor, to the hand-fused graph, and to the best of the other modes."""
    hand = modes.get("hand", {}).get("gpu_ms")
    for name, record in modes.items():
        if "gpu_ms" not in record:
            continue
        record["to_floor"] = record["gpu_ms"] / floor
        if hand is not None:
            record["hand_over"] = hand / record["gpu_ms"]
        others = [r["gpu_ms"] for n, r in modes.items() if n != name and "gpu_ms" in r]
        if others:
            record["to_best_other"] = record["gpu_ms"] / min(others)
