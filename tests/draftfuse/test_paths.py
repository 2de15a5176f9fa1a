"""Paths are Python: keys of any type, and texts that look like paths themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftfuse.handlers import catches
from draftfuse.paths import MISSING, asked_of, plain, split_path, text_of_key, value_at

KEYS = [0, -1, "x", "a']['b", 'a"b', "b].c", None, True, 0.5, float("inf"), b"x", (0, "a"), (), torch.float32]


@pytest.mark.parametrize("key", [*KEYS, torch.device("cpu")])
def test_a_key_is_what_it_was(key: Any) -> None:
    text = text_of_key(key)
    path = f"L['spec'].table[{text}]"
    owner, found = split_path(path)
    assert owner == "L['spec'].table"
    assert value_at(str(text), {}, {}) == key
    assert found in (key, text)
    assert value_at(path, {"spec": type("Spec", (), {"table": {key: "here"}})()}, {}) == "here"


def test_a_key_without_a_text_has_none() -> None:
    assert text_of_key(object()) is None
    assert text_of_key((1, object())) is None
    assert text_of_key(float("nan")) is None


def test_questions_are_told_from_paths() -> None:
    assert asked_of("len(L['spec'].table)") == ("len", "L['spec'].table", "")
    assert asked_of("tuple(L['spec'].table)") == ("tuple", "L['spec'].table", "")
    assert asked_of("(1, ' in ') in L['spec'].table") == ("in", "L['spec'].table", "(1, ' in ')")
    assert asked_of("L['spec'].a is L['spec'].b") == ("is", "L['spec'].a", "L['spec'].b")
    assert asked_of("L['spec'].table['x in y']") is None
    assert plain("tuple(L['spec'].table)") == "keys of spec.table"
    assert plain("L['spec'].table[list(dict.keys(L['spec'].table))[2]].x") == "spec.table[<key 2>].x"
    assert plain("L['spec'].a is L['spec'].b") == "spec.a is spec.b"
    assert plain("\"it's\" in L['spec'].table") == '"it\'s" in spec.table'


def test_what_is_no_path_is_missing() -> None:
    assert value_at("L['spec'][<E.A: 1>]", {"spec": {}}, {}) is MISSING
    assert split_path("L['spec'][<E.A: 1>]") == ("", "L['spec'][<E.A: 1>]")


def missing_attribute() -> None:
    try:
        print()
    except (KeyError, AttributeError):
        print()


def missing_key() -> None:
    try:
        print()
    except LookupError:
        print()


def no_handler() -> None:
    with open("/dev/null"):
        print()


def test_what_is_caught() -> None:
    assert catches(missing_attribute.__code__, AttributeError)
    assert catches(missing_attribute.__code__, KeyError)
    assert not catches(missing_key.__code__, AttributeError)
    assert catches(missing_key.__code__, KeyError)
    assert not catches(no_handler.__code__, AttributeError)
