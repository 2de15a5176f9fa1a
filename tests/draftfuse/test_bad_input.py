"""Calls and batches that cannot be: a named error before anything is built or written, and no silent draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import draftfuse
from draftfuse import AcrossRanks, DraftBatch, DraftInputs, batches
from draftfuse.errors import (
    ClosedError,
    DraftfuseError,
    InvalidBatchError,
    InvalidOptionError,
    InvalidSpeculatorError,
)
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


TENSORS = (*batches._PER_ROW, *batches._PER_TOKEN, "query_start_loc", "hidden_states")


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


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


NO_INPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "None": (lambda t: None, "is no tensor: got None"),
    "a list": (lambda t: t.tolist(), "is no tensor: got list"),
    "an array": (lambda t: t.numpy(), "is no tensor: got ndarray"),
    "a number": (lambda t: 3, "is no tensor: got int"),
    "complex": (lambda t: t.to(torch.complex64), "has a wrong dtype or shape: got torch.complex64"),
    "a dim more": (lambda t: t.unsqueeze(0), "has a wrong dtype or shape"),
    "sparse": (lambda t: t.to_sparse(), "has a wrong dtype or shape: got torch.sparse_coo of"),
    "too short": (lambda t: t[:1], "is too short: got 1"),
    "elsewhere": (lambda t: t.to("meta"), "the inputs are on several devices"),
}
INPUTS = [f.name for f in dataclasses.fields(DraftInputs) if f.name != "draft_logits"]


@pytest.mark.parametrize("case", NO_INPUTS)
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_are_none_are_refused(name: str, case: str) -> None:
    change, words = NO_INPUTS[case]
    spec = Small(k=K)
    setattr(spec.inputs, name, change(getattr(spec.inputs, name)))
    with pytest.raises(InvalidSpeculatorError, match=words if "inputs are" in words else rf"inputs\.{name} {words}"):
        draftfuse.compile(spec, compiler="none")


def test_other_inputs_that_cannot_be_are_refused() -> None:
    for name in ("seeds", "positions"):
        spec = Small(k=K)
        setattr(spec.inputs, name, strided(getattr(spec.inputs, name)))
        with pytest.raises(InvalidSpeculatorError, match=rf"inputs\.{name} is not contiguous"):
            draftfuse.compile(spec)
    spec = Small(k=K)
    for logits in (3, torch.zeros(5, K), torch.zeros(5, K, 3).long()):
        spec.inputs.draft_logits = logits  # type: ignore[assignment]
        with pytest.raises(InvalidSpeculatorError, match=r"inputs\.draft_logits (is no tensor|has a wrong dtype)"):
            draftfuse.compile(spec)


@pytest.mark.parametrize("value", [None, [0] * 5, torch.zeros(5), torch.zeros(1, dtype=torch.int64)], ids=str)
def test_an_input_that_is_replaced_later_is_looked_at_before_anything_is_written(value: Any) -> None:
    spec = Small(k=K)
    fused = draftfuse.compile(spec, compiler="none", mode="eager")
    drafts, kept = fused.propose(three_rows(spec), copy=True), spec.inputs.seeds
    spec.inputs.seeds, before = value, state_of(spec)[:3]
    with pytest.raises(InvalidSpeculatorError, match=r"inputs\.seeds"):
        fused.propose(batch_of(spec, [7, 6, 4]))
    assert all(map(torch.equal, before, state_of(spec)[:3]))
    spec.inputs.seeds = kept
    assert torch.equal(fused.propose(three_rows(spec)), drafts)


GROUPS: dict[str, tuple[str, Any, str]] = {
    "no builder": ("builder", None, "builder has no build: got NoneType"),
    "no table": ("block_table", None, "block_table has a wrong dtype or shape: got None"),
    "a list": ("slot_mapping", [1, 2], "slot_mapping has a wrong dtype or shape: got list"),
    "elsewhere": (
        "slot_mapping",
        torch.zeros(99, dtype=torch.int64, device="meta"),
        "slot_mapping is on another device",
    ),
    "one name": ("layer_names", "draft", "layer_names is no list of names: got 'draft'"),
    "no caches": ("kv_caches", [1], "kv_caches has no caches: got list"),
    "caches of None": ("kv_caches", {"draft": (None, None)}, "kv_caches has no caches: got dict"),
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups_that_are_none_are_refused(case: str) -> None:
    name, value, words = GROUPS[case]
    spec = Small(k=K)
    setattr(spec.attn_groups[0], name, value)
    with pytest.raises(InvalidSpeculatorError, match=rf"attn_groups\[0\]\.{words}"):
        draftfuse.compile(spec)
    spec.attn_groups = [object()]  # type: ignore[list-item]
    with pytest.raises(InvalidSpeculatorError, match=r"attn_groups\[0\]\.builder has no build"):
        draftfuse.compile(spec)


@pytest.mark.parametrize("name", ["on_prefill_begin", "on_multi_step_decode_end", "prefill"])
def test_hooks_that_cannot_be_called_are_refused(name: str) -> None:
    spec = Small(k=K)
    setattr(spec, name, 3)
    with pytest.raises(InvalidSpeculatorError, match=rf"spec\.{name} cannot be called: got 3"):
        draftfuse.compile(spec)


VALUES: dict[str, tuple[str, Any, str]] = {
    "one token less": ("num_tokens", 8, r"query_start_loc does not fit num_tokens: got \[0, 3, 6, 9\], expected"),
    "one row less": ("num_reqs", 2, r"query_start_loc does not fit num_tokens: got \[0, 3, 6\]"),
    "starts behind": ("query_start_loc", torch.tensor([0, 3, 6, 99], dtype=torch.int32), "does not fit num_tokens"),
    "starts late": ("query_start_loc", torch.tensor([1, 3, 6, 9], dtype=torch.int32), "does not fit num_tokens"),
    "falling starts": ("query_start_loc", torch.tensor([0, 6, 3, 9], dtype=torch.int32), "does not fit num_tokens"),
    "an empty row": ("query_start_loc", torch.tensor([0, 3, 3, 9], dtype=torch.int32), "does not fit num_tokens"),
    "negative": ("query_start_loc", torch.tensor([0, -3, 6, 9], dtype=torch.int32), "does not fit num_tokens"),
    "a longer query": (
        "query_start_loc",
        torch.tensor([0, 2, 4, 9], dtype=torch.int32),
        "query_start_loc does not fit max_query_len: got 5, expected at most 3 tokens a request",
    ),
    "a bound too low": ("max_seq_len", 8, r"seq_lens does not fit max_seq_len: got \[5, 9, 3\], expected 0..8"),
    "a negative temperature": ("temperature", torch.tensor([0.0, -0.5, 1.0]), "temperature has no meaning"),
    "no temperature": ("temperature", torch.tensor([0.0, float("nan"), 1.0]), r"got \[0.0, nan, 1.0\], expected 0"),
    "a negative length": ("seq_lens", torch.tensor([5, -1, 3]), "seq_lens does not fit max_seq_len"),
    "all rejected": ("num_rejected", torch.tensor([0, 3, 0]), r"num_rejected does not fit query_start_loc: got \[0, 3"),
    "less than none": ("num_rejected", torch.tensor([0, -1, 0]), "num_rejected does not fit query_start_loc"),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_that_do_not_fit_the_host_values_write_nothing(case: str) -> None:
    name, value, words = VALUES[case]
    spec = Small(k=K)
    fused = draftfuse.compile(spec, mode="eager")
    drafts, before = fused.propose(three_rows(spec), k=1, copy=True), state_of(spec)
    for _ in range(2):  # the addresses of the second one are known
        batch = three_rows(spec)
        batch.max_query_len = K + 1
        batch.hidden_states.neg_()
        if name in ("num_tokens", "num_reqs"):
            batch.max_query_len = None
        setattr(batch, name, value)
        with pytest.raises(InvalidBatchError, match=rf"batch\..*{words}"):
            fused.propose(batch, k=1)
        assert all(map(torch.equal, before, state_of(spec)))
    assert torch.equal(fused.propose(three_rows(spec), k=1), drafts)


ODD: list[Any] = [True, 2.5, "x", [3], {}, torch.tensor([1, 2]), numpy.array([1, 2]), object()]


@pytest.mark.parametrize("value", ODD, ids=lambda v: type(v).__name__)
def test_arguments_of_other_types_are_refused(value: Any) -> None:
    spec = Small(k=K)
    fused = draftfuse.compile(spec, compiler="none", mode="eager")
    fused.propose(three_rows(spec), k=1)
    fused.decode(1, k=1, capacity=1)  # remembered: what equals it must not pass for it
    calls: list[Callable[[], Any]] = [
        lambda: fused.propose(value),
        lambda: fused.propose(three_rows(spec), k=value),
        lambda: fused.propose(three_rows(spec), across=value),
        lambda: fused.decode(value, k=1, capacity=1),
        lambda: fused.decode(1, k=value, capacity=1),
        lambda: fused.decode(1, k=1, capacity=value),
        lambda: fused.dispatch(2, value),
        lambda: fused.dispatch(2, 4, max_query_len=value),
        lambda: fused.audit(three_rows(spec), value),
    ]
    if not isinstance(value, float):
        calls.append(lambda: fused.wait(value))
    if not isinstance(value, list):
        calls.append(lambda: AcrossRanks(value, (1,), (1,)))
    if not isinstance(value, dict):  # no steps to capture
        calls.append(lambda: fused.capture(value))
    before = state_of(spec)
    for call in calls:
        with pytest.raises((InvalidBatchError, InvalidOptionError)):
            call()
    assert all(map(torch.equal, before, state_of(spec)))


OPTIONS = (
    "num_speculative_tokens",
    "request_capacities",
    "mode",
    "compiler",
    "cudagraph",
    "pool",
    "disable",
    "dump",
    "emission",
    "one_launch",
    "k_by_num_reqs",
    "graph_memory_budget",
)
GOOD = {("cudagraph", "bool"), ("one_launch", "bool"), ("dump", "str"), ("disable", "dict"), ("k_by_num_reqs", "dict")}


@pytest.mark.parametrize("value", [3.5, *ODD], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_other_types_are_refused(name: str, value: Any) -> None:
    if (name, type(value).__name__) in GOOD or (name, value is ODD[3]) == ("request_capacities", True):
        return
    with pytest.raises(InvalidOptionError):
        draftfuse.compile(Small(k=K), **{name: value})


@pytest.mark.parametrize("dump", [3, "", "a\0b", "file", "file/below"])
def test_a_dump_that_can_be_no_folder_is_refused(dump: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(InvalidOptionError, match=r"dump is no (path|folder): got"):
        draftfuse.compile(Small(k=K), dump=dump)


def test_a_dump_that_cannot_be_written_is_named_and_the_state_is_as_before(tmp_path: Path) -> None:
    spec = Small(k=K)
    fused = draftfuse.compile(spec, compiler="none", dump=tmp_path / "dump")
    (tmp_path / "dump").write_text("a file in its place")
    before = state_of(spec)
    with pytest.raises(InvalidOptionError, match=r"the dump cannot be written: got .*File exists"):
        fused.decode(2)
    assert all(map(torch.equal, before, state_of(spec)))
    (tmp_path / "dump").unlink()
    fused.decode(2)
    assert (tmp_path / "dump" / "00_traced.py").is_file()


def test_a_loop_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="num_speculative_tokens does not fit: got 0, expected an int, 1 <= k"):
        draftfuse.compile(Small(k=K), num_speculative_tokens=0)
