"""What the numbers say of the goals: never slower, faster than fused by hand, near the floor."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

Record = dict[str, Any]
NOISE = 1.02
OURS = "draftfuse"
HAND_GOALS = {"eagle-b/r1/": 1.25}  # cells by the start of their name -> how many times faster than by hand
FLOOR_GOALS = {"eagle-a/r1/": 1.25, "eagle-b/r1/": 1.5, "eagle-a/r64/": 1.35}


def slower(cell: Record) -> list[str]:
    """The modes that beat draftfuse beyond noise in every round."""
    rounds = {name: mode["rounds_ms"] for name, mode in cell["modes"].items() if "gpu_ms" in mode}
    ours = rounds.pop(OURS, [])
    return [n for n, others in rounds.items() if ours and all(o > NOISE * t for o, t in zip(ours, others, strict=True))]


def misses(cells: Sequence[Record], key: str, goals: dict[str, float], at_most: bool) -> list[str]:
    """Cells whose ratio ``key`` misses the goal of their name."""
    lines = []
    for cell in cells:
        value = cell["modes"].get(OURS, {}).get(key)
        for start, goal in goals.items():
            if value is not None and cell["cell"].startswith(start) and (value > goal if at_most else value < goal):
                lines.append(f"{cell['cell']}: {key} {value:.3f}, goal {goal}")
    return lines


def verdict(cells: Sequence[Record]) -> list[str]:
    """One line a goal, then one a miss."""
    if not any(OURS in cell["modes"] for cell in cells):
        return [f"no verdict: the mode {OURS} was not measured"]
    failed = [f"{cell['cell']}: no number" for cell in cells if "gpu_ms" not in cell["modes"].get(OURS, {})]
    lost = [f"{cell['cell']}: slower than {', '.join(modes)}" for cell in cells if (modes := slower(cell))]
    light = [cell["modes"].get(OURS, {}).get("hand_over") for cell in cells if cell["kv_share"] < 0.5]
    known = [ratio for ratio in light if ratio is not None]
    lines = [f"never slower: {len(cells) - len(failed) - len(lost)} of {len(cells)} cells"]
    if known:
        lines.append(f"fused by hand / draftfuse, median of {len(known)} cells with little KV: {median(known):.3f}")
    far = misses(cells, "hand_over", HAND_GOALS, at_most=False) + misses(cells, "to_floor", FLOOR_GOALS, at_most=True)
    return [*lines, *(f"miss: {line}" for line in (*failed, *lost, *far))]
