"""The table of attention backends: what each refreshes, how, and whether it runs on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftfuse.errors import InvalidOptionError

KINDS = ("derived", "registered", "aliased", "static", "host-planned")
STATUSES = ("fused", "reference", "split")
Probe = Callable[[], tuple[str, str]]


def always_fused() -> tuple[str, str]:
    """The probe of a backend that needs nothing but PyTorch."""
    return "fused", "plain PyTorch and draftfuse's own operators, on any device"


@dataclass(frozen=True)
class Backend:
    """One row of the table."""

    name: str
    refresh: tuple[str, ...]  # how its metadata may be refreshed, the preferred kind first
    builder: Callable[..., Any] | None  # makes its metadata builder; None: whatever builder the user brings
    refreshes: tuple[str, ...] = ()  # step-dependent metadata fields
    buffers: tuple[str, ...] = ()  # persistent buffers that the refresh writes
    frozen: tuple[str, ...] = ()  # host decisions frozen at capture, offered as guards
    kernel: str = ""  # what attends
    probe: Probe = always_fused

    def row(self) -> dict[str, Any]:
        """The row as plain data; ``status`` is ``fused``, ``reference`` or ``split``, and ``reason`` says why."""
        status, reason = self.probe()
        assert status in STATUSES, f"{self.name} has the unknown status {status}"
        return {
            "name": self.name,
            "refresh": " or ".join(self.refresh),
            "refreshes": list(self.refreshes),
            "persistent_buffers": list(self.buffers),
            "frozen_host_decisions": list(self.frozen),
            "kernel": self.kernel,
            "status": status,
            "reason": reason,
        }


_BACKENDS: dict[str, Backend] = {}


def register_backend(
    name: str,
    *,
    builder: Callable[..., Any] | None,
    refresh: str | Sequence[str] = "derived",
    refreshes: Sequence[str] = (),
    buffers: Sequence[str] = (),
    frozen: Sequence[str] = (),
    kernel: str = "",
    probe: Probe = always_fused,
    replace: bool = False,
) -> Backend:
    """Add an attention backend to the table; anybody may, from outside this package.

    Args:
        name: how ``draftfuse backends`` lists it.
        builder: makes a metadata builder (an object with ``build(common)``; see :class:`draftfuse.MetadataBuilder`).
        refresh: one or more of ``derived``, ``registered``, ``aliased``, ``static``, ``host-planned``.
        refreshes: the metadata fields that change from step to step.
        buffers: the persistent buffers that a registered refresh writes.
        frozen: the host decisions that its ``guards(metadata)`` offers.
        kernel: what attends: an operator or a library.
        probe: returns ``(status, reason)`` for this machine: ``fused``, ``reference`` (fused, on a plain stand-in for a
            kernel that is missing here) or ``split``.
        replace: allow a name that is taken.

    Returns:
        The new row.

    Raises:
        InvalidOptionError: the name is taken, or a kind of refresh is unknown.
    """
    kinds = (refresh,) if isinstance(refresh, str) else tuple(refresh)
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or not kinds:
        raise InvalidOptionError("unknown kind of refresh", unknown or "none", f"some of {list(KINDS)}", "Name one.")
    if name in _BACKENDS and not replace:
        todo = "Choose another name, or pass replace=True."
        raise InvalidOptionError("a backend of this name is registered already", name, "a new name", todo)
    row = Backend(name, kinds, builder, tuple(refreshes), tuple(buffers), tuple(frozen), kernel, probe)
    _BACKENDS[name] = row
    return row


def unregister_backend(name: str) -> None:
    """Take a backend out of the table."""
    _BACKENDS.pop(name, None)


def backends() -> list[Backend]:
    """All rows, in the order in which they were registered."""
    return list(_BACKENDS.values())


def get_backend(name: str) -> Backend:
    """The row called ``name``.

    Raises:
        InvalidOptionError: there is none.
    """
    if name not in _BACKENDS:
        raise InvalidOptionError("no backend has this name", name, f"one of {sorted(_BACKENDS)}", "Correct the name.")
    return _BACKENDS[name]
