"""The replacements on stand-ins for vLLM's classes: what is handed on, what is captured, what is replayed."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from draftfuse.vllm import asked, explain, patch, record
from draftfuse.vllm.explain import explain_worker
from draftfuse.vllm.plan import PLAN, make_plan, plan_of
from draftfuse.vllm.versions import RELEASES, release_of

OLD, NEW = RELEASES[0], RELEASES[-1]


class Mode(Enum):
    NONE = 0
    FULL = 2


def desc(rows: int, mode: Mode = Mode.FULL) -> Any:
    return SimpleNamespace(cg_mode=mode, num_reqs=rows, num_tokens=rows)


class Manager:
    """Keeps what it captures and runs it again."""

    def __init__(self) -> None:
        self.graphs: dict[Any, Any] = {}
        self.functions: list[Any] = []

    def capture(self, function: Any) -> None:
        self.functions.append(function)
        self.graphs[SimpleHash(4)] = function

    def run_fullgraph(self, batch: Any) -> None:
        self.functions[-1](4, 4, {"l": "given"}, {"l": "slots"}, None, Mode.NONE)


class SimpleHash:
    def __init__(self, rows: int) -> None:
        self.num_reqs = self.num_tokens = rows


class Base:
    """What both generations of the speculator share."""

    num_speculative_steps = 4
    max_model_len, draft_max_seq_len = 64, 9
    advance_draft_positions = True

    def __init__(self) -> None:
        parallel = SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1)
        compilation = SimpleNamespace(inductor_compile_config={})
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel, compilation_config=compilation, model_config=SimpleNamespace()
        )
        self.log: list[Any] = []
        self.device = torch.device("cpu")
        self.eplb_state = self.pcp_manager = None
        self.supports_mm_inputs = False
        self.idx_mapping = torch.ones(4, dtype=torch.int32)
        self.current_draft_step = torch.tensor(0)
        self.input_buffers = SimpleNamespace(query_start_loc=torch.arange(5), positions=torch.zeros(4))
        self.block_tables = SimpleNamespace(compute_slot_mappings=self._slots, input_block_tables=["table"])
        self.kv_cache_config = None
        builder = type("TritonAttentionMetadataBuilder", (), {"device": "cuda"})()
        self.group = SimpleNamespace(get_metadata_builder=lambda index: builder, kv_cache_group_id=0)
        self.attn_groups = [[self.group]]
        self.decode_cudagraph_manager = Manager()
        self.model = torch.nn.Linear(2, 2)

    def _slots(self, *args: Any) -> str:
        self.log.append("slots")
        return "slots"

    def load_model(self) -> None: ...

    def _build_draft_attn_metadata(self, num_reqs: int, num_reqs_padded: int, num_tokens_padded: int) -> Any:
        self.log.append(f"build max {self.draft_max_seq_len}")
        return {"l": "built"}

    def _generate_draft(self, rows: int, tokens: int, metadata: Any, slots: Any, across: Any, *rest: Any) -> None:
        name = metadata["l"] if metadata else None
        self.log.append((int(self.current_draft_step), name, slots))


def make_old() -> type:
    class AutoRegressiveSpeculator(Base):
        def set_attn(self) -> None: ...

        def capture(self) -> None:
            self.decode_cudagraph_manager.capture(self._generate_draft)

        def _multi_step_decode(self, rows: int, skip_attn: bool, batch: Any, across: Any) -> str:
            return "shipped"

    return AutoRegressiveSpeculator


def make_new() -> type:
    class TargetDependentARSpeculator(Base):
        supports_decode_metadata_update = False

        def _configure_decode_metadata_update(self) -> None:
            self.supports_decode_metadata_update = False

        def capture(self) -> None: ...

        def _generate_fused_drafts(self, *args: Any, **kwargs: Any) -> str:
            return "shipped body"

        def _fused_multi_step_decode(self, *args: Any) -> str:
            return "shipped"

    return TargetDependentARSpeculator


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one function of vLLM that the loop calls by name; and the switch is on."""
    name = "vllm.v1.worker.gpu.attn_utils"
    module = ModuleType(name)
    module.build_slot_mappings_by_layer = lambda slots, config: {"l": slots}  # type: ignore[attr-defined]
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(asked.SWITCH, "1")
    monkeypatch.delenv(asked.COMPILER, raising=False)


def patched(cls: type, release: Any) -> Any:
    patch.patch_speculator(SimpleNamespace(**{cls.__name__: cls}), release)  # type: ignore[arg-type]
    return cls()


def test_patching_twice_changes_nothing() -> None:
    cls = make_old()
    patched(cls, OLD)
    before = cls.capture  # type: ignore[attr-defined]
    patched(cls, OLD)
    assert cls.capture is before  # type: ignore[attr-defined]


def test_old_release_captures_the_whole_loop_and_replays_it_once() -> None:
    spec = patched(make_old(), OLD)
    spec.set_attn()
    spec.capture()
    assert "_generate_draft" not in vars(spec)
    assert spec.idx_mapping.tolist() == [0, 0, 0, 0]
    assert spec.log == []
    assert spec._multi_step_decode(3, False, desc(4), None) is None
    step = [(s, "built", {"l": "slots"}) for s in (1, 2, 3)]
    assert spec.log == [
        "slots",
        "build max 9",
        step[0],
        "slots",
        "build max 9",
        step[1],
        "slots",
        "build max 9",
        step[2],
    ]
    assert plan_of(spec).counters["graph replays"] == 1  # type: ignore[union-attr]
    assert plan_of(spec).captured == ["4 requests, 3 draft steps"]  # type: ignore[union-attr]


def test_recording_sees_the_largest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = patched(make_old(), OLD)
    spec.set_attn()
    monkeypatch.setattr(spec.decode_cudagraph_manager, "capture", lambda f: f(4, 4, {"l": 0}, None, None, Mode.NONE))
    spec.capture()
    assert spec.log[1] == "build max 64"
    assert spec.draft_max_seq_len == 9


def test_old_release_hands_on_what_has_no_graph() -> None:
    spec = patched(make_old(), OLD)
    spec.set_attn()
    assert spec._multi_step_decode(3, False, desc(3, Mode.NONE), None) == "shipped"


def test_dummy_run_without_attention_does_not_replay() -> None:
    spec = patched(make_old(), OLD)
    spec.set_attn()
    spec.capture()
    spec._multi_step_decode(2, True, desc(4), None)
    assert spec.log == [(1, None, None), (2, None, None), (3, None, None)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: setattr(s, "num_speculative_steps", 1), "no decode steps"),
        (lambda s: setattr(s, "eplb_state", object()), "experts"),
        (lambda s: setattr(s, "supports_mm_inputs", True), "multimodal"),
        (lambda s: setattr(s, "pcp_manager", object()), "prefill context"),
        (lambda s: setattr(s.vllm_config.parallel_config, "decode_context_parallel_size", 2), "decode context"),
        (lambda s: setattr(s.vllm_config.model_config, "enable_sleep_mode", True), "sleep mode"),
        (lambda s: setattr(s.group.get_metadata_builder(0), "rswa_window", 8), "windowed"),
    ],
)
def test_what_draftfuse_declines_stays_as_shipped(change: Any, reason: str) -> None:
    spec = patched(make_old(), OLD)
    change(spec)
    spec.set_attn()
    spec.capture()
    assert spec.decode_cudagraph_manager.functions == [spec._generate_draft]
    assert spec._multi_step_decode(3, False, desc(4), None) == "shipped"
    worker = SimpleNamespace(model_runner=SimpleNamespace(speculator=spec))
    assert reason in explain_worker(worker)


def test_nothing_happens_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(asked.SWITCH)
    spec = patched(make_old(), OLD)
    spec.set_attn()
    assert plan_of(spec) is None
    assert spec._multi_step_decode(3, False, desc(4), None) == "shipped"


def test_new_release_fuses_what_vllm_leaves_split() -> None:
    spec = patched(make_new(), NEW)
    spec._configure_decode_metadata_update()
    assert spec.supports_decode_metadata_update
    assert spec._fused_multi_step_decode(3, False, desc(4, Mode.NONE), None, torch.ones(4), 4) == "shipped"
    assert getattr(spec, PLAN).upper_bound is None


def test_new_release_replays_without_building_on_the_host() -> None:
    spec = patched(make_new(), NEW)
    spec._configure_decode_metadata_update()
    mapped: list[Any] = []
    spec.group.map_to_kernel_block_table = mapped.append
    spec.decode_cudagraph_manager.functions.append(lambda *args: spec.log.append("replayed"))
    spec._fused_multi_step_decode(3, False, desc(4), None, torch.ones(4), 4)
    assert spec.log == ["replayed"]
    assert mapped == ["table"]


def test_new_release_uses_vllm_s_update_where_every_backend_has_one() -> None:
    spec = patched(make_new(), NEW)
    spec.group.get_metadata_builder(0).supports_draft_decode_metadata_update = True
    spec.group.update_draft_decode_metadata = lambda metadata: spec.log.append("update")
    spec._configure_decode_metadata_update()
    spec._generate_fused_drafts(4, 4, {"l": "held"}, {}, None, Mode.NONE, num_speculative_steps=3)
    steps = [(s, "held", {"l": "slots"}) for s in (1, 2)]
    assert spec.log == ["slots", "update", steps[0], "slots", "update", steps[1]]


def test_new_release_without_a_plan_runs_vllm_s_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(asked.SWITCH)
    spec = patched(make_new(), NEW)
    spec._configure_decode_metadata_update()
    assert not spec.supports_decode_metadata_update
    assert spec._generate_fused_drafts(4, 4, None, None, None, Mode.NONE, 4) == "shipped body"


def test_explain_joins_workers() -> None:
    engine = SimpleNamespace(collective_rpc=lambda name: [f"{name} a", f"{name} b"])
    assert explain(engine) == "worker 0: draftfuse_explain a\nworker 1: draftfuse_explain b"
    same = SimpleNamespace(collective_rpc=lambda name: ["x", "x"])
    assert explain(same) == "x"


def test_explain_without_a_speculator() -> None:
    assert "no speculator" in explain_worker(SimpleNamespace())


def test_plan_says_what_was_decided() -> None:
    spec = make_old()()
    plan = make_plan(spec, release_of("0.25.1"))  # type: ignore[arg-type]
    assert plan.explain().splitlines() == [
        "AutoRegressiveSpeculator, 4 speculative tokens, vLLM 0.25 to 0.26: fused, compiler none",
        "  backend TritonAttentionMetadataBuilder: aliased (views of persistent buffers)",
    ]
    assert record.longest(spec, 3).tolist() == [64, 64, 64]
