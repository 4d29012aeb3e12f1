"""Checkpoints of several real processes (gloo), resumed by as many, by fewer and by more."""

import json
import multiprocessing
import random
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_leaves

import tonnage
from networks import one_thread  # noqa: F401
from real_ranks import IMPORTED_ONCE, drop_like_others, run_ranks
from real_text import batches, network, network_of_experts
from tonnage import Job, Plan
from tonnage.errors import UnwritableFile
from tonnage.train import checkpoints

BEFORE, STEPS, MICRO_BATCHES = 2, 4, 4
ALL_PLANS: dict[str, dict[str, Any]] = {
    **{shard: {"shard": shard} for shard in ("ddp", "zero1", "zero2", "zero3")},
    "muon": {"shard": "zero1", "optimizer": "muon"},
    "adafactor": {"shard": "zero1", "optimizer": "adafactor"},
    "in backward": {"shard": "zero3", "optimizer_in_backward": True},
    "fp16": {"shard": "zero3", "precision": "fp16-mixed", "clip_grad_norm": 1.0},
    "states": {"shard": "ddp", "optimizer_offload": "cpu=0.5"},
    "adapters": {"shard": "zero3"},
    "megatron": {"shard": "ddp", "precision": "megatron-bf16"},
    "megatron zero1": {"shard": "zero1", "precision": "megatron-bf16"},
    "parameters": {"shard": "zero3", "param_offload": "cpu"},
    "tp": {"tp": 2, "shard": "ddp"},
    "tp zero3": {"tp": 2, "shard": "zero3"},
    "experts": {"shard": "zero3", "ep": 2},
    "stages": {"pp": 2, "shard": "zero1"},
    **({"in 8 bits": {"shard": "zero3", "optimizer": "adamw-8bit-ao"}} if find_spec("torchao") else {}),
}


LIKE_OTHERS = ("zero2", "megatron", "adafactor", "tp", "states", "parameters")
PLANS = drop_like_others(ALL_PLANS, LIKE_OTHERS)


def started(name: str) -> Any:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    choices = {option: min(value, ranks) if value == 2 else value for option, value in PLANS[name].items()}
    plan = Plan(**{"precision": "fp32", "optimizer": "adamw", **choices})
    dtype = torch.bfloat16 if plan.precision == "megatron-bf16" else torch.float32
    model = (
        network_of_experts()
        if name == "experts"
        else network(
            dtype,
            **({"hidden_size": 128} if name == "in 8 bits" else {}),  # large enough to be quantized
        )
    )
    torch.manual_seed(3)
    each = 1 if plan.optimizer_in_backward else MICRO_BATCHES * plan.tp * plan.pp // ranks
    job = Job(method="lora" if name == "adapters" else "full", lora_rank=4, grad_accum=each)
    return tonnage.apply(plan, model, {"lr": 1e-3}, job=job)


def losses(trainable: Any, steps: range) -> list[float]:
    world = trainable.ready.step.world
    plan = trainable.ready.step.plan
    replicas = world.size // (plan.tp * plan.pp)
    each = MICRO_BATCHES // replicas
    mine = [step[world.rank // plan.tp % replicas * each :][:each] for step in batches(STEPS, MICRO_BATCHES)]
    if trainable.ready.step.plan.optimizer_in_backward:
        mine = [[{key: torch.cat([batch[key] for batch in step]) for key in step[0]}] for step in mine]
    return [trainable.step(mine[index]).loss for index in steps]


def content(folder: Path) -> dict[str, torch.Tensor]:
    """Return everything that a checkpoint holds but random states, whole."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in stored.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return {key: tensor for key, tensor in found.items() if not key.startswith("random.")}


DIVIDED = ("zero1", "zero3", "muon", "megatron zero1", "tp zero3", "experts", "stages")
"""Plans that other numbers of ranks divide otherwise, one of each kind."""


def possible(world: int, saved_by: int | None = None) -> list[str]:
    """Return the plans that so many ranks train, or resume from what others saved."""
    return [*(PLANS if saved_by in (None, world) else DIVIDED)]


def save_main(rank: int, world: int, folder: str) -> None:
    torch.compiler.set_stance("force_eager")  # torchao compiles its update, for a minute
    expected = {}
    for name in possible(world):
        trainable = started(name)
        losses(trainable, range(BEFORE))
        trainable.save(Path(folder) / f"{name}-{world}", {"step": BEFORE})
        expected[name] = losses(trainable, range(BEFORE, STEPS))
    if rank == 1:  # the disk of one rank alone is full
        torch.save = full_disk
    try:
        started("zero3").save(Path(folder) / f"full-{world}")
    except UnwritableFile as error:
        expected["full"] = [str(error).partition(": ")[2]]
    finish(rank, folder, f"saved-{world}", expected)


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def resume_main(rank: int, world: int, folder: str, saved_by: int) -> None:
    torch.compiler.set_stance("force_eager")
    found = {}
    for name in possible(world, saved_by):
        trainable = started(name)
        assert trainable.resume(Path(folder) / f"{name}-{saved_by}") == {"step": BEFORE}
        trainable.save(Path(folder) / f"{name}-{saved_by}-{world}")
        found[name] = losses(trainable, range(BEFORE, STEPS))
    finish(rank, folder, f"resumed-{saved_by}-{world}", found)


def finish(rank: int, folder: str, name: str, found: dict[str, Any]) -> None:
    Path(folder, f"{name}-{rank}").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that starts ranks once and returns what each of them found."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @cache
    def start(world: int, saved_by: int | None = None) -> list[dict[str, Any]]:
        main, arguments = (save_main, ()) if saved_by is None else (resume_main, (saved_by,))
        name = f"saved-{world}" if saved_by is None else f"resumed-{saved_by}-{world}"
        run_ranks(main, world, str(folder), *arguments)
        return [json.loads((folder / f"{name}-{rank}").read_text()) for rank in range(world)]

    start.folder = folder  # type: ignore[attr-defined]
    return start


MOVES = [
    (saved_by, world, name)
    for saved_by, world in ((2, 2), (2, 1), (2, 4), (1, 2))
    for name in possible(world, saved_by)
]


@pytest.mark.parametrize(("saved_by", "world", "name"), MOVES)
def test_any_number_of_ranks_goes_on(saved_by: int, world: int, name: str, run: Any) -> None:
    expected = run(saved_by)[0][name]
    found = [of_rank[name] for of_rank in run(world, saved_by)]
    assert all(of_rank == found[0] for of_rank in found)
    # a weight in bf16 may round to its neighbour, and fp16 shards sum otherwise; fp32 shows the order of sums alone
    tolerance = {"megatron": 2e-3, "megatron zero1": 2e-3, "fp16": 1e-4}.get(name, 1e-6)
    assert found[0] == (expected if world == saved_by else pytest.approx(expected, rel=tolerance))


@pytest.mark.parametrize(("saved_by", "world", "name"), MOVES)
def test_what_other_ranks_save_again_is_the_same(saved_by: int, world: int, name: str, run: Any) -> None:
    run(saved_by)
    run(world, saved_by)
    folder = run.folder
    before, after = content(folder / f"{name}-{saved_by}"), content(folder / f"{name}-{saved_by}-{world}")
    assert before.keys() == after.keys()
    assert any(key.startswith("states.") for key in before)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_every_rank_learns_that_one_could_not_write(run: Any) -> None:
    assert [of_rank["full"] for of_rank in run(2)] == [["No space left on device."]] * 2


def killed_main(folder: str) -> None:
    torch.set_num_threads(1)
    checkpoints.remove_partial(Path(folder))
    trainable, every = tonnage.apply(Plan(precision="fp32"), network(), {"lr": 1e-3}), batches(MANY)
    newest = checkpoints.last_whole(Path(folder), on_skipped=Path(folder, "skipped").write_text)
    done = trainable.resume(newest)["step"] if newest else 0
    for step in range(done, MANY):
        loss = trainable.step(every[step]).loss
        trainable.save(Path(folder) / f"step-{step + 1}", {"step": step + 1, "loss": loss})
        checkpoints.keep(Path(folder), last=2)


MANY, KILLS = 30, 6


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED_ONCE, __name__])
    delays = random.Random(5)

    def go_on(folder: Path) -> Any:
        folder.mkdir(exist_ok=True)
        process = context.Process(target=killed_main, args=(str(folder),))
        process.start()
        return process

    whole = go_on(tmp_path / "whole")
    whole.join()
    for _ in range(KILLS):
        process = go_on(tmp_path / "killed")
        before = checkpoints.list_checkpoints(tmp_path / "killed")
        while process.is_alive() and checkpoints.list_checkpoints(tmp_path / "killed") == before:
            time.sleep(0.001)
        time.sleep(delays.uniform(0, 0.1))
        process.kill()
        process.join()
    last = go_on(tmp_path / "killed")
    last.join()
    assert last.exitcode == whole.exitcode == 0
    assert not (tmp_path / "killed" / "skipped").exists()
    ends = []
    for name in ("whole", "killed"):
        trainable = tonnage.apply(Plan(precision="fp32"), network(), {"lr": 1e-3})
        extra = trainable.resume(tmp_path / name / f"step-{MANY}")
        ends.append((extra, trainable.ready.optimizer.state_dict(), trainable.model.state_dict()))
    assert ends[0][0] == ends[1][0]
    leaves = [[leaf for leaf in tree_leaves(end) if isinstance(leaf, torch.Tensor)] for end in ends]
    assert all(torch.equal(one, other) for one, other in zip(*leaves, strict=True))
