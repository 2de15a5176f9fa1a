"""Small files beside Inductor's cache, for several processes at once: replaced whole, and damaged ones are seen."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from uuid import uuid4


class Damaged(ValueError):
    """A file was cut off, or is another's."""


def cached(*parts: str) -> Path:
    """A file of draftfuse's own under Inductor's cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir(), "draftfuse", *parts)


def read(file: Path) -> Any:
    """What :func:`write` wrote.

    Raises:
        Damaged: the file holds something else.
        OSError: there is none.
    """
    digest, _, text = file.read_bytes().partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise Damaged(str(file))
    return json.loads(text)


def write(file: Path, data: Any) -> None:
    """Write ``data`` as JSON; others see the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data)
    temporary = file.with_suffix(f".{uuid4().hex}")
    temporary.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}", encoding="utf-8")
    temporary.replace(file)
