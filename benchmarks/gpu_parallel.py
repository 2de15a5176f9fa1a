"""The draft loop over two GPUs: collectives inside the one graph, against split graphs and against one GPU.

    python benchmarks/gpu_parallel.py --out benchmarks/results/gpu_parallel.json
    python benchmarks/gpu_parallel.py --device cpu --small        # tries the script, with gloo

Starts one process a rank and kills all after ``--seconds``. EAGLE head of widths A, bf16, K = 8, 1 and 16 requests.
Sections, for the head split over all ranks and for the whole head on one device:

``times``    drafts against those of the loop as written and between the ranks; GPU time and host span of a
             decode: one graph of the eager loop, split graphs, ``none``, ``draftfuse``
``launches`` launches of a decode, counted by the profiler (last, because a profiler that has run slows the host)
``lost``     one rank does not call: the other's ``wait`` ends in an error that names it

The file has the sections of rank 0, complete after each measurement. Every section is guarded: its error is recorded
and the next one begins.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from draftfuse import loop
from draftfuse.bench.attention import backend_named
from draftfuse.bench.cells import ROOM, SPECULATORS
from draftfuse.bench.measure import profile, time_launch
from draftfuse.bench.modes import Ready, Workbench, build
from draftfuse.bench.parallel import ParallelHead
from draftfuse.bench.results import Results
from draftfuse.bench.speculators import BenchSpeculator
from draftfuse.errors import LostRankError
from draftfuse.passes.collectives import collectives_of
from draftfuse.reference.llama import Limits
from draftfuse.reference.parallel import shard_config

Record = dict[str, Any]
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
START = time.perf_counter()


class Rank:
    """One rank of the run: its device, its results (written by rank 0 alone) and how it keeps step with the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.number, self.world_size, self.seconds = options.rank, options.ranks, options.seconds
        self.small = options.small or options.device == "cpu"
        self.device = torch.device(options.device, self.number) if options.device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=60)
        place = {"init_method": f"file://{options.meet}", "rank": self.number, "world_size": self.world_size}
        dist.init_process_group(backend, timeout=timeout, **place)
        self.k, self.context = (4, 64) if self.small else (8, 1024)
        self.requests = (1, 4) if self.small else (1, 16)
        settings = {"ranks": self.world_size, "k": self.k, "context": self.context, "attention": options.attention}
        self.results = Results(options.out if self.number == 0 else None, self.device, settings)
        self.attention = options.attention

    def say(self, text: str) -> None:
        """A line of rank 0, at once, with the seconds since the start."""
        if self.number == 0:
            print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)

    def barrier(self) -> None:
        """Wait for the other hosts (gloo)."""
        dist.all_reduce(torch.zeros(1))

    def align(self) -> None:
        """Queue a wait of this device for the others."""
        if self.device.type == "cuda":
            dist.all_reduce(self.flag)

    @property
    def flag(self) -> torch.Tensor:
        """One number on the device."""
        if not hasattr(self, "_flag"):
            self._flag = torch.zeros(1, device=self.device)
        return self._flag

    def all_agree(self, good: bool) -> bool:
        """Whether ``good`` on all ranks."""
        answer = torch.tensor([float(good)])
        dist.all_reduce(answer, dist.ReduceOp.MIN)
        return bool(answer.item())

    def has_time(self, share: float) -> bool:
        """Whether rank 0 is still within this share of the time; one answer for all."""
        return self.all_agree(self.number != 0 or time.perf_counter() - START < self.seconds * share)

    def section(self, name: str, run: Callable[[], object], share: float = 1.0) -> None:
        """Run a section on all ranks, or on none; an error is recorded, and ends it on all."""
        if not self.has_time(share):
            self.say(f"{name}: left out, no time")
            return
        error = ""
        try:
            with torch.no_grad():
                run()
        except Exception as caught:
            error = f"{type(caught).__name__}: {str(caught)[:600]}"
            print(f"rank {self.number}, {name}: {error}", flush=True)
        if not self.all_agree(not error):
            known = self.results.data.get("errors", {})
            self.results.put("errors", known | {name: error or "on another rank"})

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether all ranks hold these values."""
        mine = tensor.cpu().contiguous()
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(found, mine)
        return all(torch.equal(mine, other) for other in found)

    def bench(self, parallel: bool) -> Workbench:
        """The head split over all ranks, or whole on this device."""
        kind = SPECULATORS["eagle-a"]
        config = kind.small if self.small else kind.config
        dtype = torch.float32 if self.small else torch.bfloat16
        limits = Limits(self.k, self.requests[-1], self.context + ROOM)
        mine = shard_config(config, self.world_size) if parallel else config
        backend = backend_named(self.attention, mine, limits.max_num_reqs, self.device, dtype)
        spec: BenchSpeculator
        if parallel:
            spec = ParallelHead(config, limits, backend, self.device, dtype, dist.group.WORLD)
        else:
            spec = kind.make(config, limits, backend, self.device, dtype)
        return Workbench(spec, list(self.requests))


class Side:
    """The loops of one head: over all ranks, or alone."""

    def __init__(self, rank: Rank, name: str) -> None:
        self.rank, self.name, self.bench = rank, name, rank.bench(name == "parallel")
        self.ready: dict[tuple[int, str], Ready] = {}

    def run(self, modes: tuple[str, ...], share: float = 1.0) -> None:
        """Measure these modes."""
        for rows, mode in product(self.rank.requests, modes):
            self.rank.section(f"{self.name} {mode} r{rows}", partial(self.measure, rows, mode), share)

    def reset(self) -> None:
        """Put the inputs back; all hosts go on together."""
        self.bench.reset(self.bench.spec)
        self.rank.barrier()

    def drafts(self, launch: Callable[[], object], rows: int) -> torch.Tensor:
        """What a loop drafts from the live inputs."""
        self.reset()
        launch()
        return self.bench.spec.inputs.draft_tokens[:rows, : self.rank.k].clone()

    def measure(self, rows: int, mode: str) -> None:
        """Build one mode, compare its drafts with the eager loop's, and time it."""
        rank = self.rank
        self.bench.load(rows, rank.context)
        expected = self.drafts(lambda: loop.decode_loop(self.bench.spec, rows, rank.k), rows)
        rank.barrier()
        ready = build(mode, self.bench, rows, rank.k)
        got = self.drafts(ready.launch, rows)
        record: Record = {"head": self.name, "requests": rows, "mode": mode, "build_s": round(ready.build_seconds, 2)}
        record["agreement"] = float((got == expected).float().mean())
        record["same_on_ranks"] = rank.same(got)
        self.ready[rows, mode] = ready
        repeats = 20 if rank.small else 60
        timing = time_launch(ready.launch, self.reset, rank.device, repeats, align=rank.align)
        record |= timing.numbers()
        rank.results.append("times", record)
        rank.say(f"{self.name} {mode} r{rows}: {line(record)}")

    def launches(self) -> None:
        """Count what one decode launches."""
        for (rows, mode), ready in self.ready.items():
            self.bench.load(rows, self.rank.context)
            found = profile(ready.launch, self.reset, self.rank.device)
            if found is not None:
                names = [k["kernel"] for k in found.top if "nccl" in k["kernel"].lower()]
                record = {"head": self.name, "requests": rows, "mode": mode, "graphs": found.graph_launches}
                record |= {"kernel_launches": found.kernel_launches, "kernels": found.kernels, "nccl": names}
                self.rank.results.append("launches", record | {"busy_ms": found.busy_ms})

    def collectives(self) -> None:
        """How many collectives the fused loop holds."""
        fused = self.bench.compiled("fused", "none")
        held = {str(key): len(collectives_of(e.graph)) for key, e in fused.runners._emissions.items()}
        self.rank.results.put("collectives", held)


def lost(rank: Rank, side: Side) -> None:
    """The last rank calls some seconds late: the others' wait names it; then all end."""
    rows, last = rank.requests[0], rank.world_size - 1
    fused = side.bench.compiled("fused", "none")
    side.bench.load(rows, rank.context)
    side.drafts(lambda: fused.decode(rows, rank.k), rows)
    fused.wait(30.0)
    rank.barrier()
    record: Record = {}
    begin = time.perf_counter()
    if rank.number == last:
        time.sleep(5.0)
        fused.decode(rows, rank.k)
        fused.wait(30.0)
    else:
        try:
            fused.decode(rows, rank.k)
            fused.wait(2.0)
            record["error"] = "none"
        except LostRankError as error:
            record |= {"error": str(error), "ranks": list(error.ranks), "step": error.step, "phase": error.phase}
        record["seconds"] = round(time.perf_counter() - begin, 2)
    rank.results.put("lost", record)
    rank.barrier()


def line(record: Record) -> str:
    """One measurement in a few words."""
    words = f"gpu {record['gpu_ms']:.3f} ms, cpu {record['cpu_us']:.0f} us, agreement {record['agreement']:.3f}"
    return f"{words}, same on ranks {record['same_on_ranks']}, built in {record['build_s']} s"


def table(data: Record) -> list[str]:
    """All measurements, one a line."""
    counted = {(r["head"], r["requests"], r["mode"]): r for r in data.get("launches", [])}
    lines = [
        f"{'head':10} {'requests':>8} {'mode':10} {'gpu ms':>8} {'cpu us':>8} {'launches':>9} {'kernels':>8} agree same"
    ]
    for r in data.get("times", []):
        c = counted.get((r["head"], r["requests"], r["mode"]), {})
        launches = c["graphs"] + c["kernel_launches"] if c else "-"
        head = f"{r['head']:10} {r['requests']:8} {r['mode']:10} {r['gpu_ms']:8.3f} {r['cpu_us']:8.1f}"
        lines.append(f"{head} {launches!s:>9} {c.get('kernels', '-')!s:>8} {r['agreement']:.3f} {r['same_on_ranks']}")
    lines += [f"collectives of each build: {data.get('collectives', '-')}", f"lost: {data.get('lost', '-')}"]
    return lines + [f"FAILED {name}: {text}" for name, text in data.get("errors", {}).items()]


def make(sides: dict[str, Side], rank: Rank, name: str) -> None:
    """Add one side."""
    sides[name] = Side(rank, name)


def work(options: argparse.Namespace) -> None:
    """What one rank does."""
    rank, sides = Rank(options), dict[str, Side]()
    for name in ("parallel", "alone"):
        rank.section(f"{name} made", partial(make, sides, rank, name))
        if name in sides:
            sides[name].run(("graph", "split", "none"))
    for side, share in zip(sides.values(), (0.8, 0.6), strict=False):
        side.run(("draftfuse",), share)
    for side in sides.values():
        rank.section(f"{side.name} launches", side.launches)
    if "parallel" in sides:
        rank.section("collectives", sides["parallel"].collectives)
        rank.section("lost", partial(lost, rank, sides["parallel"]))
    if rank.number == 0:
        print("\n".join(table(rank.results.data)), flush=True)
    rank.barrier()
    os._exit(0)  # a graph that still waits for a lost rank would keep the process


def start(options: argparse.Namespace) -> int:
    """Start all ranks, and kill them when the time is over or when one has failed."""
    environment = {**os.environ, **QUIET, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    end = time.monotonic() + options.seconds + 40
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--meet", f"{folder}/meet"]
        ranks = [subprocess.Popen([*command, "--rank", str(r)], env=environment) for r in range(options.ranks)]
        while time.monotonic() < end and any(p.poll() is None for p in ranks):
            if any(p.poll() not in (None, 0) for p in ranks):
                end = min(end, time.monotonic() + 10)
            time.sleep(0.2)
        for process in ranks:
            process.kill()
            process.wait()
    return int(any(p.returncode != 0 for p in ranks))


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="small widths, to try the script")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--attention", default="triton")
    parser.add_argument(
        "--seconds", type=float, default=110.0, help="begin no section after this; all ends 40 seconds later"
    )
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        sys.exit(start(options))
    work(options)


if __name__ == "__main__":
    main()
