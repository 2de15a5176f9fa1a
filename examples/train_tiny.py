"""Train a tiny byte-level Llama and an EAGLE head for it on Python source, as draftfuse ships them.

    python examples/train_tiny.py OUT --minutes 2              # one GPU: what ships
    python examples/train_tiny.py OUT --minutes 4 --device cpu  # a smaller run of the same model

The corpus is the running interpreter's own library and site-packages (or ``--corpus``); only weights are written:
``OUT/target`` (transformers' Llama format), ``OUT/eagle`` (what vLLM's ``eagle`` method loads) and ``OUT/train.json``.

The head follows EAGLE-1 as vLLM runs it. Row p of draft step 0 reads ``cat(embed(token[p+1]), target_hidden[p])`` at
position p, where target_hidden is the target's output after its final norm. ``fc``, then one decoder layer with no
input norm, gives the head's hidden: an estimate of target_hidden[p+1], which the target's ``lm_head`` reads as it is,
with no norm, and which takes the place of target_hidden[p+1] in row p+1 of the next draft step.
"""

# Shapes: B sequences, L tokens, R = L - 1 rows of the head, H hidden, V vocabulary, N heads, D head size, S draft steps

from __future__ import annotations

import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

BOS, EOS, PAD = 256, 257, 258
DRAFT_STEPS = 4
HELD_OUT_EVERY = 50
HELD_OUT_TEXT = Path(__file__).parents[1] / "draftfuse" / "data" / "held_out.py.txt"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The numbers of both models, under the names that transformers gives them; the head's MLP is its own."""

    vocab_size: int = 320
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


TARGET = Shape()
EAGLE = Shape(num_hidden_layers=1, intermediate_size=1024)


# ---- the two models, parameter names as in the checkpoints


def rotate(x: Tensor, start: int) -> Tensor:
    """Rotary position embedding of ``x`` [B, N, L, D], whose first token stands at position ``start``."""
    half = x.shape[-1] // 2
    rate = TARGET.rope_theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(start, start + x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Norm(nn.RMSNorm):
    """RMSNorm in float32, whatever autocast gave it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Attention(nn.Module):
    """Grouped-query attention; how keys are remembered and masked is the caller's ``attend``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.groups = shape.num_attention_heads, shape.num_attention_heads // shape.num_key_value_heads
        inner, outer = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, outer, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, outer, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, start: int, attend: Attend) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (rows.repeat_interleave(self.groups, dim=1) for rows in (rotate(k, start), v))
        out: Tensor = self.o_proj(attend(rotate(q, start), k, v).transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A Llama decoder layer; EAGLE's only layer has no input norm."""

    def __init__(self, shape: Shape, input_norm: bool = True) -> None:
        super().__init__()
        norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.input_layernorm = norm if input_norm else nn.Identity()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, start: int, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), start, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    """Embedding, layers and final norm of the target."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, ids: Tensor, start: int, attends: list[Attend]) -> Tensor:
        x = self.embed_tokens(ids)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, start, attend)
        out: Tensor = self.norm(x)
        return out


class Target(nn.Module):
    """transformers' LlamaForCausalLM, as far as this file needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Backbone(TARGET)
        self.lm_head = nn.Linear(TARGET.hidden_size, TARGET.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states [B, L, H] after the final norm."""
        out: Tensor = self.model(ids, 0, [causal] * TARGET.num_hidden_layers)
        return out


class Eagle(nn.Module):
    """The draft head; embedding and lm_head are the target's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * EAGLE.hidden_size, EAGLE.hidden_size, bias=False)
        self.layers = nn.ModuleList(Layer(EAGLE, input_norm=False) for _ in range(EAGLE.num_hidden_layers))

    def forward(self, embeds: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        joined = self.fc(torch.cat((embeds, hidden), dim=-1)).float()
        out: Tensor = self.layers[0](joined, 0, attend)
        return out


def initialise(module: nn.Module, layers: int) -> None:
    """Normal weights, smaller where a layer writes to the residual stream."""
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if small else 0.02)


# ---- how attention sees the past


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention over one whole sequence."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Cached:
    """Attention over all keys so far: the first call is a prompt, each later one a single token."""

    def __init__(self) -> None:
        self.past: tuple[Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompt = self.past is None
        if self.past is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.past, (k, v), strict=True))
        self.past = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=prompt)


def shift(x: Tensor, rows: int) -> Tensor:
    """``x`` [..., R, D] moved down by ``rows``, zeros above."""
    return F.pad(x[..., : x.shape[-2] - rows, :], (0, 0, rows, 0)) if rows else x


class Unrolled:
    """Attention of every draft step, for all rows at once.

    At step s, row p is the s-th token drafted after row p-s. It sees what the target wrote (step 0 up to row p-s) and
    what that draft wrote since (step j at row p-s+j, for j = 1..s): one diagonal a step beside the causal block.
    """

    def __init__(self) -> None:
        self.past: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step, rows = len(self.past), q.shape[-2]
        self.past.append((k, v))
        (first_k, first_v), own = self.past[0], self.drafted(step)
        future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1 - step)
        block = (q @ first_k.mT).masked_fill(future, -math.inf)
        diagonals = [(q * key).sum(-1, keepdim=True, dtype=block.dtype) for key, _ in own]
        weights = torch.softmax(torch.cat([block, *diagonals], dim=-1) / math.sqrt(q.shape[-1]), dim=-1).to(v.dtype)
        out = weights[..., :rows] @ first_v
        for j, (_, value) in enumerate(own):
            out = out + weights[..., rows + j, None] * value
        return out

    def drafted(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of steps 1..step, each moved to the rows of ``step``."""
        return [(shift(k, step - j), shift(v, step - j)) for j, (k, v) in enumerate(self.past) if j > 0]


def unroll(target: Target, head: Eagle, ids: Tensor, hidden: Tensor) -> Iterator[Tensor]:
    """The head's hidden [B, R, H] of each draft step, fed the true tokens; step s means nothing in its first s rows."""
    embeds, feature, attend = target.model.embed_tokens(ids[:, 1:]), hidden[:, :-1], Unrolled()
    for _ in range(DRAFT_STEPS):
        drafted = head(embeds, feature, attend)
        yield drafted
        feature = shift(drafted, 1)


# ---- text


def python_files(folders: list[Path]) -> list[Path]:
    """Python files under ``folders``, in an order that mixes packages and is the same on every run."""
    found = {(path.relative_to(folder).as_posix(), path) for folder in folders for path in folder.rglob("*.py")}
    return [path for _, path in sorted(found, key=lambda pair: hashlib.sha256(pair[0].encode()).digest())]


def read(path: Path) -> bytes:
    """A file's bytes; nothing where it cannot be read, is tiny, or is more table than text."""
    try:
        text = path.read_bytes()
    except OSError:
        return b""
    return text if 200 <= len(text) <= 400_000 and len(text) < 120 * text.count(b"\n") else b""


def is_held_out(text: bytes) -> bool:
    """One text in fifty, by its own hash, so that copies fall on the same side."""
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") % HELD_OUT_EVERY == 0


def read_corpus(folders: list[Path], megabytes: float) -> tuple[list[bytes], list[bytes]]:
    """Texts to train on, up to ``megabytes``, and the texts held out along the way."""
    files, texts, size = python_files(folders), dict[bytes, None](), 0
    with ThreadPoolExecutor(16) as pool:
        for begin in range(0, len(files), 128):
            found = [text for text in pool.map(read, files[begin : begin + 128]) if text and text not in texts]
            texts.update(dict.fromkeys(found))
            size += sum(map(len, found))
            if size > megabytes * 1e6:
                break
    held = {text for text in texts if is_held_out(text)}
    return [text for text in texts if text not in held], sorted(held)


def pack(texts: list[bytes]) -> Tensor:
    """One long int16 row: BOS, the bytes, EOS, text after text."""
    flat = torch.frombuffer(bytearray(b"".join(b"\0" + text + b"\0" for text in texts)), dtype=torch.uint8)
    ids, ends = flat.to(torch.int16), torch.tensor([len(text) + 2 for text in texts]).cumsum(0)
    ids[ends - 1] = EOS
    ids[torch.cat((torch.zeros(1, dtype=torch.int64), ends[:-1]))] = BOS
    return ids


class Crops:
    """Random windows of a packed corpus."""

    def __init__(self, ids: Tensor, sequence: int, device: torch.device, seed: int) -> None:
        self.ids, self.window = ids.to(device), torch.arange(sequence, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, count: int) -> Tensor:
        last = self.ids.numel() - self.window.numel()
        starts = torch.randint(last, (count, 1), generator=self.generator, device=self.ids.device)
        return self.ids[starts + self.window].long()


# ---- training


@dataclass
class Budget:
    """How far a phase has come: by steps or by seconds, whichever ends first."""

    steps: int | None
    seconds: float | None
    began: float = 0.0

    def progress(self, step: int) -> float:
        self.began = self.began or time.monotonic()
        by_step = step / self.steps if self.steps else 0.0
        by_time = (time.monotonic() - self.began) / self.seconds if self.seconds else 0.0
        return max(by_step, by_time)


@dataclass(frozen=True)
class Scale:
    """How much of everything: what differs between a GPU of the day and a CPU."""

    minutes: float | None
    steps: int | None
    megabytes: float
    sequence: int
    batch: int
    head_batch: int
    head_share: float
    prompts: int
    new_tokens: int
    seed: int = 0
    compile: bool = False

    def budget(self, share: float) -> Budget:
        """Time is shared between the phases; a number of steps is that of each."""
        return Budget(self.steps, self.minutes * 60 * share if self.minutes else None)


GPU = Scale(2.0, None, 128.0, 2048, 32, 16, 0.45, prompts=128, new_tokens=256)
CPU = Scale(5.0, None, 16.0, 256, 4, 4, 0.45, prompts=16, new_tokens=96)


def rate(progress: float) -> float:
    """Warm-up over the first 3 %, then a cosine down to a fiftieth."""
    return min(progress / 0.03 + 0.01, 0.02 + 0.49 * (1 + math.cos(math.pi * progress)))


class Trainer:
    """AdamW on one module; its record goes to train.json."""

    def __init__(self, name: str, module: nn.Module, peak: float, loss: Callable[[], Tensor]) -> None:
        self.name, self.module, self.peak, self.loss = name, module, peak, loss
        self.device = next(module.parameters()).device
        self.optimiser = torch.optim.AdamW(module.parameters(), peak, (0.9, 0.95), weight_decay=0.1, fused=True)

    def backward(self) -> Tensor:
        """Loss and gradients, in bfloat16 where that is fast."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self, progress: float) -> Tensor:
        loss = self.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.peak * rate(progress)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss

    def run(self, budget: Budget) -> dict[str, object]:
        """Train until the budget is spent. The first pass, which may compile, is outside it and changes nothing."""
        self.backward()
        self.optimiser.zero_grad(set_to_none=True)
        losses, step, began = [], 0, time.monotonic()
        while (progress := budget.progress(step)) < 1:
            loss, step = self.step(progress), step + 1
            if step % 20 == 0:
                losses.append(round(loss.item(), 4))
            if step % 200 == 0:
                typer.echo(f"{self.name} step {step}: loss {losses[-1]}, {progress:.0%}")
        seconds = round(time.monotonic() - began, 1)
        return {"steps": step, "seconds": seconds, "losses": losses[:: len(losses) // 40 + 1] + losses[-1:]}


def target_loss(target: Target, ids: Tensor) -> Tensor:
    """Nats a byte of the next byte."""
    logits = target.lm_head(target(ids)[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def head_loss(target: Target, head: Eagle, ids: Tensor, hidden: Tensor) -> Tensor:
    """Each draft step against the target: its hidden state (smooth L1) and its distribution (cross entropy)."""
    goal = hidden[:, 1:]
    wanted = torch.softmax(target.lm_head(goal).float(), dim=-1)
    total = torch.zeros((), device=ids.device)
    for step, drafted in enumerate(unroll(target, head, ids, hidden)):
        logits = target.lm_head(drafted[:, step:]).float().flatten(0, 1)
        total = total + F.cross_entropy(logits, wanted[:, step:].flatten(0, 1))
        total = total + 0.2 * F.smooth_l1_loss(drafted[:, step:].float(), goal[:, step:].float())
    return total / DRAFT_STEPS


def ship_precision(module: nn.Module) -> None:
    """Round every weight to the bfloat16 that is written, so that what was measured is what ships."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(weight.bfloat16())


def train_target(target: Target, crops: Crops, scale: Scale) -> dict[str, object]:
    loss = torch.compile(target_loss) if scale.compile else target_loss
    trainer = Trainer("target", target, 3e-3, lambda: loss(target, crops(scale.batch)))
    record = trainer.run(scale.budget(1 - scale.head_share))
    ship_precision(target)
    target.requires_grad_(False)
    return record


def train_head(target: Target, head: Eagle, crops: Crops, scale: Scale) -> dict[str, object]:
    loss = torch.compile(head_loss) if scale.compile else head_loss

    def loss_of_crops() -> Tensor:
        ids = crops(scale.head_batch)
        with torch.no_grad():
            hidden = target(ids)
        return loss(target, head, ids, hidden)

    record = Trainer("head", head, 2e-3, loss_of_crops).run(scale.budget(scale.head_share))
    ship_precision(head)
    return record


# ---- measuring


@torch.no_grad()
def generate(target: Target, prompts: Tensor, count: int) -> Tensor:
    """``prompts`` [B, L] and the target's own greedy continuation of ``count`` tokens."""
    caches: list[Attend] = [Cached() for _ in range(TARGET.num_hidden_layers)]
    ids, new = prompts, prompts
    for _ in range(count):
        hidden = target.model(new, ids.shape[1] - new.shape[1], caches)
        new = target.lm_head(hidden[:, -1:]).argmax(-1)
        ids = torch.cat((ids, new), dim=1)
    return ids


@torch.no_grad()
def agreement(target: Target, head: Eagle, ids: Tensor) -> Tensor:
    """Where draft and target have the same best token [B, R, S], column s the s-th draft of the step begun at row p."""
    hidden = target(ids)
    best, rows = target.lm_head(hidden)[:, 1:].argmax(-1), ids.shape[1] - DRAFT_STEPS
    drafts = [target.lm_head(drafted).argmax(-1) for drafted in unroll(target, head, ids, hidden)]
    return torch.stack([(draft == best)[:, s : s + rows] for s, draft in enumerate(drafts)], dim=-1)


def accepted(target: Target, head: Eagle, prompts: Tensor, count: int) -> Tensor:
    """Tokens accepted in every step of greedy speculative decoding that continues ``prompts``, one flat row.

    Greedy verification accepts a draft as long as it equals the target's own continuation, so the continuation is
    generated first and every draft is read off one unrolled pass: fed true tokens, step s is what a real loop would
    draft there whenever all before it were accepted.
    """
    same = agreement(target, head, generate(target, prompts, count))[:, prompts.shape[1] - 1 : -1]
    lengths = same.long().cumprod(-1).sum(-1).tolist()
    return torch.tensor([n for row in lengths for n in walk(row)])


def walk(lengths: list[int]) -> Iterator[int]:
    """The rows at which drafting starts: each step moves on by what was accepted and one token of the target."""
    row = 0
    while row < len(lengths):
        yield lengths[row]
        row += lengths[row] + 1


def measure(target: Target, head: Eagle, texts: list[bytes], prompts: int, count: int) -> dict[str, object]:
    """How drafts fare on ``texts``, in windows at evenly spaced places whose first half is the prompt."""
    ids, device = pack(texts).long(), next(head.parameters()).device
    places = torch.linspace(0, ids.numel() - 512, prompts).long()[:, None]
    windows = ids[places + torch.arange(512)].to(device)
    lengths = accepted(target, head, windows[:, :256], count)
    with torch.no_grad():
        nats = target_loss(target, windows).item()
    return {
        "accepted_per_step": rounded(lengths.double().mean()),
        "accepted_by_position": [rounded((lengths > s).double().mean()) for s in range(DRAFT_STEPS)],
        "draft_steps": len(lengths),
        "agreement_on_text": [rounded(a) for a in agreement(target, head, windows).double().mean((0, 1))],
        "nats_per_byte": round(nats, 4),
    }


def rounded(value: Tensor) -> float:
    return round(value.item(), 3)


def measure_all(target: Target, head: Eagle, held: list[bytes], scale: Scale) -> dict[str, object]:
    """The held-out files of the corpus and, where it is at hand, the text that ships with draftfuse."""
    results = {"held_out_files": measure(target, head, held, scale.prompts, scale.new_tokens)}
    if HELD_OUT_TEXT.exists():
        texts = [HELD_OUT_TEXT.read_bytes()]
        results["held_out_text"] = measure(target, head, texts, scale.prompts // 4, scale.new_tokens)
    return {"accepted_of": DRAFT_STEPS, **results}


# ---- writing


def config_of(shape: Shape) -> dict[str, object]:
    """config.json of either model. vLLM renames the head's architecture itself."""
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16"}
    flags = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "use_cache": True}
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return {**fixed, **asdict(shape), **flags, **ids}


def tokenizer() -> dict[str, object]:
    """tokenizer.json: byte-level BPE without merges, so that a token's id is the byte itself."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    vocab = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(other)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
    added = [{"id": token, "content": name, **flags} for name, token in special.items()]
    options: dict[str, object] = dict.fromkeys(
        ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    )
    model: dict[str, object] = {
        "type": "BPE",
        **options,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocab,
        "merges": [],
    }
    steps = {"normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **steps, "model": model}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


def write_model(folder: Path, module: nn.Module, shape: Shape) -> None:
    """config.json and model.safetensors in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().bfloat16().cpu().contiguous() for name, weight in module.named_parameters()}
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config_of(shape))


def write_tokenizer(folder: Path) -> None:
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer.json", tokenizer())
    write_json(folder / "tokenizer_config.json", {**kind, **names, "model_max_length": TARGET.max_position_embeddings})


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "safetensors": safetensors.__version__}


def record_of(scale: Scale, device: torch.device, began: float) -> dict[str, object]:
    """Where, when and how the run was made, for train.json."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    date, seconds = time.strftime("%Y-%m-%d", time.gmtime()), round(time.monotonic() - began, 1)
    return {"device": chip, "date": date, "seconds": seconds, "versions": versions(), "scale": asdict(scale)}


def default_corpus() -> list[Path]:
    """The interpreter's library and its site-packages (one may lie inside the other: a text counts once)."""
    return sorted({Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib", "platlib")})


def build(scale: Scale, device: torch.device) -> tuple[Target, Eagle]:
    """Both models with fresh weights, the same on every machine."""
    torch.manual_seed(scale.seed)
    target, head = Target(), Eagle()
    initialise(target, TARGET.num_hidden_layers)
    initialise(head, EAGLE.num_hidden_layers)
    return target.to(device), head.to(device)


def train(out: Path, folders: list[Path], scale: Scale, device: torch.device) -> dict[str, object]:
    """The whole run; returns the acceptance."""
    began, (texts, held) = time.monotonic(), read_corpus(folders, scale.megabytes)
    crops = Crops(pack(texts), scale.sequence, device, scale.seed)
    corpus = {"files": len(texts), "held_out_files": len(held), "bytes": crops.ids.numel()}
    typer.echo(f"corpus: {corpus}, read in {time.monotonic() - began:.0f} s")
    target, head = build(scale, device)
    runs = {"target": train_target(target, crops, scale), "head": train_head(target, head, crops, scale)}
    results = measure_all(target, head, held, scale)
    write_model(out / "target", target, TARGET)
    write_tokenizer(out / "target")
    write_model(out / "eagle", head, EAGLE)
    write_json(out / "train.json", {**record_of(scale, device, began), "corpus": corpus, "acceptance": results, **runs})
    return results


def main(
    out: Path,
    device: Annotated[str, typer.Option(help="cuda or cpu; cuda where there is one")] = "",
    minutes: Annotated[float | None, typer.Option(help="training time; 2 on a GPU, 5 on a CPU, unless --steps")] = None,
    steps: Annotated[int | None, typer.Option(help="training steps of each phase")] = None,
    corpus: Annotated[list[Path] | None, typer.Option(help="folder of Python source; may be repeated")] = None,
    megabytes: Annotated[float | None, typer.Option(help="most text to read; 128 on a GPU, 16 on a CPU")] = None,
    sequence: Annotated[int | None, typer.Option(help="tokens a crop; 2048 on a GPU, 256 on a CPU")] = None,
    batch: Annotated[int | None, typer.Option(help="crops a step of the target; 32 on a GPU, 4 on a CPU")] = None,
    head_batch: Annotated[int | None, typer.Option(help="crops a step of the head; 16 on a GPU, 4 on a CPU")] = None,
    compile: Annotated[bool, typer.Option(help="torch.compile both losses")] = False,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves the choice to torch")] = 0,
    seed: int = 0,
) -> None:
    """Train target and head, measure acceptance on held-out source, write all under OUT."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    base = GPU if place.type == "cuda" else CPU
    given = {"megabytes": megabytes, "sequence": sequence, "batch": batch, "head_batch": head_batch}
    chosen = {name: value for name, value in given.items() if value is not None}
    time_limit = minutes or (None if steps else base.minutes)
    scale = replace(base, **chosen, minutes=time_limit, steps=steps, compile=compile, seed=seed)  # type: ignore[arg-type]
    torch.set_num_threads(threads or torch.get_num_threads())
    typer.echo(json.dumps(train(out, corpus or default_corpus(), scale, place), indent=1))


if __name__ == "__main__":
    typer.run(main)
