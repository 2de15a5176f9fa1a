"""Host span of decode and of a whole ``propose``, fused against split: one graph for the prefill, one for each step.

R requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from draftfuse import loop
from draftfuse.bench.measure import REPEATS, host_span, profile
from draftfuse.bench.modes import Ready, Workbench, build, split
from draftfuse.bench.workload import uniform_batch
from draftfuse.fused import FusedDraft
from draftfuse.speculator import DraftBatch
from draftfuse.state import load_batch


def split_propose(bench: Workbench, rows: int, k: int, batch: DraftBatch) -> Ready:
    """Load a uniform batch, replay its prefill, then the split decode steps; no other Python."""
    steps = split(bench, rows, k)
    rebuild, prefill = split_prefill(bench, rows, k, batch)

    def launch() -> None:
        load_batch(bench.spec, batch, rows, k + 1)
        rebuild()
        prefill.launch()
        steps.launch()

    return Ready(launch, bench.spec, [steps, prefill])


def split_prefill(bench: Workbench, rows: int, k: int, batch: DraftBatch) -> tuple[Callable[[], None], Ready]:
    """What rebuilds the metadata of a uniform prefill, and the graph of the rest."""
    spec, query_len = bench.spec, k + 1
    inputs = spec.inputs.view(rows, rows * query_len)
    by_layer = dict[str, Any]()

    def rebuild() -> None:
        for group in spec.attn_groups:
            loop.update_slot_mapping(group, inputs, ragged=True)
            common = loop.common_metadata(spec, group, inputs, 0, query_len, spec.max_model_len)
            by_layer.update(dict.fromkeys(group.layer_names, group.builder.build(common)))

    def run() -> None:
        hidden, feedback = spec.prefill(inputs, by_layer)
        loop.prepare_decode(spec, inputs, hidden, feedback)

    def prepare() -> None:
        load_batch(spec, batch, rows, query_len)
        rebuild()

    return rebuild, bench.captured(run, spec, prepare)


class Span:
    """Decode and propose of ``rows`` requests, split and fused, and a graph launch alone."""

    def __init__(self, bench: Workbench, fused: FusedDraft, rows: int, context: int, k: int) -> None:
        bench.load(rows, context)
        batch = uniform_batch(bench.spec, rows, context, k)
        self.bench, self.rows, self.context, self.k = bench, rows, context, k
        self.runs: dict[str, Callable[[], object]] = {
            "split_decode": build("split", bench, rows, k).launch,
            "fused_decode": lambda: fused.decode(rows, k),
            "graph_launch": build("graph", bench, rows, k).launch,
            "split_propose": split_propose(bench, rows, k, batch).launch,
            "fused_propose": lambda: fused.propose(batch, k),
        }

    def times(self, rounds: int = 4) -> dict[str, Any]:
        """Median host microseconds of each over rounds in which all take turns, and fused over split.

        A ratio is the median of those of the rounds: a host that changes its speed on the way changes both sides.
        """
        reset = partial(self.bench.reset, self.bench.spec)
        taken: dict[str, list[float]] = {name: [] for name in self.runs}
        for _ in range(rounds):
            for name, run in self.runs.items():
                taken[name].append(host_span(run, reset, self.bench.device, REPEATS // 2))
        record: dict[str, Any] = {"requests": self.rows, "k": self.k}
        record |= {f"{name}_us": round(median(values), 1) for name, values in taken.items()}
        for name in ("decode", "propose"):
            ratios = [f / s for f, s in zip(taken[f"fused_{name}"], taken[f"split_{name}"], strict=True)]
            record[f"{name}_ratio"] = round(median(ratios), 4)
            record[f"{name}_ratio_range"] = [round(min(ratios), 4), round(max(ratios), 4)]
        return record

    def launches(self) -> dict[str, Any]:
        """Launches of graphs and of single kernels, counted by the profiler."""
        self.bench.load(self.rows, self.context)
        reset = partial(self.bench.reset, self.bench.spec)
        found = {name: profile(run, reset, self.bench.device) for name, run in self.runs.items()}
        return {
            n: {"graphs": p.graph_launches, "kernels": p.kernel_launches} for n, p in found.items() if p is not None
        }
