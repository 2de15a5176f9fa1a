"""The commands lint, audit and bisect: exit codes, JSON, and a reproduction that runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import draftfuse
from draftfuse import bisect as bisect_module
from draftfuse import tapped
from draftfuse.audit_report import AuditReport, Divergence
from draftfuse.backends import unregister_backend
from draftfuse.bisect import bisect, write_reproduction
from draftfuse.build import passes_for
from draftfuse.cli import app
from draftfuse.errors import InvalidOptionError
from draftfuse.loading import dummy_batch, load
from draftfuse.passes import ir, name_of
from tests.failures.small import Small

ROOT = Path(__file__).resolve().parents[2]
RIGHT, WRONG = "tests.draftfuse.test_safety_cli:right", "tests.draftfuse.test_safety_cli:random"


def right() -> Small:
    return Small(k=2)


def random() -> Any:
    from tests.failures.test_class_05_sampling_repeats import Multinomial

    return Multinomial(k=2)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_lint_exits_with_one_on_errors() -> None:
    assert run("lint", RIGHT).exit_code == 0
    result = run("lint", WRONG, "--json")
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)
    assert (found["severity"], found["name"], found["allowed"]) == ("error", "baked-rng", None)
    assert found["source"]["file"].endswith("test_class_05_sampling_repeats.py")
    assert "multinomial" in found["source"]["text"]
    assert "gumbel_sample" in found["todo"]
    printed = run("lint", WRONG)
    assert printed.exit_code == 1
    place = f"{found['source']['file']}:{found['source']['line']}: {found['source']['text']}"
    assert printed.stdout == f"error [baked-rng] {found['text']}. {found['todo']}\n  {place}\n"


def test_audit_prints_json() -> None:
    result = run("audit", RIGHT, "--steps", "2", "--compiler", "none", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ok"] is True


def strict(text: str) -> Any:
    """Parsed as JSON proper, which has no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_an_audit_that_met_nan_is_json() -> None:
    report = AuditReport()
    for value in (float("nan"), float("inf"), 1.5, 3):
        report.divergences.append(Divergence(0, 1, "forward", "hidden", 0, value, value, None))
    found = strict(report.to_json())["divergences"]
    assert [d["got"] for d in found] == ["nan", "inf", 1.5, 3]


def readme_commands() -> list[str]:
    """Every lint, audit and bisect that the README shows with a target."""
    lines = (ROOT / "README.md").read_text().splitlines()
    return [line.split("#")[0].strip() for line in lines if re.match(r"draftfuse (lint|audit|bisect) ", line)]


SHOWN = [pytest.param(c, marks=[pytest.mark.slow] if "bisect" in c else []) for c in readme_commands()]


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_of_the_readme_runs_as_it_stands(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = run(*command.split()[1:])
    assert result.exit_code == 0, result.output
    if "--json" in command:
        assert strict(result.stdout)["ok"] is True
    assert not Path("reproduction.py").exists()


def test_the_readme_shows_all_three_commands() -> None:
    assert [command.split()[1] for command in readme_commands()] == ["lint", "audit", "bisect"]


EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "train_tiny"]  # that one trains


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_lint_takes_every_example(path: Path) -> None:
    try:
        result = run("lint", f"{path}:make")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if path.stem == "custom_backend":
            unregister_backend("attention_sinks")
    assert (result.exit_code, result.stdout) == (0, "nothing found\n"), result.output


@pytest.mark.parametrize("target", ["nowhere:right", "tests.draftfuse.test_safety_cli:nothing", "tests"])
def test_a_bad_target_is_named(target: str) -> None:
    with pytest.raises(InvalidOptionError, match="module:factory"):
        bisect_module.bisect(lambda: load(target), "none")


def raises() -> Any:
    raise KeyError("weights")


def ends() -> Any:
    sys.exit(3)


def nothing_made() -> Any:
    return None


def takes(size: int) -> Any:
    return size


class Tree(Small):
    def sample(self, hidden: Any, step: int) -> Any:
        return super().sample(hidden, step).unsqueeze(1)


def tree() -> Small:
    return Tree(k=2)


HERE = "tests.draftfuse.test_safety_cli"
TARGETS: dict[str, tuple[str, str, str]] = {
    "raises": (f"{HERE}:raises", "InvalidSpeculatorError", "raises fails: got KeyError: 'weights', expected"),
    "ends": (f"{HERE}:ends", "InvalidSpeculatorError", "ends fails: got SystemExit: 3, expected a speculator"),
    "None": (f"{HERE}:nothing_made", "InvalidSpeculatorError", "nothing_made returns nothing: got None"),
    "arguments": (f"{HERE}:takes", "InvalidOptionError", "the factory takes arguments: got"),
    "not there": (f"{HERE}:absent", "InvalidOptionError", "absent (nothing of that name), expected module:factory"),
    "no function": (f"{HERE}:ROOT", "InvalidOptionError", "the target is no factory: got"),
    "no name": (HERE, "InvalidOptionError", "the target is no factory: got"),
    "nothing": ("", "InvalidOptionError", "the target is no factory: got nothing"),
    "no module": ("no_such_module:make", "InvalidOptionError", "Run in the folder of the module"),
    "relative": ("..above:make", "InvalidOptionError", "Run in the folder of the module"),
    "no file": ("no_such_file.py:make", "InvalidOptionError", "Run in the folder of the module"),
    "raises at import": ("bad.py:make", "InvalidOptionError", "(ValueError: odd), expected"),
    "no Python": ("worse.py:make", "InvalidOptionError", "(SyntaxError: "),
    "ends at import": ("over.py:make", "InvalidOptionError", "(SystemExit: 4), expected"),
}
SOURCES = {"bad.py": 'raise ValueError("odd")', "worse.py": "def make(:", "over.py": "raise SystemExit(4)"}


@pytest.mark.parametrize("command", ["lint", "audit", "bisect"])
@pytest.mark.parametrize("case", TARGETS)
def test_a_target_without_a_speculator_is_refused_in_words_and_in_json(
    case: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, name, words = TARGETS[case]
    monkeypatch.chdir(tmp_path)
    for file, text in SOURCES.items():
        Path(file).write_text(text)
    result = run(command, target, "--json")
    assert result.exit_code == 2, result.output
    error = strict(result.stdout)["error"]
    assert sorted(error) == ["came", "class", "expected", "source", "todo", "what"]
    assert error["class"] == name
    assert result.stderr.startswith(f"{name}: {error['what']}: got {error['came']}, expected {error['expected']}. ")
    assert words in result.stderr
    if target in (f"{f}:make" for f in SOURCES):
        assert Path(error["source"]["file"]).name == target.partition(":")[0]
        assert (error["source"]["line"], error["source"]["text"]) == (1, SOURCES[target.partition(":")[0]])


@pytest.mark.parametrize("command", ["audit", "bisect"])
def test_a_loop_of_another_kind_is_refused_in_json(command: str) -> None:
    result = run(command, f"{HERE}:tree", "--compiler", "none", "--json")
    assert result.exit_code == 2, result.output
    error = strict(result.stdout)["error"]
    assert (error["class"], error["came"]) == ("UnsafeLoopError", "(3, 1)")
    assert error["source"]["text"] == "def sample(self, hidden: Any, step: int) -> Any:"


def test_every_command_with_json_has_its_refusal_in_json(tmp_path: Path) -> None:
    refused = [
        ["audit", RIGHT, "--compiler", "gcc"],
        ["audit", RIGHT, "--compiler", "none", "--steps", "9"],
        ["bisect", RIGHT, "--out", str(tmp_path / "nowhere" / "x.py")],
        ["bisect", RIGHT, "--out", str(tmp_path)],
        ["demo", "--device", "tpu"],
        ["demo", "--compiler", "gcc"],
        ["bench", "--cells", "nothing", "--device", "cpu"],
        ["bench", "--modes", "nothing"],
        ["bench", "--out", __file__, "--device", "cpu"],
        ["bench", "--render", str(tmp_path / "nothing.json")],
        ["bench", "--render", __file__],
    ]
    for arguments in refused:
        result = run(*arguments, "--json")
        assert result.exit_code == 2, arguments
        assert strict(result.stdout)["error"]["class"] == "InvalidOptionError"
        assert result.stderr.count("\n") == 1, result.stderr


def test_bisect_prints_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reports = iter([AuditReport([Divergence(0, 1, "forward", "hidden", 0, 1, 2, None)]), AuditReport()])
    monkeypatch.setattr(bisect_module, "_audited", lambda *args: next(reports))
    result = run("bisect", RIGHT, "--json", "--out", str(tmp_path / "show.py"))
    assert result.exit_code == 1, result.output
    assert strict(result.stdout) == {
        "culprit": "the emission (compiler='inductor')",
        "trials": [{"name": "everything", "equal": False}, {"name": "without the compiler", "equal": True}],
        "reproduction": str(tmp_path / "show.py"),
    }
    assert (tmp_path / "show.py").is_file()


def test_a_process_of_the_benchmark_that_fails_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from draftfuse.bench import command

    monkeypatch.setattr(command, "run_children", lambda given: dict.fromkeys(given, 3))
    monkeypatch.setattr(command, "child", lambda *given: 3)
    for more in ([], ["--compile"]):
        result = run("bench", "--device", "cpu", "--cells", "eagle-a", "--out", str(tmp_path), *more)
        assert result.exit_code == 1, result.output


@pytest.mark.slow
def test_bisect_names_the_pass_and_writes_a_reproduction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftfuse import build

    def hoist_invariants(graph: Any) -> int:
        """A pass gone wrong: what the tap of the second step's metadata marks is that of the first."""
        taps = [n for n in graph.nodes if ir.is_tap(n) and n.args[1] == "group0.metadata.start"]
        if len(taps) > 1:
            taps[1].replace_input_with(taps[1].args[0], taps[0].args[0])
        return 1

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        return tuple(hoist_invariants if name_of(p) == "hoist_invariants" else p for p in passes_for(*args, **kwargs))

    monkeypatch.setattr(tapped, "passes_for", spoiled)
    monkeypatch.setattr(build, "passes_for", spoiled)
    verdict = bisect(lambda: Small(k=3), "none")
    assert verdict.culprit == "hoist_invariants", str(verdict)
    assert verdict.trials[0].report.first is not None
    write_reproduction(tmp_path / "show.py", RIGHT, verdict)
    text = (tmp_path / "show.py").read_text()
    assert "hoist_invariants" in text
    monkeypatch.undo()
    shown = subprocess.run(
        [sys.executable, str(tmp_path / "show.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert "tensors compared" in shown.stdout, shown.stderr


def test_bisect_of_a_right_loop_finds_nothing() -> None:
    verdict = bisect(right, "none")
    assert verdict.culprit is None
    assert len(verdict.trials) == 1


def test_the_switch_runs_everything_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTFUSE_DISABLE", "1")
    fused = draftfuse.compile(Small(k=2), compiler="none")
    fused.decode(2)
    assert fused.report.builds == []
    assert fused.report.counters["eager steps"] == 1
    with pytest.raises(InvalidOptionError, match="an audit needs a compiled loop: got DRAFTFUSE_DISABLE=1"):
        fused.audit(dummy_batch(fused.spec))
    with pytest.raises(InvalidOptionError, match="needs a compiled loop"):
        bisect(right, "none")
