"""Whole proposals in one graph: when, what is captured, what is handed to vLLM; and released speculators' drafts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftfuse.vllm import asked, patch, proposal
from draftfuse.vllm.plan import PLAN, Plan, plan_of
from draftfuse.vllm.proposal import Proposal, make_proposal, pairs, recorded, refusal, remember
from draftfuse.vllm.versions import RELEASES

OLD = RELEASES[0]
WHEELS = Path(os.environ.get("DRAFTFUSE_VLLM_WHEELS", "/nonexistent"))  # <folder>/<version>/vllm/...
K, HIDDEN, ROWS = 3, 4, 8


class Mode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


@dataclass(frozen=True)
class Desc:
    cg_mode: Mode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None


class Manager:
    """vLLM's choice of a graph, without its graphs."""

    def __init__(self, config: Any, device: Any, mode: Any, query_len: int) -> None:
        self.cudagraph_mode, self.query_len = mode, query_len
        self.graphs: dict[Desc, Any] = {}
        self.replayed: list[Desc] = []
        self._capture_descs: dict[Mode, list[Desc]] = {}

    def with_rows(self, *rows: int) -> Manager:
        self._capture_descs[Mode.FULL] = [Desc(Mode.FULL, n * self.query_len, n, self.query_len) for n in rows]
        return self

    def capture(self, function: Any, *args: Any, progress_bar_desc: str) -> None:
        for desc in self._capture_descs[Mode.FULL]:
            self.graphs[desc] = (function, args, progress_bar_desc)

    def dispatch(self, num_reqs: int, num_tokens: int, uniform: int | None, num_active_loras: int) -> Desc:
        fits = [d for d in self.graphs if d.num_tokens >= num_tokens and (d.num_reqs or 0) >= num_reqs]
        fits = [d for d in fits if d.uniform_token_count == uniform]
        return min(fits, key=lambda d: d.num_tokens, default=Desc(Mode.NONE, num_tokens, num_reqs))

    def run_fullgraph(self, desc: Desc) -> None:
        assert desc in self.graphs
        self.replayed.append(desc)


def captured(*rows: int, query_len: int = 1) -> Manager:
    manager = Manager(None, None, "both", query_len).with_rows(*rows)
    manager.capture(None, progress_bar_desc="")
    return manager


def speculator(aux: bool = True) -> Any:
    inputs = SimpleNamespace(
        input_ids=torch.zeros(64, dtype=torch.int32),
        positions=torch.zeros(64, dtype=torch.int64),
        query_start_loc=torch.zeros(ROWS + 1, dtype=torch.int32),
        seq_lens=torch.zeros(ROWS, dtype=torch.int32),
    )
    spec = SimpleNamespace(
        input_buffers=inputs,
        num_speculative_steps=K,
        max_model_len=64,
        advance_draft_positions=True,
        hidden_states=torch.zeros(64, HIDDEN),
        last_token_indices=torch.zeros(ROWS, dtype=torch.int64),
        current_draft_step=torch.tensor(0),
        idx_mapping=torch.zeros(ROWS, dtype=torch.int32),
        temperature=torch.zeros(ROWS),
        seeds=torch.zeros(ROWS, dtype=torch.int64),
        draft_tokens=torch.zeros(ROWS, K, dtype=torch.int64),
        draft_logits=None,
        device=torch.device("cpu"),
        vllm_config=None,
        dp_size=1,
        prefill_cudagraph_manager=captured(1, 2, 4, query_len=K + 1),
        decode_cudagraph_manager=captured(2, 4),
        model=SimpleNamespace(combine_hidden_states=lambda joined: joined[:, :HIDDEN]),
    )
    remember(spec, [torch.zeros(1, 3), torch.zeros(1, 5)] if aux else None)
    return spec


def batch(rows: int, tokens: int | None = None, padded: int | None = None) -> Any:
    count = rows * (K + 1) if tokens is None else tokens
    lengths = torch.full((rows,), count // rows)
    lengths[0] += count - int(lengths.sum())
    return SimpleNamespace(
        num_reqs=rows,
        num_tokens=count,
        num_tokens_after_padding=padded or count,
        num_scheduled_tokens=lengths.numpy(),
        input_ids=torch.zeros(64, dtype=torch.int32),
        positions=torch.zeros(64, dtype=torch.int64),
        idx_mapping=torch.arange(rows, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *lengths.tolist()]).cumsum(0).int(),
        seq_lens=torch.full((rows,), 9, dtype=torch.int32),
    )


def read(rows: int) -> tuple[torch.Tensor, ...]:
    some = (torch.ones(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32))
    tokens = (torch.zeros(ROWS, 1, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int32))
    return (*some, *tokens, torch.zeros(ROWS), torch.zeros(ROWS, dtype=torch.int64))


def made(spec: Any) -> Proposal:
    plan = Plan(OLD, "Tried", K, fused=True)
    setattr(spec, PLAN, plan)
    plan.proposal = Proposal(spec, plan)
    plan.proposal.capture((("states",), {"progress_bar_desc": "prefill"}))
    return plan.proposal  # type: ignore[no-any-return]


def aux_of(tokens: int) -> list[torch.Tensor]:
    return [torch.full((tokens, 3), 1.0), torch.full((tokens, 5), 2.0)]


@torch.inference_mode()
def tried(found: Proposal, given: Any, aux: list[torch.Tensor] | None = None, hidden: int = 0) -> torch.Tensor | None:
    tokens = given.num_tokens_after_padding
    states = aux_of(tokens) if aux is None and found.joined is not None else aux
    return found.run(given, torch.ones(hidden or tokens, HIDDEN), states, read(given.num_reqs))


def test_each_prefill_meets_the_decode_rows_that_vllm_would_take() -> None:
    prefill, decode = captured(1, 2, 4, query_len=4), captured(3, 4)
    met = {steps.num_reqs: [d.num_reqs for d in descs] for steps, descs in pairs(prefill, decode, 4).items()}
    assert met == {3: [4, 2, 1], 4: [4]}
    assert pairs(prefill, decode, 5) == {}
    assert pairs(prefill, captured(), 4) == {}


def test_captures_with_what_vllm_captured_its_prefill_with() -> None:
    found = made(speculator())
    assert {steps.num_reqs: [d.num_reqs for d in m.graphs] for steps, m in found.managers.items()} == {
        2: [2, 1],
        4: [4],
    }
    _, args, title = next(iter(next(iter(found.managers.values())).graphs.values()))
    assert args == ("states",)
    assert title == "Capturing CUDA graphs of proposals"
    assert found.plan.captured == [f"{rows} requests, whole proposal" for rows in (1, 2, 4)]


@pytest.mark.parametrize(("rows", "prefill", "decode"), [(1, 1, 2), (2, 2, 2), (3, 4, 4), (4, 4, 4)])
def test_a_uniform_batch_is_one_replay(rows: int, prefill: int, decode: int) -> None:
    spec = speculator()
    found = made(spec)
    drafts = tried(found, batch(rows, padded=prefill * (K + 1)))
    assert drafts is not None
    assert drafts.data_ptr() == spec.draft_tokens.data_ptr()
    assert drafts.shape == (rows, K)
    replayed = {s.num_reqs: [d.num_reqs for d in m.replayed] for s, m in found.managers.items() if m.replayed}
    assert replayed == {decode: [prefill]}
    assert found.load.live.tolist() == [rows]
    assert found.joined is not None
    assert found.joined[prefill * (K + 1) - 1].tolist() == [1.0] * 3 + [2.0] * 5


def test_last_hidden_states_are_copied_where_no_others_are_taken() -> None:
    spec = speculator(aux=False)
    assert tried(made(spec), batch(2)) is not None
    assert spec.hidden_states[:9].sum(1).tolist() == [4.0] * 8 + [0.0]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"given": batch(2, tokens=6)}, "other than 4 tokens"),
        (
            {"given": SimpleNamespace(**{**vars(batch(2)), "num_scheduled_tokens": torch.tensor([3, 5]).numpy()})},
            "other",
        ),
        ({"given": batch(5)}, "no full graphs"),
        ({"given": batch(2, padded=9)}, "no full graphs"),
        ({"given": batch(2), "aux": aux_of(7)}, "another shape"),
        ({"given": batch(2), "aux": [x.double() for x in aux_of(8)]}, "another shape or dtype"),
        ({"given": batch(2), "aux": []}, "another shape"),
        ({"given": SimpleNamespace(**{**vars(batch(2)), "positions": torch.zeros(8)})}, "loading kernel"),
    ],
)
def test_other_batches_are_vllm_s_with_one_logged_reason(given: dict[str, Any], reason: str) -> None:
    spec = speculator()
    found = made(spec)
    assert tried(found, **given) is None
    assert tried(found, **given) is None
    assert len(found.plan.notes) == 1
    assert reason in found.plan.notes[0]
    assert found.plan.counters == {"proposals outside one graph": 2}
    assert not any(manager.replayed for manager in found.managers.values())
    assert spec.input_buffers.seq_lens.tolist() == [1] * ROWS, "nothing is loaded"


def test_hidden_states_of_another_length_are_vllm_s() -> None:
    assert tried(made(speculator(aux=False)), batch(2), hidden=5) is None


@pytest.mark.parametrize("name", ["prefill_cudagraph_manager", "decode_cudagraph_manager"])
def test_other_graphs_than_those_captured_beside_are_vllm_s(name: str) -> None:
    spec = speculator()
    found = made(spec)
    setattr(spec, name, captured(2, 4))
    assert tried(found, batch(2)) is None
    assert "replaced" in found.plan.notes[0]


def test_outside_inference_mode_it_is_vllm_s() -> None:
    found = made(speculator())
    assert found.run(batch(2), torch.ones(8, HIDDEN), aux_of(8), read(2)) is None
    assert "inference mode" in found.plan.notes[0]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposal, "digest", lambda release: release.digest)
    monkeypatch.setattr(proposal, "overridden", lambda cls, release: "")


@pytest.mark.parametrize(
    ("change", "given", "reason"),
    [
        (lambda s: None, [], "captured no draft prefill"),
        (lambda s: setattr(s, "decode_cudagraph_manager", None), [((), {})], "captured no draft prefill"),
        (lambda s: setattr(s, "dp_size", 2), [((), {})], "data-parallel"),
        (lambda s: delattr(s, proposal.SEEN), [((), {})], "before the capture"),
        (lambda s: s.prefill_cudagraph_manager.graphs.clear(), [((), {})], "no full graphs"),
        (lambda s: setattr(s, proposal.SEEN, ((3, torch.half), (5, torch.float))), [((), {})], "several dtypes"),
        (lambda s: setattr(s.model, "combine_hidden_states", fails), [((), {})], "cannot be judged: no such layer"),
        (lambda s: setattr(s.model, "combine_hidden_states", away), [((), {})], "touches the host"),
    ],
)
@pytest.mark.usefixtures("known")
def test_what_is_not_captured_says_why(change: Any, given: list[Any], reason: str) -> None:
    spec, plan = speculator(), Plan(OLD, "Tried", K, fused=True)
    change(spec)
    assert make_proposal(spec, plan, given) is None
    assert len(plan.notes) == 1
    assert reason in plan.notes[0]


def fails(joined: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such layer")


def away(joined: torch.Tensor) -> torch.Tensor:
    return joined.to("meta")


@pytest.mark.usefixtures("known")
def test_what_is_sound_is_captured() -> None:
    spec, plan = speculator(), Plan(OLD, "Tried", K, fused=True)
    assert make_proposal(spec, plan, [(("states",), {})]) is not None
    assert plan.notes == []


def test_text_that_was_not_read_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, plan = speculator(), Plan(OLD, "Tried", K, fused=True)
    monkeypatch.setattr(proposal, "digest", lambda release: "another")
    assert "not the one that was read" in refusal(spec, plan, [((), {})])
    monkeypatch.setattr(proposal, "digest", lambda release: release.digest)
    monkeypatch.setattr(proposal, "overridden", lambda cls, release: "propose")
    assert "has a propose of its own" in refusal(spec, plan, [((), {})])


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, plan = speculator(), Plan(OLD, "Tried", K, fused=True)
    monkeypatch.setenv(asked.ONE_GRAPH, "0")
    assert refusal(spec, plan, [((), {})]) == "DRAFTFUSE_VLLM_ONE_GRAPH=0"


def test_capture_is_watched_and_left_as_it_was() -> None:
    manager = captured()
    with recorded(manager) as given:
        manager.capture("function", "a", progress_bar_desc="b")
    manager.capture("function", "c", progress_bar_desc="d")
    assert given == [(("a",), {"progress_bar_desc": "b"})]
    assert "capture" not in vars(manager)
    with recorded(None) as given:
        assert given == []


class Shipped:
    """A speculator whose ``propose`` says what it was called with."""

    def propose(self, *given: Any) -> Any:
        return ("shipped", given)


def propose(spec: Any, **switches: Any) -> Any:
    given = batch(2)
    with torch.inference_mode():
        return patch._propose(Shipped.propose, spec, given, "m", "s", torch.ones(8, 4), aux_of(8), *read(2), **switches)


def test_proposals_are_handed_on_where_there_is_no_graph() -> None:
    spec = speculator()
    delattr(spec, proposal.SEEN)
    shipped, given = propose(spec, mm_inputs=None)
    assert shipped == "shipped"
    assert given[1:3] == ("m", "s")
    assert given[-5:] == (None, False, False, None, False)
    assert getattr(spec, proposal.SEEN) == ((3, torch.float32), (5, torch.float32))


@pytest.mark.parametrize(
    "switch", [{"dummy_run": True}, {"is_profile": True}, {"mm_inputs": ()}, {"num_tokens_across_dp": 1}]
)
def test_dummy_runs_are_handed_on(switch: dict[str, Any]) -> None:
    spec = speculator()
    made(spec)
    assert propose(spec)[0] != "shipped"
    assert propose(spec, **switch)[0] == "shipped"
    plan_of(spec).fused = False  # type: ignore[union-attr]
    assert propose(spec)[0] == "shipped"


RELEASED = [("0.25.1", ("eagle3", "drawn", "static")), ("0.26.0", ("eagle3",))]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which is not installed")
@pytest.mark.parametrize(("version", "kinds"), RELEASED, ids=[version for version, _ in RELEASED])
def test_released_speculators_draft_the_same(version: str, kinds: tuple[str, ...]) -> None:
    if not (WHEELS / version / "vllm").is_dir():
        pytest.skip("no unpacked wheel: DRAFTFUSE_VLLM_WHEELS is not set (bash .ci/vllm sets it)")
    names = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    names["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, str(Path(__file__).with_name("proposals.py")), str(WHEELS / version), *kinds]
    done = subprocess.run(command, env=names, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, done.stdout[-3000:] + done.stderr[-6000:]
    for kind, report in json.loads(found[0].removeprefix("RESULT ")).items():
        check(kind, report)


def check(kind: str, report: dict[str, Any]) -> None:
    """Every arm drafts as shipped and leaves each buffer as shipped; the control shows that it matters."""
    assert report["distinct"] > 10, "a model that drafts one token proves nothing"
    for arm in ("decode", "one graph", "kernels"):
        assert (kind, arm, report[arm]["equal"], report[arm]["differing"]) == (kind, arm, True, [])
    for arm in ("one graph", "kernels"):
        assert "proposals in one graph: 7" in report[arm]["told"], report[arm]["told"]
        assert "proposals outside one graph: 3" in report[arm]["told"]
    assert "because DRAFTFUSE_VLLM_ONE_GRAPH=0" in report["decode"]["told"]
    assert report["control"]["equal"] is (kind == "static"), "static positions need no rejections"
