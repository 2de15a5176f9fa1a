"""Forward hooks of modules behind a draft loop: a trace takes them in; one that comes or goes later changes the loop.

Dynamo guards no hooks. Asking every module before each replay would cost more than the replay, but PyTorch numbers the
hooks of a process: as long as no new number was given out, and there was no hook to remove, none has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn import Module
from torch.nn.modules import module as globals_of_modules
from torch.utils.hooks import RemovableHandle

from draftfuse import python_state

_KINDS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks")


class ModuleHooks:
    """The forward hooks of all modules that are reachable from a speculator, as they are now."""

    def __init__(self, spec: Any) -> None:
        owners = python_state.of_speculator(spec, wide=False).owners.values()
        self.modules = list({id(owner): owner for owner, _ in owners if isinstance(owner, Module)}.values())
        self.numbered = RemovableHandle.next_id
        self.hooks = list(self._now())

    def hold(self) -> bool:
        """Whether they are still the same; one comparison where the process has no hook that it had not then."""
        if not self.hooks and RemovableHandle.next_id == self.numbered:
            return True
        numbered = RemovableHandle.next_id
        if list(self._now()) != self.hooks:
            return False
        self.numbered = numbered
        return True

    def _now(self) -> Iterator[tuple[int, str, int, Any]]:
        for index, module in enumerate(self.modules):
            for kind in _KINDS:
                for number, hook in getattr(module, kind).items():
                    yield index, kind, number, hook
        for kind in _GLOBAL:
            for number, hook in getattr(globals_of_modules, kind).items():
                yield -1, kind, number, hook
