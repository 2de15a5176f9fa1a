"""The reference speculators: the three modes agree bit for bit, and the engine gives the target's own text."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import models
from draftfuse.errors import InvalidBatchError
from draftfuse.models import ModelConfig
from draftfuse.reference import (
    DraftModelSpeculator,
    EagleSpeculator,
    Engine,
    Limits,
    StaticDrafter,
    Target,
    small_config,
)

CONFIG = small_config(max_model_len=48)
ROWS = 4
Maker = Callable[[ModelConfig, Limits, Target], Any]

MAKERS: dict[str, Maker] = {
    "eagle": lambda config, limits, target: EagleSpeculator.random(config, limits, seed=1),
    "draft_model": lambda config, limits, target: DraftModelSpeculator.random(config, limits, seed=1),
    "static": lambda config, limits, target: StaticDrafter.random(config, target.caches[-1:], limits, seed=1),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These matrices are too small for two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def limits_of(k: int, config: ModelConfig = CONFIG) -> Limits:
    return Limits(k, ROWS, config.max_position_embeddings, max_num_tokens=96, page_size=4)


def make(kind: str, k: int) -> tuple[Any, list[Tensor]]:
    """A speculator, and the KV caches that it reads or writes; the target's are full of noise."""
    limits = limits_of(k)
    target = Target.random(CONFIG, limits)
    generator = torch.Generator().manual_seed(2)
    for cache in (tensor for pair in target.caches for tensor in pair):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    spec = MAKERS[kind](CONFIG, limits, target)
    table = torch.randperm(ROWS * limits.blocks, generator=generator).view(ROWS, limits.blocks)
    spec.attn_groups[0].block_table[:ROWS].copy_(table)
    own = [tensor for pair in spec.attn_groups[0].kv_caches.values() for tensor in pair]
    return spec, [*own, *(tensor for pair in target.caches for tensor in pair)]


def make_batch(rows: int, seed: int, query_len: int | None = None) -> draftfuse.DraftBatch:
    """Ragged queries (or ``query_len`` each), some rejected, greedy and sampled; row 0 reaches the length limit."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (rows,), generator=generator)

    queries = draw(2, 6) if query_len is None else torch.full((rows,), query_len)
    lengths = queries + draw(1, 20)
    lengths[0] = CONFIG.max_position_embeddings
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)])
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(lengths.tolist(), queries.tolist(), strict=True)])
    tokens = int(starts[-1])
    rejected = torch.minimum(draw(0, 3), queries - 1)
    rejected[0] = 1  # one token before the limit: dead after two draft steps
    return draftfuse.DraftBatch(
        num_reqs=rows,
        num_tokens=tokens,
        max_seq_len=int(lengths.max()),
        hidden_states=torch.randn(tokens, CONFIG.hidden_size, generator=generator),
        input_ids=torch.randint(0, CONFIG.vocab_size, (tokens,), generator=generator),
        positions=positions,
        query_start_loc=starts.int(),
        seq_lens=lengths.int(),
        num_rejected=rejected,
        last_sampled=draw(0, CONFIG.vocab_size),
        temperature=torch.tensor([0.0, 0.7, 0.0, 1.3])[:rows],
        seeds=torch.arange(rows) + 2**40,
        idx_mapping=torch.arange(rows),
        max_query_len=query_len,
    )


Call = tuple[int, int, int | None]  # rows, k, tokens a row (None: ragged)


def record(kind: str, k: int, mode: str, calls: list[Call]) -> tuple[list[dict[str, Tensor]], draftfuse.FusedDraft]:
    """All that can be seen after each call of ``propose``: tokens, persistent inputs of live rows, all KV."""
    spec, caches = make(kind, k)
    fused = draftfuse.compile(spec, mode=mode, compiler="none", request_capacities=[ROWS])
    seen = []
    for seed, (rows, count, query_len) in enumerate(calls):
        tokens = fused.propose(make_batch(rows, seed, query_len), count, copy=True)
        state = {f"kv{i}": cache.clone() for i, cache in enumerate(caches)}
        state |= {name: tensor[:rows].clone() for name, tensor in spec.inputs.named_tensors().items()}
        seen.append({"tokens": tokens, **state})
    return seen, fused


# ---- the modes agree


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_split_and_fused_equal_eager_bit_for_bit(kind: str, k: int) -> None:
    ragged: list[Call] = [(ROWS, k, None), (3, k, None), (1, k, None), (2, min(k, 2), None), (ROWS, 0, None)]
    uniform: list[Call] = [(ROWS, k, k + 1), (2, k, k + 1)]
    calls = ragged + uniform
    expected, _ = record(kind, k, "eager", calls)
    for mode in ("split", "fused"):
        seen, fused = record(kind, k, mode, calls)
        assert not fused.report.fallbacks
        assert not fused.report.findings
        for call, before, after in zip(calls, expected, seen, strict=True):
            differing = [name for name in before if not torch.equal(before[name], after[name])]
            assert not differing, (mode, call)


def test_one_ladder_step_a_power_of_two_gives_the_same_tokens() -> None:
    ladder = draftfuse.compile(make("eagle", 2)[0], mode="fused", compiler="none")
    padded = draftfuse.compile(make("eagle", 2)[0], mode="eager", request_capacities=[ROWS])
    for rows in (1, 2, 3, 4):
        assert torch.equal(ladder.propose(make_batch(rows, rows)), padded.propose(make_batch(rows, rows)))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_row_at_the_length_limit_stops_writing(kind: str) -> None:
    seen, _ = record(kind, 5, "eager", [(ROWS, 5, None)])
    last = CONFIG.max_position_embeddings - 1
    assert int(seen[0]["positions"][0]) == (last - 1 if kind == "static" else last)
    assert int(seen[0]["seq_lens"][0]) == last  # at position last it is dead


def test_the_static_drafter_writes_no_kv_and_stays() -> None:
    _, before = make("static", 5)
    seen, _ = record("static", 5, "fused", [(ROWS, 5, None)])
    assert all(torch.equal(cache, seen[0][f"kv{i}"]) for i, cache in enumerate(before))
    batch = make_batch(ROWS, 0)
    last = batch.query_start_loc[1:].long() - 1 - batch.num_rejected
    assert torch.equal(seen[0]["positions"][:ROWS], batch.positions[last])
    assert torch.equal(seen[0]["seq_lens"][:ROWS], batch.seq_lens - batch.num_rejected.int())


@pytest.mark.parametrize("kind", MAKERS)
def test_every_step_draws_with_its_own_noise(kind: str) -> None:
    spec, _ = make(kind, 5)
    rows = spec.inputs.view(ROWS, ROWS)
    rows.temperature.fill_(100.0)
    rows.seq_lens.fill_(9)
    rows.positions.fill_(8)
    hidden, tokens = torch.zeros(ROWS, CONFIG.hidden_size), []
    for step in range(4):
        tokens.append(spec.sample(hidden, step))
        spec.advance(tokens[-1], hidden, step)
    assert len({tuple(drawn.tolist()) for drawn in tokens}) == 4
    rows.positions.fill_(8)
    assert torch.equal(spec.sample(hidden, 0), tokens[0])


# ---- the engine gives the target's own text


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engine_generates_what_the_target_generates_alone(kind: str, temperature: float) -> None:
    limits = limits_of(3)
    target = Target.random(CONFIG, limits)
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
    alone = Engine(target).generate(prompts, 20, temperature=temperature, seed=5)
    fused = draftfuse.compile(MAKERS[kind](CONFIG, limits, target), mode="eager")
    both = Engine(target, fused).generate(prompts, 20, temperature=temperature, seed=5)
    assert both.tokens == alone.tokens
    assert {len(tokens) for tokens in alone.tokens} == {20}
    assert not alone.accepted
    assert 0 < len(both.accepted) <= sum(map(len, both.drafts))  # rows that end are drafted for once more
    assert {tokens.shape[1] for tokens in both.drafts} == {3}


def test_engine_stops_at_the_stop_token() -> None:
    limits = limits_of(3)
    target = Target.random(CONFIG, limits)
    prompts = [[1, 2, 3], [4, 5]]
    whole = Engine(target).generate(prompts, 20, temperature=1.0).tokens
    stop = whole[0][7]
    fused = draftfuse.compile(EagleSpeculator.random(CONFIG, limits), mode="eager")
    cut = Engine(target, fused).generate(prompts, 20, temperature=1.0, stop=stop).tokens
    assert cut == [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in whole]


def test_engine_refuses_what_does_not_fit() -> None:
    engine = Engine(Target.random(CONFIG, limits_of(3)))
    with pytest.raises(InvalidBatchError, match="prompts do not fit: got"):
        engine.generate([[1]] * (ROWS + 1), 4)
    with pytest.raises(InvalidBatchError, match="none of them empty"):
        engine.generate([[1], []], 4)
    with pytest.raises(InvalidBatchError, match="at most 48 tokens"):
        engine.generate([[1] * 30], 19)


# ---- the packaged model means what its training script means


def load_example(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return load_example("train_tiny")


@pytest.mark.parametrize("k", [4])
@torch.no_grad()
def test_target_and_head_are_the_trained_ones(training: ModuleType, k: int) -> None:
    folder = models.packaged_model_dir()
    theirs, head = training.Target(), training.Eagle()
    theirs.load_state_dict(models.load_weights(folder / "target", torch.float32))
    head.load_state_dict(models.load_weights(folder / "eagle", torch.float32))
    prompt = list(models.held_out_text().encode()[:100])
    limits = Limits(k, 1, 256, max_num_tokens=128)
    target = Target.from_packaged(limits)
    fused = draftfuse.compile(EagleSpeculator.from_packaged(limits), mode="eager")
    run = Engine(target, fused).generate([prompt], 2)

    ids = torch.tensor([*prompt, run.tokens[0][0], *run.drafts[0][0].tolist()])[None]
    hidden = theirs(ids)
    assert run.first_batch is not None
    torch.testing.assert_close(run.first_batch.hidden_states, hidden[0, : len(prompt)], atol=1e-3, rtol=1e-3)
    steps = enumerate(training.unroll(theirs, head, ids, hidden), start=len(prompt) - 1)
    best = [int(theirs.lm_head(features[0, row]).argmax()) for row, features in steps]
    assert best == run.drafts[0][0].tolist()


# ---- the examples run


@pytest.mark.parametrize("name", ["eagle", "draft_model", "static_drafter"])
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    load_example(name).main(compiler="none")
    said = capsys.readouterr().out
    assert "fallback" not in said
    assert "writes the same: False" not in said


# ---- Inductor


@pytest.fixture(scope="session")
def inductor_eagle() -> draftfuse.FusedDraft:
    """The packaged head, fused and compiled once for all tests that want generated code."""
    spec = EagleSpeculator.from_packaged(Limits(3, ROWS, 256, max_num_tokens=512))
    return draftfuse.compile(spec, mode="fused", request_capacities=[ROWS])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_generated_code_drafts_the_same_tokens(inductor_eagle: draftfuse.FusedDraft, temperature: float) -> None:
    limits = Limits(3, ROWS, 256, max_num_tokens=512)
    target = Target.from_packaged(limits)
    text = models.held_out_text().encode()
    prompts = [list(text[begin : begin + 60]) for begin in (0, 1000, 2000)]
    eager = draftfuse.compile(EagleSpeculator.from_packaged(limits), mode="eager", request_capacities=[ROWS])
    expected, seen = (Engine(target, f).generate(prompts, 24, temperature=temperature) for f in (eager, inductor_eagle))
    assert seen.tokens == expected.tokens == Engine(target).generate(prompts, 24, temperature=temperature).tokens
    assert all(torch.equal(a, b) for a, b in zip(expected.drafts, seen.drafts, strict=True))
    assert not inductor_eagle.report.fallbacks
