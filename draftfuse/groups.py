"""What draftfuse asks of a process group; torch.distributed is touched only where it is there."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

LONGEST_WAIT = 1800.0  # seconds, where a group names no timeout


def is_parallel() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def group_named(name: str) -> Any:
    """The process group behind a name in a traced graph; the default group for an empty one."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(name) if name else dist.group.WORLD  # type: ignore[arg-type]


def default_store() -> Any:
    """The store that the processes of this job met on."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def timeout_of(group: Any) -> float:
    """Seconds after which a collective of ``group`` gives up."""
    for device in group._device_types:
        given = getattr(group._get_backend(device).options, "_timeout", None)
        if given is not None:
            return float(given.total_seconds())
    return LONGEST_WAIT


def cuda_backend(group_name: str) -> str:
    """What the process group of that name runs CUDA tensors with (``nccl``), in lower case; empty if nothing."""
    config = dist.get_backend_config(group_named(group_name))
    parts = dict(part.split(":") for part in config.split(",") if ":" in part)
    return str(parts.get("cuda", "")).lower()
