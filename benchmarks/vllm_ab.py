"""vLLM's draft loop as shipped against the same loop through draftfuse, in one engine, interleaved.

Usage: ``vllm_ab.py [--k 7] [--requests 1 16] [--out FILE]``; needs a CUDA device and vLLM 0.25 or 0.26.

One engine, one set of weights: the plug-in captures its graphs as it does in service, then vLLM's own single-step
graphs are captured beside them, and once more the fused loop with the refresh switched off (the control: its drafts
must differ). Every round runs each variant in turn. Weights are random, of a size at which drafts vary. Drafted tokens
of every step are hashed: outputs alone prove nothing, verification returns the target's tokens whatever was drafted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
)

VARIANTS = "of shipped, none, inductor, and inductor_own_draw (vLLM's own argmax)"
SPANS = {"multi_step": "_multi_step_decode", "propose": "propose"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=7, help="speculative tokens")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument(
        "--variants", nargs="+", default=["shipped", "none"], help="of shipped, none, inductor, inductor_own_draw"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--plain", action="store_true", help="no plug-in at all, in a process of its own")
    parser.add_argument("--serve", type=int, default=0, help="requests of a mixed load, prefix caching on")
    parser.add_argument("--attention", help="attention backend, vLLM's choice by default")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def make_models(root: Path, args: argparse.Namespace) -> None:
    """Configurations only: a target with the widths given, and an EAGLE-3 head of one layer."""
    from transformers import LlamaConfig

    heads = args.hidden // 128
    widths = {
        "vocab_size": 32000,
        "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 7 // 2,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    target = LlamaConfig(num_hidden_layers=args.layers, **widths)
    target.architectures = ["LlamaForCausalLM"]
    target.save_pretrained(root / "target")
    head = LlamaConfig(num_hidden_layers=1, **widths).to_dict()
    head.update(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=32000)
    (root / "eagle3").mkdir()
    (root / "eagle3" / "config.json").write_text(json.dumps(head))


def make_engine(root: Path, args: argparse.Namespace) -> Any:
    from vllm import LLM

    speculative = {"method": "eagle3", "model": str(root / "eagle3"), "num_speculative_tokens": args.k}
    if args.temperature > 0:
        speculative["draft_sample_method"] = "probabilistic"
    options = {} if args.attention is None else {"attention_backend": args.attention}
    return LLM(
        model=str(root / "target"),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=max(args.requests),
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=args.serve > 0,
        disable_log_stats=True,
        seed=0,
        speculative_config=speculative,
        compilation_config={"mode": 3, "cudagraph_capture_sizes": [8, 16, 32, 64, 128]},
        **options,
    )


def runner_of(llm: Any) -> Any:
    """The model runner of the one worker, which lives in this process."""
    found: list[Any] = []
    llm.collective_rpc(lambda worker: found.append(worker.model_runner))
    return found[0]


def vary_weights(runner: Any) -> None:
    """Weights of a size at which drafts vary; the draft's attention is sharp, so stale metadata shows in its tokens."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(0)
    sharp = {"qkv_proj": 2.0, "o_proj": 4.0}
    with torch.inference_mode():
        for model, factors in ((runner.model, {}), (runner.speculator.model, sharp)):
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point() and parameter.dim() >= 2:
                    factor = next((value for part, value in factors.items() if part in name), 1.0)
                    size = 1.0 if "embed" in name else factor * parameter.shape[-1] ** -0.5
                    parameter.normal_(0, size, generator=generator)
                elif parameter.is_floating_point():
                    parameter.fill_(1)


class Variants:
    """The graphs of each variant, and the switch between them."""

    def __init__(self, spec: Any, names: list[str]) -> None:
        from draftfuse.vllm.plan import plan_of

        self.spec, self.plan = spec, plan_of(spec)
        assert self.plan is not None, "the plug-in is not active"
        assert self.plan.fused, self.plan.reason
        self.managers = {"none": spec.decode_cudagraph_manager}
        for name in names:
            if name not in self.managers:
                self.managers[name] = self._captured(name)
        self.managers["no refresh"] = self._captured("no refresh")

    def use(self, name: str) -> None:
        self.spec.decode_cudagraph_manager = self.managers[name]
        self.plan.fused = name != "shipped"

    def _captured(self, name: str) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.config.compilation import CUDAGraphMode

        spec, first = self.spec, self.managers["none"]
        manager = type(first)(spec.vllm_config, spec.device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=1)
        with set_current_vllm_config(spec.vllm_config), self._function(name) as function:
            manager.capture(
                function,
                spec.model_state,
                spec.input_buffers,
                spec.block_tables,
                spec.attn_groups,
                spec.kv_cache_config,
                progress_bar_desc=f"{name}",
            )
        return manager

    @contextmanager
    def _function(self, name: str) -> Iterator[Callable[..., None]]:
        from functools import partial

        from draftfuse.vllm import patch

        if name == "shipped":
            yield self.spec._generate_draft
            return
        from draftfuse.vllm import compiled

        before, self.plan.compiler = self.plan.compiler, "inductor" if name.startswith("inductor") else "none"
        self.plan.program, compiled.FUSE_DRAW = None, name != "inductor_own_draw"
        patch.reset_rows(self.spec)
        with patch.worst_case_length(self.spec), refresh_off(name == "no refresh"):
            yield partial(patch._whole_loop, self.spec, self.plan)
        self.plan.compiler, compiled.FUSE_DRAW = before, True


@contextmanager
def refresh_off(off: bool) -> Iterator[None]:
    """While this holds, a recorded loop keeps the slots and metadata of step 1: the control."""
    from draftfuse.vllm import record

    before = record.update_slots, record.build
    held: dict[str, Any] = {}

    def update_slots(spec: Any, rows: int, tokens: int) -> Any:
        if "slots" not in held:
            held["slots"] = before[0](spec, rows, tokens)
        return held["slots"]

    def build(spec: Any, release: Any, rows: int, tokens: int, step: int, bound: Any = None) -> Any:
        if "metadata" not in held:
            held["metadata"] = before[1](spec, release, rows, tokens, step, bound)
        metadata = held["metadata"]
        if step == spec.num_speculative_steps - 1:
            held.clear()  # the next loop starts with metadata of its own
        return metadata

    if off:
        record.update_slots, record.build = update_slots, build
    try:
        yield
    finally:
        record.update_slots, record.build = before


class Watch:
    """CPU spans of the draft's methods and of the engine's step, and on demand all drafted tokens."""

    def __init__(self, llm: Any, spec: Any) -> None:
        self.spans: dict[str, list[float]] = {name: [] for name in (*SPANS, "step")}
        self.starts: list[float] = []
        self.drafts: list[Any] | None = None
        for name, method in SPANS.items():
            setattr(spec, method, self._timed(name, getattr(spec, method)))
        llm.llm_engine.step = self._timed("step", llm.llm_engine.step)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.spans[name].append(time.perf_counter() - start)
            if name == "propose":
                self.starts.append(start)
                if self.drafts is not None:
                    self.drafts.append(result.clone())
            return result

        return timed

    def clear(self) -> None:
        for values in self.spans.values():
            values.clear()
        self.starts.clear()

    def medians(self) -> dict[str, float]:
        """Milliseconds: each span, and from one proposal to the next."""
        gaps = [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]
        found = {**self.spans, "wall": gaps}
        return {name: statistics.median(v[4:] or v) * 1e3 for name, v in found.items() if v}


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


def sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def drafted(llm: Any, watch: Watch, count: int, args: argparse.Namespace, expected: list[Any]) -> dict[str, Any]:
    """An untimed run: hashes of everything drafted and of the outputs, and where drafts differ from ``expected``.

    ``expected`` takes the drafts of the first run.
    """
    watch.drafts = []
    outputs = generate(llm, count, args, 48)
    rows = [batch.tolist() for batch in watch.drafts]
    watch.drafts = None
    expected[:] = expected or rows
    distinct = len({token for batch in rows for row in batch for token in row})
    found = {"drafted": sha(rows), "proposals": len(rows), "distinct": distinct, "outputs": sha(outputs)}
    return found | {"different": different(rows, expected)}


def different(rows: list[Any], expected: list[Any]) -> dict[str, Any]:
    """How many drafted tokens differ, by draft step, and the first few places: (proposal, row, draft step)."""
    places = [
        (i, j, step)
        for i, (a, b) in enumerate(zip(rows, expected, strict=False))
        for j, (x, y) in enumerate(zip(a, b, strict=False))
        for step, (p, q) in enumerate(zip(x, y, strict=False))
        if p != q
    ]
    by_step = {str(s): sum(place[2] == s for place in places) for s in sorted({place[2] for place in places})}
    tokens = sum(len(row) for batch in expected for row in batch)
    return {"tokens": tokens, "count": len(places), "by_step": by_step, "first": places[:8]}


def launches(llm: Any, watch: Watch, count: int, args: argparse.Namespace) -> dict[str, float]:
    """Launches a scheduler step, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    watch.clear()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        generate(llm, count, args, 24)
    steps = max(len(watch.spans["propose"]), 1)
    counts = {event.key: event.count for event in profiled.key_averages()}
    kernels = sum(number for name, number in counts.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    return {
        "graph_launches": counts.get("cudaGraphLaunch", 0) / steps,
        "kernel_launches": kernels / steps,
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


def select(variants: Any, name: str) -> None:
    if variants is not None:
        variants.use(name)


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Median over rounds of each round's median, and the spread."""
    out: dict[str, Any] = {}
    for name in rounds[0]:
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
        name: {key: round((mine[name][key] / base[key] - 1) * 100, 1) for key in keys}
        for name in names
        if name != "shipped"
    }


def environment() -> dict[str, Any]:
    import torch
    import triton
    import vllm

    return {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "driver": driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": vllm.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def driver() -> str:
    import subprocess

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0]


def load_plugin() -> None:
    """What vLLM does for an installed entry point; here the repository is on the path only."""
    import draftfuse.vllm

    draftfuse.vllm.register()


def main() -> None:
    args = arguments()
    os.environ["DRAFTFUSE_VLLM"] = "0" if args.plain else "1"
    started = time.time()
    if not args.plain:
        load_plugin()
    root = Path(tempfile.mkdtemp(prefix="vllm-ab-"))
    make_models(root, args)
    llm = make_engine(root, args)
    runner = runner_of(llm)
    vary_weights(runner)
    variants = None if args.plain else Variants(runner.speculator, args.variants)
    names = ["shipped"] if args.plain else args.variants
    watch = Watch(llm, runner.speculator)
    ready = time.time() - started
    results = measure(llm, watch, variants, names, args)
    if args.serve:
        results["serve"] = serve(llm, variants, names, args)
    told = "" if args.plain else variants.plan.explain()
    settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
    seconds = {"ready": round(ready), "all": round(time.time() - started)}
    report = {**environment(), "settings": settings, "seconds": seconds, "results": results, "explain": told}
    text = json.dumps(report, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
