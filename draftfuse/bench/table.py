"""Tables: every mode of every cell for the terminal, one row a cell for the README."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from draftfuse.errors import InvalidOptionError

Record = dict[str, Any]
COLUMNS = (  # key in a mode's record, title, format
    ("gpu_ms", "GPU ms", "{:.3f}"),
    ("cpu_us", "CPU us", "{:.0f}"),
    ("launches", "launches", "{:d}"),
    ("kernels", "kernels", "{:d}"),
    ("to_floor", "x floor", "{:.2f}"),
    ("hand_over", "hand / this", "{:.2f}"),
    ("to_best_other", "this / best other", "{:.2f}"),
    ("agreement", "same tokens", "{:.1%}"),
    ("build_s", "build s", "{:.1f}"),
    ("peak_mb", "peak MiB", "{:.0f}"),
)
README_MODES = ("eager", "split", "graph", "hand", "whole", "none", "draftfuse")
README_TITLES = {
    "split": "split graphs",
    "graph": "one graph",
    "hand": "fused by hand",
    "whole": "whole loop compiled",
    "none": 'draftfuse, `compiler="none"`',
}


def shown(record: Record, key: str, form: str) -> str:
    """A value, or a dash."""
    return form.format(record[key]) if record.get(key) is not None else "-"


def terminal_table(cells: Iterable[Record]) -> Table:
    """A row for each mode of each cell."""
    table = Table(title="draft steps 1..k-1")
    for title in ("cell", "floor ms", "mode", *(title for _, title, _ in COLUMNS)):
        table.add_column(title, justify="left" if title in ("cell", "mode") else "right")
    for cell in cells:
        for index, (name, record) in enumerate(cell["modes"].items()):
            head = (cell["cell"], f"{cell['floor_ms']:.3f}") if index == 0 else ("", "")
            values = [shown(record, key, form) for key, _, form in COLUMNS]
            table.add_row(*head, name, *([record["error"], *values[1:]] if "error" in record else values))
        table.add_section()
    return table


def load_cells(paths: Sequence[Path]) -> tuple[list[Record], list[Record]]:
    """Cells of all result files, and their environments without repetition."""
    files = [_result_file(path) for path in paths]
    cells = [cell for data in files for cell in data.get("cells", [])]
    environments = [data["environment"] for data in files]
    return cells, [e for i, e in enumerate(environments) if e not in environments[:i]]


def _result_file(path: Path) -> Record:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        todo = "Name files that draftfuse bench --out wrote."
        raise InvalidOptionError("this is no result file", f"{path} ({error})", "JSON", todo) from error
    if not isinstance(data, dict) or "environment" not in data:
        raise InvalidOptionError("this is no result file", path, "an object with environment", "Name another file.")
    return data


def readme_table(cells: Sequence[Record], environments: Sequence[Record]) -> str:
    """Markdown: milliseconds of every mode, the floor, and what draftfuse makes of both."""
    modes = [m for m in README_MODES if any(m in cell["modes"] for cell in cells)]
    titles = ["cell", *(README_TITLES.get(m, m) for m in modes), "floor", "draftfuse / floor", "by hand / draftfuse"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += ["| " + " | ".join(readme_row(cell, modes)) + " |" for cell in cells]
    return "\n".join([*lines, "", *(origin(e) for e in environments)])


def readme_row(cell: Record, modes: Sequence[str]) -> list[str]:
    """The texts of one cell."""
    ours = cell["modes"].get("draftfuse", {})
    times = [shown(cell["modes"].get(m, {}), "gpu_ms", "{:.3f}") for m in modes]
    ratios = [shown(ours, "to_floor", "{:.2f}"), shown(ours, "hand_over", "{:.2f}")]
    return [f"`{cell['cell']}`", *times, f"{cell['floor_ms']:.3f}", *ratios]


def origin(environment: Record) -> str:
    """Where numbers come from, in one line."""
    parts = [f"{key} {environment[key]}" for key in ("torch", "triton", "cuda", "driver") if environment.get(key)]
    return f"{environment['device']}, {', '.join(parts)}, {environment['date']}; milliseconds, medians."


def tiny_table(records: Iterable[Record]) -> Table:
    """The packaged model on the CPU."""
    table = Table(title="packaged model: draft steps 1..k-1, milliseconds")
    for title in ("k", "requests", "eager", "draftfuse", "speed-up", "same tokens"):
        table.add_column(title, justify="right")
    for r in records:
        times = (f"{r['eager_ms']:.3f}", f"{r['draftfuse_ms']:.3f}", f"{r['speedup']:.2f}")
        table.add_row(str(r["k"]), str(r["requests"]), *times, "yes" if r["tokens_match"] else "no")
    return table
