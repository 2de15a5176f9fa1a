"""Load a batch into the persistent inputs of draft step 0, and make the rows behind it dead: one launch.

Shape letters: T tokens, R requests (rows), Q query tokens of a padded row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import define, fake, implement, require_triton

# Order of the two tensor lists; the letters are those of DraftInputs and DraftBatch.
WRITTEN = (
    "input_ids",
    "positions",
    "seq_lens",
    "query_start_loc",
    "idx_mapping",
    "last_token_indices",
    "temperature",
    "seeds",
    "hidden_states",
)
READ = (
    "input_ids",
    "positions",
    "seq_lens",
    "query_start_loc",
    "idx_mapping",
    "num_rejected",
    "last_sampled",
    "temperature",
    "seeds",
    "hidden_states",
)


def reference(
    written: Sequence[Tensor], read: Sequence[Tensor], rows: int, tokens: int, capacity: int, query_len: int
) -> None:
    """The meaning, in place: ids shift left by one in a row, the newest verified token behind the last accepted one.

    Rows ``rows..capacity`` become dead: zeros, ``idx_mapping`` -1, ``query_len`` tokens each.
    """
    out = dict(zip(WRITTEN, written, strict=True))
    if read:
        _load(out, dict(zip(READ, read, strict=True)), rows, tokens)
    if rows < capacity:
        _pad(out, rows, capacity, query_len)


def _load(out: dict[str, Tensor], batch: dict[str, Tensor], rows: int, tokens: int) -> None:
    out["query_start_loc"][: rows + 1].copy_(batch["query_start_loc"][: rows + 1])
    last = out["query_start_loc"][1 : rows + 1].to(torch.int64) - 1 - batch["num_rejected"][:rows]
    out["last_token_indices"][:rows].copy_(last)
    out["input_ids"][: tokens - 1].copy_(batch["input_ids"][1:tokens])
    out["input_ids"][:tokens].index_copy_(0, last, batch["last_sampled"][:rows].to(torch.int32))
    for name in ("positions", "hidden_states"):
        out[name][:tokens].copy_(batch[name][:tokens])
    for name in ("seq_lens", "idx_mapping", "temperature", "seeds"):
        out[name][:rows].copy_(batch[name][:rows])


def _pad(out: dict[str, Tensor], rows: int, capacity: int, query_len: int) -> None:
    tail, tokens = slice(rows, capacity), slice(rows * query_len, capacity * query_len)
    for name in ("seq_lens", "temperature", "seeds"):
        out[name][tail].zero_()
    out["input_ids"][tokens].zero_()
    out["positions"][tokens].zero_()
    out["idx_mapping"][tail].fill_(-1)
    ends = torch.arange(rows + 1, capacity + 1, device=out["seq_lens"].device) * query_len
    out["query_start_loc"][rows + 1 : capacity + 1].copy_(ends)
    out["last_token_indices"][tail].copy_(ends - 1)


def _cuda(
    written: Sequence[Tensor], read: Sequence[Tensor], rows: int, tokens: int, capacity: int, query_len: int
) -> None:
    require_triton("load_rows")
    from draftfuse.lowering.ops._load_rows_triton import launch

    launch(written, read, rows, tokens, capacity, query_len)


def _fake(
    written: Sequence[Tensor], read: Sequence[Tensor], rows: int, tokens: int, capacity: int, query_len: int
) -> None:
    """Nothing is returned."""


define("load_rows(Tensor(a!)[] written, Tensor[] read, int rows, int tokens, int capacity, int query_len) -> ()")
implement("load_rows", reference, "CPU")
implement("load_rows", _cuda, "CUDA")
fake("load_rows", _fake)


def load_rows(
    written: Sequence[Tensor], read: Sequence[Tensor], rows: int, tokens: int, capacity: int, query_len: int
) -> None:
    """Write ``rows`` rows of a batch, and dead rows up to ``capacity``, into persistent inputs.

    Args:
        written: the inputs named by :data:`WRITTEN`, in that order.
        read: the batch's tensors named by :data:`READ`, in that order; an empty list only pads.
        rows: live rows.
        tokens: live tokens.
        capacity: rows in all; where it is more than ``rows``, every live row has ``query_len`` tokens.
        query_len: tokens of each padded row.
    """
    torch.ops.draftfuse.load_rows(written, read, rows, tokens, capacity, query_len)
