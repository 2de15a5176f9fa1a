"""Compile the Triton kernels to sm_90 machine code without a GPU; test_triton_kernels.py runs this file in a process.

It catches what the interpreter accepts and the compiler does not, and a page table that is no longer vectorised.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from draftfuse.lowering.ops import (
    _argmax_triton,
    _load_rows_triton,
    _paged_attention_triton,
    _small_linear_triton,
    _sort_triton,
    _write_kv_triton,
)
from draftfuse.lowering.ops._paged_attention_plan import STAGES


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """PTX of ``kernel``; arguments without a type are i32, and strides and addresses are multiples of 16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n] not in ("constexpr", "fp32")
    }
    for name in ("num_reqs", "num_tokens", "splits", "capacity", "length"):
        if name in names:
            aligned.pop((names.index(name),), None)
    values = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return ptx


def attention(head_size: int, dtype: str, ragged: bool, window: int) -> None:
    cache = f"*{dtype}"
    types = dict.fromkeys(("query", "key_cache", "value_cache"), cache) | dict.fromkeys(("out", "lse"), "*fp32")
    types |= dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "*i32") | {"scale": "fp32"}
    constants = dict.fromkeys(("q_d", "k_d", "v_d", "table_b"), 1)
    blocks = {"BLOCK_Q": 16, "BLOCK_M": 64} if ragged else {"BLOCK_Q": 1, "BLOCK_M": 16}
    constants |= blocks | {"KV_HEADS": 8, "GROUP": 4, "HEAD_SIZE": head_size, "PAGE": 16, "WINDOW": window}
    constants |= {
        "RAGGED": ragged,
        "SPLIT": True,
        "PDL": True,
        "BLOCK_D": triton.next_power_of_2(head_size),
        "BLOCK_N": 64,
    }
    precision = {"PRECISION": "ieee" if dtype == "fp32" else "tf32"}
    kernel = _paged_attention_triton._attend
    ptx = compile_kernel(kernel, types, constants | precision, num_warps=4, num_stages=STAGES)
    if dtype != "fp32":
        assert ptx.count("cp.async.cg.shared.global") >= 32, "K and V tiles are not copied 16 bytes at a time"


def small_linear(**variant: bool | int) -> None:
    tensors = ("x", "second", "weight", "gain", "second_gain", "residual", "out")
    types = dict.fromkeys(tensors, "*bf16") | {"epsilon": "fp32", "index": "*i32"}
    types |= {"out": "*i64"} if variant.get("ARGMAX") else {}
    constants = {"N": 4096, "K": 4096, "FIRST": 4096, "M": 1, "NORM": True, "PDL": True, "BLOCK_N": 4, "BLOCK_K": 1024}
    constants |= dict.fromkeys(("GATHER", "SWIGLU", "RESIDUAL", "ARGMAX"), False) | variant
    ptx = compile_kernel(_small_linear_triton._small_linear, types, constants)
    assert "griddepcontrol.wait" in ptx
    assert "ld.global.v4.b32" in ptx, "weights are not loaded 16 bytes at a time"


def load_rows() -> None:
    types = dict.fromkeys(_load_rows_triton._load_rows.arg_names[:19], "*i64")
    types |= dict.fromkeys(("out_ids", "out_seq_lens", "out_starts", "seq_lens", "starts"), "*i32")
    types |= dict.fromkeys(("out_temperature", "temperature"), "*fp32")
    types |= dict.fromkeys(("out_hidden", "hidden"), "*bf16")
    blocks = {"BLOCK": _load_rows_triton.BLOCK, "HIDDEN_BLOCK": _load_rows_triton.HIDDEN_BLOCK}
    ptx = compile_kernel(_load_rows_triton._load_rows, types, blocks)
    assert "st.global.v4.b32" in ptx, "hidden states are not copied 16 bytes at a time"


def main() -> None:
    small_linear(RESIDUAL=True)
    small_linear(SWIGLU=True)
    small_linear(ARGMAX=True)
    small_linear(GATHER=True, FIRST=2048)
    types = {"keys": "*i64", "out": "*i64"}
    compile_kernel(_small_linear_triton._pick, types, {"BLOCK": _small_linear_triton.PICK_BLOCK, "PDL": True})
    types = {"x": "*i64", "values": "*i64", "indices": "*i64"}
    constants = {"DESCENDING": False, "BLOCK": _sort_triton.BLOCK, "OTHERS": 128, "PDL": True}
    compile_kernel(_sort_triton._sort, types, constants)
    types = {"x": "*bf16", "keys": "*i64"}
    ptx = compile_kernel(_argmax_triton._best_of_parts, types, {"BLOCK": _argmax_triton.BLOCK, "PDL": True})
    assert "ld.global.v4.b32" in ptx, "logits are not loaded 16 bytes at a time"
    load_rows()
    attention(128, "bf16", False, 0)
    attention(128, "bf16", True, 512)
    attention(64, "fp32", False, 0)
    types = {"partial": "*fp32", "lse": "*fp32", "out": "*bf16"}
    compile_kernel(
        _paged_attention_triton._reduce, types, {"HEAD_SIZE": 128, "BLOCK_S": 64, "BLOCK_D": 128, "PDL": True}
    )
    types = dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16") | {"slot_mapping": "*i64"}
    constants = {"PAGE": 16, "HEADS": 8, "HEAD_SIZE": 128, "BLOCK": 1024, "PDL": True}
    constants |= dict.fromkeys(("key_d", "value_d", "key_cache_d", "value_cache_d"), 1)
    assert "st.global.v4.b32" in compile_kernel(_write_kv_triton._write_kv, types, constants)


if __name__ == "__main__":
    main()
