"""The check of generated code: every store goes straight into its persistent buffer, exactly once.

It runs on Inductor's scheduled IR, before fusion. As Inductor calls no pass when its cache already holds the code, the
verdict is kept in a file beside that cache, under the key of the segment.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from draftfuse.lowering.hook import sources_hash

try:  # torch >= 2.13 asks for this class, else it bypasses its cache
    from torch._inductor.custom_graph_pass import CustomSchedulerPass as _Base
except ImportError:
    _Base = object  # type: ignore[misc, assignment]


class SchedulerCheck(_Base):  # type: ignore[misc]
    """Looks at the scheduled nodes of one graph and changes none."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.ran = False
        self.findings: list[str] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        self.ran = True
        self.findings = find_faults(nodes)
        return nodes

    def uuid(self) -> str:
        """The check changes no code: one identity for each version of it."""
        return f"draftfuse-check-{sources_hash()}"

    def verdict(self) -> list[str] | None:
        """Findings of this compile or, where Inductor served cached code, of the compile that made it; None = unknown."""
        file = verdict_file(self.key)
        if self.ran:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(f".{id(self)}")
            temporary.write_text(json.dumps(self.findings))
            temporary.replace(file)
            return self.findings
        if not file.exists():
            return None
        found: list[str] = json.loads(file.read_text())
        return found


def verdict_file(key: str) -> Path:
    """Where the verdict on the segment ``key`` is kept."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "draftfuse" / f"{sources_hash()[:16]}-{key[:32]}.json"


def find_faults(nodes: list[Any]) -> list[str]:
    """Faults in a list of Inductor scheduler nodes, one sentence each."""
    made = {buffer.get_name() for node in nodes for buffer in node.get_outputs()}
    faults: list[str] = []
    writes: Counter[str] = Counter()
    for node in nodes:
        for buffer in node.get_outputs():
            for target in buffer.get_mutations():
                writes[target] += 1
                if target in made:
                    faults.append(f"{node.get_name()} writes the temporary {target}, not a buffer of the caller")
    faults += [f"{name} is written {times} times" for name, times in writes.items() if times > 1]
    return faults
