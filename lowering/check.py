"""The check of generated code: every store goes straight into its persistent buffer, exactly once.

It runs on Inductor's scheduled IR, before fusion. As Inductor calls no pass when its cache already holds the code, the
verdict is kept in a file beside that cache, under the key of the segment.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import fx

from draftfuse.lowering import kept_file
from draftfuse.lowering.hook import sources_hash
from draftfuse.passes import ir

try:  # Inductor bypasses its cache where the check is not of the class that it asks for
    from torch._inductor.custom_graph_pass import CustomSchedulerPass as _Base
except ImportError:  # torch < 2.13
    from torch._inductor.custom_graph_pass import CustomGraphPass as _Base  # type: ignore[assignment]


class SchedulerCheck(_Base):
    """Looks at the scheduled nodes of one graph and changes none."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.ran = False
        self.findings: list[str] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        self.ran = True
        self.findings = self.find(nodes)
        return nodes

    def find(self, nodes: list[Any]) -> list[str]:
        """Faults of one segment."""
        return find_faults(nodes)

    def uuid(self) -> str:
        """The check changes no code: one identity for each version of it."""
        return f"draftfuse-check-{sources_hash()}"

    def verdict(self) -> list[str] | None:
        """Findings of this compile or, for code from a cache, of the compile that made it; None = unknown."""
        file = verdict_file(self.key)
        if self.ran:
            with suppress(OSError):  # no room there: whoever finds the code in a cache compiles it once more
                kept_file.write(file, self.findings)
            return self.findings
        try:
            found: list[str] = kept_file.read(file)
        except (kept_file.Damaged, OSError):
            return None
        return found


def verdict_file(key: str) -> Path:
    """Where the verdict on the segment ``key`` is kept."""
    return kept_file.cached(f"{sources_hash()[:16]}-{key[:32]}.json")


def find_faults(nodes: list[Any], several_writes: bool = False) -> list[str]:
    """Faults in a list of Inductor scheduler nodes, one sentence each."""
    made = {buffer.get_name() for node in nodes for buffer in node.get_outputs()}
    faults: list[str] = []
    writes: Counter[str] = Counter()
    for node in nodes:
        for buffer in node.get_outputs():
            for target in buffer.get_mutations():
                writes[target] += 1
                if target in made and is_operator(node):  # a scatter may fill a temporary of its own
                    faults.append(f"{node.get_name()} writes the temporary {target}, not a buffer of the caller")
    if not several_writes:
        faults += [f"{name} is written {times} times" for name, times in writes.items() if times > 1]
    return faults


class VersionCheck(SchedulerCheck):
    """The check of a whole graph: beside writes in place, every read must see the version that program order gives."""

    def find(self, nodes: list[Any]) -> list[str]:
        """Faults of the whole graph."""
        from torch._inductor.virtualized import V

        program: Any = V.graph.module
        return find_faults(nodes, several_writes=True) + find_stale_reads(nodes, list(program.graph.nodes))


def find_stale_reads(scheduled: list[Any], program: list[fx.Node]) -> list[str]:
    """Kernels that read another version of a buffer than the operators that they compute would, in program order."""
    expected = expected_versions(program)
    done: Counter[str] = Counter()
    faults: list[str] = []
    for node in scheduled:
        reads = {real_name(dep.name) for dep in node.read_writes.reads}
        for origin in getattr(node.node, "origins", ()):
            for name, version in expected.get(origin, {}).items():
                if name in reads and done[name] != version:
                    faults.append(
                        f"{node.get_name()} reads version {done[name]} of {name}, {origin.name} needs {version}"
                    )
        for name in written_names(node):
            done[name] += 1
    return faults


def expected_versions(program: list[fx.Node]) -> dict[fx.Node, dict[str, int]]:
    """For each operator, how often each placeholder that it reads was written before it."""
    owners = {ir.storage(n): n.name for n in program if n.op == "placeholder" and ir.is_tensor(n)}
    versions: Counter[str] = Counter()
    expected: dict[fx.Node, dict[str, int]] = {}
    for node in (n for n in program if n.op == "call_function"):
        if not ir.is_view(node):
            reads = [a for a in node.all_input_nodes if ir.storage(a) in owners and not is_overwritten(node, a)]
            expected[node] = {owners[ir.storage(a)]: versions[owners[ir.storage(a)]] for a in reads}
        for target in ir.written(node):
            if ir.storage(target) in owners:
                versions[owners[ir.storage(target)]] += 1
    return expected


def is_overwritten(node: fx.Node, arg: fx.Node) -> bool:
    """Whether ``node`` writes ``arg`` without reading it."""
    return node.target is torch.ops.aten.copy_.default and node.args[0] is arg


def written_names(node: Any) -> list[str]:
    """Graph inputs that a scheduler node writes."""
    return [real_name(name) for buffer in node.get_outputs() for name in buffer.get_mutations()]


def is_operator(node: Any) -> bool:
    """Whether a scheduler node calls a registered operator as it stands (ATen scatters are not meant)."""
    operator = getattr(node.node, "op_overload", None)
    return getattr(operator, "namespace", "aten") not in ("aten", "prims")


def real_name(name: str) -> str:
    """The buffer that a renamed version stands for."""
    from torch._inductor.virtualized import V

    renames = getattr(V.graph.scheduler, "mutation_real_name", {})
    return str(renames.get(name, name))
