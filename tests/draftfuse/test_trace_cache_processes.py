"""Stored traces between processes: reference speculators, edited files, and two processes that start at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftfuse.trace_cache import FROM_DISK

ROOT = Path(__file__).resolve().parent.parent.parent
REFERENCE = """
import hashlib, json
import torch
import draftfuse
from draftfuse.loading import dummy_batch
from draftfuse.reference.draft_model import DraftModelSpeculator
from draftfuse.reference.eagle import EagleSpeculator, packaged_head
from draftfuse.reference.llama import Limits

def eagle(k):
    return EagleSpeculator.from_packaged(Limits(num_speculative_tokens=k, max_num_reqs=4, max_model_len=64))


def draft_model(k):
    config = packaged_head("cpu", torch.float32)[0]
    limits = Limits(num_speculative_tokens=k, max_num_reqs=4, max_model_len=64)
    return DraftModelSpeculator.random(config, limits)


found = []
for make, k, one_launch in [(eagle, 8, False), (eagle, 4, True), (draft_model, 4, False)]:
    spec = make(k)
    fused = draftfuse.compile(spec, compiler="none", request_capacities=[1, 4], one_launch=one_launch)
    fused.capture(progress=False)
    state = hashlib.sha256()
    for rows in (3, 1):
        state.update(fused.propose(dummy_batch(spec, rows)).contiguous().numpy().tobytes())
        for tensor in spec.inputs.named_tensors().values():
            state.update(tensor.contiguous().numpy().tobytes())
    for cache in (c for g in spec.attn_groups for pair in g.kv_caches.values() for c in pair):
        state.update(cache.contiguous().numpy().tobytes())
    builds = [[b.kind, b.k, b.num_reqs, b.copied_steps, b.stored] for b in fused.report.builds]
    found.append({"state": state.hexdigest(), "builds": builds})
print(json.dumps(found))
"""
MODEL = """
from helper import helped
from tests.failures.small import Small


class Model(Small):
    def sample(self, hidden, step):
        return super().sample(helped(hidden) * 2, step)
"""
HELPER = """
def helped(hidden):
    return hidden + 1
"""
MAIN = """
import dataclasses, json
import draftfuse
from model import Model
from tests.failures.small import batch_of

tokens = []
for mode in ("fused", "eager"):
    spec = Model(k=3)
    fused = draftfuse.compile(spec, mode=mode, compiler="none", request_capacities=[4])
    batch = dataclasses.replace(batch_of(spec, [5, 9, 4], [0, 1, 0]), max_query_len=4)
    tokens.append(fused.propose(batch).tolist())
    said = said if mode == "eager" else fused.report.builds[0].stored
print(json.dumps({"right": tokens[0] == tokens[1], "said": said}))
"""


def start(code: str, folder: Path, cache: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(folder), str(ROOT)])
    settings = {"DRAFTFUSE_TRACE_CACHE": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> Any:
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_reference_speculators_come_back_the_same(tmp_path: Path) -> None:
    cold = result(start(REFERENCE, tmp_path, tmp_path / "cache"))
    warm = result(start(REFERENCE, tmp_path, tmp_path / "cache"))
    for before, after in zip(cold, warm, strict=True):
        assert [b[:4] for b in before["builds"]] == [b[:4] for b in after["builds"]]
        assert before["state"] == after["state"]
        assert {b[4] for b in before["builds"]} == {""}
        assert {b[4] for b in after["builds"]} == {FROM_DISK}
    assert any(b[3] for b in warm[0]["builds"])
    assert {b[2] for b in warm[0]["builds"]} == {None, 1}


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in two files, and the traces of a first process."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.py").write_text(MODEL)
    (folder / "helper.py").write_text(HELPER)
    both = [start(MAIN, folder, folder / "cache") for _ in range(2)]  # at once
    assert [result(p)["right"] for p in both] == [True, True]
    return folder


def test_a_later_process_loads(cold: Path) -> None:
    assert result(start(MAIN, cold, cold / "cache")) == {"right": True, "said": FROM_DISK}


EDITS = {
    "helper": ("helper.py", "hidden + 1", "hidden - 1"),
    "model": ("model.py", "* 2", "* -2"),
    "comment": ("helper.py", "return", "# moves the line that errors point at\n    return"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_file_is_traced_again(cold: Path, name: str) -> None:
    file, old, new = EDITS[name]
    text = (cold / file).read_text()
    (cold / file).write_text(text.replace(old, new))
    try:
        found = result(start(MAIN, cold, cold / "cache"))
    finally:
        (cold / file).write_text(text)
    assert found["right"]
    assert found["said"].startswith(f"the IR on disk was not used: {cold}")  # this edit, or the one before it
    assert found["said"].endswith("py has changed")
