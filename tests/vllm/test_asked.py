"""When the plug-in is on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import draftfuse
from draftfuse.errors import InvalidOptionError, MissingExtraError
from draftfuse.vllm import asked


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
    monkeypatch.setenv(asked.COMPILER, "gcc")
    with pytest.raises(InvalidOptionError) as caught:
        asked.compiler()
    assert caught.value.came == "'gcc'"


def test_register_refuses_an_unknown_release_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftfuse import vllm

    monkeypatch.setattr(vllm, "vllm_version", lambda: "9.9.9")
    vllm.register()
    monkeypatch.setenv(asked.SWITCH, "1")
    with pytest.raises(MissingExtraError) as caught:
        vllm.register()
    assert caught.value.came == "9.9.9"
