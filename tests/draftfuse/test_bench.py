"""The benchmark's host logic and, on small sizes, all that it measures; what needs CUDA is behind one function each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import draftfuse
from draftfuse.bench import cells as grid
from draftfuse.bench import modes, tiny
from draftfuse.bench.cells import Cell, all_cells, select, speculator_for, step_bytes
from draftfuse.bench.layers import Experts
from draftfuse.bench.measure import Profile, Timing, floor_ms, summarise, time_launch
from draftfuse.bench.memory import measure_kv_copies
from draftfuse.bench.modes import DEFAULT_MODES, MODES, Ready, Workbench
from draftfuse.bench.results import Results
from draftfuse.bench.runner import add_ratios, measure_cells
from draftfuse.bench.span import Span, split_propose
from draftfuse.bench.speculators import BenchSpeculator, MtpBlock
from draftfuse.bench.table import load_cells, readme_table, terminal_table
from draftfuse.bench.verdict import verdict
from draftfuse.bench.workload import Workload, uniform_batch
from draftfuse.errors import InvalidOptionError

CPU = torch.device("cpu")
SPECULATORS = list(grid.SPECULATORS)
Record = dict[str, Any]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def small(name: str, requests: int = 3, k: int = 3, attention: str = "triton") -> tuple[BenchSpeculator, Cell]:
    cell = Cell(name, requests, k, 64)
    return speculator_for([cell], CPU, attention), cell


def agreements(spec: BenchSpeculator, cell: Cell, names: Sequence[str]) -> Record:
    """Each mode's share of the eager loop's tokens, or all of its record where it failed."""
    (record,) = measure_cells(Workbench(spec, [cell.requests]), [cell], names, 1e9, lambda text: None, 4)
    return {name: mode.get("agreement", mode) for name, mode in record["modes"].items()}


# ---- cells and bytes


def test_the_grid_is_the_issues() -> None:
    names = {c.name for c in all_cells(torch.device("cuda"))}
    assert len(names) == len(SPECULATORS) * 4 * 2 * 2
    assert {"eagle-a/r1/k8/c1024", "mtp/r64/k4/c8192", "draft-28/r16/k4/c1024"} <= names


def test_patterns_select_cells() -> None:
    cells = all_cells(torch.device("cuda"))
    assert select(cells, []) == cells
    assert {c.speculator for c in select(cells, ["eagle-b"])} == {"eagle-b"}
    assert [c.name for c in select(cells, ["mtp/r1/k4/*"])] == ["mtp/r1/k4/c1024", "mtp/r1/k4/c8192"]


def test_a_pattern_without_a_cell_is_an_error() -> None:
    with pytest.raises(InvalidOptionError, match="'eagle-z'"):
        select(all_cells(CPU), ["eagle-z"])


@pytest.mark.parametrize("name", SPECULATORS)
def test_step_bytes_count_weights_and_kv(name: str) -> None:
    spec, cell = small(name)
    each, share = step_bytes(spec, cell)
    kv_token = sum(cache[0, 0].numel() * cache.element_size() for cache in spec.kv_caches())
    assert len(each) == cell.k - 1
    assert each[1] - each[0] == cell.requests * kv_token
    assert each[0] == spec.weight_bytes(cell.requests) + 64 * 3 * kv_token
    assert 0 < share < 1


def test_weight_bytes_of_the_eagle_head() -> None:
    spec, _ = small("eagle-a")
    c = spec.config
    heads = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    inner = c.num_attention_heads * c.head_dim
    products = heads * 2 * c.hidden_size + inner * c.hidden_size + 3 * c.intermediate_size * c.hidden_size
    assert spec.weight_bytes(1) == 4 * (products + c.vocab_size * c.hidden_size + 4 * c.hidden_size)


def test_distinct_experts() -> None:
    experts = Experts()
    assert experts.distinct(1) == pytest.approx(6)
    assert 20 < experts.distinct(4) < 24
    assert 63 < experts.distinct(64) < 64


# ---- speculators


@pytest.mark.parametrize("attention", ["triton", "fa3"])
@pytest.mark.parametrize("name", SPECULATORS)
def test_modes_draft_what_the_eager_loop_drafts(name: str, attention: str) -> None:
    spec, cell = small(name, attention=attention)
    assert agreements(spec, cell, ("eager", "split", "graph")) == {"eager": 1.0, "split": 1.0, "graph": 1.0}


@pytest.mark.slow
def test_compiled_modes_draft_what_the_eager_loop_drafts() -> None:
    assert agreements(*small("eagle-b", k=2), DEFAULT_MODES) == dict.fromkeys(DEFAULT_MODES, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), [("draft-28", "triton"), ("mtp", "triton"), ("eagle-b", "fa3")])
def test_fused_loops_draft_what_the_eager_loop_drafts(name: str, attention: str) -> None:
    assert agreements(*small(name, attention=attention), ("none",)) == {"none": 1.0}


def test_a_twin_has_exact_rows_and_shares_kv() -> None:
    spec, _ = small("eagle-b")
    twin = spec.twin(2)
    assert {t.shape[0] for n, t in twin.inputs.named_tensors().items() if n != "query_start_loc"} == {2}
    assert twin.attn_groups[0].slot_mapping.shape == (2,)
    assert twin.kv_caches()[0] is spec.kv_caches()[0]
    assert twin.inputs.positions.data_ptr() != spec.inputs.positions.data_ptr()


def test_routed_experts_are_those_that_each_token_chose() -> None:
    spec, _ = small("mtp")
    assert isinstance(spec, MtpBlock)
    layer, x = spec.layer, torch.randn(5, spec.config.hidden_size)
    share, chosen = (x @ layer.router.T).softmax(-1).topk(layer.experts.active)
    for token in range(5):
        expected = torch.zeros(spec.config.hidden_size)
        for weight, expert in zip(share[token], chosen[token].tolist(), strict=True):
            gate, up = (layer.into[expert].float() @ x[token]).chunk(2)
            expected += weight * (layer.out_of[expert].float() @ (torch.nn.functional.silu(gate) * up))
        assert torch.allclose(layer.routed(x)[token], expected, atol=0.05, rtol=0.05)


# ---- propose


def test_split_propose_drafts_what_propose_drafts() -> None:
    spec, cell = small("eagle-b", k=2)
    bench = Workbench(spec, [cell.requests])
    bench.load(cell.requests, cell.context)
    batch = uniform_batch(spec, cell.requests, cell.context, cell.k)
    fused = draftfuse.compile(spec, mode="eager", request_capacities=[cell.requests])
    expected = fused.propose(batch, copy=True)
    ready = split_propose(bench, cell.requests, cell.k, batch)
    spec.inputs.draft_tokens.fill_(-1)
    ready.launch()
    assert torch.equal(spec.inputs.draft_tokens[: cell.requests, : cell.k], expected)


def test_span_compares_split_and_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = iter([200.0, 10.0, 9.0, 400.0, 50.0])
    monkeypatch.setattr("draftfuse.bench.span.host_span", lambda run, reset, device, repeats: next(spans))
    spec, cell = small("eagle-b")
    fused = draftfuse.compile(spec, mode="eager", request_capacities=[cell.requests])
    span = Span(Workbench(spec, [cell.requests]), fused, cell.requests, cell.context, cell.k)
    record = span.times(rounds=1)
    assert record | {"decode_ratio": 0.05, "propose_ratio": 0.125, "graph_launch_us": 9.0} == record
    assert span.launches() == {}


# ---- measuring


def test_inputs_are_reset_before_each_run() -> None:
    calls: list[str] = []
    timing = time_launch(lambda: calls.append("run"), lambda: calls.append("reset"), CPU, repeats=4, warmups=2)
    assert calls == ["reset", "run"] * 6
    assert len(timing.device_ms) == len(timing.host_us) == 4


def test_timing_numbers() -> None:
    timing = Timing([1.0, 2.0, 3.0], [10.0, 20.0, 30.0])
    timing.add(Timing([4.0, 5.0], [40.0, 50.0]))
    assert timing.numbers() == {"gpu_ms": 3.0, "gpu_ms_low": 1.5, "gpu_ms_high": 4.5, "cpu_us": 30.0}


def event(name: str, device: str, microseconds: float = 0.0) -> Any:
    times = SimpleNamespace(elapsed_us=lambda: microseconds)
    return SimpleNamespace(name=name, device_type=f"DeviceType.{device}", time_range=times)


def test_a_profile_is_counted() -> None:
    events = [
        event("cudaGraphLaunch", "CPU"),
        event("cudaLaunchKernel", "CPU"),
        event("cuLaunchKernelEx", "CPU"),
        event("aten::mm", "CPU"),
        event("gemm", "CUDA", 10.0),
        event("gemm", "CUDA", 20.0),
        event("Memcpy DtoD (Device -> Device)", "CUDA", 5.0),
        event("argmax", "CUDA", 1.0),
    ]
    top = [{"kernel": "gemm", "count": 2, "us": 30.0}]
    found = summarise(events, top=1)
    assert found == Profile(1, 2, kernels=3, copies=1, busy_ms=pytest.approx(0.036), top=top)
    assert found.launches == 3


def test_floor() -> None:
    assert floor_ms([1e9, 3e9], 4e12) == pytest.approx(1.0)


def test_ratios() -> None:
    records: dict[str, Record] = {"hand": {"gpu_ms": 2.0}, "draftfuse": {"gpu_ms": 1.0}, "whole": {"error": "no"}}
    add_ratios(records, 0.5)
    assert records["draftfuse"] == {"gpu_ms": 1.0, "to_floor": 2.0, "hand_over": 2.0, "to_best_other": 0.5}
    assert records["hand"]["to_best_other"] == 2.0
    assert records["whole"] == {"error": "no"}


def test_a_mode_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Workbench, rows: int, k: int) -> Ready:
        raise RuntimeError("no such kernel\nand more")

    def breaks_later(bench: Workbench, rows: int, k: int) -> Ready:
        return Ready(lambda: 1 / 0, bench.spec)

    monkeypatch.setitem(MODES, "hand", broken)
    monkeypatch.setitem(MODES, "whole", breaks_later)
    spec, cell = small("eagle-b")
    (record,) = measure_cells(Workbench(spec, [3]), [cell], ("eager", "hand", "whole"), 1e9, lambda text: None, 4)
    assert record["modes"]["hand"]["error"] == "RuntimeError: no such kernel"
    assert record["modes"]["whole"]["error"].startswith("ZeroDivisionError")
    assert record["modes"]["eager"]["agreement"] == 1.0


def test_cells_that_differ_in_context_share_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[int, int]] = []
    monkeypatch.setitem(MODES, "eager", lambda bench, rows, k: built.append((rows, k)) or modes.eager(bench, rows, k))
    cells = [Cell("eagle-b", 2, k, context) for k in (2, 3) for context in (32, 64)]
    spec = speculator_for(cells, CPU, "triton")
    records = list(measure_cells(Workbench(spec, [2]), cells, ["eager"], 1e9, lambda text: None, 4))
    assert [r["cell"] for r in records] == [c.name for c in cells]
    assert built == [(2, 2), (2, 3)]


@pytest.mark.slow
def test_kv_pools_are_not_copied() -> None:
    spec, _ = small("eagle-b")
    before = spec.kv_caches()[0].shape[0]
    found = measure_kv_copies(spec, 1 << 20, 2, 2, 32)
    assert found == {"kv_bytes": found["kv_bytes"], "peak_bytes_beyond": 0, "copied": False}
    assert spec.kv_caches()[0].shape[0] > before


def test_a_workload_puts_live_rows_back() -> None:
    spec, cell = small("eagle-b")
    work = Workload(spec, 2, cell.context)
    before = {n: t.clone() for n, t in spec.inputs.view(2, 2).named_tensors().items()}
    spec.inputs.positions.fill_(9)
    spec.inputs.draft_tokens.fill_(9)
    work.reset(spec)
    assert all(torch.equal(t, before[n]) for n, t in spec.inputs.view(2, 2).named_tensors().items())


# ---- results and tables


@dataclass(frozen=True)
class Files:
    one: Path
    two: Path


@pytest.fixture
def files(tmp_path: Path) -> Files:
    found = []
    for name, speed in (("eagle-a", 1.0), ("eagle-b", 0.5)):
        results = Results(tmp_path / f"{name}.json", CPU, {})
        results.data["environment"] = {"device": "GPU", "torch": "2.11.0", "triton": None, "date": "2026-11-29"}
        ours = {"gpu_ms": speed, "to_floor": 1.2, "hand_over": 1.25, "launches": 1, "agreement": 1.0}
        both = {"hand": {"gpu_ms": 1.25 * speed}, "whole": {"error": "OutOfMemoryError: no"}, "draftfuse": ours}
        results.append("cells", {"cell": f"{name}/r1/k8/c1024", "floor_ms": speed / 1.2, "modes": both})
        found.append(tmp_path / f"{name}.json")
    return Files(*found)


def test_a_result_file_is_complete_after_each_cell(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    results = Results(path, CPU, {"repeats": 4})
    results.append("cells", {"cell": "a"})
    assert json.loads(path.read_text())["cells"] == [{"cell": "a"}]
    results.append("cells", {"cell": "b"})
    written = json.loads(path.read_text())
    assert [c["cell"] for c in written["cells"]] == ["a", "b"]
    assert written["environment"]["torch"] == torch.__version__
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


README_TABLE = """\
| cell | fused by hand | whole loop compiled | draftfuse | floor | draftfuse / floor | by hand / draftfuse |
|---|---|---|---|---|---|---|
| `eagle-a/r1/k8/c1024` | 1.250 | - | 1.000 | 0.833 | 1.20 | 1.25 |
| `eagle-b/r1/k8/c1024` | 0.625 | - | 0.500 | 0.417 | 1.20 | 1.25 |

GPU, torch 2.11.0, 2026-11-29; milliseconds, medians."""


def test_readme_table(files: Files) -> None:
    assert readme_table(*load_cells([files.one, files.two])) == README_TABLE


def test_terminal_table_has_a_row_for_each_mode(files: Files) -> None:
    found, _ = load_cells([files.one])
    table = terminal_table(found)
    assert table.row_count == 3
    assert "OutOfMemoryError: no" in list(table.columns[3].cells)


def judged(name: str, ours: list[float], hand: list[float], floor: float, kv_share: float = 0.1) -> Record:
    measured: dict[str, Record] = {
        mode: {"gpu_ms": sum(rounds) / 2, "rounds_ms": rounds} for mode, rounds in (("hand", hand), ("draftfuse", ours))
    }
    add_ratios(measured, floor)
    return {"cell": name, "kv_share": kv_share, "modes": measured}


def test_the_verdict_names_misses() -> None:
    found = verdict(
        [
            judged("eagle-a/r1/k8/c1024", [1.5, 1.5], [2.0, 2.0], 1.23),
            judged("eagle-b/r1/k8/c1024", [1.1, 1.1], [1.0, 1.0], 0.5),
            judged("eagle-b/r64/k8/c8192", [1.1, 1.0], [1.0, 1.0], 0.5, kv_share=0.9),
        ]
    )
    assert found == [
        "never slower: 2 of 3 cells",
        "fused by hand / draftfuse, median of 2 cells with little KV: 1.121",
        "miss: eagle-b/r1/k8/c1024: slower than hand",
        "miss: eagle-b/r1/k8/c1024: hand_over 0.909, goal 1.25",
        "miss: eagle-b/r1/k8/c1024: to_floor 2.200, goal 1.5",
    ]


def test_a_cell_without_a_number_is_a_miss() -> None:
    cell = {"cell": "mtp/r1/k4/c64", "kv_share": 0.1, "modes": {"draftfuse": {"error": "no"}}}
    assert verdict([cell]) == ["never slower: 0 of 1 cells", "miss: mtp/r1/k4/c64: no number"]


# ---- the command


def test_render_prints_the_readme_table(files: Files) -> None:
    from draftfuse.cli import app

    done = CliRunner().invoke(app, ["bench", "--render", str(files.one), "--render", str(files.two)])
    assert done.exit_code == 0
    assert done.stdout.strip() == README_TABLE
    listed = CliRunner().invoke(app, ["bench", "--render", str(files.one), str(files.two)])
    assert listed.stdout == done.stdout
    assert CliRunner().invoke(app, ["bench", str(files.one)]).exit_code == 2
    few = CliRunner().invoke(app, ["bench", "--render", str(files.one), "--cells", "mtp"]).stdout
    assert "`eagle" in done.stdout
    assert "`eagle" not in few


@pytest.mark.parametrize("arguments", [["--modes", "fast"], ["--attention", "best"], ["--cells", "eagle-z"]])
def test_unknown_names_are_errors(arguments: list[str]) -> None:
    from draftfuse.cli import app

    done = CliRunner().invoke(app, ["bench", "--device", "cpu", *arguments])
    assert done.exit_code == 2
    assert "InvalidOptionError" in done.stderr
    assert repr(arguments[1]) in done.stderr


@pytest.mark.slow
def test_the_command_measures_apart(tmp_path: Path) -> None:
    from draftfuse.cli import app

    cells = ["--cells", "eagle-b/r1/k4/*,mtp/r4/k4/*", "--modes", "eager,none", "--repeats", "4"]
    done = CliRunner().invoke(app, ["bench", "--device", "cpu", "--json", "--out", str(tmp_path), *cells])
    found = json.loads(done.stdout)
    assert [c["cell"] for c in found["cells"]] == ["eagle-b/r1/k4/c64", "mtp/r4/k4/c64"]
    assert all(m["agreement"] == 1.0 for c in found["cells"] for m in c["modes"].values())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bench-eagle-b-cpu.json", "bench-mtp-cpu.json"]


@pytest.mark.slow
def test_the_packaged_model_drafts_the_same_tokens_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "REPEATS", 3)
    (record,) = tiny.measure_tiny([2], 1, lambda text: None)
    assert record["k"] == 2
    assert record["tokens_match"]


@pytest.mark.slow
def test_compile_time_is_split_into_stages() -> None:
    from draftfuse.bench.compile_time import measure_compile

    found = measure_compile("eagle-b", CPU, "triton", ks=(2,), capacities=(1, 2))
    assert found["builds"] == 2
    assert found["total_s"] >= found["trace_s"] + found["compile_s"] > 0
