"""Traced loops on disk: a second process that compiles the same speculator runs neither Dynamo nor the logged loop.

An entry is found by what a trace is made for (sources, versions, settings, the state of the process) and used only if
every fact that it rests on holds now (:mod:`draftfuse.trace_facts`); anything else is traced as if there were none.
Entries are written whole under another name first, so several processes may start at once.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard

from draftfuse import python_state, stored_reads
from draftfuse.dispatch import Descriptor
from draftfuse.fingerprints import name_of, patched
from draftfuse.lowering import kept_file
from draftfuse.module_hooks import ModuleHooks
from draftfuse.passes.switch import is_on
from draftfuse.paths import MISSING, arguments_of, plain
from draftfuse.trace import Trace
from draftfuse.trace_facts import Facts, NotCacheable, Question, Scope, reason_of
from draftfuse.trace_store import from_json, restored, sources, to_json

SWITCH = "DRAFTFUSE_TRACE_CACHE"
KEPT = 512  # files; the oldest go first
FROM_DISK = "IR from disk"
HOOKED = "a module has forward hooks"
_MODULES = ("torch._dynamo.config", "torch._functorch.config", "torch.fx.experimental._config", "torch.compiler.config")
_FLAGS = (
    "torch.get_float32_matmul_precision",
    "torch.is_inference_mode_enabled",
    "torch.get_default_device",
    "torch.backends.cuda.flash_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled",
    "torch.backends.cuda.math_sdp_enabled",
    "torch.backends.cuda.cudnn_sdp_enabled",
    "torch._C._get_cudnn_enabled",
    "torch._C._get_mkldnn_enabled",
    "torch._C._get_nnpack_enabled",
)


class Entry:
    """The place of one trace on disk; :attr:`said` is its line in the report."""

    def __init__(self, function: Callable[..., None], args: tuple[Any, ...], traced_args: tuple[Any, ...], key: str):
        self.spec, self.key, self.said = args[0], key, ""
        self.scope = Scope(arguments_of(function, traced_args), function.__globals__)
        self.facts, self.tensors = Facts(), dict[str, Any]()
        self.places: dict[str, list[str]] | None = None  # where those tensors stand; None without an entry on disk

    @property
    def file(self) -> Path:
        """Where the trace is kept."""
        return folder() / f"{self.key}.json"

    def load(self) -> Trace | None:
        """The stored trace on the live tensors, where there is one and all of its facts hold."""
        try:
            with torch.no_grad(), without_collection():
                return self._load()
        except FileNotFoundError:
            self.said = ""
        except Exception as reason:  # an entry may hold anything
            self.said = f"the IR on disk was not used: {reason_of(reason)}"
        return None

    def _load(self) -> Trace:
        data = read(self.file)
        facts, tensors = Facts.from_json(data["facts"]), self._tensors(data["trace"])
        if broken := self._broken(facts, tensors, data["places"]):
            raise NotCacheable(broken)
        traced = from_json(data["trace"], tensors)
        traced.baked = {path: _baked(self.scope.at(path)) for path in data["trace"]["baked"]}
        traced.reads = stored_reads.from_json(data["reads"], self.scope)
        self.facts, self.tensors, self.places = facts, tensors, data["places"]
        self.said, traced.entry = FROM_DISK, self
        if os.access(self.file, os.W_OK):
            os.utime(self.file)  # the oldest go first
        return traced

    def _tensors(self, data: dict[str, Any]) -> dict[str, Any]:
        return {name: self.scope.at(path) for name, path in sources(data).items()}

    def _broken(self, facts: Facts, tensors: dict[str, Any], known: dict[str, list[str]]) -> str:
        """What does not hold any more; empty where all does."""
        if broken := facts.broken(self.scope):
            return broken
        if (now := places(self.spec, tensors)) != known:
            return f"tensors stand in other places: {_changed(known, now)}"
        return HOOKED if ModuleHooks(self.spec).hooks else ""

    def take(self, traced: Trace, codes: Iterable[types.CodeType]) -> None:
        """What a fresh trace rests on, beside what was asked while it was made."""
        traced.entry, self.facts = self, traced.facts or Facts(refused="nothing was traced")
        try:
            self.facts.add_files(codes)
            self.facts.add((Question("exact", path) for path in traced.baked), self.scope, set())
            self.facts.add(stored_reads.questions(traced.reads, self.scope), self.scope, set())
            self.facts.settle(self.scope)
        except Exception as reason:  # whatever a user's object does when it is asked, the loop is built
            self.facts.refused = self.facts.refused or reason_of(reason)

    def save(self, traced: Trace) -> None:
        """Keep ``traced``, as no pass has changed it yet; the report says why where that is not possible."""
        if self.said == FROM_DISK:
            return
        try:
            with torch.no_grad(), without_collection():
                self._save(traced)
        except Exception as reason:  # the same
            self._say(f"the IR is not kept on disk: {reason_of(reason)}")

    def _save(self, traced: Trace) -> None:
        if self.facts.refused:
            raise NotCacheable(self.facts.refused)
        if ModuleHooks(self.spec).hooks:
            raise NotCacheable(HOOKED)
        data = json.loads(json.dumps(to_json(traced)))
        if moved := [p for n, p in sources(data).items() if self.scope.at(p) is not traced.tensors[n]]:
            raise NotCacheable(f"{plain(moved[0])} is another tensor than the one that was traced")
        restored(data, traced.tensors)
        found = places(self.spec, traced.tensors)
        reads = stored_reads.to_json(traced.reads)
        write(self.file, {"facts": self.facts.to_json(), "places": found, "trace": data, "reads": reads})
        self.tensors, self.places = dict(traced.tensors), found

    def repeats_at(self, rows: int) -> bool:
        """Whether it is known that the copied steps stand for the loop at another number of rows."""
        try:
            data = read(self._rows_file(rows))
            also = Facts({}, [], data["files"])
            return data["facts"] == self.facts.digest() and not also.broken(self.scope) and self._still_holds()
        except Exception:  # the loop is run, as without an entry
            return False

    def note_repeats(self, rows: int, codes: Iterable[types.CodeType]) -> str:
        """Remember that they do; why not, where that is not possible."""
        try:
            also = Facts()
            also.add_files(codes)
            if self._still_holds():
                write(self._rows_file(rows), {"facts": self.facts.digest(), "files": also.files})
        except Exception as reason:  # the loop was run, and is run again the next time
            return f"what holds at {rows} rows is not kept on disk: {reason_of(reason)}"
        return ""

    def _still_holds(self) -> bool:
        """Whether the trace is on disk, and could be loaded again."""
        with torch.no_grad():
            return self.places is not None and not self._broken(self.facts, self.tensors, self.places)

    def _rows_file(self, rows: int) -> Path:
        return folder() / f"{self.key}-{rows}.json"

    def _say(self, text: str) -> None:
        self.said = f"{self.said}; {text}" if self.said else text


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside, Python looks for no garbage: among thousands of new nodes that takes longer than making them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def entry_for(
    function: Callable[..., None],
    args: tuple[Any, ...],
    traced_args: tuple[Any, ...],
    symbolic: str | None,
    descriptor: Descriptor,
) -> Entry | None:
    """The place of the trace of ``function(*args)``, of which ``traced_args`` are traced; None where it has none."""
    if not is_on(SWITCH) or has_modes():
        return None
    with torch.no_grad():
        state = surroundings(args[0].inputs.positions.device)
    numbers = [a for a in (*args, *traced_args) if isinstance(a, int)]
    made_for = [name_of(type(args[0])), function.__qualname__, numbers, symbolic, str(descriptor), _sizes(args[0])]
    return Entry(function, args, traced_args, hashlib.sha256(repr([made_for, state]).encode()).hexdigest()[:40])


def has_modes() -> bool:
    """Whether a mode of torch is active here (a default device is one too): what it does is known to nobody else."""
    stacks = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return any(stacks) or torch._C._functorch.peek_interpreter_stack() is not None


def _sizes(spec: Any) -> list[Any]:
    """Sizes of a speculator, so that several of a class have entries of their own."""
    shapes = [(name, [*t.shape], str(t.dtype)) for name, t in spec.inputs.named_tensors().items()]
    return [spec.num_speculative_tokens, spec.max_num_reqs, spec.max_model_len, shapes]


def surroundings(device: torch.device) -> list[str]:
    """The state of the process that a trace may depend on: versions, flags, settings of torch, the device."""
    flags = [f"{name} {_value_of(name)()}" for name in _FLAGS]
    settings = [f"{name} {_settings(name)}" for name in _MODULES]
    state = str(GlobalStateGuard().__getstate__())
    return [*versions(), *flags, *settings, _device(device), state, *patched()]


def _value_of(name: str) -> Any:
    value: Any = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part, str)
    return value


def _settings(name: str) -> str:
    module = sys.modules[name]
    found: dict[str, Any] = module.get_config_copy()
    return str(sorted((key, _canonical(value)) for key, value in found.items()))


def _canonical(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return str(sorted(map(_canonical, value)))
    if isinstance(value, (list, tuple)):
        return str([*map(_canonical, value)])
    if isinstance(value, dict):
        return str([(_canonical(k), _canonical(v)) for k, v in value.items()])
    plain_types = (int, float, bool, str, type(None), torch.dtype)
    return repr(value) if isinstance(value, plain_types) else getattr(value, "__qualname__", type(value).__qualname__)


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{device} of {torch.cuda.device_count()} {torch.cuda.get_device_properties(device)}"


@cache
def versions() -> tuple[str, ...]:
    """Python, torch, Triton and the sources of draftfuse itself."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    python = f"{sys.version} {sys.flags.optimize} {sys.implementation.cache_tag}"
    return python, torch.__version__, str(torch.version.git_version), str(torch.version.cuda), triton, _own_sources()


def _own_sources() -> str:
    package = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for top, folders, files in os.walk(package, followlinks=True):
        folders.sort()
        for name in sorted(f for f in files if f.endswith(".py")):
            digest.update(f"{Path(top, name).relative_to(package)}\n".encode() + Path(top, name).read_bytes())
    return digest.hexdigest()


def places(spec: Any, tensors: dict[str, Any]) -> dict[str, list[str]]:
    """Everywhere behind ``spec`` where the tensors of a trace stand: a step that was copied may read another place."""
    by_id: dict[int, list[str]] = {}
    for path, tensor in python_state.of_speculator(spec, wide=False).tensors.items():
        by_id.setdefault(id(tensor), []).append(path)
    return {name: sorted(by_id.get(id(tensor), [])) for name, tensor in tensors.items()}


def _changed(old: dict[str, list[str]], new: dict[str, list[str]]) -> str:
    return next(f"{old.get(n)} and {new.get(n)}" for n in [*old, *new] if old.get(n) != new.get(n))


def _baked(value: Any) -> Any:
    if value is MISSING:
        raise NotCacheable("a value that was taken from Python is gone")
    return frozenset(value) if isinstance(value, set) else value


def folder() -> Path:
    """Where traces are kept: beside what Inductor keeps."""
    return kept_file.cached("traces")


def read(file: Path) -> dict[str, Any]:
    """What :func:`write` wrote.

    Raises:
        NotCacheable: the file was cut off, or is another's.
    """
    try:
        data: dict[str, Any] = kept_file.read(file)
    except kept_file.Damaged as reason:
        raise NotCacheable("the file is damaged") from reason
    return data


def write(file: Path, data: dict[str, Any]) -> None:
    """Write a file whole, and drop the oldest where there are too many."""
    kept_file.write(file, data)
    found = sorted(file.parent.iterdir(), key=_age, reverse=True)
    for old in found[:-KEPT]:
        old.unlink(missing_ok=True)


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except FileNotFoundError:  # another process has dropped it
        return 0.0
