"""The demo: what it reports, that its modes agree, and what its command does with the result."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from draftfuse import demo as module
from draftfuse.cli import app
from draftfuse.errors import InvalidOptionError
from draftfuse.models import held_out_text

ACCEPTED = 1.5  # of 4 drafts on held-out text, greedy: what the packaged checkpoint must reach


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return module.demo(module.Options(compiler="none"))


def test_all_modes_draft_the_same_and_write_the_targets_text(result: dict[str, Any]) -> None:
    assert result["tokens_match"] is True
    assert list(result["modes"]) == ["eager", "split", "fused"]
    for mode in result["modes"].values():
        assert mode["tokens_match"]
        assert mode["text_is_the_targets"]
        assert mode["acceptance_length"] == result["modes"]["eager"]["acceptance_length"]
    assert not result["fallbacks"]


def test_acceptance_of_the_packaged_model(result: dict[str, Any]) -> None:
    assert result["acceptance_length"] > ACCEPTED
    assert 0 < result["modes"]["fused"]["acceptance_length"]["gumbel"] < result["acceptance_length"]


def test_one_call_a_propose(result: dict[str, Any]) -> None:
    assert result["launches_per_propose"] == 1
    calls = {name: (mode["calls_per_propose"], mode["calls_are"]) for name, mode in result["modes"].items()}
    assert calls["eager"] == (3, "eager steps")
    assert calls["split"][0] == 3
    assert all(mode["decode_span_ms"] > 0 for mode in result["modes"].values())


def test_the_result_is_json(result: dict[str, Any]) -> None:
    wanted = {"tokens_match", "acceptance_length", "launches_per_propose", "modes", "passes", "device", "torch"}
    assert wanted <= json.loads(json.dumps(result)).keys()
    assert {"decode", "propose"} == {p["build"] for p in result["passes"]}
    assert any(p["rewrites"] for p in result["passes"])


@pytest.mark.parametrize("match", [True, False])
def test_show(result: dict[str, Any], match: bool) -> None:
    out = io.StringIO()
    module.show({**result, "tokens_match": match, "fallbacks": ["decode: runs split"]}, Console(file=out, width=100))
    text = out.getvalue()
    assert ("All modes drafted the same tokens" in text) is match
    assert ("Tokens differ" in text) is not match
    assert "hoist_invariants" in text
    assert "fallback: decode: runs split" in text


# ---- prompts


def test_prompts_are_cut_at_even_distances() -> None:
    prompts = module.cut_prompts(held_out_text(), 3)
    assert [len(prompt) for prompt in prompts] == [module.PROMPT_TOKENS] * 3
    assert bytes(prompts[0]).decode() == held_out_text()[: module.PROMPT_TOKENS]
    assert module.cut_prompts("abcdef", 1) == [list(b"abc")]


@pytest.mark.parametrize(("text", "requests"), [("", 1), ("a", 1), ("abcdef", 0)])
def test_a_text_without_a_prompt_is_refused(text: str, requests: int) -> None:
    with pytest.raises(InvalidOptionError, match="no prompt can be cut"):
        module.cut_prompts(text, requests)


# ---- the command


def invoke(monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], *arguments: str) -> tuple[Result, list[Any]]:
    """Run ``draftfuse demo`` with :func:`demo` replaced; returns the options that it was given, too."""
    seen: list[Any] = []
    monkeypatch.setattr(module, "demo", lambda options: seen.append(options) or result)
    return CliRunner().invoke(app, ["demo", *arguments]), seen


@pytest.mark.parametrize("match", [True, False])
def test_exit_code_says_whether_tokens_match(
    monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], match: bool
) -> None:
    done, _ = invoke(monkeypatch, {**result, "tokens_match": match}, "--json")
    assert done.exit_code == (0 if match else 1)
    assert json.loads(done.stdout)["tokens_match"] is match


def test_options_arrive(monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "text.py"
    file.write_text("x = 1\n" * 40)
    options = ("--k", "3", "--tokens", "8", "--requests", "2", "--compiler", "none", "--device", "cpu")
    done, seen = invoke(monkeypatch, result, "--text", str(file), *options)
    assert done.exit_code == 0
    assert seen == [module.Options("x = 1\n" * 40, 3, 8, 2, "none", "cpu")]


def test_mistakes_end_with_a_message(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    done = CliRunner().invoke(app, ["demo", "--text", str(empty)])
    assert done.exit_code == 2
    assert "no prompt can be cut: got 0 bytes" in done.output
    assert CliRunner().invoke(app, ["demo", "--text", str(tmp_path / "missing")]).exit_code == 2
    assert CliRunner().invoke(app, ["demo", "--k", "1"]).exit_code == 2
