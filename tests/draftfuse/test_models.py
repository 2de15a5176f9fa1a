"""The packaged model: it loads, it is small, it means what transformers says, and its drafts are accepted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse import models
from draftfuse.errors import MissingExtraError

TARGET, EAGLE = models.packaged_model_dir() / "target", models.packaged_model_dir() / "eagle"
MEGABYTE = 1_000_000
K = 4


# ---- both models in a few lines, one sequence [L], no cache


def norm(x: Tensor, weight: Tensor, config: models.ModelConfig) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, config.rms_norm_eps)


def rotate(x: Tensor, config: models.ModelConfig) -> Tensor:
    half = config.head_dim // 2
    angle = torch.arange(x.shape[-2])[:, None] * config.rope_theta ** (-torch.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), dim=-1)


def attention(x: Tensor, weights: dict[str, Tensor], config: models.ModelConfig) -> Tensor:
    heads = [
        (x @ weights[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
        for name in "qkv"
    ]
    q, k, v = rotate(heads[0], config), rotate(heads[1], config), heads[2]
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    return out.transpose(0, 1).flatten(1) @ weights["self_attn.o_proj.weight"].T


def layer(x: Tensor, weights: dict[str, Tensor], config: models.ModelConfig) -> Tensor:
    first = weights.get("input_layernorm.weight")
    x = x + attention(x if first is None else norm(x, first, config), weights, config)
    y = norm(x, weights["post_attention_layernorm.weight"], config)
    gate, up = y @ weights["mlp.gate_proj.weight"].T, y @ weights["mlp.up_proj.weight"].T
    return x + (F.silu(gate) * up) @ weights["mlp.down_proj.weight"].T


def part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


class Models:
    """Target and head in float32."""

    def __init__(self) -> None:
        self.target, self.head = (models.load_weights(folder, torch.float32) for folder in (TARGET, EAGLE))
        self.configs = [models.load_config(folder) for folder in (TARGET, EAGLE)]

    def target_hidden(self, ids: Tensor) -> Tensor:
        x = self.target["model.embed_tokens.weight"][ids]
        for i in range(self.configs[0].num_hidden_layers):
            x = layer(x, part(self.target, f"model.layers.{i}."), self.configs[0])
        return norm(x, self.target["model.norm.weight"], self.configs[0])

    def head_hidden(self, next_ids: Tensor, hidden: Tensor) -> Tensor:
        joined = torch.cat((self.target["model.embed_tokens.weight"][next_ids], hidden), dim=-1)
        return layer(joined @ self.head["fc.weight"].T, part(self.head, "layers.0."), self.configs[1])

    def best(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.target["lm_head.weight"].T).argmax(-1)

    def propose(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """K drafts after ``ids`` [L], given the target's ``hidden`` [L-1, H] of all but the last."""
        next_ids, drafts = ids[1:], ids[:0]
        for _ in range(K):
            feature = self.head_hidden(next_ids, hidden)[-1:]
            drafts = torch.cat((drafts, self.best(feature)))
            next_ids, hidden = torch.cat((next_ids, drafts[-1:])), torch.cat((hidden, feature))
        return drafts

    def step(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, int]:
        """One step of greedy speculative decoding from ``ids`` [L] and the target's ``hidden`` of all but the last.

        Returns both grown by the accepted drafts and one token of the target's own, and how many were accepted.
        """
        drafts = self.propose(ids, hidden)
        hidden = self.target_hidden(torch.cat((ids, drafts)))
        best = self.best(hidden)[len(ids) - 1 :]
        count = int((best[:K] == drafts).long().cumprod(0).sum())
        return torch.cat((ids, best[: count + 1])), hidden[: len(ids) + count], count


@pytest.fixture(scope="module")
def both() -> Models:
    return Models()


def held_out_ids(begin: int, count: int) -> Tensor:
    return torch.tensor(list(models.held_out_text().encode()[begin : begin + count]))


# ---- what ships


def test_the_package_data_is_small() -> None:
    assert sum(path.stat().st_size for path in models.packaged_model_dir().rglob("*") if path.is_file()) < 12 * MEGABYTE


@pytest.mark.parametrize("folder", [TARGET, EAGLE], ids=["target", "eagle"])
def test_weights_are_finite_bfloat16_of_the_configured_shapes(folder: Path) -> None:
    config, weights = models.load_config(folder), models.load_weights(folder)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(weight.isfinite().all() for weight in weights.values())
    assert config.head_dim == 64
    prefix = "model.layers.0." if folder == TARGET else "layers.0."
    sizes = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    for name, heads in sizes.items():
        shape = weights[f"{prefix}self_attn.{name}_proj.weight"].shape
        assert shape == (heads * config.head_dim, config.hidden_size)
    assert weights[f"{prefix}mlp.up_proj.weight"].shape == (config.intermediate_size, config.hidden_size)


def test_load_weights_converts() -> None:
    weights = models.load_weights(EAGLE, torch.float64, torch.device("cpu"))
    assert {weight.dtype for weight in weights.values()} == {torch.float64}


def test_the_head_is_in_the_format_of_vllms_eagle_method() -> None:
    config, weights = models.load_config(EAGLE), models.load_weights(EAGLE)
    norms = ["layers.0.post_attention_layernorm.weight"]
    projections = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    mlp = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert sorted(weights) == sorted(["fc.weight", *norms, *projections, *mlp])
    assert weights["fc.weight"].shape == (config.hidden_size, 2 * config.hidden_size)
    raw = json.loads((EAGLE / "config.json").read_text())
    assert (raw["architectures"], raw["model_type"]) == (["LlamaForCausalLM"], "llama")


def test_target_and_head_agree_where_they_must() -> None:
    target, head = models.load_config(TARGET), models.load_config(EAGLE)
    for name in (
        "vocab_size",
        "hidden_size",
        "max_position_embeddings",
        "num_key_value_heads",
        "head_dim",
        "rope_theta",
    ):
        assert getattr(target, name) == getattr(head, name)


def test_train_json_says_how_it_was_made() -> None:
    record = json.loads((models.packaged_model_dir() / "train.json").read_text())
    assert record["acceptance"]["accepted_of"] == K
    assert record["acceptance"]["held_out_text"]["accepted_per_step"] > 1.5


def test_held_out_text_is_python() -> None:
    text = models.held_out_text()
    compile(text, "held_out.py", "exec")
    assert 150 <= text.count("\n") <= 250


def test_missing_safetensors_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(MissingExtraError, match=r"draftfuse\[models\]"):
        models.load_weights(TARGET)


# ---- what it means


def test_transformers_loads_the_target_and_gives_the_same_logits(both: Models) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    assert {name: tuple(weight.shape) for name, weight in theirs.named_parameters()} == {
        name: tuple(weight.shape) for name, weight in both.target.items()
    }
    ids = held_out_ids(0, 200)
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(
        both.target_hidden(ids) @ both.target["lm_head.weight"].T, expected, atol=2e-3, rtol=2e-3
    )


def test_transformers_tokenizer_is_the_bytes() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TARGET)
    text = models.held_out_text() + "naïve ≠ 日本\t\r\n\x00"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        models.BOS,
        models.EOS,
        models.PAD,
    )


def test_speculative_decoding_equals_greedy_and_accepts_drafts(both: Models) -> None:
    accepted = []
    for begin in (0, 2000, 4000):
        ids = held_out_ids(begin, 128)
        hidden = both.target_hidden(ids[:-1])
        while len(ids) < 176:
            ids, hidden, count = both.step(ids, hidden)
            accepted.append(count)
        assert torch.equal(ids[128:], both.best(both.target_hidden(ids[:-1]))[127:])
    assert sum(accepted) / len(accepted) > 1.5
