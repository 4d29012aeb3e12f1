"""Real processes that exchange tensors through gloo, each forked from one that has imported the libraries."""

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Case = TypeVar("Case")

IMPORTED_ONCE: Final = (
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "gemma2", "mixtral", "qwen3_moe")),
    *("torch._dynamo", "torch.distributed.optim", "torch.distributed.pipelining", "torch.distributed.checkpoint"),
    *("torch.distributed.tensor.parallel", "torch.distributed.tensor.experimental", "torch.distributed.fsdp"),
    *("tonnage.step.step", "tonnage.step.clipping", "tonnage.train.applying", "peft", "bitsandbytes", "pytest"),
    "deepspeed",
)
"""Of all test files: the process is started by the first that needs it; what is not installed is left out."""


def drop_like_others(cases: dict[str, Case], like_others: tuple[str, ...]) -> dict[str, Case]:
    """Return the cases without those that only the long tests run, since others ask nearly the same."""
    runs_long = bool(os.environ.get("TONNAGE_TEST_LONG"))
    return {name: case for name, case in cases.items() if runs_long or name not in like_others}


def run_ranks(main: Callable[..., None], world: int, *arguments: Any) -> None:
    """Run `main(rank, world, *arguments)` in a process for each rank; raises what one of them raised."""
    multiprocessing.set_forkserver_preload(list(IMPORTED_ONCE))
    with TemporaryDirectory() as folder:
        words = (main, world, str(Path(folder) / "group"), arguments)
        mp.start_processes(_start, words, nprocs=world, start_method="forkserver")


def _start(rank: int, main: Callable[..., None], world: int, group: str, arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # nobody need look for garbage in what was imported
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=world)
    main(rank, world, *arguments)
    dist.barrier()
    dist.destroy_process_group()
