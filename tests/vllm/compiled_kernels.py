"""Compile the kernels of draftfuse.vllm to sm_90 machine code without a GPU; test_load.py runs this in a process."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from draftfuse.vllm import _load_triton as kernels

WIDE = ("out_last", "out_step", "out_positions", "out_seeds", "positions", "last_sampled", "seeds", "drafts")


def compile_kernel(kernel: Any, flag: str, value: bool, numbers: tuple[str, ...], ones: tuple[str, ...] = ()) -> None:
    """Numbers in ``ones`` are 1, which Triton takes as a constant."""
    names = kernel.arg_names
    constants = {"BLOCK": kernels.BLOCK, flag: value} | dict.fromkeys(ones, 1)
    types = dict.fromkeys(WIDE, "*i64") | dict.fromkeys(("temperature", "out_temperature"), "*fp32")
    types |= dict.fromkeys(numbers, "i32")
    signature = {n: "constexpr" if n in constants else types.get(n, "*i32") for n in names}
    values = {(names.index(n),): constant for n, constant in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    assert "st.global" in triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]


def main() -> None:
    for value in (False, True):
        compile_kernel(kernels._load, "PADS", value, ("rows", "capacity"))
        compile_kernel(kernels._load, "PADS", value, (), ("rows", "capacity"))
        compile_kernel(kernels._turn, "ADVANCES", value, ("stride", "capacity", "max_model_len"))
        compile_kernel(kernels._turn, "ADVANCES", value, ("stride", "max_model_len"), ("capacity",))


if __name__ == "__main__":
    main()
