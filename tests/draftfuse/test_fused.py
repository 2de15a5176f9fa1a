"""The compiled loop: all modes leave the same bits, and a mistake is refused by name and leaves nothing half built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import CommonMetadata, DraftInputs
from draftfuse.errors import (
    DraftfuseError,
    InvalidOptionError,
    InvalidSpeculatorError,
    NotFusableError,
    UnsafeLoopError,
    UnstableMetadataError,
    UntraceableLoopError,
)
from tests.draftfuse.toy import (
    Config,
    Run,
    Toy,
    ToyBuilder,
    ToyMetadata,
    assert_same_runs,
    differences,
    make_batch,
    run_mode,
    small,
    snapshot,
)

ALL = ("step", "invariant", "pieces", "several")
CONFIGS = {
    "aliases": small(fields=()),
    "derived": small(layers=2, groups=2, fields=ALL, logits=True),
    "tokens": small(fields=("token", "step"), gumbel=True, k=4),
    "bfloat16": small(fields=ALL, dtype=torch.bfloat16, page=3),
    "static": small(fields=ALL, advance_positions=False),
    "at the limit": small(fields=ALL, max_model_len=9, k=4),
}


def calls(config: Config) -> list[tuple[Any, int | None]]:
    """Batches that grow, shrink, pad, and ask for every k."""
    sizes = [2, 3, 4, 3, 1, 4]
    ks: list[int | None] = [None, config.k - 1, None, 1, None, 0]
    return [(partial(make_batch, num_reqs=n, seed=i), k) for i, (n, k) in enumerate(zip(sizes, ks, strict=True))]


@pytest.fixture(scope="module")
def eager() -> Callable[[str], Run]:
    """The eager run of each configuration, made once."""
    made: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in made:
            made[name] = run_mode(CONFIGS[name], "eager", calls(CONFIGS[name]))
        return made[name]

    return run


@pytest.mark.parametrize(
    "name", ["derived", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "derived")]
)
def test_fused_equals_eager(name: str, eager: Callable[[str], Run]) -> None:
    fused = run_mode(CONFIGS[name], "fused", calls(CONFIGS[name]))
    assert_same_runs(eager(name), fused)
    assert not fused.fused.report.fallbacks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["derived", "tokens"])
def test_split_equals_eager(name: str, eager: Callable[[str], Run]) -> None:
    assert_same_runs(eager(name), run_mode(CONFIGS[name], "split", calls(CONFIGS[name])))


def test_drafts_depend_on_every_field(eager: Callable[[str], Run]) -> None:
    """What makes the comparisons above mean something: another window, another draft."""
    other = run_mode(replace(CONFIGS["derived"], window=4), "eager", calls(CONFIGS["derived"]))
    assert not torch.equal(other.tokens[2], eager("derived").tokens[2])
    fewer = run_mode(replace(CONFIGS["derived"], fields=ALL[1:]), "eager", calls(CONFIGS["derived"]))
    assert not torch.equal(fewer.tokens[2], eager("derived").tokens[2])


def test_every_k_drafts_a_prefix() -> None:
    config = small(k=3)
    run = run_mode(config, "fused", [(partial(make_batch, num_reqs=2, seed=7), k) for k in (3, 2, 1, 0, 3)])
    longest = run.tokens[0]
    assert [t.shape for t in run.tokens] == [(2, 3), (2, 2), (2, 1), (2, 0), (2, 3)]
    assert all(torch.equal(t, longest[:, : t.shape[1]]) for t in run.tokens)


def test_decode_continues_what_an_engine_prefilled() -> None:
    def states(mode: str) -> dict[str, Tensor]:
        spec = Toy(small())
        fused = draftfuse.compile(spec, mode=mode, compiler="none")
        fused.propose(make_batch(spec, 3, seed=1), k=1)  # the prefill alone: rows as draft step 1 reads them
        fused.decode(3)
        return snapshot(spec)

    assert differences(states("eager"), states("fused")) == []


def test_dead_rows_write_no_kv_and_read_no_table() -> None:
    spec = Toy(small(rows=4))
    for group in spec.attn_groups:
        group.block_table[3:].fill_(10**6)  # a padded row that read its table would leave the pool
    fused = draftfuse.compile(spec, compiler="none", request_capacities=[4])
    before = [pool.clone() for pool in spec.pools]
    batch = make_batch(spec, 3, seed=2, lengths=[9, 6, 12])
    fused.propose(batch)
    written = {int(s) for s in spec.attn_groups[0].slot_mapping.tolist()}
    assert -1 in written
    changed = [(pool != old).flatten(3).any(-1) for pool, old in zip(spec.pools, before, strict=True)]
    pages = {int(p) for rows in changed for p in rows.any(-1).any(-1).nonzero()}
    table = spec.attn_groups[0].block_table
    assert pages <= {int(p) for row, n in enumerate((9, 6, 12)) for p in table[row, : (n + 3) // 4 + 1]}


# What a speculator may lack


def without(name: str) -> Toy:
    class Lacking(Toy):
        pass

    setattr(Lacking, name, None)
    return Lacking(small())


def changed(**fields: Any) -> Toy:
    spec = Toy(small())
    for name, value in fields.items():
        setattr(spec, name, value)
    return spec


def with_inputs(**fields: Any) -> Toy:
    spec = Toy(small())
    spec.inputs = replace(spec.inputs, **fields)
    return spec


def with_group(**fields: Any) -> Toy:
    spec = Toy(small())
    spec.attn_groups = [replace(spec.attn_groups[0], **fields)]
    return spec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(without, "forward"), "the speculator has no method forward: got Lacking without it"),
        (partial(without, "sample"), "the speculator has no method sample"),
        (partial(without, "advance"), "the speculator has no method advance"),
        (partial(changed, num_speculative_tokens=0), "spec.num_speculative_tokens is not a count: got 0"),
        (partial(changed, max_num_reqs=True), "spec.max_num_reqs is not a count: got True"),
        (partial(changed, max_model_len="48"), "spec.max_model_len is not a count: got '48'"),
        (partial(changed, inputs={}), "spec.inputs is not a DraftInputs: got dict"),
        (partial(changed, num_speculative_tokens=4), "inputs.draft_tokens is too narrow: got 3"),
        (partial(changed, max_num_reqs=7), "is too short"),
        (partial(changed, attn_groups=None), "spec.attn_groups is no sequence: got NoneType"),
        (
            lambda: with_inputs(positions=torch.zeros(17, dtype=torch.int32)),
            r"inputs.positions has a wrong dtype or shape: got torch.int32\[17\], expected 1 dims of torch.int64",
        ),
        (
            lambda: with_inputs(input_ids=torch.zeros(17, dtype=torch.int64)),
            r"inputs.input_ids has a wrong dtype or shape: got torch.int64\[17\], expected 1 dims of torch.int32",
        ),
        (lambda: with_inputs(hidden_states=torch.zeros(17)), r"inputs.hidden_states .* got torch.float32\[17\]"),
        (lambda: with_inputs(seq_lens=torch.zeros(5)), "inputs.seq_lens has a wrong dtype or shape"),
        (lambda: with_group(builder=object()), r"attn_groups\[0\].builder has no build: got object"),
        (lambda: with_group(page_size=0), r"attn_groups\[0\].page_size is no size: got 0"),
        (lambda: with_group(slot_mapping=torch.zeros(17)), r"attn_groups\[0\].slot_mapping has a wrong dtype"),
        (lambda: with_group(block_table=[]), r"attn_groups\[0\].block_table has a wrong dtype or shape: got list"),
    ],
)
def test_unsound_speculators_are_refused(make: Callable[[], Toy], message: str) -> None:
    with pytest.raises(InvalidSpeculatorError, match=message) as error:
        draftfuse.compile(make())
    assert error.value.source is not None
    assert error.value.source.file == __file__ or error.value.source.file.endswith("toy.py")


@pytest.mark.parametrize("k", [-1, 4, 1.5, True, "2"])
def test_a_k_that_does_not_fit_is_refused_and_nothing_is_written(k: Any) -> None:
    spec = Toy(small(k=3))
    fused = draftfuse.compile(spec, compiler="none")
    before = snapshot(spec)
    for call in (lambda: fused.propose(make_batch(spec, 2), k=k), lambda: fused.decode(2, k=k)):
        with pytest.raises(InvalidOptionError, match=r"k does not fit the compiled loop: .* 0 <= k <= 3"):
            call()
    assert differences(before, snapshot(spec)) == []
    assert not fused.report.builds


# Loops that cannot be fused


class Itemised(Toy):
    """Control flow on a number of the batch."""

    broken = True

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        if self.broken and inputs.positions.shape[0] == inputs.seq_lens.shape[0]:
            count = int(inputs.seq_lens.max().item())
            for _ in range(count % 2):
                inputs = inputs.view(inputs.seq_lens.shape[0], inputs.positions.shape[0])
        return super().forward(inputs, metadata)


class Branching(Toy):
    """A branch on the values of a tensor."""

    broken = True

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        if self.broken and step > 0 and (hidden > 3).any():
            hidden = hidden * 2
        return super().sample(hidden, step)


class Printing(Toy):
    """A call that no graph can hold."""

    broken = True

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        if self.broken and step > 0:
            open("/dev/null").close()
        super().advance(tokens, hidden, step)


class Rebinding(Toy):
    """Binds a fresh tensor to an attribute: a replay would never do that again."""

    broken = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.last = torch.zeros(config.rows, config.hidden)

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        if self.broken and step > 0:
            self.last = hidden * 2
        super().advance(tokens, hidden, step)


LOOPS = [
    (Itemised, UntraceableLoopError, ("count = int(", "for _ in range(count")),
    (Branching, UntraceableLoopError, ("if self.broken and step > 0 and (hidden > 3).any():",)),
    (Printing, UntraceableLoopError, ('open("/dev/null").close()',)),
    (Rebinding, UnsafeLoopError, ("self.last = hidden * 2",)),
]


@pytest.mark.parametrize("mode", ["auto", "fused"])
@pytest.mark.parametrize(("klass", "error", "lines"), LOOPS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_loop_that_cannot_be_traced_names_the_line(
    klass: type[Toy], error: type[DraftfuseError], lines: tuple[str, ...], mode: str
) -> None:
    spec = klass(small())
    fused = draftfuse.compile(spec, mode=mode, compiler="none")
    fused.propose(make_batch(spec, 2, seed=3), k=1)  # live values that a failing build must keep
    before = snapshot(spec)
    attributes = {name: id(value) for name, value in vars(spec).items()}
    with pytest.raises(error) as caught:
        fused.decode(2)
    message = str(caught.value)
    assert __file__ in message
    assert any(line in message for line in lines), message
    assert differences(before, snapshot(spec)) == []
    assert {name: id(value) for name, value in vars(spec).items()} == attributes
    assert not fused.runners.made


@pytest.mark.parametrize("klass", [Itemised, Rebinding], ids=lambda c: c.__name__)
def test_after_an_error_a_corrected_loop_works(klass: type[Toy]) -> None:
    spec, twin = klass(small()), klass(small())
    fused = draftfuse.compile(spec, mode="fused", compiler="none")
    batch = make_batch(spec, 3, seed=5)
    with pytest.raises(DraftfuseError):
        fused.propose(batch)
    spec.broken = twin.broken = False
    expected = draftfuse.compile(twin, mode="eager", compiler="none").propose(batch)
    assert torch.equal(fused.propose(batch), expected)
    assert differences(snapshot(twin), snapshot(spec)) == []


# Builders that cannot be fused


class HostBuilder(ToyBuilder):
    """Reads lengths on the host."""

    def build(self, common: CommonMetadata) -> ToyMetadata:
        made = super().build(common)
        if int(common.seq_lens.max()) > 3:
            made.start = made.start * 2 if made.start is not None else None
        return made


class PlannedBuilder(ToyBuilder):
    """Says itself that it plans on the host."""

    refresh_kind = "host-planned"


class ChangingBuilder(ToyBuilder):
    """Other fields at other steps."""

    def build(self, common: CommonMetadata) -> ToyMetadata:
        made = super().build(common)
        if common.draft_step == 2:
            made.order = made.seq_lens[:1]
        return made


HOST = [(HostBuilder, "seq_lens.max()"), (PlannedBuilder, "(PlannedBuilder) plans each step on the host")]


def toy_with(builder: type[ToyBuilder]) -> Toy:
    return Toy(small(), builder(("step",), 5))


@pytest.mark.parametrize(("builder", "reason"), HOST, ids=lambda v: getattr(v, "__name__", ""))
def test_a_builder_on_the_host_runs_split_and_says_why(builder: type[ToyBuilder], reason: str) -> None:
    spec, twin = toy_with(builder), toy_with(builder)
    fused = Run(draftfuse.compile(spec, compiler="none"))
    plain = Run(draftfuse.compile(twin, compiler="none", mode="eager"))
    for run in (fused, plain):
        run.draft(make_batch(spec, 3, seed=1))
        run.draft(make_batch(spec, 2, seed=2))
    assert_same_runs(plain, fused)
    fallbacks = fused.fused.report.fallbacks
    assert [(f.what, f.mode) for f in fallbacks] == [("decode", "split")]
    if builder is PlannedBuilder:
        assert reason in fallbacks[0].reason


@pytest.mark.parametrize(("builder", "reason"), HOST, ids=lambda v: getattr(v, "__name__", ""))
def test_a_builder_on_the_host_is_refused_where_fusing_was_asked_for(builder: type[ToyBuilder], reason: str) -> None:
    spec = toy_with(builder)
    fused = draftfuse.compile(spec, mode="fused", compiler="none")
    fused.propose(make_batch(spec, 2, seed=3), k=1)
    before = snapshot(spec)
    with pytest.raises(NotFusableError) as error:
        fused.decode(2)
    assert "the loop cannot be fused" in str(error.value)
    if builder is HostBuilder:
        assert isinstance(error.value.__cause__, UntraceableLoopError)
        assert reason in str(error.value.__cause__)
    else:
        assert reason in str(error.value)
    assert differences(before, snapshot(spec)) == []
    assert not fused.runners.made


def test_metadata_that_changes_its_layout_cannot_run_split() -> None:
    batch = make_batch(toy_with(ChangingBuilder), 2, seed=4)
    expected = draftfuse.compile(toy_with(ChangingBuilder), mode="eager", compiler="none").propose(batch)
    fused = draftfuse.compile(toy_with(ChangingBuilder), mode="fused", compiler="none")
    assert torch.equal(fused.propose(batch), expected)
    spec = toy_with(ChangingBuilder)
    with pytest.raises(UnstableMetadataError, match="metadata changes its layout at draft step 2") as error:
        draftfuse.compile(spec, mode="split", compiler="none").propose(batch)
    assert "got ToyMetadata.order=int32[1], expected ToyMetadata.order=None" in str(error.value)
