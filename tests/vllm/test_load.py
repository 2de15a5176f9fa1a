"""What a proposal writes by itself: a batch into the draft's buffers, and the turn from prefill to decode."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftfuse.vllm import load
from draftfuse.vllm.load import Loader, Turn

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which is not installed")


def speculator(draws: bool = False, advances: bool = True) -> Any:
    inputs = SimpleNamespace(
        input_ids=torch.full((12,), 7, dtype=torch.int32),
        positions=torch.full((12,), 7),
        query_start_loc=torch.full((5,), 7, dtype=torch.int32),
        seq_lens=torch.full((4,), 7, dtype=torch.int32),
    )
    return SimpleNamespace(
        input_buffers=inputs,
        last_token_indices=torch.full((4,), 7),
        current_draft_step=torch.tensor(7),
        idx_mapping=torch.full((4,), 7, dtype=torch.int32),
        temperature=torch.full((4,), 7.0),
        seeds=torch.full((4,), 7),
        draft_tokens=torch.tensor([[41, 0], [42, 0], [43, 0], [44, 0]]),
        draft_logits=torch.zeros(1) if draws else None,
        device=torch.device("cpu"),
        max_model_len=16,
        advance_draft_positions=advances,
    )


def batch() -> tuple[Tensor, ...]:
    """Two requests of three tokens, in state rows 2 and 0; one token of the first is rejected, the second prefills."""
    return (
        torch.tensor([10, 11, 12, 20, 21, 22], dtype=torch.int32),
        torch.tensor([4, 5, 6, 13, 14, 15]),
        torch.tensor([2, 0], dtype=torch.int32),
        torch.tensor([[90], [91], [92], [93]]),
        torch.tensor([80, 81, 82, 83], dtype=torch.int32),
        torch.tensor([2, 0], dtype=torch.int32),
        torch.tensor([1, 0], dtype=torch.int32),
        torch.tensor([0, 3, 6], dtype=torch.int32),
        torch.tensor([7, 16], dtype=torch.int32),
        torch.tensor([0.1, 0.2, 0.3, 0.4]),
        torch.tensor([1, 2, 3, 4]),
    )


def test_loads_what_vllm_loads() -> None:
    spec = speculator()
    loader = Loader(spec)
    assert loader(batch(), 2)
    inputs = spec.input_buffers
    assert inputs.input_ids.tolist()[:7] == [11, 92, 7, 21, 22, 80, 7]  # a rejected token stays what it was
    assert inputs.positions.tolist()[:7] == [4, 5, 7, 13, 14, 15, 7]
    assert inputs.query_start_loc.tolist() == [0, 3, 6, 6, 6]
    assert inputs.seq_lens.tolist() == [7, 16, 0, 0]
    assert spec.last_token_indices.tolist() == [1, 5, 0, 0]
    assert spec.idx_mapping.tolist() == [2, 0, 7, 7]
    assert spec.temperature.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert spec.seeds.tolist() == [1, 2, 3, 4]
    assert (int(spec.current_draft_step), loader.live.tolist()) == (0, [2])


def test_padded_rows_are_marked_where_logits_are_kept() -> None:
    spec = speculator(draws=True)
    assert Loader(spec)(batch(), 2)
    assert spec.idx_mapping.tolist() == [2, 0, -1, -1]


@pytest.mark.parametrize(("advances", "lens", "first"), [(True, [7, 16, 0, 0], 5), (False, [7, 16, 0, 0], 4)])
def test_turn_moves_live_rows_by_one(advances: bool, lens: list[int], first: int) -> None:
    spec = speculator(advances=advances)
    loader = Loader(spec)
    loader(batch(), 2)
    spec.input_buffers.positions[:2] = torch.tensor([4, 15])  # the prefill gathers those of the last tokens
    Turn(spec, loader)()
    inputs = spec.input_buffers
    assert inputs.input_ids.tolist()[:4] == [41, 42, 7, 21]
    assert inputs.positions.tolist()[:4] == [first, 15, 7, 13]  # the second row is at the model's length
    assert inputs.seq_lens.tolist() == lens  # one rejected, one more
    assert inputs.query_start_loc.tolist() == [0, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, torch.zeros(12, dtype=torch.int32)[::2]),
        (6, torch.tensor([1.0, 0.0])),
        (9, torch.zeros(3)),
        (9, torch.zeros(4, dtype=torch.int64)),
        (10, torch.zeros(3, dtype=torch.int64)),
        (2, torch.zeros(2, dtype=torch.int32, device="meta")),
    ],
    ids=["strided", "floating", "short temperature", "whole temperature", "short seeds", "device"],
)
def test_what_does_not_fit_is_not_loaded(place: int, value: Tensor) -> None:
    spec, given = speculator(), batch()
    assert not Loader(spec)((*given[:place], value, *given[place + 1 :]), 2)
    assert spec.input_buffers.seq_lens.tolist() == [7] * 4


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a CUDA device would be asked to do."""
    log: list[str] = []
    module = ModuleType("draftfuse.vllm._load_triton")

    def launch_load(written: Any, read: Any, rows: int, pads: bool) -> Any:
        log.append(f"first {rows}")
        return lambda: log.append(f"again {rows}")

    module.launch_load = launch_load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return log


def test_known_addresses_are_launched_without_another_look(launched: list[str]) -> None:
    loader, given = Loader(speculator()), batch()
    loader.on_cuda = True
    for rows in (2, 2, 1, 2):
        assert loader(given, rows)
    moved = (*given[:2], given[2].clone(), *given[3:])
    assert loader(moved, 2)
    wider = (*given[:6], given[6].view(torch.int16), *given[7:])
    assert loader(wider, 2)
    assert launched == ["first 2", "again 2", "first 1", "again 2", "first 2", "first 2"]


def test_the_kernel_is_compiled_before_a_batch_needs_it(launched: list[str]) -> None:
    loader = Loader(speculator())
    loader.warm_up()
    assert launched == []
    loader.on_cuda = True
    loader.warm_up()
    assert launched == ["first 1"]
    assert loader.launches == {}


def test_the_table_of_launches_stays_small(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_LAUNCHES", 3)
    loader, given = Loader(speculator()), batch()
    loader.on_cuda = True
    kept = [(*given[:2], given[2].clone(), *given[3:]) for _ in range(5)]
    for each in kept:
        loader(each, 2)
        assert len(loader.launches) <= 3


def run(*arguments: str, **environment: str) -> None:
    names = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1", **environment}
    done = subprocess.run([sys.executable, *arguments], env=names, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_triton
@pytest.mark.slow
def test_kernels_interpreted() -> None:
    root = str(HERE.parents[1])
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", root, str(HERE / "interpreted_load.py"),
        TRITON_INTERPRET="1")  # fmt: skip


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    run(str(HERE / "compiled_kernels.py"), TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=str(HERE.parents[1]))
