"""One toy through Inductor: a loop with a registered operator that writes a persistent buffer twice a step.

Inductor runs a mutating operator twice on one buffer and gives the read between the two writes the second value, if it
compiles the loop as it stands. Here the read is lazy, an opaque operator keeps its result, and the next step reads on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import draftfuse
from draftfuse import DraftInputs
from tests.draftfuse.toy import Config, Run, Toy, make_batch, small
from tests.passes.helpers import log, peek

CALLS = ((3, None), (2, None), (4, 3))  # (requests, k)


class Noting(Toy):
    """Notes two values a step in one persistent buffer, and drafts from what it read after each note.

    With ``stale`` the first read sees the second note, which is what Inductor's fault comes to.
    """

    def __init__(self, config: Config, stale: bool = False) -> None:
        super().__init__(config)
        self.stale = stale
        self.notes = torch.zeros(config.rows + 1, config.hidden)

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        rows = self.notes[: inputs.seq_lens.shape[0]]
        base = inputs.seq_lens.unsqueeze(1) * torch.arange(1.0, rows.shape[1] + 1)
        log(base, rows)
        first = rows * 2 + 200 if self.stale else rows * 2  # reads the first note
        pinned = peek(first)
        log(base + 100, rows)
        logits, feedback = super().forward(inputs, metadata)
        if inputs.positions.shape[0] == rows.shape[0]:
            logits = logits + torch.sin((first + rows + 0 * pinned) / 7) * 3
        return logits, feedback


class CompiledToy:
    """The fused run, the eager run, and the addresses of everything persistent before and after."""

    def __init__(self) -> None:
        self.config = config = small(rows=4, layers=1, k=4, fields=("step", "invariant", "pieces", "several"))
        self.eager = Run(draftfuse.compile(Noting(config), mode="eager", compiler="none", request_capacities=[4]))
        self.fused = Run(draftfuse.compile(Noting(config), mode="fused", request_capacities=[4]))
        self.before = self.addresses()
        for seed, (rows, k) in enumerate(CALLS):
            for run in (self.eager, self.fused):
                run.draft(make_batch(run.fused.spec, rows, seed=seed), k)
        self.after = self.addresses()

    def stale(self) -> Tensor:
        """What a loop drafts that reads the second note twice."""
        spec = Noting(self.config, stale=True)
        run = Run(draftfuse.compile(spec, mode="eager", compiler="none", request_capacities=[4]))
        return run.draft(make_batch(spec, CALLS[0][0], seed=0), CALLS[0][1])

    def addresses(self) -> dict[str, int]:
        """Where the buffers of the fused toy are."""
        spec = self.fused.fused.spec
        found = {name: tensor.data_ptr() for name, tensor in spec.inputs.named_tensors().items()}
        found |= {f"pool {i}": pool.data_ptr() for i, pool in enumerate(spec.pools)}
        return found | {"notes": spec.notes.data_ptr(), "slots": spec.attn_groups[0].slot_mapping.data_ptr()}
