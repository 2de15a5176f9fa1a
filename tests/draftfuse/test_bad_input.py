"""Calls and batches that cannot be: a named error before anything is built or written, and no silent draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import draftfuse
from draftfuse import AcrossRanks, DraftBatch, validate
from draftfuse.errors import ClosedError, DraftfuseError, InvalidBatchError, InvalidOptionError
from tests.failures.small import Small, batch_of, three_rows

K = 2


def state_of(spec: Small) -> list[torch.Tensor]:
    return [t.clone() for t in (*spec.inputs.named_tensors().values(), spec.attn_groups[0].slot_mapping, spec.key)]


def refused(call: Callable[[draftfuse.FusedDraft, Small], Any], error: type[DraftfuseError], words: str) -> None:
    """The call raises, writes nothing, builds nothing, and the next right call drafts."""
    spec = Small(k=K)
    fused = draftfuse.compile(spec, compiler="none")
    before = state_of(spec)
    with pytest.raises(error, match=words):
        call(fused, spec)
    assert all(map(torch.equal, before, state_of(spec)))
    assert fused.report.builds == []
    assert fused.propose(three_rows(spec), k=1).shape == (3, 1)


TENSORS = (*validate._PER_ROW, *validate._PER_TOKEN, "query_start_loc", "hidden_states")


@pytest.mark.parametrize("name", TENSORS)
def test_a_batch_without_a_tensor_is_refused(name: str) -> None:
    def call(fused: draftfuse.FusedDraft, spec: Small) -> None:
        batch = three_rows(spec)
        setattr(batch, name, None)
        fused.propose(batch)

    refused(call, InvalidBatchError, rf"batch\.{name} is no tensor: got None, expected a tensor of shape \(")


@pytest.mark.parametrize("name", TENSORS)
def test_a_batch_with_a_dim_more_or_less_is_refused(name: str) -> None:
    for change in (lambda t: t.unsqueeze(-1).repeat(*[1] * t.dim(), 2), lambda t: t.flatten()[0]):

        def call(fused: draftfuse.FusedDraft, spec: Small, change: Any = change) -> None:
            batch = three_rows(spec)
            setattr(batch, name, change(getattr(batch, name)))
            fused.propose(batch)

        refused(call, InvalidBatchError, rf"batch\.{name} has a wrong shape: got \(")


COUNTS: list[tuple[str, Any, str]] = [
    ("num_reqs", 3.0, r"batch.num_reqs is no count: got 3.0, expected an int"),
    ("num_reqs", None, "batch.num_reqs is no count: got None"),
    ("num_reqs", -1, "num_reqs is out of range: got -1"),
    ("num_tokens", True, "batch.num_tokens is no count: got True"),
    ("num_tokens", torch.tensor(9), r"batch.num_tokens is no count: got tensor\(9\)"),
    ("max_seq_len", None, "batch.max_seq_len is no count: got None"),
    ("max_seq_len", -1, "max_seq_len is out of range: got -1"),
    ("max_seq_len", 2, "max_seq_len is out of range: got 2, expected .* room for num_tokens=9 in 3 requests"),
    ("max_query_len", 3.5, "max_query_len cannot be: got 3.5"),
    ("max_query_len", True, "max_query_len cannot be: got True"),
]


@pytest.mark.parametrize(("name", "value", "words"), COUNTS)
def test_a_batch_with_a_count_that_is_none_is_refused(name: str, value: Any, words: str) -> None:
    def call(fused: draftfuse.FusedDraft, spec: Small) -> None:
        batch = three_rows(spec)
        setattr(batch, name, value)
        fused.propose(batch)

    refused(call, InvalidBatchError, words)


@pytest.mark.parametrize("batch", [None, {}, torch.ones(3)], ids=["None", "dict", "tensor"])
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    came = "None" if batch is None else type(batch).__name__
    words = f"the batch is no DraftBatch: got {came}, expected draftfuse.DraftBatch"
    refused(lambda fused, spec: fused.propose(batch), InvalidBatchError, words)


@pytest.mark.parametrize("name", ["seq_lens", "positions", "seeds", "num_rejected"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64], ids=str)
def test_flags_and_complex_numbers_are_no_integers(name: str, dtype: torch.dtype) -> None:
    spec = Small(k=K)
    fused = draftfuse.compile(spec, compiler="none")
    batch, before = three_rows(spec), state_of(spec)
    setattr(batch, name, getattr(batch, name).to(dtype))
    with pytest.raises(InvalidBatchError, match=rf"batch\.{name} has a wrong dtype: got {dtype}, expected an integer"):
        fused.propose(batch, k=1)
    assert all(map(torch.equal, before, state_of(spec)))


OWN: dict[str, tuple[str, Callable[[Small], torch.Tensor]]] = {
    "drafts": ("input_ids", lambda spec: spec.inputs.draft_tokens.view(-1)),
    "last drafts": ("last_sampled", lambda spec: spec.inputs.draft_tokens.view(-1)[1:]),
    "slots": ("positions", lambda spec: spec.attn_groups[0].slot_mapping),
    "table": ("seq_lens", lambda spec: spec.attn_groups[0].block_table.view(-1)[-8:]),
    "lengths": ("seq_lens", lambda spec: spec.inputs.seq_lens),
}


@pytest.mark.parametrize("case", OWN)
def test_a_batch_in_the_memory_of_the_loop_is_refused(case: str) -> None:
    name, of = OWN[case]
    spec = Small(k=K)
    fused = draftfuse.compile(spec, compiler="none")
    for _ in range(2):  # a batch that was refused is looked at again
        batch, before = three_rows(spec), state_of(spec)
        setattr(batch, name, of(spec))
        with pytest.raises(InvalidBatchError, match=rf"batch\.{name} lies in the speculator's inputs"):
            fused.propose(batch, k=1)
        assert all(map(torch.equal, before, state_of(spec)))


def test_a_batch_beside_the_inputs_in_one_allocation_is_none_of_them() -> None:
    spec = Small(k=K)
    arena = torch.zeros(64, dtype=torch.int64)
    spec.inputs.seeds = arena[:5]
    batch = three_rows(spec)
    batch.seeds = arena[5:8]
    assert draftfuse.compile(spec, compiler="none").propose(batch, k=1).shape == (3, 1)


@pytest.mark.parametrize("bound", [-4, 33, 2.5, "x", True])
def test_decode_refuses_a_length_bound_that_cannot_be(bound: Any) -> None:
    refused(lambda fused, spec: fused.decode(2, max_seq_len=bound), InvalidBatchError, "max_seq_len is out of range")


@pytest.mark.parametrize("sizes", [(0, None), (2, 1), (5, 5), (2, 99), (-1, None), (2, 4.0)])
def test_dummy_runs_that_cannot_be_are_refused(sizes: tuple[int, Any]) -> None:
    refused(lambda fused, spec: fused.dummy_run(*sizes), InvalidBatchError, "out of range|dummy run of these sizes")


def test_other_calls_that_cannot_be_are_refused() -> None:
    refused(lambda fused, spec: fused.dispatch(-1, 3), InvalidBatchError, "num_reqs is out of range: got -1")
    refused(lambda fused, spec: fused.capture(2), InvalidOptionError, "ks is no list: got 2")  # type: ignore[arg-type]


def ragged(spec: Small) -> DraftBatch:
    """Two requests of K and K + 2 tokens: as many in all as a uniform batch has."""
    batch = batch_of(spec, [K + 1, K + 1])
    batch.query_start_loc = torch.tensor([0, K, 2 * (K + 1)], dtype=torch.int32)
    batch.max_query_len = K + 2
    return batch


def test_ranks_that_hide_a_longer_query_are_refused() -> None:
    across = AcrossRanks((2,), (2 * (K + 1),), (K + 1,))  # would pass for uniform, and run one launch
    words = f"longer queries than its rank: got max_query_len={K + 2}, expected at most {K + 1}"
    refused(lambda fused, spec: fused.propose(ragged(spec), across=across), InvalidBatchError, words)
    with pytest.raises(InvalidOptionError, match="num_reqs of the ranks is no count"):
        AcrossRanks((True,), (1,), (1,))
    wider = AcrossRanks((2, 2), (2 * (K + 1),) * 2, (K + 1, K + 2))
    spec = Small(k=K)
    assert draftfuse.compile(spec, compiler="none").propose(ragged(spec), k=1, across=wider).shape == (2, 1)


def test_closing_twice_does_nothing() -> None:
    spec = Small(k=K)
    fused = draftfuse.compile(spec, compiler="none")
    fused.propose(three_rows(spec), k=1)
    fused.close()
    fused.close()
    with pytest.raises(ClosedError, match=r"after close\(\)"):
        fused.propose(three_rows(spec))
