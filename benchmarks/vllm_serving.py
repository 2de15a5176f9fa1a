"""Serving through vLLM's draft loop as shipped and through draftfuse's plug-in, in one engine, in turn.

Usage: ``vllm_serving.py [--k 3] [--concurrency 1 16 64] --out PREFIX`` with vLLM 0.25 or 0.26 and a CUDA device writes
``PREFIX_tiny.json`` and ``PREFIX_random.json``, each complete after every cell. ``--dry`` is small and takes vLLM 0.32
on a CPU, to try the script.

Two engines, each in a process of its own: the packaged tiny trained model (EAGLE) on real Python source, and 8 layers
of the widths of an 8 B model with an EAGLE-3 head and random weights. Both start at once, and measure one after the
other. A cell is a concurrency and a temperature: in each round every variant serves the same load once (A/B/A/B), then
medians over rounds. One more run a variant, which is not timed, hashes the drafted tokens of every step. A cell that
fails is an ``error`` in the file.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from itertools import product
from pathlib import Path
from typing import Any

from vllm_load import Client, Load, python_prompts, random_prompts, seen
from vllm_models import ROOT, environment, load_plugin, make_models, pad_vocabulary, runner_of, vary_weights
from vllm_variants import Switched, Variants, Watch, different, sha

STARTED = time.time()
VARIANTS = {"tiny": ["shipped", "one_graph", "inductor_one_graph"], "random": ["shipped", "one_graph"]}
HEAD = (
    "| model | temperature | concurrency | variant | ITL shipped, ms | ITL, ms | change | acceptance shipped, % "
    "| acceptance, % | ITL x accepted length | drafts equal | outputs equal |\n|" + " --- |" * 12
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--k", type=int, default=3, help="speculative tokens")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96, help="of each request")
    parser.add_argument("--variants", nargs="+", help="see vllm_variants.py")
    parser.add_argument("--draft-sample", choices=["probabilistic", "greedy"], default="probabilistic")
    parser.add_argument("--seconds", type=float, default=285, help="no round begins after this time")
    parser.add_argument("--dry", action="store_true", help="small, on a CPU")
    parser.add_argument("--out", type=Path, required=True, help="beginning of the result files' names")
    parser.add_argument("--lock", type=Path, help="of engines that start side by side and measure in turn")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if len(args.models) == 1:
        measure(args.models[0], args)
        return
    lock = args.lock or Path(tempfile.mkdtemp(prefix="vllm-serving-")) / "lock"
    lock.touch()
    given = [word for word in sys.argv[1:] if word not in ("--models", *VARIANTS)]
    commands = [[sys.executable, __file__, *given, "--models", name, "--lock", str(lock)] for name in args.models]
    running = [subprocess.Popen(command) for command in commands]
    sys.exit(max(abs(process.wait()) for process in running))


def measure(name: str, args: argparse.Namespace) -> None:
    """All cells of one model."""
    with open(args.lock or __file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        llm, variants, watch = ready(name, args)
        fcntl.flock(lock, fcntl.LOCK_EX)  # when the others are ready, or have measured
        names = args.variants or VARIANTS[name]
        results = start_file(name, args)
        warm_up(name, llm, variants, names, args)
        for temperature, concurrency in product(args.temperature, args.concurrency):
            load = make_load(name, concurrency, temperature, args)
            cell: dict[str, Any] = {"model": name, "temperature": temperature, "concurrency": concurrency}
            try:
                cell |= one_cell(llm, variants, watch, names, load, args)
            except Exception:  # one cell must not cost the others
                cell["error"] = traceback.format_exc()
                print(cell["error"], flush=True)
            results.append("cells", cell)
            print("\n".join(rows(cell)), flush=True)
        results.put("explain", variants.plan.explain().split("\n"))
        results.put("seconds", round(time.time() - STARTED))
        print("\n".join([HEAD, *(row for cell in results.data["cells"] for row in rows(cell))]), flush=True)


def start_file(name: str, args: argparse.Namespace) -> Any:
    import torch

    from draftfuse.bench.results import Results

    settings = {key: str(value) for key, value in vars(args).items() if key not in ("out", "lock")}
    results = Results(Path(f"{args.out}_{name}.json"), torch.device("cpu" if args.dry else "cuda"), settings)
    results.data["environment"] = environment()
    results.put("ready_seconds", round(time.time() - STARTED))
    return results


def ready(name: str, args: argparse.Namespace) -> tuple[Any, Any, Watch]:
    """The engine, its variants, and the watch on its drafts."""
    os.environ["DRAFTFUSE_VLLM"] = "1"
    if args.dry:
        sys.path.insert(0, str(ROOT / "tests" / "vllm"))
        import triton_on_cpu  # noqa: F401
    load_plugin()
    llm = make_engine(name, args)
    runner = runner_of(llm)
    if name == "random" and not args.dry:
        vary_weights(runner)
    names = args.variants or VARIANTS[name]
    variants = Switched(runner.speculator) if args.dry else Variants(runner.speculator, names)
    return llm, variants, Watch(llm, runner.speculator)


def make_engine(name: str, args: argparse.Namespace) -> Any:
    from vllm import LLM

    root = Path(tempfile.mkdtemp(prefix="vllm-serving-"))
    if name == "tiny":
        made = pad_vocabulary(root)
        models = {"target": made["target"], "draft": made["eagle"]}
    else:
        make_models(root, 256 if args.dry else 4096, 8)
        models = {"target": root / "target", "draft": root / "eagle3"}
    return LLM(
        model=str(models["target"]),
        skip_tokenizer_init=True,
        load_format="auto" if name == "tiny" else "dummy",
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max(args.concurrency),
        max_num_batched_tokens=1024 if args.dry else 8192,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        speculative_config={
            "method": "eagle" if name == "tiny" else "eagle3",
            "model": str(models["draft"]),
            "num_speculative_tokens": args.k,
            "draft_sample_method": args.draft_sample,
        },
        **(on_cpu() if args.dry else on_gpu(name, args)),
    )


def on_gpu(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A share of memory that leaves room for a second engine; graphs for every power of two of requests.

    With FlashAttention 3, vLLM 0.25.1 by itself, without the plug-in, ends in an illegal memory access of its combine
    kernel while it captures the draft prefill of the tiny model (seen on an H200): that model takes Triton attention.
    """
    requests = [2**i for i in range(max(args.concurrency).bit_length())]
    sizes = sorted({n * tokens for n in requests for tokens in (1, args.k + 1)})
    graphs = {"mode": 3, "cudagraph_capture_sizes": sizes}
    attention = {"attention_backend": "TRITON_ATTN"} if name == "tiny" else {}
    return {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 8 << 30, "compilation_config": graphs, **attention}


def on_cpu() -> dict[str, Any]:
    return {
        "kv_cache_memory_bytes": 64 << 20,
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        "block_size": 32,
    }


def make_load(name: str, concurrency: int, temperature: float, args: argparse.Namespace) -> Load:
    """Twice as many requests as are served at a time, at least four."""
    make = python_prompts if name == "tiny" else random_prompts
    return Load(make(max(4, 2 * concurrency), 24 if args.dry else 512), concurrency, temperature, args.tokens)


def warm_up(name: str, llm: Any, variants: Any, names: list[str], args: argparse.Namespace) -> None:
    """Every variant once at the highest concurrency and both temperatures, so that nothing compiles in a cell."""
    for variant, temperature in product(names, args.temperature):
        variants.use(variant)
        make_load(name, max(args.concurrency), temperature, args).serve(llm)


def one_cell(
    llm: Any, variants: Any, watch: Watch, names: list[str], load: Load, args: argparse.Namespace
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    first: list[Any] = []
    for name in names:
        variants.use(name)
        found[name] = drafted(llm, watch, load, first)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    done = 0
    while done < args.rounds and time.time() - STARTED < args.seconds:
        for name in names:
            variants.use(name)
            rounds[name].append(seen(load.serve(llm), args.k))
        done += 1
    for name in names:
        found[name] |= medians(rounds[name])
    return {"rounds": done, "requests": len(load.prompts), "variants": found, "change": changes(found, names)}


def drafted(llm: Any, watch: Watch, load: Load, first: list[Any]) -> dict[str, Any]:
    """Hashes of all drafted tokens and of the outputs; ``first`` takes those of the first variant."""
    watch.drafts = []
    clients = load.serve(llm)
    rows = [batch.tolist() for batch in watch.drafts]
    watch.drafts = None
    outputs = [client.tokens for client in clients]
    first[:] = first or [rows, outputs]
    equal = sum(a == b for a, b in zip(outputs, first[1], strict=True))
    return {
        "drafted": sha(rows),
        "proposals": len(rows),
        "outputs": sha(outputs),
        "equal_outputs": equal,
        "different_drafts": different(rows, first[0])["count"] if len(rows) == len(first[0]) else None,
        "output_tokens": sum(map(len, outputs)),
        "sample": sample(clients),
    }


def sample(clients: list[Client]) -> list[int]:
    """The first tokens of the first request, to see what it writes."""
    return clients[0].tokens[:24]


def medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Median over rounds, and the spread."""
    out: dict[str, Any] = {}
    for key in rounds[0] if rounds else ():
        values = [r[key] for r in rounds]
        out[key] = round(statistics.median(values), 4)
        out[f"{key}_spread"] = [round(min(values), 4), round(max(values), 4)]
    return out


def changes(found: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Against the first variant: per cent of times, points of acceptance, and per cent of ITL x accepted length."""
    base = found[names[0]]
    if "itl_ms" not in base:
        return {}
    step = base["itl_ms"] * base["accepted_length"]
    return {
        name: {
            "itl": per_cent(found[name]["itl_ms"], base["itl_ms"]),
            "gap": per_cent(found[name]["gap_ms"], base["gap_ms"]),
            "acceptance_points": round(found[name]["acceptance"] - base["acceptance"], 2),
            "itl_x_accepted_length": per_cent(found[name]["itl_ms"] * found[name]["accepted_length"], step),
            "drafts_equal": found[name]["drafted"] == base["drafted"],
            "outputs_equal": found[name]["outputs"] == base["outputs"],
        }
        for name in names[1:]
    }


def per_cent(new: float, old: float) -> float:
    return round((new / old - 1) * 100, 2)


def rows(cell: dict[str, Any]) -> list[str]:
    """The cell as rows of the table."""
    found, out = cell.get("variants", {}), []
    for name, change in cell.get("change", {}).items():
        base, mine = found[next(iter(found))], found[name]
        accepted = f"{base['acceptance']:.2f} | {mine['acceptance']:.2f}"
        out.append(
            f"| {cell['model']} | {cell['temperature']:g} | {cell['concurrency']} | {name} | {base['itl_ms']:.3f} "
            f"| {mine['itl_ms']:.3f} | {change['itl']:+.1f} % | {accepted} "
            f"| {change['itl_x_accepted_length']:+.1f} % | {change['drafts_equal']} | {change['outputs_equal']} |"
        )
    return out or [f"| {cell['model']} | {cell['temperature']:g} | {cell['concurrency']} | not measured |"]


if __name__ == "__main__":
    main()
