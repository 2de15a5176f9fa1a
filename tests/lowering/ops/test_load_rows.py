"""load_rows: a batch into the persistent inputs, and dead rows behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops.load_rows import READ, WRITTEN, load_rows

KINDS = {
    "input_ids": torch.int32,
    "seq_lens": torch.int32,
    "query_start_loc": torch.int32,
    "temperature": torch.float32,
}


def buffers(length: int = 12) -> dict[str, Tensor]:
    found = {name: torch.full((length,), 77, dtype=KINDS.get(name, torch.int64)) for name in WRITTEN}
    return found | {"hidden_states": torch.full((length, 2), 77.0)}


def batch() -> dict[str, Tensor]:
    """Two requests of 3 and 2 tokens; the first has one rejected token."""
    return {
        "input_ids": torch.tensor([10, 11, 12, 20, 21]),
        "positions": torch.tensor([4, 5, 6, 8, 9]),
        "seq_lens": torch.tensor([7, 10], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 3, 5], dtype=torch.int32),
        "idx_mapping": torch.tensor([5, 3]),
        "num_rejected": torch.tensor([1, 0]),
        "last_sampled": torch.tensor([99, 88]),
        "temperature": torch.tensor([0.5, 0.0]),
        "seeds": torch.tensor([1, 2]),
        "hidden_states": torch.arange(10.0).view(5, 2),
    }


def load(out: dict[str, Tensor], rows: int, tokens: int, capacity: int, query_len: int) -> None:
    read = batch() if rows else {}
    load_rows([out[n] for n in WRITTEN], [read[n] for n in READ if n in read], rows, tokens, capacity, query_len)


def test_shifts_ids_and_places_the_newest_token_behind_the_last_accepted() -> None:
    out = buffers()
    load(out, 2, 5, 2, 1)
    assert out["input_ids"][:2].tolist() == [11, 99]  # the third token of the first request was rejected
    assert out["input_ids"][3:5].tolist() == [21, 88]
    assert out["last_token_indices"][:2].tolist() == [1, 4]
    assert out["positions"][:6].tolist() == [4, 5, 6, 8, 9, 77]
    assert out["seq_lens"][:3].tolist() == [7, 10, 77]
    assert out["hidden_states"][:6].flatten().tolist() == [*range(10), 77, 77]


def test_rows_behind_the_live_ones_become_dead_and_nothing_else_is_touched() -> None:
    out = buffers()
    load(out, 0, 0, 0, 1)
    assert all((t == 77).all() for t in out.values())
    load_rows([out[n] for n in WRITTEN], [], 2, 0, 4, 2)
    assert out["seq_lens"].tolist()[:5] == [77, 77, 0, 0, 77]
    assert out["idx_mapping"].tolist()[:5] == [77, 77, -1, -1, 77]
    assert out["positions"].tolist()[3:9] == [77, 0, 0, 0, 0, 77]
    assert out["query_start_loc"].tolist()[2:6] == [77, 6, 8, 77]
    assert out["last_token_indices"].tolist()[1:5] == [77, 5, 7, 77]
    assert out["temperature"].tolist()[1:5] == [77, 0, 0, 77]


def test_opcheck() -> None:
    out, read = buffers(), batch()
    args = ([out[n] for n in WRITTEN], [read[n] for n in READ], 2, 5, 2, 1)
    torch.library.opcheck(torch.ops.draftfuse.load_rows.default, args)
