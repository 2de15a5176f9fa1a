"""Generated code of another process: found without decomposing, equal to the bit, and only where nothing has changed.

R rows of buffers, W their width, n requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from draftfuse.lowering import emit, inductor, kept_file, segment, stored_code
from draftfuse.lowering.check import SchedulerCheck, verdict_file
from draftfuse.lowering.workspace import Workspace
from draftfuse.passes import ir
from draftfuse.trace import Trace, trace
from tests.passes.helpers import log

ROOT = Path(__file__).resolve().parent.parent.parent
CHILD = """
import json, sys, torch
torch.set_num_threads(int(sys.argv[1]))
from torch._dynamo.utils import counters
from tests.lowering.test_stored_code import Buffers, emitted
print(json.dumps([emitted(Buffers())[1], counters["inductor"]["fxgraph_cache_bypass"]]))
"""


class Buffers(SimpleNamespace):
    """What the loop reads and writes: kernels of floats, and of whole numbers alone."""

    def __init__(self, rows: int = 9, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        x = torch.linspace(-2, 2, rows * width, dtype=dtype).view(rows, width)
        lengths = torch.arange(rows, dtype=torch.int64)
        super().__init__(x=x, out=torch.zeros_like(x), notes=torch.zeros_like(x), lengths=lengths)


def loop(spec: Any, n: int) -> None:
    spec.out[:n].copy_(torch.softmax(torch.sin(spec.x[:n]) * 3, -1))
    log(spec.out[:n], spec.notes[:n])
    spec.lengths[:n].copy_(torch.clamp(spec.lengths[:n] * 3 + 1, max=17))


def traced_loop(spec: Buffers) -> Trace:
    return trace(loop, (spec, 4), "n")


def emission_of(traced: Trace, options: dict[str, Any] | None = None) -> emit.Emission:
    return emit.emit(traced.graph, traced.fake_mode, traced.tensors, compiler="inductor", options=options)


def emitted(spec: Buffers) -> tuple[emit.Emission, list[list[Any]]]:
    """The emission of the loop, and what it leaves in the buffers, in full."""
    made = emission_of(traced_loop(spec))
    made.bind(3, Workspace()).run()
    made.bind(5, Workspace()).run()
    return made, [[v.hex() if isinstance(v, float) else v for v in t.flatten().tolist()] for t in tensors(spec)]


def tensors(spec: Buffers) -> list[Tensor]:
    return [spec.x, spec.out, spec.notes, spec.lengths]


def start(cache: Path) -> subprocess.Popen[str]:
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(torch.get_num_threads())]
    return subprocess.Popen(command, cwd=cache, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """What two processes computed that started at once on an empty cache, which this process shares from now on."""
    cache = tmp_path_factory.mktemp("cache")
    both = [start(cache) for _ in range(2)]
    found = [json.loads(process.communicate(timeout=500)[0].splitlines()[-1]) for process in both]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        yield found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called to compile; nothing that this process has compiled is used."""
    found: list[str] = []
    for module, name in ((segment, "decompose"), (inductor, "compile_fx_inner")):
        given = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, g=given, n=name, **k: (found.append(n), g(*a, **k))[1])
    monkeypatch.setattr(emit, "_COMPILED", {})
    return found


def notes() -> list[Path]:
    return sorted(kept_file.cached("code").iterdir())


@pytest.mark.slow
def test_two_processes_at_once_compute_the_same_and_fill_the_cache(children: list[Any]) -> None:
    assert children[0] == children[1]
    assert children[0][1] == 0  # Inductor keeps the code, whatever class it asks the check to be
    assert len(notes()) == 2
    assert sorted(kept_file.read(n)["scalar"] for n in notes()) == [False, True]


@pytest.mark.slow
def test_stored_code_is_neither_decomposed_nor_compiled_and_gives_the_same_bits(
    children: list[Any], calls: list[str]
) -> None:
    before = counters["aot_autograd"]["total"], counters["inductor"]["fxgraph_cache_hit"]
    made, state = emitted(Buffers())
    assert calls == []
    assert (counters["aot_autograd"]["total"], counters["inductor"]["fxgraph_cache_hit"] - before[1]) == (before[0], 2)
    assert state == children[0][0]
    assert made.unique == 2
    assert [made.guards_hold(n) for n in (1, 2, 8, 9)] == [False, True, True, True]
    assert all(c.guards and not c.findings for c in made.calls.values())


def damage(text: bytes, kind: str) -> bytes:
    """A note that was cut off, that was edited, or that leads elsewhere."""
    if kind in ("cut off", "empty"):
        return text[:-9] if kind == "cut off" else b""
    return text.replace(b'"name": "f', b'"name": "g')


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut off", "empty", "edited"])
def test_a_damaged_note_is_a_miss(children: list[Any], calls: list[str], kind: str) -> None:
    for note in notes():
        note.write_bytes(damage(note.read_bytes(), kind))
    assert emitted(Buffers())[1] == children[0][0]
    assert calls == ["decompose", "compile_fx_inner"] * 2
    assert all(kept_file.read(n) for n in notes())  # written again


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../traces", "", "f" * 40])
def test_a_note_that_leads_nowhere_is_a_miss(children: list[Any], calls: list[str], name: str) -> None:
    for note in notes():
        kept_file.write(note, {**kept_file.read(note), "name": name})
    assert emitted(Buffers())[1] == children[0][0]
    assert calls == ["decompose", "compile_fx_inner"] * 2


class Noted(Exception):
    """Ends an emission at its first segment; the argument is the note."""


def note_of(monkeypatch: pytest.MonkeyPatch, traced: Trace, options: dict[str, Any] | None = None) -> str:
    """The name of the note on the first segment of a loop."""
    asked = stored_code.StoredCode.note_of

    def stop(self: Any, key: str, inputs: Any) -> None:
        raise Noted(asked(self, key, inputs))

    with monkeypatch.context() as patch:
        patch.setattr(stored_code.StoredCode, "note_of", stop)
        patch.setattr(emit, "_COMPILED", {})
        with pytest.raises(Noted) as found:
            emission_of(traced, options)
    return str(found.value)


@pytest.fixture(scope="module")
def traced() -> Trace:
    return traced_loop(Buffers())


def test_whatever_changes_the_code_changes_the_name(monkeypatch: pytest.MonkeyPatch, traced: Trace) -> None:
    found = [note_of(monkeypatch, traced_loop(b)) for b in (Buffers(), Buffers(rows=8), Buffers(width=16))]
    assert note_of(monkeypatch, traced) == found[0]
    found.append(note_of(monkeypatch, traced, {"cpp.simdlen": 1}))
    with inductor_config.patch(max_fusion_size=3):
        found.append(note_of(monkeypatch, traced))
    with monkeypatch.context() as patch:
        patch.setattr(stored_code, "sources_hash", lambda: "edited")
        found.append(note_of(monkeypatch, traced))
    torch.use_deterministic_algorithms(True)
    found.append(note_of(monkeypatch, traced))
    torch.use_deterministic_algorithms(False)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    found.append(note_of(monkeypatch, traced))
    torch.set_num_threads(threads)
    assert len(set(found)) == len(found)
    assert note_of(monkeypatch, traced) == found[0]


def test_decompositions_of_others_keep_no_notes(monkeypatch: pytest.MonkeyPatch, traced: Trace) -> None:
    assert not stored_code.has_foreign_decompositions()
    monkeypatch.setitem(inductor.decomposition_table(), torch.ops.aten.sin.default, lambda x: x)
    assert stored_code.has_foreign_decompositions()
    assert note_of(monkeypatch, traced) == "None"


def test_code_that_fails_the_check_is_not_noted(monkeypatch: pytest.MonkeyPatch, traced: Trace) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(stored_code.StoredCode, "save", lambda *a: saved.append(a))
    monkeypatch.setattr(stored_code.StoredCode, "load", lambda *a: None)
    monkeypatch.setattr(emit, "_COMPILED", {})
    monkeypatch.setattr(segment, "compile_graph", lambda *a: (lambda inputs: (), ["a fault"]))
    with pytest.raises(emit.EmissionError, match="a fault"):
        emission_of(traced)
    assert not saved
    monkeypatch.setattr(segment, "compile_graph", lambda *a: (lambda inputs: (), []))
    emission_of(traced)
    assert len(saved) == 2


def test_a_damaged_verdict_is_none() -> None:
    check = SchedulerCheck("key of a test")
    check.ran, check.findings = True, ["a fault"]
    assert check.verdict() == ["a fault"]
    assert SchedulerCheck("key of a test").verdict() == ["a fault"]
    file = verdict_file("key of a test")
    file.write_bytes(file.read_bytes()[:-1])
    assert SchedulerCheck("key of a test").verdict() is None


def test_segments_that_store_other_values_are_not_taken_for_each_other() -> None:
    def extracted(stored: int, returned: int) -> segment.Extracted:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.zeros(4)
        made = [graph.call_function(torch.ops.aten.add.Tensor, (x, i)) for i in range(3)]
        for node in made:
            node.meta["val"] = torch.zeros(4)
        graph.output((made[returned], made[stored]))
        return segment.Extracted(graph, [x], [made[returned]], [0], made, "\nstores [0]")

    given = [extracted(0, 1), extracted(0, 2), extracted(0, 1), extracted(1, 2)]
    shared = segment.share_outputs(given)
    assert len({s.key for s in shared[:3]}) == 1
    assert shared[3].key != shared[0].key
    for before, after in zip(given, shared, strict=True):
        assert after.outputs == [before.nodes[1], before.nodes[2]]
        assert after.inputs == before.inputs
        assert ir.placeholders(after.graph)
