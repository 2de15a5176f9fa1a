"""vLLM's draft loop as shipped against the same loop through draftfuse, in one engine, interleaved.

Usage: ``vllm_ab.py [--k 7] [--requests 1 16] [--out FILE]``; needs a CUDA device and vLLM 0.25 or 0.26.

One engine, one set of weights: the plug-in captures its graphs as it does in service, then vLLM's own single-step
graphs are captured beside them, and once more the fused loop with the refresh switched off (the control: its drafts
must differ). Every round runs each variant in turn. Weights are random, of a size at which drafts vary. Drafted tokens
of every step are hashed: outputs alone prove nothing, verification returns the target's tokens whatever was drafted.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_models import environment, load_plugin, make_models, runner_of, vary_weights
from vllm_variants import Variants, Watch, different, select, sha


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=7, help="speculative tokens")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--variants", nargs="+", default=["shipped", "none", "one_graph"], help="see vllm_variants.py")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--hook", action="store_true", help="the pass hook too, products choose kernels under inductor")
    parser.add_argument("--plain", action="store_true", help="no plug-in at all, in a process of its own")
    parser.add_argument("--serve", type=int, default=0, help="requests of a mixed load, prefix caching on")
    parser.add_argument("--attention", help="attention backend, vLLM's choice by default")
    parser.add_argument("--lock", type=Path, help="of engines that start side by side and measure in turn")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def make_engine(root: Path, args: argparse.Namespace) -> Any:
    from vllm import LLM

    speculative = {"method": "eagle3", "model": str(root / "eagle3"), "num_speculative_tokens": args.k}
    if args.temperature > 0:
        speculative["draft_sample_method"] = "probabilistic"
    options = {} if args.attention is None else {"attention_backend": args.attention}
    compilation: dict[str, Any] = {"mode": 3, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
    if args.hook:
        import draftfuse
        from draftfuse.lowering import hook

        # One engine has variants of both compilers: the pass acts as for inductor, and variants of none ignore it.
        hook.may_choose_kernels = lambda: True
        compilation["inductor_compile_config"] = {"post_grad_custom_post_pass": draftfuse.post_grad_pass}
    return LLM(
        model=str(root / "target"),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=max(args.requests),
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=8 << 30,  # engines may start side by side
        enable_prefix_caching=args.serve > 0,
        disable_log_stats=True,
        seed=0,
        speculative_config=speculative,
        compilation_config=compilation,
        **options,
    )


def generate(llm: Any, count: int, args: argparse.Namespace, tokens: int) -> list[list[int]]:
    import torch
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 31000 + 5 for j in range(64 + 3 * i)]} for i in range(count)]
    settings = [
        SamplingParams(max_tokens=tokens, temperature=args.temperature, seed=i, ignore_eos=True, detokenize=False)
        for i in range(count)
    ]
    results = llm.generate(prompts, settings, use_tqdm=False)
    torch.cuda.synchronize()
    return [list(result.outputs[0].token_ids) for result in results]


def drafted(llm: Any, watch: Watch, count: int, args: argparse.Namespace, expected: list[Any]) -> dict[str, Any]:
    """An untimed run: hashes of everything drafted and of the outputs, and where drafts differ from ``expected``.

    ``expected`` takes the drafts of the first run.
    """
    llm.reset_prefix_cache()
    watch.drafts = []
    outputs = generate(llm, count, args, 48)
    rows = [batch.tolist() for batch in watch.drafts]
    watch.drafts = None
    expected[:] = expected or rows
    distinct = len({token for batch in rows for row in batch for token in row})
    found = {"drafted": sha(rows), "proposals": len(rows), "distinct": distinct, "outputs": sha(outputs)}
    return found | {"different": different(rows, expected)}


def launches(llm: Any, watch: Watch, count: int, args: argparse.Namespace) -> dict[str, float]:
    """Launches a scheduler step and milliseconds of all kernels in it, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    watch.clear()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        generate(llm, count, args, 24)
    steps = max(len(watch.spans["propose"]), 1)
    events = profiled.key_averages()
    counts = {event.key: event.count for event in events}
    on_device = sum(event.self_device_time_total for event in events) / 1e3
    kernels = sum(number for name, number in counts.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    return {
        "graph_launches": counts.get("cudaGraphLaunch", 0) / steps,
        "kernel_launches": kernels / steps,
        "kernels_ms": on_device / steps,
        "steps": steps,
    }


def measure(llm: Any, watch: Watch, variants: Any, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for count in args.requests:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        mine: dict[str, Any] = {}
        first: list[Any] = []
        for name in [*names, "no refresh"] if variants else names:
            select(variants, name)
            mine[name] = drafted(llm, watch, count, args, first)
        select(variants, names[0])
        again = drafted(llm, watch, count, args, first)
        for _ in range(args.rounds):
            for name in names:
                select(variants, name)
                watch.clear()
                generate(llm, count, args, args.tokens)
                rounds[name].append(watch.medians())
        for name in names:
            select(variants, name)
            mine[name] |= summary(rounds[name]) | {"launches": launches(llm, watch, count, args)}
        results[str(count)] = mine | {"change": changes(mine, names), f"{names[0]} again": again}
        print(json.dumps({count: results[str(count)]}), flush=True)
    return results


def serve(llm: Any, variants: Any, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """A mixed load through each variant: lengths from 8 tokens to the model's limit, shared prefixes, late finishes."""
    from vllm import SamplingParams

    lengths = [8 + (37 * i) % 900 if i % 10 else 2030 for i in range(args.serve)]
    prompts = [
        {"prompt_token_ids": [(11 * (i % 7) + 13 * j) % 31000 + 5 for j in range(n)]} for i, n in enumerate(lengths)
    ]
    settings = [
        SamplingParams(
            max_tokens=8 + (29 * i) % 90, temperature=args.temperature, seed=i, ignore_eos=True, detokenize=False
        )
        for i in range(args.serve)
    ]
    results: dict[str, Any] = {}
    for name in names:
        select(variants, name)
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = [list(r.outputs[0].token_ids) for r in llm.generate(prompts, settings, use_tqdm=False)]
        seconds = time.perf_counter() - start
        results[name] = {"outputs": sha(outputs), "tokens": sum(map(len, outputs)), "seconds": round(seconds, 2)}
    print(json.dumps({"serve": results}), flush=True)
    return results


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Median over rounds of each round's median, and the spread."""
    out: dict[str, Any] = {}
    for name in sorted(set.intersection(*map(set, rounds))):  # a whole proposal has no decode steps of its own
        values = [r[name] for r in rounds]
        out[f"{name}_ms"] = round(statistics.median(values), 4)
        out[f"{name}_spread_ms"] = [round(min(values), 4), round(max(values), 4)]
    return out


def changes(mine: dict[str, Any], names: list[str]) -> dict[str, dict[str, float]]:
    """Per cent against shipped."""
    if "shipped" not in names:
        return {}
    base = mine["shipped"]
    keys = ("multi_step_ms", "propose_ms", "step_ms", "wall_ms")
    return {
        name: {key: round((mine[name][key] / base[key] - 1) * 100, 1) for key in keys if key in mine[name]}
        for name in names
        if name != "shipped"
    }


def main() -> None:
    args = arguments()
    os.environ["DRAFTFUSE_VLLM"] = "0" if args.plain else "1"
    if not args.plain:
        load_plugin()
    with open(args.lock or os.devnull, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        run(args, lambda: fcntl.flock(lock, fcntl.LOCK_EX))


def run(args: argparse.Namespace, wait: Callable[[], None]) -> None:
    """Start the engine, wait until the device is free, measure, and write the file."""
    started = time.time()
    root = Path(tempfile.mkdtemp(prefix="vllm-ab-"))
    make_models(root, args.hidden, args.layers)
    llm = make_engine(root, args)
    runner = runner_of(llm)
    vary_weights(runner)
    variants = None if args.plain else Variants(runner.speculator, [*args.variants, "no refresh"])
    names = ["shipped"] if args.plain else args.variants
    watch = Watch(llm, runner.speculator)
    ready = time.time() - started
    wait()
    begin = time.time()
    results = measure(llm, watch, variants, names, args)
    if args.serve:
        results["serve"] = serve(llm, variants, names, args)
    told = "" if args.plain else variants.plan.explain()
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("out", "lock")}
    seconds = {"ready": round(ready), "measured": round(time.time() - begin)}
    report = {**environment(), "settings": settings, "seconds": seconds, "results": results, "explain": told}
    text = json.dumps(report, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
