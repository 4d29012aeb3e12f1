"""Training that stops and goes on, on one process: bit for bit, whatever the plan, and after whatever happens."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

import tonnage
from networks import one_thread  # noqa: F401
from real_text import batches, network
from tonnage import Job, Plan
from tonnage.errors import UnreadableFile, UnwritableFile, UsageError
from tonnage.train import checkpoints
from tonnage.train.trainable import Trainable

BEFORE, STEPS = 2, 5

PLANS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "fp16-mixed": {"precision": "fp16-mixed", "clip_grad_norm": 0.5},
    **{name: {"optimizer": name} for name in ("adamw-fused", "adamw-loop", "sgd", "sgd-plain", "adafactor", "muon")},
    "optimizer in backward": {"optimizer_in_backward": True},
    "optimizer in backward, clipped": {"optimizer_in_backward": True, "clip_grad_norm": 0.5},
    **{f"states {place}": {"optimizer_offload": place} for place in ("cpu", "cpu=0.5", "nvme", "nvme=0.5")},
    "muon, states cpu": {"optimizer": "muon", "optimizer_offload": "cpu"},
    "megatron": {"precision": "megatron-bf16"},
    **{f"shard {name}": {"shard": name} for name in ("ddp", "zero1", "zero2", "zero3")},
    "parameters cpu": {"shard": "zero3", "param_offload": "cpu"},
}


@pytest.fixture(autouse=True)
def alone() -> Any:
    """Give plans that shard a group of one process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def started(choices: dict[str, Any], method: str = "full") -> Trainable:
    plan = Plan(**{"precision": "fp32", **choices})
    if plan.shard != "none" and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dtype = torch.bfloat16 if plan.precision == "megatron-bf16" else torch.float32
    dropout = {} if method == "full" else {"attention_dropout": 0.1}
    model = network(dtype, **dropout)
    torch.manual_seed(7)
    return tonnage.apply(plan, model, {"lr": 0.01}, job=Job(method=method, lora_rank=4))


def losses(trainable: Trainable, steps: range) -> list[float]:
    every = batches(STEPS)
    return [trainable.step(every[index]).loss for index in steps]


def schedulers(trainable: Trainable) -> list[Any]:
    return [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in trainable.optimizers]


@pytest.mark.parametrize("name", PLANS)
def test_resumed_training_equals_training_without_a_stop(name: str, tmp_path: Path) -> None:
    whole = started(PLANS[name])
    losses(whole, range(BEFORE))
    whole.save(tmp_path / "step-2", {"seen": 2})
    expected = losses(whole, range(BEFORE, STEPS))
    resumed = started(PLANS[name])
    losses(resumed, range(1))  # states of other values, which are to be overwritten
    assert resumed.resume(tmp_path / "step-2") == {"seen": 2}
    assert losses(resumed, range(BEFORE, STEPS)) == expected
    ours, theirs = resumed.unapply().state_dict(), whole.unapply().state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_adapters_and_random_states_are_resumed(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    whole = started({}, "lora")
    losses(whole, range(BEFORE))
    whole.save(tmp_path / "saved")
    stored = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert all("lora_" in name for name in stored if name.startswith("weights."))
    expected = losses(whole, range(BEFORE, STEPS))
    resumed = started({}, "lora")
    resumed.resume(tmp_path / "saved")
    assert losses(resumed, range(BEFORE, STEPS)) == expected


def test_learning_rates_are_resumed(tmp_path: Path) -> None:
    whole = started({"optimizer_offload": "cpu=0.5"})
    for optimizer in whole.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.005
    losses(whole, range(BEFORE))
    whole.save(tmp_path / "saved")
    resumed = started({"optimizer_offload": "cpu=0.5"})
    resumed.resume(tmp_path / "saved")
    assert resumed.step(batches(STEPS)[BEFORE]).learning_rate == 0.005
    assert all(group["lr"] == 0.005 for part in resumed.optimizers[0].parts.values() for group in part.param_groups)


def test_another_plan_is_refused_with_what_differs(tmp_path: Path) -> None:
    started({}).save(tmp_path / "saved")
    with pytest.raises(UsageError, match=r"saved with checkpointing none, and this plan has full"):
        started({"checkpointing": "full"}).resume(tmp_path / "saved")
    with pytest.raises(UsageError, match=r"exists; save into a new folder"):
        started({}).save(tmp_path / "saved")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "step-2"
    trainable = started({})
    losses(trainable, range(BEFORE))
    trainable.save(folder)
    return folder


def damaged(saved: Path, folder: Path, change: Any) -> Path:
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    change(folder)
    return folder


def shards_of(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def cut(folder: Path) -> None:
    content = shards_of(folder).read_bytes()
    shards_of(folder).write_bytes(content[: len(content) // 2])


def flip(folder: Path) -> None:
    content = bytearray(shards_of(folder).read_bytes())
    content[len(content) // 2] ^= 1
    shards_of(folder).write_bytes(content)


def execute(folder: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return Path.touch, (folder / "executed",)

    content = pickle.dumps(Harmful())
    (folder / ".metadata").write_bytes(content)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    del manifest["files"][".metadata"]
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


DAMAGES: dict[str, tuple[Any, str]] = {
    "half a file": (cut, r"bytes, and .* were written"),
    "another bit": (flip, "is not as it was written"),
    "a file is gone": (lambda folder: shards_of(folder).unlink(), "No such file"),
    "no manifest": (lambda folder: (folder / "checkpoint.json").unlink(), "no checkpoint, or was not finished"),
    "no json": (lambda folder: (folder / "checkpoint.json").write_text("{"), "cannot be read"),
    "other json": (lambda folder: (folder / "checkpoint.json").write_text("[1]"), "schema version"),
    "fields gone": (
        lambda folder: (folder / "checkpoint.json").write_text('{"schema_version": 1}'),
        "lacks files, or it is of another kind",
    ),
    "a program": (execute, "which was not executed"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_said_in_one_line(name: str, saved: Path, tmp_path: Path) -> None:
    change, message = DAMAGES[name]
    folder = damaged(saved, tmp_path / "step-3", change)
    with pytest.raises(UnreadableFile, match=message) as raised:
        started({}).resume(folder)
    assert "\n" not in str(raised.value)
    assert not (folder / "executed").exists()


def test_the_newest_whole_checkpoint_is_found(saved: Path, tmp_path: Path) -> None:
    damaged(saved, tmp_path / "step-2", lambda folder: None)
    damaged(saved, tmp_path / "step-10", cut)
    skipped: list[str] = []
    assert checkpoints.last_whole(tmp_path, skipped.append) == tmp_path / "step-2"
    assert len(skipped) == 1


def test_the_last_ones_and_the_best_are_kept(saved: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        damaged(saved, tmp_path / f"step-{step}", lambda folder: None)
    checkpoints.keep(tmp_path, last=2, best=tmp_path / "step-1")
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["step-1", "step-3", "step-10"]
    checkpoints.keep(tmp_path, last=0)
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["step-10"]


def test_the_only_whole_one_is_kept(saved: Path, tmp_path: Path) -> None:
    for step, change in ((1, shards_gone), (2, lambda folder: None), (3, cut), (4, shards_gone)):
        damaged(saved, tmp_path / f"step-{step}", change)
    checkpoints.keep(tmp_path, last=1)
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["step-2", "step-3", "step-4"]


def shards_gone(folder: Path) -> None:
    shards_of(folder).unlink()


def test_states_from_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    trainable = started({})
    trainable.save(tmp_path / "start")
    expected = losses(trainable, range(STEPS))
    trainable.resume(tmp_path / "start")
    assert losses(trainable, range(STEPS)) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 2}, r"here is no weights\.model\.layers\.2"),
        ({"num_hidden_layers": 4}, r"it lacks weights\.model\.layers\.3"),
        ({"intermediate_size": 64}, r"it has \(48, 32\) and not \(64, 32\) as the size of weights"),
    ],
)
def test_another_network_is_refused(fields: dict[str, int], message: str, saved: Path) -> None:
    other = tonnage.apply(Plan(precision="fp32"), network(**fields), {"lr": 0.01})
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(UsageError, match=message):
        other.resume(saved)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.model.state_dict().items())


def grouped(first: int) -> Trainable:
    """Return a network with other hyperparameters for its first parameters, whose learning rates are tensors."""

    def new(parameters: list[Any]) -> torch.optim.Optimizer:
        parts = parameters[:first], parameters[first:]
        return torch.optim.AdamW([{"params": part, "lr": torch.tensor(0.01)} for part in parts])

    return tonnage.apply(Plan(precision="fp32"), network(), new)


def test_groups_are_recognised_by_their_parameters(tmp_path: Path) -> None:
    whole = grouped(3)
    whole.optimizers[0].param_groups[0]["lr"].fill_(0.5)
    whole.save(tmp_path / "saved")
    same = grouped(3)
    same.resume(tmp_path / "saved")
    assert [float(group["lr"]) for group in same.optimizers[0].param_groups] == [0.5, pytest.approx(0.01)]
    with pytest.raises(UsageError, match="in groups with different hyperparameters"):
        grouped(5).resume(tmp_path / "saved")


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"a": {1}}, r"extra\['a'\] is a set"), ({"a": [{2: 3}]}, r"extra\['a'\]\[0\] has the key 2")],
)
def test_only_what_comes_back_is_saved(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        started({}).save(tmp_path / "saved", extra)
    assert list(tmp_path.iterdir()) == []


def test_a_job_may_differ_where_no_step_depends_on_it(tmp_path: Path) -> None:
    def of(**choices: Any) -> Trainable:
        return tonnage.apply(Plan(precision="fp32"), network(), {"lr": 0.01}, job=Job(**choices))

    of(seq_len=64).save(tmp_path / "saved")
    of(seq_len=64, grad_accum=2, eval_batch=4, save_checkpoint="full").resume(tmp_path / "saved")
    with pytest.raises(UsageError, match="saved with seq-len 64, and this job has 32"):
        of(seq_len=32).resume(tmp_path / "saved")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory.")])
def test_an_interrupted_save_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(type(error)):
        started({}).save(tmp_path / "step-2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [(os, "fsync"), (json, "dump"), (Path, "rename")])
def test_a_disk_that_is_full_at_the_end_leaves_nothing(
    place: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainable = started({})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*place, full)
    with pytest.raises(UnwritableFile, match="step-2 cannot be written: No space left on device"):
        trainable.save(tmp_path / "step-2")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnwritableFile, match="step-1 cannot be written: Not a directory"):
        started({}).save(tmp_path / "file" / "step-1")


@pytest.mark.parametrize("name", ["adamw-8bit", "lion", "paged-adamw"])
def test_states_of_bitsandbytes_are_resumed(name: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")

    def new() -> Trainable:
        model = network(hidden_size=128)  # large enough for states of 8 bits
        return tonnage.apply(Plan(precision="fp32", optimizer=name), model, {"lr": 0.01})

    whole = new()
    losses(whole, range(BEFORE))
    whole.save(tmp_path / "saved")
    expected = losses(whole, range(BEFORE, STEPS))
    resumed = new()
    resumed.resume(tmp_path / "saved")
    assert losses(resumed, range(BEFORE, STEPS)) == expected


@pytest.mark.parametrize("name", ["adamw-8bit-ao", "adamw-4bit"])
@torch.compiler.set_stance("force_eager")  # else its update is compiled, for a minute
def test_states_of_torchao_are_resumed(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")

    def new() -> Trainable:
        model = network(hidden_size=128)  # large enough for states of 8 bits
        return tonnage.apply(Plan(precision="fp32", optimizer=name), model, {"lr": 0.01})

    whole = new()
    losses(whole, range(BEFORE))
    kinds = {type(state["exp_avg"]).__name__ for state in whole.optimizers[0].state.values()}
    assert len(kinds) == 2, kinds  # small parameters have plain ones
    whole.save(tmp_path / "saved")
    expected = losses(whole, range(BEFORE, STEPS))
    resumed = new()
    resumed.resume(tmp_path / "saved")
    assert losses(resumed, range(BEFORE, STEPS)) == expected


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = started({})
    losses(trainable, range(BEFORE))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(UnwritableFile, match="step-2 cannot be written: No space left on device"):
            trainable.save(tmp_path / "step-2")
        with pytest.raises(UnwritableFile, match="thread-2 cannot be written: No space left on device"):
            trainable.save(tmp_path / "thread-2")
    assert list(tmp_path.iterdir()) == []
    trainable.save(tmp_path / "step-2")
    checkpoints.check_whole(tmp_path / "step-2", checkpoints.read_manifest(tmp_path / "step-2"))
