"""Loads the Model Runner V2 speculator of a released vLLM from its unpacked wheel, on any machine with Triton.

Those files of ``vllm/v1/worker/gpu`` that matter are the released ones; everything else of vLLM is a stand-in. Import
with ``TRITON_INTERPRET=1``: then vLLM's kernels run on CPU tensors.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

GPU = "vllm.v1.worker.gpu"
REAL = {
    f"{GPU}.{name}"
    for name in (
        "cudagraph_utils",
        "dp_utils",
        "input_batch",
        "spec_decode.autoregressive.cudagraph_utils",
        "spec_decode.autoregressive.speculator",
        "spec_decode.speculator",
    )
}
CONTEXT: dict[str, Any] = {}  # what the last set_forward_context was given


class CUDAGraphMode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def __bool__(self) -> bool:
        return self.value != 0

    def decode_mode(self) -> CUDAGraphMode:
        return CUDAGraphMode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> CUDAGraphMode:
        return CUDAGraphMode(self.value[1]) if self.separate_routine() else self

    def separate_routine(self) -> bool:
        return isinstance(self.value, tuple)

    def has_piecewise_cudagraphs(self) -> bool:
        return self.mixed_mode() is CUDAGraphMode.PIECEWISE


@contextmanager
def set_forward_context(metadata: Any, config: Any, **given: Any) -> Iterator[None]:
    CONTEXT["metadata"] = metadata
    yield


def slots_by_layer(slots: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    return {name: row for row, group in zip(slots, config.kv_cache_groups, strict=True) for name in group.layer_names}


def build_attn_metadata(*, attn_groups: Any, **common: Any) -> dict[str, Any]:
    """As vLLM does it: one build a group, one metadata object for its layers."""
    found: dict[str, Any] = {}
    for index, groups in enumerate(attn_groups):
        for group in groups:
            given = SimpleNamespace(
                num_reqs=common["num_reqs"],
                query_start_loc=common["query_start_loc_gpu"],
                seq_lens=common["seq_lens"],
                block_table_tensor=common["block_tables"][index],
                slot_mapping=common["slot_mappings"][index],
            )
            built = group.get_metadata_builder(0).build(0, given)
            found |= dict.fromkeys(group.layer_names, built)
    return found


def gumbel_sample(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    apply_temperature: bool,
    output_processed_logits: torch.Tensor,
    output_processed_logits_col: torch.Tensor,
    use_fp64: bool,
) -> torch.Tensor:
    """Some draw that depends on all that vLLM's depends on; logits are kept for rows that a request stands in."""
    out = torch.zeros(len(logits), dtype=torch.int64)
    for row, state in enumerate(idx_mapping.tolist()):
        if state >= 0:
            key = int(seeds[state]) * 7919 + int(positions[row])
            noise = torch.rand(logits.shape[1], generator=torch.Generator().manual_seed(key))
            scaled = logits[row] / max(float(temperature[state]), 0.5)
            output_processed_logits[state, int(output_processed_logits_col)] = scaled
            out[row] = (scaled + noise).argmax()
    return out


def ranks() -> Any:
    return SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)


def stand_ins() -> dict[str, dict[str, Any]]:
    """What the released files take from modules that are no released ones here, where anything would not do."""
    import triton
    import triton.language as tl

    offloader = SimpleNamespace(sync_prev_onload=lambda: None, join_after_forward=lambda: None)
    return {
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.config.compilation": {"CUDAGraphMode": CUDAGraphMode},
        "vllm.forward_context": {"set_forward_context": set_forward_context, "BatchDescriptor": SimpleNamespace},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.multimodal": {"MULTIMODAL_REGISTRY": SimpleNamespace(supports_multimodal_inputs=lambda config: False)},
        "vllm.utils": {"random_uuid": lambda: "0"},
        "vllm.utils.math_utils": {"round_up": lambda x, y: -(-x // y) * y},
        "vllm.distributed.parallel_state": {"get_pp_group": ranks},
        "vllm.platforms": {"current_platform": SimpleNamespace(get_global_graph_pool=lambda: None)},
        "vllm.compilation.breakable_cudagraph": {"is_breakable_cudagraph_enabled": lambda: False},
        "vllm.model_executor.offloader.base": {"get_offloader": lambda: offloader},
        f"{GPU}.attn_utils": {
            "build_slot_mappings_by_layer": slots_by_layer,
            "build_attn_metadata": build_attn_metadata,
        },
        f"{GPU}.sample.gumbel": {"gumbel_sample": gumbel_sample},
    }


class Anything(ModuleType):
    """A module with every name that is asked for: a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class Released(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds all of vLLM: the files named in :data:`REAL` under ``root``, stand-ins for the rest."""

    def __init__(self, root: Path) -> None:
        self.root, self.given = root, stand_ins()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != "vllm":
            return None
        if name in REAL:
            return importlib.util.spec_from_file_location(name, self.root / (name.replace(".", "/") + ".py"))
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.given.get(module.__name__, {}))


def load(root: Path) -> ModuleType:
    """The speculator's module of the wheel under ``root``; its graph manager runs again what it captured."""
    sys.meta_path.insert(0, Released(root))
    module = importlib.import_module(f"{GPU}.spec_decode.autoregressive.speculator")
    manager = importlib.import_module(f"{GPU}.cudagraph_utils").CudaGraphManager
    manager.capture = capture
    return module


def capture(self: Any, create: Any, progress_bar_desc: str = "") -> None:
    """vLLM's order of warm-up and capture; a graph is the captured function, run again."""
    for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
        for desc in self._capture_descs.get(mode, ()):
            forward(create(desc, warmup=True))(CUDAGraphMode.NONE)
            if mode is CUDAGraphMode.FULL:
                function = forward(create(desc, warmup=False))
                function(CUDAGraphMode.NONE)
                self.graphs[desc] = SimpleNamespace(replay=lambda run=function: run(CUDAGraphMode.NONE))
    self._graphs_captured = True


def forward(created: Any) -> Any:
    """0.25 returns the attention state beside the function."""
    return created[0] if isinstance(created, tuple) else created
