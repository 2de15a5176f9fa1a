"""The trained EAGLE head split over ranks: its all-reduces are part of each rank's one compiled loop (or CUDA graph).

    torchrun --nproc-per-node 2 examples/tensor_parallel.py        # NCCL with a GPU a rank, gloo on the CPU

The speculator is draftfuse/reference/parallel.py: plain PyTorch with functional collectives (``dist.all_reduce`` works
as well). All ranks call the same methods with the same batch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import draftfuse
from draftfuse.reference import EagleSpeculator, Engine, Limits, Target
from draftfuse.reference.parallel import ParallelEagleSpeculator

PROMPT = "class Counter:\n    def __init__(self) -> None:\n        self."


LIMITS = Limits(num_speculative_tokens=4, max_num_reqs=1, max_model_len=256, max_num_tokens=128)


def make(device: torch.device | str = "cpu") -> ParallelEagleSpeculator:
    """This rank's part of the head; all of it where this process is alone, as under ``draftfuse lint``."""
    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp(prefix="draftfuse-")) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    return ParallelEagleSpeculator.split_packaged(LIMITS, dist.group.WORLD, device)


def main() -> None:
    """Generate with the split head and with the whole one, and show that the drafts are the same."""
    dist.init_process_group()  # gloo for tensors of the CPU, NCCL for those of a GPU
    rank, cuda = dist.get_rank(), torch.cuda.device_count() >= dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    target = Target.from_packaged(LIMITS, device)
    split = draftfuse.compile(make(device), compiler="none")
    whole = draftfuse.compile(EagleSpeculator.from_packaged(LIMITS, device), mode="eager")

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
