"""Build the sdist and from it the wheel, install the wheel into an empty environment, and use it from there.

``python .ci/wheel_check.py FOLDER``, with the dev extra installed; FOLDER must not exist. The new environment sees the
third-party packages of the running one, and nothing of the checkout: the source folder of an editable install is only
added by a ``.pth`` file, which a path line in another ``.pth`` file does not run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = ("expecttest", "flash_attn", "flashinfer", "hypothesis", "pytest", "transformers", "triton", "vllm")
SNIPPET = """\
import draftfuse
from draftfuse.speculator import DraftInputs

version: str = draftfuse.__version__
inputs: DraftInputs = DraftInputs.allocate(4, 3, 8)
rows: int = inputs.seq_lens.shape[0]
"""
# Runs in the new environment. Only the base dependencies can be imported there; a module inside a subpackage may need
# an optional one, a package or a module right under draftfuse may not.
IMPORT_ALL = """\
import importlib, importlib.metadata, sys
optional, folder, *names = sys.argv[1].split(","), *sys.argv[2:]
sys.modules.update(dict.fromkeys(optional))
for name in names:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in optional or name.count(".") < 2:
            raise
        print(f"  {name} needs {missing}")
        continue
    assert module.__file__ and module.__file__.startswith(folder), (name, module.__file__)
for entry in importlib.metadata.distribution("draftfuse").entry_points:
    if entry.module in names:
        assert callable(entry.load()), entry
    else:
        print(f"  entry point {entry.name} = {entry.value}: no such module yet")
print(f"  {len(names)} modules")
"""


def call(*command: object, cwd: Path) -> None:
    print("$", *(str(word) if "\n" not in str(word) else "..." for word in command[:6]), flush=True)
    if code := subprocess.run([str(word) for word in command], cwd=cwd).returncode:
        raise SystemExit(f"exit status {code}")


def wanted_files() -> set[str]:
    """What the wheel must hold besides its metadata: the sources of three folders and the package data."""
    found = {"draftfuse/py.typed"}
    for folder, prefix in (("draftfuse", ""), ("passes", "draftfuse/"), ("lowering", "draftfuse/")):
        found |= {prefix + path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
    data = (path for path in (ROOT / "draftfuse" / "data").rglob("*") if path.is_file())
    return found | {path.relative_to(ROOT).as_posix() for path in data if "__pycache__" not in path.parts}


def build(folder: Path) -> tuple[Path, set[str]]:
    """By way of the sdist, so that a stale ``build/`` folder cannot leak into the wheel."""
    call(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    if files != wanted_files():
        raise SystemExit(f"wheel and checkout differ: {sorted(files ^ wanted_files())}")
    return wheel, files


def install(wheel: Path, env: Path) -> Path:
    """Install into a new environment, then let it see the packages of the running one. Returns its Python."""
    venv.create(env, with_pip=False, symlinks=True)
    python = env / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, cwd=env)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (env / "lib" / version / "site-packages" / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def check_types(python: Path, folder: Path) -> None:
    """Examples (and a few lines of our own) type-check against what the wheel installed."""
    folder.mkdir()
    (folder / "snippet.py").write_text(SNIPPET)
    for example in (ROOT / "examples").glob("*.py"):
        shutil.copy(example, folder)
    options = ("--strict", "--ignore-missing-imports", "--config-file=", f"--python-executable={python}")
    call(sys.executable, "-m", "mypy", *options, *sorted(folder.glob("*.py")), cwd=folder)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    empty = folder / "empty"
    empty.mkdir(parents=True)
    wheel, files = build(folder)
    python = install(wheel, folder / "env")
    paths = (name.removesuffix(".py").removesuffix("/__init__") for name in files if name.endswith(".py"))
    names = sorted(path.replace("/", ".") for path in paths if not path.endswith("/__main__"))
    call(python, "-W", "error::SyntaxWarning", "-c", IMPORT_ALL, ",".join(OPTIONAL), folder / "env", *names, cwd=empty)
    call(python, "-c", SNIPPET, cwd=empty)
    check_types(python, folder / "types")


if __name__ == "__main__":
    main()
