"""Which kernels a loop runs and how long each takes: the modes of one cell side by side.

python benchmarks/profile_loop.py --cell eagle-a/r1/k8/c1024 --modes whole,draftfuse
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from draftfuse.bench.cells import all_cells, select, speculator_for
from draftfuse.bench.modes import Workbench, build
from draftfuse.lowering.file_lock import locked


def kernels(ready: Any, reset: Any) -> list[tuple[str, int, float]]:
    """(name, launches, microseconds in all) of the kernels of one launch, longest first."""
    for _ in range(3):
        reset()
        ready.launch()
    reset()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ready.launch()
        torch.cuda.synchronize()
    count, total = Counter[str](), Counter[str]()
    for event in profile.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count[event.name] += 1
            total[event.name] += event.device_time  # type: ignore[attr-defined]
    return [(name, count[name], float(us)) for name, us in total.most_common()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", default="eagle-a/r1/k8/c1024")
    parser.add_argument("--modes", default="whole,draftfuse")
    parser.add_argument("--lock", type=Path, help="of processes that build side by side and run in turn")
    options = parser.parse_args()
    device = torch.device("cuda")
    (cell,) = select(all_cells(device), [options.cell])
    spec = speculator_for([cell], device, "triton")
    bench = Workbench(spec, [cell.requests])
    bench.load(cell.requests, cell.context)
    built = {mode: build(mode, bench, cell.requests, cell.k) for mode in options.modes.split(",")}
    with locked(options.lock) if options.lock else nullcontext():
        report(cell.name, bench, built)


def report(cell: str, bench: Workbench, built: dict[str, Any]) -> None:
    for mode, ready in built.items():
        rows = kernels(ready, lambda ready=ready: bench.reset(ready.spec))
        print(f"{cell}  {mode}: {sum(r[1] for r in rows)} kernels, {sum(r[2] for r in rows):.0f} us")
        for name, times, us in rows[:22]:
            print(f"  {us:8.1f} us  {times:4d} x  {us / times:7.2f}  {name[:110]}")


if __name__ == "__main__":
    main()
