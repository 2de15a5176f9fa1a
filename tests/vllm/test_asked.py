"""When the plug-in is on."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import draftfuse
from draftfuse.errors import MissingExtraError
from draftfuse.vllm import asked
from draftfuse.vllm.versions import release_of


def config(**passes: Any) -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(inductor_compile_config=passes))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(asked.SWITCH, raising=False)
    monkeypatch.delenv(asked.COMPILER, raising=False)


def test_off_unless_asked_for() -> None:
    assert not asked.is_asked(config())
    assert not asked.is_asked(SimpleNamespace())


def test_on_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(asked.SWITCH, "1")
    assert asked.is_asked(config())


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: SimpleNamespace(callable=p)])
def test_on_by_the_hook_in_the_configuration(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_hook = config(post_grad_custom_post_pass=wrap(draftfuse.post_grad_pass))
    assert asked.is_asked(with_hook)
    monkeypatch.setenv(asked.SWITCH, "0")
    assert not asked.is_asked(with_hook)


def test_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked.compiler() == "none"
    monkeypatch.setenv(asked.COMPILER, "inductor")
    assert asked.compiler() == "inductor"


@pytest.mark.parametrize(
    ("name", "value", "expected", "of"),
    [
        (asked.SWITCH, "yes", "0 or 1", lambda: not asked.is_asked(config())),
        (asked.COMPILER, "gcc", "none or inductor", lambda: asked.compiler() == "none"),
        (asked.ONE_GRAPH, "no", "0 or 1", lambda: asked.one_graph() is True),
    ],
)
def test_a_value_without_meaning_is_a_warning_and_the_default(
    name: str, value: str, expected: str, of: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked.warn.cache_clear()
    monkeypatch.setenv(name, value)
    assert of()
    assert of()
    said = f"draftfuse: {name}={value} has no meaning, as if it were unset: expected {expected}"
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("WARNING", said)]
    monkeypatch.setenv(name, "")
    assert of()


def test_an_odd_switch_leaves_the_hook_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(asked.SWITCH, "true")
    assert asked.is_asked(config(post_grad_custom_post_pass=draftfuse.post_grad_pass))


def test_register_refuses_an_unknown_release_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftfuse import vllm

    monkeypatch.setattr(vllm, "vllm_version", lambda: "9.9.9")
    vllm.register()
    monkeypatch.setenv(asked.SWITCH, "1")
    with pytest.raises(MissingExtraError) as caught:
        vllm.register()
    assert caught.value.came == "9.9.9"
    monkeypatch.setattr(vllm, "vllm_version", lambda: "")
    with pytest.raises(MissingExtraError, match="DRAFTFUSE_VLLM=1 is set without vLLM: got no package"):
        vllm.register()


def test_the_extra_installs_what_the_plug_in_knows_and_nothing_else() -> None:
    from packaging.requirements import Requirement

    text = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (extra,) = text["project"]["optional-dependencies"]["vllm"]
    versions = [f"0.{minor}.{patch}" for minor in range(20, 45) for patch in (0, 1)]
    allowed = [v for v in versions if Requirement(extra).specifier.contains(v)]
    assert allowed == [v for v in versions if release_of(v) is not None]
