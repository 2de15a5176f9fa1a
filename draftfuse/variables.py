"""Every environment variable that draftfuse reads: its values, and what it does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftfuse.errors import InvalidOptionError
from draftfuse.passes.switch import CHECK, OFF, ON, choice, is_on
from draftfuse.passes.switch import VLLM_COMPILER as VLLM_COMPILER
from draftfuse.trace_cache import SWITCH as TRACE_CACHE

DISABLE = "DRAFTFUSE_DISABLE"
VLLM, VLLM_ONE_GRAPH = "DRAFTFUSE_VLLM", "DRAFTFUSE_VLLM_ONE_GRAPH"
VLLM_COMPILERS = ("none", "inductor")
PREFIX = "DRAFTFUSE_"


@dataclass(frozen=True)
class Variable:
    """One variable; ``default`` is what an unset or empty one stands for."""

    name: str
    what: str
    values: tuple[str, ...] = (OFF, ON)
    default: str = OFF


VARIABLES = (
    Variable(DISABLE, "draftfuse.compile makes eager loops, whatever mode says"),
    Variable(TRACE_CACHE, "traced loops are kept on disk, beside Inductor's cache"),
    Variable(CHECK, "the IR is verified after every pass"),
    Variable(VLLM, "the plug-in is on; 0 also overrules the pass hook", default="the pass hook decides"),
    Variable(VLLM_COMPILER, "what compiles vLLM's draft loop", VLLM_COMPILERS, VLLM_COMPILERS[0]),
    Variable(VLLM_ONE_GRAPH, "vLLM 0.25 and 0.26 propose a uniform batch in one graph", default=ON),
)
COMPILE_READS = (DISABLE, TRACE_CACHE, CHECK)
CACHE_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # torch and Triton write there, and name no variable


def check_variables() -> None:
    """Raise :class:`InvalidOptionError` where a variable that a compiled loop depends on has no meaning."""
    for name in COMPILE_READS:
        choice(name)


def check_folders() -> None:
    """Raise :class:`InvalidOptionError` where a cache folder that a variable names is no folder."""
    for name in CACHE_FOLDERS:
        if (given := os.environ.get(name)) and not _can_be_folder(Path(given)):
            raise InvalidOptionError(f"{name} names no folder", given, "a folder", "Correct or unset the variable.")


def _can_be_folder(path: Path) -> bool:
    """Whether ``path``, or the nearest thing above it that there is, is a folder."""
    there = next((place for place in (path, *path.absolute().parents) if place.exists()), path)
    return there.is_dir()


def refuse_disabled(what: str) -> None:
    """Raise :class:`InvalidOptionError` for ``what`` looks at compiled code, where none is to be made."""
    if is_on(DISABLE):
        came, expected = f"{DISABLE}=1", "unset or 0: every loop runs eager, and there is nothing to compare with it"
        raise InvalidOptionError(f"{what} needs a compiled loop", came, expected, "Unset the variable.")


def in_words() -> Iterator[tuple[str, str, str]]:
    """Name, value and fault of every variable of draftfuse that is set; the fault is empty where there is none."""
    known = {variable.name: variable for variable in VARIABLES}
    for name in sorted(n for n in os.environ if n.startswith(PREFIX)):
        value, variable, fault = os.environ[name], known.get(name), ""
        if variable is None:
            fault = f"draftfuse reads no such variable; it reads {', '.join(known)}"
        elif value and value not in variable.values:
            fault = f"no such value: {' or '.join(variable.values)} (unset: {variable.default})"
        yield name, value, fault
