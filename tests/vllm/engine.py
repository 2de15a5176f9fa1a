"""One real vLLM engine on a tiny random model, in a process of its own: prints one JSON line with what it drafted.

Usage: ``engine.py '{"method": "eagle3", "k": 3, "runs": ["as is", "split", "control"]}'``. ``cli`` is a compilation
configuration that goes through vLLM's command-line parser. Runs: *as is*; *split*, vLLM's own loop in the same engine;
*control*, the fused loop with its refresh switched off; *compiled*, the fused loop through Inductor. ``drawn`` names
such runs again: there the last batch is proposed for ``draws`` times, with new seeds each time, and the tokens are
told; *hot* is as is at thrice the temperature.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ASK = json.loads(sys.argv[1])
V2 = ASK.get("runner", "v2") == "v2"
os.environ.update(
    VLLM_USE_V2_MODEL_RUNNER="1" if V2 else "0",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
sys.path.insert(0, str(Path(__file__).parent))
if V2:
    import triton_on_cpu  # noqa: F401

import torch  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

WIDTHS = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def make_models(root: Path) -> None:
    """Configurations only: weights are random."""
    for name, layers in (("target", 8), ("draft_model", 2)):
        config = LlamaConfig(num_hidden_layers=layers, **WIDTHS)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(root / name)
    head = LlamaConfig(num_hidden_layers=1, **WIDTHS).to_dict()
    head.update(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=512)
    (root / "eagle3").mkdir()
    (root / "eagle3" / "config.json").write_text(json.dumps(head))


def engine_options(root: Path) -> dict[str, Any]:
    speculative = {"method": ASK["method"], "model": str(root / ASK["method"]), "num_speculative_tokens": ASK["k"]}
    return {
        "model": str(root / "target"),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": ASK.get("max_model_len", 128),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "distributed_executor_backend": "uni",
        "enforce_eager": ASK.get("eager", True),
        "seed": 0,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "speculative_config": {**speculative, **ASK.get("speculative", {})},
    }


def compilation() -> dict[str, Any]:
    config = dict(ASK.get("config", {}))
    if ASK.get("hook") == "object":
        import draftfuse

        config["inductor_compile_config"] = {"post_grad_custom_post_pass": draftfuse.post_grad_pass}
    return config


def make_llm(root: Path) -> Any:
    from vllm import LLM

    options = engine_options(root)
    if ASK.get("cli"):
        return llm_from_command_line(options)
    if compilation():
        options["compilation_config"] = compilation()
    return LLM(**options)


def llm_from_command_line(options: dict[str, Any]) -> Any:
    """The configuration goes through the parser of ``vllm serve``."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = EngineArgs.from_cli_args(
        parser.parse_args(["--model", options["model"], "--compilation-config", ASK["cli"]])
    )
    return LLM(**options, compilation_config=parsed.compilation_config)


def vary_weights() -> None:
    """Random weights of a size at which drafts vary and depend on what attention reads.

    vLLM's dummy weights are almost zero, and on the CPU they are packed as soon as they are loaded: so it is the
    function that makes them which is replaced.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(self: Any, model: torch.nn.Module, config: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dim() >= 2:
                parameter.data.normal_(0, spread(type(model).__name__, name, parameter), generator=generator)
            elif parameter.is_floating_point():
                parameter.data.fill_(1)

    DummyModelLoader.load_weights = load_weights


def spread(model: str, name: str, parameter: torch.Tensor) -> float:
    """Standard deviation of one parameter; the attention of the draft is sharp."""
    if "embed" in name:
        return 1.0
    if "lm_head" in name:
        return float(ASK.get("logits", 1.0)) * float(parameter.shape[-1]) ** -0.5
    sharp = {"qkv_proj": 2.0, "o_proj": 4.0} if "Eagle" in model else {}
    factor = next((value for part, value in sharp.items() if part in name), 1.0)
    return factor * float(parameter.shape[-1]) ** -0.5


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


class Watch:
    """Keeps what every proposal returned, and the arguments of the last one."""

    def __init__(self, llm: Any) -> None:
        self.drafts: list[torch.Tensor] = []
        self.last: dict[str, Any] = {}
        if V2:
            speculator = runner_of(llm).speculator
            self.propose, speculator.propose = speculator.propose, self.kept

    def kept(self, *args: Any, **kwargs: Any) -> Any:
        self.last = inspect.signature(self.propose).bind(*args, **kwargs).arguments
        result = self.propose(*args, **kwargs)
        self.drafts.append(result.clone())
        return result

    def draw(self, first_seed: int, heat: float) -> list[list[int]]:
        """Propose for the last batch again and again, never with the same seed: tokens by draft step."""
        drawn, rows = [], self.last["seeds"].numel()
        for i in range(ASK["draws"]):
            new = {"seeds": torch.arange(rows) + first_seed + i * rows, "temperature": self.last["temperature"] * heat}
            drawn.append(self.propose(**self.last | new).clone())
        tokens: list[list[int]] = torch.cat(drawn).T.tolist()
        return tokens


@contextmanager
def running(name: str, llm: Any) -> Iterator[None]:
    """Switch the loop of a live engine for one run."""
    from draftfuse.vllm import record

    if name == "as is":
        yield
        return
    speculator = runner_of(llm).speculator
    plan = speculator._draftfuse_plan
    before = record.build, record.update_slots, plan.fused, plan.compiler
    if name == "split":
        plan.fused = speculator.supports_decode_metadata_update = False
    elif name == "compiled":
        plan.compiler = "inductor"
    else:
        record.build, record.update_slots = without_refresh(record.build, record.update_slots)
    yield
    record.build, record.update_slots, fused, plan.compiler = before
    plan.fused = speculator.supports_decode_metadata_update = fused


def without_refresh(build: Callable[..., Any], update_slots: Callable[..., Any]) -> tuple[Any, Any]:
    """The control: slots and metadata of step 1 for the whole loop."""
    held: dict[str, Any] = {}

    def stale_slots(*args: Any) -> Any:
        if "slots" not in held:
            held["slots"] = update_slots(*args)
        return held["slots"]

    def stale_build(spec: Any, release: Any, rows: int, tokens: int, step: int, bound: Any = None) -> Any:
        if "metadata" not in held:
            held["metadata"] = build(spec, release, rows, tokens, step, bound)
        metadata = held["metadata"]
        if step == spec.num_speculative_steps - 1:
            held.clear()
        return metadata

    return stale_build, stale_slots


def count_markers(found: list[int]) -> None:
    """Keep how many markers each call of the pass took out."""
    from draftfuse.lowering import hook

    erase = hook.erase_markers

    def counted(graph: Any) -> int:
        found.append(erase(graph))
        return found[-1]

    hook.erase_markers = counted


def generate(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    count = ASK.get("requests", 3)
    prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 500 + 5 for j in range(5 + 9 * i)]} for i in range(count)]
    temperature = ASK.get("temperature", 0.0)
    lengths = [ASK.get("tokens", 12) + ASK.get("longer", 3) * i for i in range(count)]
    samplings = [
        SamplingParams(max_tokens=n, temperature=temperature, seed=i, ignore_eos=True, detokenize=False)
        for i, n in enumerate(lengths)
    ]
    results = llm.generate(prompts, samplings, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def main() -> None:
    from draftfuse.vllm import explain

    root = Path(tempfile.mkdtemp(prefix="draftfuse-vllm-"))
    make_models(root)
    markers: list[int] = []
    count_markers(markers)
    vary_weights()
    llm = make_llm(root)
    watch = Watch(llm)
    report: dict[str, Any] = {"runs": [one_run(name, llm, watch) for name in ASK.get("runs", ["as is"])]}
    report["drawn"] = [one_draw(name, llm, watch, 10**6 * i) for i, name in enumerate(ASK.get("drawn", []))]
    report.update(told=explain(llm), markers=markers)
    print("RESULT " + json.dumps(report), flush=True)


def one_run(name: str, llm: Any, watch: Watch) -> dict[str, Any]:
    watch.drafts.clear()
    with running(name, llm):
        outputs = generate(llm)
    flat = [d.tolist() for d in watch.drafts]
    distinct = len({token for batch in flat for row in batch for token in row})
    return {"drafted": sha(flat), "proposals": len(flat), "distinct": distinct, "outputs": sha(outputs)}


def one_draw(name: str, llm: Any, watch: Watch, first_seed: int) -> list[list[int]]:
    with running("as is" if name == "hot" else name, llm):
        return watch.draw(first_seed, 3.0 if name == "hot" else 1.0)


if __name__ == "__main__":
    main()
