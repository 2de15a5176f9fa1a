"""vLLM's own pass manager and piecewise compilation on the CPU: prints how often the pass was called.

On the CPU vLLM compiles a graph in one piece, without its pass manager; this puts a small marked module through the
path of the GPU. What the CPU build lacks (operators that one of vLLM's own passes names) is left out.
"""

from __future__ import annotations

import dataclasses
import json
import os

os.environ["VLLM_USE_AOT_COMPILE"] = "0"

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from draftfuse.lowering import hook
from draftfuse.lowering.ops.marker import marker


def cut(value: torch.Tensor) -> torch.Tensor:
    return value * 1


direct_register_custom_op("draftfuse_cut", cut, fake_impl=lambda value: torch.empty_like(value))


def make_config() -> VllmConfig:
    passes = {"post_grad_custom_post_pass": hook.post_grad_pass}
    compilation = CompilationConfig(
        mode=3, inductor_compile_config=passes, splitting_ops=["vllm::draftfuse_cut"], cudagraph_mode=CUDAGraphMode.NONE
    )
    config = VllmConfig(compilation_config=compilation)
    chosen = config.compilation_config  # the CPU platform has changed it
    chosen.mode, chosen.backend = CompilationMode.VLLM_COMPILE, "inductor"
    chosen.splitting_ops, chosen.compile_sizes = ["vllm::draftfuse_cut"], []
    for field in dataclasses.fields(chosen.pass_config):
        if isinstance(getattr(chosen.pass_config, field.name), bool):
            setattr(chosen.pass_config, field.name, False)
    return config


def main() -> None:
    FixFunctionalizationPass.__call__ = lambda self, graph: None
    calls: list[int] = []
    erase = hook.erase_markers

    def counted(graph: torch.fx.Graph) -> int:
        calls.append(erase(graph))
        return calls[-1]

    hook.erase_markers = counted
    config = make_config()
    with set_current_vllm_config(config):

        @support_torch_compile(dynamic_arg_dims={"value": 0})
        class Module(nn.Module):
            def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
                super().__init__()

            def forward(self, value: torch.Tensor) -> torch.Tensor:
                first = marker(value) * 2 + 1
                return torch.ops.vllm.draftfuse_cut(first).relu()

        module = Module(vllm_config=config)
        value = torch.arange(32.0).reshape(4, 8) - 9
        with set_forward_context(None, config), torch.inference_mode():
            result = module(value)
    right = torch.equal(result, (value * 2 + 1).relu())
    print("RESULT " + json.dumps({"calls": calls, "right": right}), flush=True)


if __name__ == "__main__":
    main()
