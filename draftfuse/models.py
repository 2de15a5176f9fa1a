"""The tiny trained model that ships with draftfuse: a byte-level Llama target and an EAGLE head for it.

``packaged_model_dir() / "target"`` is in transformers' Llama format, ``packaged_model_dir() / "eagle"`` in the format
that vLLM's ``eagle`` method loads; ``examples/train_tiny.py`` makes both. Here they load with safetensors alone.

A token's id is its byte; :data:`BOS`, :data:`EOS` and :data:`PAD` follow. The head has ``fc.weight`` and
``layers.0.*``, with no input norm, no final norm, and neither embedding nor ``lm_head``: those are the target's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from draftfuse.errors import MissingExtraError

BOS, EOS, PAD = 256, 257, 258


@dataclass(frozen=True)
class ModelConfig:
    """What ``config.json`` says of a model in Llama format, under the names that it has there."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float


def packaged_model_dir() -> Path:
    """The folder of the packaged model, with ``target`` and ``eagle`` in it."""
    return _data() / "tiny"


def held_out_text() -> str:
    """Python source that the packaged model was not trained on."""
    return (_data() / "held_out.py.txt").read_text(encoding="utf-8")


def load_config(model_dir: Path) -> ModelConfig:
    """Read ``config.json`` in ``model_dir``."""
    values = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return ModelConfig(**{field.name: values[field.name] for field in fields(ModelConfig)})


def load_weights(
    model_dir: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Read ``model.safetensors`` in ``model_dir``: every weight by its name, as ``dtype`` (bfloat16, as stored)."""
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        what, todo = "the packaged model cannot be read", "Install it with: pip install 'draftfuse[models]'."
        raise MissingExtraError(what, "no package safetensors", "the extra [models]", todo) from error
    weights = load_file(model_dir / "model.safetensors", device=str(device))
    return {name: weight.to(dtype or weight.dtype) for name, weight in weights.items()}


def _data() -> Path:
    return Path(str(resources.files("draftfuse"))) / "data"
