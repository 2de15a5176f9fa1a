"""Live inputs for a measured loop, and how to put them back between runs.

Shapes: R requests, T tokens, H hidden, K speculative tokens.
"""

from __future__ import annotations

import torch

from draftfuse.bench.layers import Maker
from draftfuse.bench.speculators import BenchSpeculator
from draftfuse.speculator import DraftBatch, DraftInputs
from draftfuse.state import pad


def fill_decode(spec: BenchSpeculator, rows: int, context: int, seed: int = 1) -> None:
    """Write ``rows`` requests of ``context`` tokens as draft step 1 reads them; rows behind them are padded."""
    make, inputs = Maker(spec.device, spec.dtype, seed), spec.inputs
    for tensor in inputs.named_tensors().values():
        tensor.zero_()
    inputs.hidden_states[:rows].copy_(make.normal(rows, spec.config.hidden_size))
    inputs.input_ids[:rows].copy_(make.permutation(spec.config.vocab_size)[:rows])
    inputs.draft_tokens[:rows, 0].copy_(inputs.input_ids[:rows])
    inputs.positions[:rows].fill_(context - 1)
    inputs.seq_lens[:rows].fill_(context)
    pad(inputs, rows, inputs.seq_lens.shape[0])
    numbers = torch.arange(inputs.query_start_loc.shape[0], device=spec.device)
    inputs.query_start_loc.copy_(numbers)
    inputs.idx_mapping[:rows].copy_(numbers[:rows])


class Workload:
    """``rows`` live requests of ``context`` tokens, put into a speculator's inputs before each run."""

    def __init__(self, spec: BenchSpeculator, rows: int, context: int) -> None:
        fill_decode(spec, rows, context)
        self.rows, self.context = rows, context
        self.live = {name: t.clone() for name, t in spec.inputs.view(rows, rows).named_tensors().items()}

    def reset(self, spec: BenchSpeculator) -> None:
        """Write the live rows into ``spec`` (a speculator or its twin)."""
        write_rows(spec.inputs.view(self.rows, self.rows), self.live)


def write_rows(inputs: DraftInputs, live: dict[str, torch.Tensor]) -> None:
    """Copy saved rows into the views of ``inputs``."""
    for name, tensor in inputs.named_tensors().items():
        tensor.copy_(live[name])


def uniform_batch(spec: BenchSpeculator, rows: int, context: int, k: int, seed: int = 2) -> DraftBatch:
    """A scheduler step in which each request verified k drafts: k + 1 tokens a row, some of them rejected."""
    make, device = Maker(spec.device, spec.dtype, seed), spec.device
    tokens, numbers = rows * (k + 1), torch.arange(rows * (k + 1), device=device)
    ids = (numbers * 7919 + 13) % spec.config.vocab_size
    return DraftBatch(
        num_reqs=rows,
        num_tokens=tokens,
        max_seq_len=context,
        hidden_states=make.normal(tokens, spec.config.hidden_size),
        input_ids=ids.to(torch.int32),
        positions=context - (k + 1) + numbers % (k + 1),
        query_start_loc=(torch.arange(rows + 1, device=device) * (k + 1)).to(torch.int32),
        seq_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        num_rejected=numbers[:rows] % (k + 1),
        last_sampled=ids[:rows],
        temperature=torch.zeros(rows, device=device),
        seeds=numbers[:rows].clone(),
        idx_mapping=numbers[:rows].clone(),
        max_query_len=k + 1,
    )
