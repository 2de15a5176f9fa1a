"""The text of vLLM's functions whose work is done elsewhere: only what was read is taken over."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from draftfuse.vllm.versions import Release


def digest(release: Release) -> str:
    """SHA-256 of the texts of ``release.read`` as they are installed; empty where one cannot be had."""
    try:
        texts = [inspect.getsource(function) for _, _, function in functions(release)]
    except (AttributeError, KeyError, OSError, TypeError):  # no such function, or no text of it
        return ""
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def functions(release: Release) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and function of ``release.read``, in order; a kernel's function is the one that was decorated."""
    for module, names in release.read.items():
        for name in names:
            owner: Any = sys.modules[module]
            *path, last = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            found = getattr(owner, last)
            yield owner, last, getattr(found, "fn", found)


def overridden(cls: type, release: Release) -> str:
    """The first method of ``release.read`` that ``cls`` has in another version; empty if there is none."""
    methods = [
        (owner, name) for owner, name, _ in functions(release) if isinstance(owner, type) and issubclass(cls, owner)
    ]
    return next((name for owner, name in methods if getattr(cls, name) is not getattr(owner, name)), "")
