"""``draftfuse backends``: the table of attention backends as text or JSON."""

from __future__ import annotations

import json

COLUMNS = ("name", "refresh", "status", "reason")


def render_backends(as_json: bool) -> str:
    """All rows: JSON with every field, or a table of name, kind of refresh, status and reason."""
    from draftfuse.backends import backends

    rows = [backend.row() for backend in backends()]
    if as_json:
        return json.dumps(rows, indent=2)
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in COLUMNS]
    lines = [list(COLUMNS), *([row[name] for name in COLUMNS] for row in rows)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
