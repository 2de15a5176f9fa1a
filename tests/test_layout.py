"""Guards of the layout: one copy of every module, small files, nothing left undone, each pass tested and documented."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("draftfuse", "passes", "lowering")
LINKED = ("passes", "lowering")
MAX_BYTES = 16 * 1024
UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")


def sources(*folders: str) -> list[Path]:
    """Python files of ``folders``, each once: rglob does not follow the two links inside ``draftfuse/``."""
    found = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return sorted(path for path in found if not any((ROOT / "draftfuse" / name) in path.parents for name in LINKED))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    prefix = () if parts[0] == "draftfuse" else ("draftfuse",)
    return ".".join(prefix + parts).removesuffix(".__init__")


MODULES = sorted(module_name(path) for path in sources(*FOLDERS) if path.stem != "__main__")


def is_pass(path: Path) -> bool:
    """A pass is a function of its file's name that returns how many rewrites it made."""
    found = re.search(rf"^def {path.stem}\(.*?\) -> ([^:]+):$", path.read_text(), re.MULTILINE | re.DOTALL)
    return found is not None and found[1] == "int"


PASSES = sorted(path.stem for path in (ROOT / "passes").glob("*.py") if is_pass(path))


@pytest.mark.parametrize("name", LINKED)
def test_top_level_import_is_refused(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: import draftfuse.{name}, not {name}" in done.stderr


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative(name: str) -> None:
    assert (ROOT / "draftfuse" / name).readlink() == Path("..") / name


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_once(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("flash_attn", "triton", "vllm") or name.count(".") < 2:
            raise
        pytest.skip(f"needs {missing}, which is not installed")
    assert module.__name__ == name
    assert not {"passes", "lowering"} & set(sys.modules)


def test_folders_of_modules_are_packages() -> None:
    folders = {path.parent for path in sources(*FOLDERS)}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_files_are_small() -> None:
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in sources(*FOLDERS)}
    assert {name: size for name, size in sizes.items() if size > MAX_BYTES} == {}


def test_nothing_is_left_undone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources(*FOLDERS, "tests", "examples", "benchmarks")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert found == []


def test_each_pass_has_its_test_file() -> None:
    assert [name for name in PASSES if not (ROOT / "tests" / "passes" / f"test_{name}.py").is_file()] == []


def test_each_pass_shows_before_and_after() -> None:
    texts = {name: (ROOT / "passes" / f"{name}.py").read_text() for name in PASSES}
    assert [name for name, text in texts.items() if not ("Before::" in text and "After::" in text)] == []


def test_readme_lists_each_pass() -> None:
    readme = ROOT / "README.md"
    if not readme.is_file():
        pytest.skip("no README.md yet")
    rows = "\n".join(line for line in readme.read_text().splitlines() if line.startswith("|"))
    assert [name for name in PASSES if f"`{name}`" not in rows] == []
