"""A whole ``propose`` as it runs split: one graph for the prefill, one a step, metadata rebuilt in Python between them.

R requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftfuse import loop
from draftfuse.bench.modes import Ready, Workbench, split
from draftfuse.speculator import DraftBatch
from draftfuse.state import load_batch


def split_propose(bench: Workbench, rows: int, k: int, batch: DraftBatch) -> Ready:
    """Load a uniform batch, replay its prefill, then the split decode steps; no other Python."""
    steps = split(bench, rows, k)
    rebuild, prefill = split_prefill(bench, rows, k, batch)

    def launch() -> None:
        load_batch(bench.spec, batch)
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
        load_batch(spec, batch)
        rebuild()

    return rebuild, bench.captured(run, spec, prepare)
