"""Class 9: padding after the metadata was built. Builders see the padded batch, with dead rows of length 0."""

from __future__ import annotations

from functools import partial

import torch

from draftfuse import CommonMetadata, DraftBatch
from tests.failures.small import Small, WindowBuilder, WindowMetadata, batch_of, both, three_rows

SEEN: list[tuple[int, list[int]]] = []


class Watching(WindowBuilder):
    refresh_kind = "host-planned"  # so that build runs in Python, where it can look

    def build(self, common: CommonMetadata) -> WindowMetadata:
        SEEN.append((common.num_reqs, common.seq_lens.tolist()))
        return super().build(common)


def test_metadata_is_built_for_the_padded_batch() -> None:
    pair = both(lambda: Small(k=3, builder=Watching()), lambda spec: batch_of(spec, [5, 9, 3, 7]))
    SEEN.clear()
    pair.draft(three_rows)  # after a larger batch, whose last row is still in the buffers
    decode = [seen for seen in SEEN if seen[0] == 4]
    assert decode
    assert all(lengths[3] == 0 for _, lengths in decode)


def test_the_fused_loop_pads_before_it_builds() -> None:
    class Shaped(WindowBuilder):
        def build(self, common: CommonMetadata) -> WindowMetadata:
            metadata = super().build(common)
            assert (
                metadata.start.shape[0] == common.num_reqs == common.slot_mapping.shape[0] or common.max_query_len > 1
            )
            return metadata

    pair = both(lambda: Small(k=3, builder=Shaped()), lambda spec: batch_of(spec, [5, 9, 3, 7]))
    pair.draft(three_rows)
    assert int(pair.fused.spec.inputs.seq_lens[3]) == 0


def test_a_uniform_batch_is_padded_as_it_is_loaded() -> None:
    def uniform(lengths: list[int], spec: Small) -> DraftBatch:
        batch = batch_of(spec, lengths)
        batch.max_query_len = spec.num_speculative_tokens + 1
        return batch

    pair = both(lambda: Small(k=3), partial(uniform, [5, 9, 4, 7]))
    key = pair.fused.spec.key.clone()
    pair.draft(partial(uniform, [6, 10, 5]))  # the last row of the batch before must neither move nor write
    assert pair.fused.report.counters["eager prefills"] == 0
    page = pair.fused.spec.attn_groups[0].block_table[3].long()
    assert torch.equal(pair.fused.spec.key[page], key[page])
    assert int(pair.fused.spec.inputs.seq_lens[3]) == 0
