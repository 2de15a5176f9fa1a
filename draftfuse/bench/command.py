"""``draftfuse bench``: measure every mode of every cell side by side, print the table, keep the numbers."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from draftfuse.bench.attention import BACKENDS
from draftfuse.bench.cells import SPECULATORS, Cell, all_cells, select, speculator_for
from draftfuse.bench.compile_time import measure_compile
from draftfuse.bench.measure import REPEATS, copy_bandwidth
from draftfuse.bench.modes import DEFAULT_MODES, MODES, Workbench
from draftfuse.bench.results import Results, device_slug
from draftfuse.bench.runner import build_groups, measure_groups
from draftfuse.bench.table import load_cells, readme_table, terminal_table, tiny_table
from draftfuse.bench.tiny import measure_tiny
from draftfuse.bench.together import my_turn, run_children, start
from draftfuse.bench.verdict import verdict
from draftfuse.environment import check_device
from draftfuse.errors import InvalidOptionError
from draftfuse.validate import check_option

Turn = AbstractContextManager[None]
TINY_KS = (2, 3, 4, 5, 6, 7, 8)


def say(text: str) -> None:
    """Progress, beside the output."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def bench(
    device: Annotated[str, typer.Option(help="cuda or cpu; what is there by default")] = "",
    cells: Annotated[
        list[str] | None, typer.Option(help="eagle-a, 'eagle-*/r1/k8/*', ...; commas or repeats for more")
    ] = None,
    modes: Annotated[str, typer.Option(help="comma-separated")] = ",".join(DEFAULT_MODES),
    attention: Annotated[str, typer.Option(help=" or ".join(BACKENDS))] = "triton",
    repeats: Annotated[int, typer.Option(min=4, help="timed runs of each mode in each cell")] = REPEATS,
    out: Annotated[Path | None, typer.Option(help="folder for the result files, one a speculator")] = None,
    compile_time: Annotated[
        bool, typer.Option("--compile", help="measure compile time, cold and warm, instead")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
    render: Annotated[
        list[Path] | None, typer.Option(help="print the README table of result files instead, of --cells if given")
    ] = None,
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILES]...", help="further files of --render, as a shell lists them")
    ] = None,
) -> None:
    """Measure draft loops: eager, split, one graph, fused by hand, compiled whole, draftfuse.

    Exit code 1 where a process of it failed, whose cells are missing then.

    On the CPU and without --cells: the packaged model, compiled against eager, at k = 2..8.
    """
    patterns = [p for text in cells or [] for p in text.split(",")]
    if more and not render:
        raise InvalidOptionError("files without --render", [*map(str, more)], "options only", "Write --render FILES.")
    if render:
        found, environments = load_cells([*render, *(more or [])])
        wanted_cells = {c.name for c in select(all_cells(torch.device("cuda")), patterns)}
        print(readme_table([c for c in found if not patterns or c["cell"] in wanted_cells], environments))
        return
    require_folder(out)
    target = torch.device(check_device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    wanted = modes.split(",")
    for name in wanted:
        check_option("mode", name, list(MODES))
    check_option("attention", attention, list(BACKENDS))
    if target.type == "cpu" and not cells and not compile_time:
        measured = run_tiny(out)
        if as_json:
            print(json.dumps(measured, indent=1))
        else:
            Console().print(tiny_table(measured["tiny"]))
        return
    chosen = select(all_cells(target), patterns)
    names = [name for name in SPECULATORS if any(c.speculator == name for c in chosen)]
    folder = out or Path(tempfile.mkdtemp(prefix="draftfuse-bench-"))
    paths = [folder / f"{'compile' if compile_time else 'bench'}-{name}-{device_slug(target)}.json" for name in names]
    if compile_time:
        failed = sum(run_compile(name, path, target, attention) for name, path in zip(names, paths, strict=True))
        print(json.dumps([json.loads(path.read_text())["compile"] for path in paths if path.is_file()], indent=1))
        raise typer.Exit(int(failed > 0))
    groups = {path: [c for c in chosen if c.speculator == name] for name, path in zip(names, paths, strict=True)}
    failed = run_apart(groups, {"device": str(target), "modes": wanted, "attention": attention, "repeats": repeats})
    show([path for path in paths if path.is_file()], as_json)
    raise typer.Exit(int(failed > 0))


def require_folder(out: Path | None) -> None:
    """Raise :class:`InvalidOptionError` unless results can go into ``out``: that shows before minutes of measuring."""
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        todo = "Name a folder, or leave --out away."
        raise InvalidOptionError("the results have no place", error, "a folder to write into", todo) from error


def show(paths: Sequence[Path], as_json: bool) -> None:
    """Print what result files hold."""
    found, environments = load_cells(paths)
    if as_json:
        print(json.dumps({"environments": environments, "cells": found, "verdict": verdict(found)}, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(terminal_table(found))
        print("\n".join(verdict(found)))
    say(f"results: {', '.join(map(str, paths))}")


def run_tiny(out: Path | None) -> dict[str, Any]:
    """The packaged model on the CPU."""
    device = torch.device("cpu")
    results = Results(None if out is None else out / "bench-tiny-cpu.json", device, {"requests": 1})
    results.put("tiny", measure_tiny(TINY_KS, 1, say))
    return results.data


def run_cells(
    cells: Sequence[Cell],
    path: Path,
    device: torch.device,
    modes: Sequence[str],
    attention: str,
    repeats: int,
    turn: Turn | None = None,
) -> None:
    """All ``cells`` of one speculator, in this process; the file is complete after each.

    ``turn`` is entered between building and measuring.
    """
    settings = {"modes": list(modes), "attention": attention, "repeats": repeats, "page_size": 16}
    results = Results(path, device, settings | {"speculator": SPECULATORS[cells[0].speculator].words})
    spec = speculator_for(cells, device, attention)
    workbench = Workbench(spec, sorted({c.requests for c in cells}))
    groups = build_groups(workbench, cells, modes, say)

    def keep(record: dict[str, Any]) -> None:
        results.append("cells", record)
        times = {n: round(m["gpu_ms"], 3) for n, m in record["modes"].items() if "gpu_ms" in m}
        say(f"{record['cell']}: floor {record['floor_ms']:.3f} ms, {times}")

    with turn or nullcontext():
        bandwidth = copy_bandwidth(device)
        results.put("copy_bandwidth", bandwidth)
        results.put("cells", measure_groups(workbench, groups, bandwidth, keep, repeats))


def child(arguments: dict[str, Any], cache: str) -> int:
    """Run this module's :func:`work` in another process, with compiler caches in ``cache``."""
    return start(arguments, cache).wait()


def run_apart(groups: dict[Path, list[Cell]], common: dict[str, Any]) -> int:
    """:func:`run_cells` in a process a speculator, with empty compiler caches; how many failed, others unharmed."""
    arguments = {str(path): {"path": str(path), "cells": [vars(c) for c in cells]} for path, cells in groups.items()}
    names = {str(path): cells[0].speculator for path, cells in groups.items()}
    codes = run_children({names[path]: given | common for path, given in arguments.items()})
    for name, code in codes.items():
        if code:
            say(f"{name}: the process ended with {code}")
    return sum(code != 0 for code in codes.values())


def run_compile(name: str, path: Path, device: torch.device, attention: str) -> int:
    """Compile time of one speculator, cold, then warm; how many of the two failed."""
    given = {"compile": name, "path": str(path), "device": str(device), "attention": attention}
    with tempfile.TemporaryDirectory(prefix="draftfuse-cold-") as cache:
        return sum(child(given | {"stage": stage}, cache) != 0 for stage in ("cold", "warm"))


def work(arguments: dict[str, Any]) -> None:
    """What a child process does."""
    device, path = torch.device(arguments["device"]), Path(arguments["path"])
    if "compile" in arguments:
        found = measure_compile(arguments["compile"], device, arguments["attention"])
        results = Results(path, device, {"attention": arguments["attention"]})
        before = json.loads(path.read_text()).get("compile", {}) if path.is_file() else {}
        results.put("compile", before | {arguments["stage"]: found})
        say(f"{arguments['compile']} {arguments['stage']}: {found['total_s']:.1f} s")
        return
    cells = [Cell(**c) for c in arguments["cells"]]
    folder, name, count = arguments["turn"]
    turn = my_turn(Path(folder), name, count)
    run_cells(cells, path, device, arguments["modes"], arguments["attention"], arguments["repeats"], turn)
