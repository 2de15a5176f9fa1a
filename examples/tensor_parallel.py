"""The trained EAGLE head split over ranks: its all-reduces are part of each rank's one compiled loop (or CUDA graph).

    torchrun --nproc-per-node 2 examples/tensor_parallel.py        # NCCL with a GPU a rank, gloo on the CPU

The speculator is draftfuse/reference/parallel.py: plain PyTorch with functional collectives (``dist.all_reduce`` works
as well). All ranks call the same methods with the same batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import draftfuse
from draftfuse.reference import EagleSpeculator, Engine, Limits, Target
from draftfuse.reference.parallel import ParallelEagleSpeculator

PROMPT = "class Counter:\n    def __init__(self) -> None:\n        self."


def main() -> None:
    """Generate with the split head and with the whole one, and show that the drafts are the same."""
    dist.init_process_group()  # gloo for tensors of the CPU, NCCL for those of a GPU
    rank, cuda = dist.get_rank(), torch.cuda.device_count() >= dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    limits = Limits(num_speculative_tokens=4, max_num_reqs=1, max_model_len=256, max_num_tokens=128)
    target = Target.from_packaged(limits, device)
    split = draftfuse.compile(ParallelEagleSpeculator.split_packaged(limits, dist.group.WORLD, device), compiler="none")
    whole = draftfuse.compile(EagleSpeculator.from_packaged(limits, device), mode="eager")

    prompt = list(PROMPT.encode())  # a token is a byte
    ours, theirs = (Engine(target, each).generate([prompt], 32) for each in (split, whole))
    split.wait(timeout=60)
    if rank == 0:
        print(PROMPT + bytes(ours.tokens[0]).decode(errors="replace"))
        print("the whole head drafts the same:", all(map(torch.equal, ours.drafts, theirs.drafts)))
        print(split.explain())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
