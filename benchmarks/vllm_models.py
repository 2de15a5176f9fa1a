"""Models and engines of the vLLM benchmarks. Importing this sets vLLM's environment: import it before vLLM.

The packaged tiny trained model (``method: eagle``), and a target of any widths with an EAGLE-3 head and random weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.update(
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
)


def make_models(root: Path, hidden: int, layers: int) -> None:
    """Configurations only: a target with the widths given, and an EAGLE-3 head of one layer."""
    from transformers import LlamaConfig

    heads = hidden // 128
    widths = {
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    target = LlamaConfig(num_hidden_layers=layers, **widths)
    target.architectures = ["LlamaForCausalLM"]
    target.save_pretrained(root / "target")
    head = LlamaConfig(num_hidden_layers=1, **widths).to_dict()
    head.update(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=32000)
    (root / "eagle3").mkdir()
    (root / "eagle3" / "config.json").write_text(json.dumps(head))


PADDED_VOCAB = 8192


def pad_vocabulary(root: Path) -> dict[str, Path]:
    """Copies of the packaged tiny models whose vocabulary is a block of vLLM's sampling kernel.

    While vLLM 0.25.1 captures graphs on a GPU, its sampler returns indices of the whole block where logits are not
    numbers; with 320 tokens the draft's embedding then reads outside its table and ends the process, with the plug-in
    and without it. The new rows are those of the padding token, which is never likely.
    """
    from safetensors.torch import load_file, save_file

    made = {}
    for name in ("target", "eagle"):
        source, made[name] = ROOT / "draftfuse/data/tiny" / name, root / name
        made[name].mkdir()
        config = json.loads((source / "config.json").read_text())
        old, pad = config["vocab_size"], config.get("pad_token_id", 258)
        (made[name] / "config.json").write_text(json.dumps(config | {"vocab_size": PADDED_VOCAB}))
        tensors = load_file(source / "model.safetensors")
        for key, table in tensors.items():
            if table.shape[0] == old:
                tensors[key] = table[[*range(old), *[pad] * (PADDED_VOCAB - old)]].contiguous()
        save_file(tensors, made[name] / "model.safetensors", {"format": "pt"})
    return made


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


def load_plugin() -> None:
    """What vLLM does for an installed entry point; here the repository is on the path only."""
    import draftfuse.vllm

    draftfuse.vllm.register()


def runner_of(llm: Any) -> Any:
    """The model runner of the one worker, which lives in this process."""
    found: list[Any] = []
    llm.collective_rpc(lambda worker: found.append(worker.model_runner))
    return found[0]


def environment() -> dict[str, Any]:
    """Device, versions and date."""
    import torch
    import vllm

    from draftfuse.bench import results

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return results.environment(device) | {"vllm": vllm.__version__}
