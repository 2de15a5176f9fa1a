"""``draftfuse demo``: complete real text speculatively in three modes, and compare drafts and cost.

The packaged target and its EAGLE head continue prompts from held-out source, greedily and with seeded Gumbel noise. The
target alone (the same engine with k = 0) says what the text has to be. R requests, K draft tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import draftfuse
from draftfuse.errors import InvalidOptionError
from draftfuse.models import EOS, held_out_text
from draftfuse.reference import EagleSpeculator, Engine, Generation, Limits, Target
from draftfuse.state import Saved, persistent_tensors

MODES = ("eager", "split", "fused")
TEMPERATURES = {"greedy": 0.0, "gumbel": 0.5}
PROMPT_TOKENS = 192
SPANS = 30  # measured decode loops a mode
CALLS = ("graph replays", "compiled calls", "eager steps")  # counters of a report, of which a mode moves one


@dataclass(frozen=True)
class Options:
    """What the demo runs."""

    text: str | None = None  # prompts come from here; held-out source by default
    k: int = 4
    tokens: int = 64
    requests: int = 4
    compiler: str = "inductor"
    device: str = "cpu"


@dataclass
class Run:
    """One mode: its compiled loop and what it generated, by name of the temperature."""

    fused: draftfuse.FusedDraft
    generations: dict[str, Generation]
    seconds: float
    spans: list[float]

    @property
    def calls(self) -> tuple[float, str]:
        """Launches or calls a propose, and the name of what was counted."""
        counters, proposals = self.fused.report.counters, sum(len(g.drafts) for g in self.generations.values())
        name = next((name for name in CALLS if counters[name]), "eager steps")
        return counters[name] / max(1, proposals), name

    @property
    def span(self) -> float:
        """Median CPU span of the decode loop in milliseconds."""
        return statistics.median(self.spans) * 1e3


def demo(options: Options) -> dict[str, Any]:
    """Run all modes; the result is what ``--json`` prints."""
    prompts = cut_prompts(held_out_text() if options.text is None else options.text, options.requests)
    with one_thread(options.device):
        limits = limits_of(options, prompts)
        target = Target.from_packaged(limits, options.device)
        alone = {name: generate(Engine(target), prompts, options, t) for name, t in TEMPERATURES.items()}
        runs = {mode: run_mode(mode, target, limits, prompts, options) for mode in MODES}
        calls = {mode: run.calls for mode, run in runs.items()}  # before the measured loops count as well
        measure(list(runs.values()), options.k)
    return summary(options, prompts, alone, runs, calls)


def cut_prompts(text: str, requests: int) -> list[list[int]]:
    """``requests`` prompts from evenly spaced places of ``text``; a token is a byte."""
    ids = list(text.encode())
    length = min(PROMPT_TOKENS, len(ids) // 2)
    if length < 1 or requests < 1:
        todo = "Pass a longer text, and one request or more."
        raise InvalidOptionError(
            "no prompt can be cut", f"{len(ids)} bytes, {requests} requests", "2 bytes or more", todo
        )
    step = (len(ids) - length) // requests
    return [ids[i * step : i * step + length] for i in range(requests)]


@contextmanager
def one_thread(device: str) -> Iterator[None]:
    """On a CPU, models this small lose more by waiting for a second thread than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if torch.device(device).type == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def limits_of(options: Options, prompts: list[list[int]]) -> Limits:
    """Room for every request to its last draft."""
    length = len(prompts[0]) + options.tokens + options.k
    tokens = options.requests * max(len(prompts[0]), options.k + 1)
    return Limits(options.k, options.requests, length, max_num_tokens=tokens)


def generate(engine: Engine, prompts: list[list[int]], options: Options, temperature: float) -> Generation:
    return engine.generate(prompts, options.tokens, temperature=temperature, seed=1, stop=EOS)


def run_mode(mode: str, target: Target, limits: Limits, prompts: list[list[int]], options: Options) -> Run:
    """Compile the head in ``mode`` and generate at every temperature; all modes pad to the same rows."""
    head = EagleSpeculator.from_packaged(limits, options.device)
    compiler = "none" if mode == "eager" else options.compiler
    start = time.perf_counter()
    fused = draftfuse.compile(head, mode=mode, compiler=compiler, request_capacities=[options.requests])
    engine = Engine(target, fused)
    generations = {name: generate(engine, prompts, options, t) for name, t in TEMPERATURES.items()}
    return Run(fused, generations, time.perf_counter() - start, [])


def measure(runs: list[Run], k: int) -> None:
    """Time the decode loop of every mode in turn, always from the inputs that the first batch left."""
    saved = []
    for run in runs:
        batch = run.generations["greedy"].first_batch
        if batch is not None:
            run.fused.propose(batch, k)
        saved.append(Saved(persistent_tensors(run.fused.spec)))
    for _ in range(SPANS):
        for run, state in zip(runs, saved, strict=True):
            run.spans.append(decode_span(run.fused, state, k))


def decode_span(fused: draftfuse.FusedDraft, state: Saved, k: int) -> float:
    """Seconds that the CPU is busy with draft steps 1..k-1 of all rows (on a GPU: until all work is queued)."""
    state.restore()
    if fused.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    fused.decode(fused.spec.max_num_reqs, k)
    return time.perf_counter() - start


# ---- the result


def summary(
    options: Options,
    prompts: list[list[int]],
    alone: dict[str, Generation],
    runs: dict[str, Run],
    calls: dict[str, tuple[float, str]],
) -> dict[str, Any]:
    """Everything as plain data."""
    modes = {mode: describe(run, runs["eager"], alone, calls[mode]) for mode, run in runs.items()}
    fused = runs["fused"].fused.report
    return {
        "tokens_match": all(mode["tokens_match"] and mode["text_is_the_targets"] for mode in modes.values()),
        "acceptance_length": modes["fused"]["acceptance_length"]["greedy"],
        "launches_per_propose": modes["fused"]["calls_per_propose"],
        "modes": modes,
        "passes": passes_of(fused),
        "fallbacks": [str(fallback) for fallback in fused.fallbacks],
        "k": options.k,
        "requests": options.requests,
        "compiler": options.compiler,
        "device": device_name(options.device),
        "torch": torch.__version__,
        "sample": [decode(prompts[0]), decode(runs["fused"].generations["greedy"].tokens[0])],
    }


def describe(run: Run, eager: Run, alone: dict[str, Generation], calls: tuple[float, str]) -> dict[str, Any]:
    """One mode against the eager one and against the target alone."""
    pairs = [(run.generations[name], eager.generations[name], alone[name]) for name in TEMPERATURES]
    return {
        "tokens_match": all(same_drafts(mine, theirs) for mine, theirs, _ in pairs),
        "text_is_the_targets": all(mine.tokens == target.tokens for mine, _, target in pairs),
        "acceptance_length": {name: round(g.acceptance_length, 3) for name, g in run.generations.items()},
        "calls_per_propose": round(calls[0], 3),
        "calls_are": calls[1],
        "decode_span_ms": round(run.span, 4),
        "speedup": round(eager.span / run.span, 2),
        "seconds": round(run.seconds, 1),
    }


def same_drafts(mine: Generation, theirs: Generation) -> bool:
    """Whether two runs drafted the same tokens at every step."""
    if len(mine.drafts) != len(theirs.drafts):
        return False
    return all(torch.equal(a, b) for a, b in zip(mine.drafts, theirs.drafts, strict=True))


def passes_of(report: Any) -> list[dict[str, Any]]:
    """The passes of every fused build."""
    return [
        {"build": build.kind, "name": p.name, "rewrites": p.rewrites, "nodes": p.nodes, "seconds": round(p.seconds, 3)}
        for build in report.builds
        for p in build.passes
    ]


def device_name(device: str) -> str:
    place = torch.device(device)
    return f"cuda ({torch.cuda.get_device_name(place)})" if place.type == "cuda" else str(place)


def decode(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


# ---- printing


def show(result: dict[str, Any], console: Console) -> None:
    """Print a result of :func:`demo`."""
    prompt, text = result["sample"]
    sample = Text.assemble((prompt.lstrip(), "dim"), ("⟩", "bold"), (text, "bold green"))
    title = f"the first of {result['requests']} texts: prompt ⟩ what was generated"
    console.print(Panel(sample, title=title, title_align="left"), modes_table(result), passes_table(result))
    for line in result["fallbacks"]:
        console.print(f"[yellow]fallback: {line}")
    console.print(verdict(result))


def modes_table(result: dict[str, Any]) -> Table:
    heading = f"K = {result['k']}, {result['device']}, torch {result['torch']}, compiler {result['compiler']}"
    legend = (
        "same: drafts as eager, text as the target alone; greedy, gumbel: drafts\n"
        "accepted a step; launches: graphs or compiled calls a propose; loop: median\n"
        "time that the CPU is busy with draft steps 1..K-1; ratio: eager's over it"
    )
    columns = ("mode", "same drafts", "same text", *TEMPERATURES, "launches", "loop", "ratio")
    table = Table(*columns, title=heading, title_justify="left", caption=legend, caption_justify="left")
    for name, mode in result["modes"].items():
        yes = ["yes" if mode[key] else "[red]NO" for key in ("tokens_match", "text_is_the_targets")]
        lengths = [f"{length:.2f}" for length in mode["acceptance_length"].values()]
        calls = "none" if mode["calls_are"] == "eager steps" else f"{mode['calls_per_propose']:g}"
        table.add_row(name, *yes, *lengths, calls, f"{mode['decode_span_ms']:.2f} ms", f"{mode['speedup']:.2f} x")
    return table


def passes_table(result: dict[str, Any]) -> Table:
    """One row a pass, one column a build."""
    builds = list(dict.fromkeys(p["build"] for p in result["passes"]))
    table = Table("pass", *builds, title="rewrites, and nodes left", title_justify="left")
    cells = {(p["name"], p["build"]): f"{p['rewrites']}, {p['nodes']}" for p in result["passes"]}
    for name in dict.fromkeys(name for name, _ in cells):
        table.add_row(name, *(cells.get((name, build), "") for build in builds))
    return table


def verdict(result: dict[str, Any]) -> str:
    """The last line: what was compared, and how it came out."""
    if result["tokens_match"]:
        return "[green]All modes drafted the same tokens, and every text is the target's own."
    return "[red]Tokens differ: see the table. --compiler none rules out other roundings of compiled code."
