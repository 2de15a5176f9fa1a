"""The packaged trained model on the CPU: the compiled callable against the eager loop, k = 2..8.

R requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import draftfuse
from draftfuse import loop
from draftfuse.bench.measure import Timing, time_launch
from draftfuse.models import held_out_text
from draftfuse.reference.eagle import EagleSpeculator
from draftfuse.reference.engine import Engine
from draftfuse.reference.llama import Limits
from draftfuse.reference.target import Target
from draftfuse.speculator import DraftBatch
from draftfuse.state import Saved, load_batch, persistent_tensors

PROMPT, ROUNDS, REPEATS = 96, 4, 15
Say = Callable[[str], None]


def first_batch(limits: Limits, requests: int) -> DraftBatch:
    """What the first proposal on held-out text starts from."""
    target, head = Target.from_packaged(limits), EagleSpeculator.from_packaged(limits)
    text = held_out_text().encode()
    prompts = [list(text[i * PROMPT : (i + 1) * PROMPT]) for i in range(requests)]
    eager = draftfuse.compile(head, mode="eager")
    batch = Engine(target, eager).generate(prompts, 2, k=1).first_batch
    assert batch is not None, "a generation of two tokens drafts once"
    return batch


def measure_tiny(ks: Sequence[int], requests: int, say: Say) -> list[dict[str, Any]]:
    """One record a k: milliseconds of draft steps 1..k-1, eager and compiled, and whether they draft the same."""
    limits = Limits(max(ks), requests, max_model_len=256, max_num_tokens=requests * PROMPT)
    with torch.no_grad():
        batch = first_batch(limits, requests)
        head = EagleSpeculator.from_packaged(limits)
        fused = draftfuse.compile(head, request_capacities=[requests])
        load_batch(head, batch, batch.num_reqs, batch.num_tokens // batch.num_reqs)
        loop.prefill(head, batch.num_reqs, batch.num_tokens, batch.num_tokens, batch.max_seq_len)
        start = Saved(persistent_tensors(head))
        records = []
        for k in ks:
            records.append(measure_one(head, fused, start, requests, k))
            say(f"k {k}: {records[-1]}")
    return records


def measure_one(
    head: EagleSpeculator, fused: draftfuse.FusedDraft, start: Saved, requests: int, k: int
) -> dict[str, Any]:
    """Eager and compiled in turn, several rounds."""
    device = head.inputs.positions.device
    runs: dict[str, Callable[[], None]] = {
        "eager": partial(loop.decode_loop, head, requests, k),
        "draftfuse": partial(fused.decode, requests, k),
    }
    drafts = {name: drafted(head, start, run, requests, k) for name, run in runs.items()}
    timings = {name: Timing() for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            timings[name].add(time_launch(run, start.restore, device, REPEATS))
    found = {f"{name}_ms": timing.numbers()["gpu_ms"] for name, timing in timings.items()}
    speedup = found["eager_ms"] / found["draftfuse_ms"]
    same = bool(torch.equal(drafts["eager"], drafts["draftfuse"]))
    return {"k": k, "requests": requests, **found, "speedup": speedup, "tokens_match": same}


def drafted(head: EagleSpeculator, start: Saved, run: Callable[[], None], requests: int, k: int) -> Tensor:
    """The tokens that ``run`` drafts."""
    start.restore()
    run()
    return head.inputs.draft_tokens[:requests, :k].clone()
