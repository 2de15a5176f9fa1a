"""What must hold between passes, checked on one page.

1. Placeholders come first, one output (empty) comes last.
2. Every tensor node has a fake value; a node is used after it is made.
3. Mutations stand in program order and nobody uses their result.
4. Fake values alias where the program's values do.
5. Owned rows are written by exactly one node, before anything reads them.
"""

from __future__ import annotations

import operator

from torch import fx

from draftfuse.passes import ir


def verify(graph: fx.Graph, *, after: str = "trace") -> None:
    """Assert the invariants of the IR; ``after`` names the pass that is to blame."""
    for rule in (_order, _values, _mutations, _aliases, _rows):
        fault = rule(graph)
        assert fault is None, f"after {after}: {fault}"


def _order(graph: fx.Graph) -> str | None:
    kinds = [n.op for n in graph.nodes]
    inputs = kinds.count("placeholder")
    if kinds[:inputs] != ["placeholder"] * inputs or kinds[-1] != "output":
        return "placeholders come first and one output comes last"
    return None


def _values(graph: fx.Graph) -> str | None:
    missing = [n.name for n in graph.nodes if n.op == "placeholder" and "val" not in n.meta]
    return f"no fake value: {missing}" if missing else None


def _mutations(graph: fx.Graph) -> str | None:
    used = [n.name for n in graph.nodes if ir.is_mutation(n) and any(u.op != "output" for u in n.users)]
    used = [n for n in used if not _makes_value(graph, n)]
    return f"the result of a mutation is used: {used}" if used else None


def _makes_value(graph: fx.Graph, name: str) -> bool:
    """An operator that both writes an argument and returns a value of its own."""
    node = next(n for n in graph.nodes if n.name == name)
    schema = ir.schema_of(node)
    return schema is not None and any(r.alias_info is None for r in schema.returns)


def _aliases(graph: fx.Graph) -> str | None:
    wrong = [n.name for n in graph.nodes if _is_view_operator(n) and not ir.storages(n) <= ir.storages(n.args[0])]
    return f"the fake value is of other memory than that of the argument: {wrong}" if wrong else None


def _is_view_operator(node: fx.Node) -> bool:
    """Whether the schema of ``node`` says that its results are memory of its first argument."""
    schema = ir.schema_of(node)
    if schema is None:
        return node.target is operator.getitem
    return bool(schema.returns) and all(r.alias_info and not r.alias_info.is_write for r in schema.returns)


def _rows(graph: fx.Graph) -> str | None:
    for row in (p for p in ir.placeholders(graph) if p.meta.get("owned")):
        key = ir.storage(row)
        users = [n for n in graph.nodes if any(ir.storage(a) == key for a in n.all_input_nodes) and not ir.is_alias(n)]
        if not users or row not in ir.written(users[0]):
            return f"{row.name} is read before it is written"
        if sum(ir.storage(t) == key for n in users for t in ir.written(n)) != 1:
            return f"{row.name} is written more than once"
    return None
