"""The recorder's predictions for the CPU against real CPU runs, byte for byte."""

import importlib
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DynamicOutputShapeException

import tonnage
from live_bytes import measured, predicted
from networks import TINY, one_thread, tiny, tiny_job  # noqa: F401
from real_ranks import drop_like_others, run_ranks
from tonnage.case import Case
from tonnage.catalog.devices import host_device
from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.estimates.timeline import timeline
from tonnage.job import Job
from tonnage.meta import recording
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.trace.gc_paused import gc_paused

_GROUPED = {key: TINY["llama"][key] for key in TINY["llama"] if key != "model_type"}

MORE: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral", **_GROUPED, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", **_GROUPED},
    "olmo2": {"model_type": "olmo2", **_GROUPED},
    "phi3": {"model_type": "phi3", **_GROUPED, "pad_token_id": 0},
    "gpt_neox": {
        "model_type": "gpt_neox",
        **{key: value for key, value in _GROUPED.items() if key != "num_key_value_heads"},
        "attention_dropout": 0.0,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
    },
}
READ_VALUES = ("idefics3", "qwen2_5_vl", "qwen3_vl")
"""Their vision towers read values that were computed, which do not exist under the recorder."""

ARCHITECTURES = (*(name for name in TINY if name not in READ_VALUES), *MORE)

PRECISIONS = ("fp32", "bf16-true", "bf16-mixed", "fp16-mixed")
CHECKPOINTING = ("none", "full", "every-2", "selective")
OPTIMIZERS = ("adamw", "sgd", "adamw-foreach", "adafactor", "muon", "adamw-fused", "adamw-loop")
METHODS = ("full", "lora") if importlib.util.find_spec("peft") else ("full",)


@pytest.fixture(autouse=True, scope="module")
def no_collector() -> Iterator[None]:
    if "lora" in METHODS:
        importlib.import_module("peft")  # what it allocates when it is imported is not the step's
    with gc_paused():  # garbage in cycles is found at moments that differ from run to run
        yield


def model(name: str) -> ModelRef:
    return tiny(name) if name in TINY else ModelRef(name=name, kind="config", config=MORE[name])


def covering() -> list[tuple[str, str, str, str, str]]:
    """Return one row for each architecture; options vary at different rates, so that neighbours differ in all of
    them.
    """
    optimizers = cycle(OPTIMIZERS)
    rows = []
    for index, name in enumerate(ARCHITECTURES):
        precision, checkpointing = PRECISIONS[index % 4], CHECKPOINTING[(index + index // 4) % 4]
        method = METHODS[(index // 2) % len(METHODS)]
        optimizer = next(optimizers)
        if method == "lora" and optimizer == "muon":  # adapters are all matrices: nothing would be left for AdamW
            optimizer = next(optimizers)
        rows.append((name, precision, checkpointing, optimizer, method))
    return rows


def marked() -> list[Any]:
    """Return the rows; every second one is marked `long`."""
    return [pytest.param(*row, marks=pytest.mark.long) if index % 2 else row for index, row in enumerate(covering())]


def test_the_rows_cover_every_value() -> None:
    assert len(covering()) >= 15
    for place, values in enumerate((ARCHITECTURES, PRECISIONS, CHECKPOINTING, OPTIMIZERS, METHODS)):
        assert {row[place] for row in covering()} == set(values)


@pytest.mark.parametrize(("name", "precision", "checkpointing", "optimizer", "method"), marked())
def test_live_bytes_are_those_of_a_real_run(
    name: str, precision: str, checkpointing: str, optimizer: str, method: str
) -> None:
    image = tiny_job(name).image_size if name in TINY else None
    job = Job(model=model(name), seq_len=24, micro_batch=2, method=method, image_size=image)
    plan = Plan(precision=precision, checkpointing=checkpointing, optimizer=optimizer)
    real, _ = measured(job, plan)
    assert [boundary for boundary, _ in real] == ["load", *["forward", "backward", "step"] * 2]
    assert predicted(job, plan)[0] == real


OTHERS = {
    "accumulation": (tiny_job(grad_accum=2), Plan()),
    "eager attention": (tiny_job("gpt2"), Plan(precision="fp32", attention="eager")),
    "math attention": (tiny_job(), Plan(precision="bf16-true", attention="math")),
    "chunked loss": (tiny_job(), Plan(precision="fp32", loss="chunked")),
    "norms of 16 bits with weights of 32": (tiny_job("bert"), Plan(precision="bf16-mixed")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_too(name: str) -> None:
    assert predicted(*OTHERS[name])[0] == measured(*OTHERS[name])[0]


ALL_SHARDED = {
    2: {
        "ddp": ("llama", Plan(precision="fp32", shard="ddp")),
        "zero1": ("llama", Plan(precision="fp32", shard="zero1")),
        "zero2": ("gpt2", Plan(precision="bf16-true", shard="zero2", optimizer="adamw-foreach")),
        "zero3": ("qwen3", Plan(precision="bf16-mixed", shard="zero3", checkpointing="full")),
    },
    4: {
        "ddp": ("gpt2", Plan(precision="bf16-mixed", shard="ddp")),
        "zero3": ("llama", Plan(precision="fp32", shard="zero3")),
    },
}


SHARDED = {world: drop_like_others(cases, ("ddp", "zero2")) for world, cases in ALL_SHARDED.items()}

ATTEMPTS = 12
"""To see every free of a first step: torch's profiler hears of the program's threads alone, and gloo's own may be the
last to let go of what was sent; what they let go of counts as there for the rest of the run."""

FIRST_STEP = 4
"""Boundaries up to its end."""

BESIDE_BYTES = 1024
"""Of the process group: what its barrier averaged, and a count or two."""


def rank_main(rank: int, world: int, folder: str) -> None:
    predictions = torch.load(Path(folder) / "predicted")
    found = {}
    with gc_paused():  # garbage in cycles is found at moments that differ from run to run
        for name, (network, plan) in SHARDED[world].items():
            ours = predictions[name, rank]
            found[name] = least = torch.full((len(ours),), 2**40)
            for _ in range(ATTEMPTS):
                real = measured(tiny_job(network), plan, world_size=world, rank=rank)[0]
                assert [boundary for boundary, _ in real] == [boundary for boundary, _ in ours]
                more = [of_real - of_ours for (_, of_real), (_, of_ours) in zip(real, ours, strict=True)]
                least.copy_(torch.minimum(least, torch.tensor(more)))
                of_all = least.clone()
                dist.all_reduce(of_all, dist.ReduceOp.MIN)
                if int(of_all[:FIRST_STEP].max()) <= BESIDE_BYTES:
                    break
    torch.save(found, Path(folder) / f"{rank}")


_RUNS: dict[int, list[dict[str, torch.Tensor]]] = {}


def in_processes(world: int) -> list[dict[str, torch.Tensor]]:
    """Return by rank and case how many bytes more were alive at each boundary of real processes (gloo) than
    predicted.
    """
    if world not in _RUNS:
        ours = {
            (name, rank): predicted(tiny_job(network), plan, world_size=world, rank=rank)[0]
            for name, (network, plan) in SHARDED[world].items()
            for rank in range(world)
        }
        with tempfile.TemporaryDirectory() as folder:
            torch.save(ours, Path(folder) / "predicted")
            run_ranks(rank_main, world, folder)
            _RUNS[world] = [torch.load(Path(folder) / f"{rank}") for rank in range(world)]
    return _RUNS[world]


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in SHARDED for name in SHARDED[world]])
def test_a_ranks_live_bytes_are_those_of_real_processes(world: int, name: str) -> None:
    """Never more than real on any rank, and in the first step equal on a rank that was seen to free everything.

    What gloo frees late is at most every weight as it was gathered, and every gradient in flight.
    """
    architecture, _ = SHARDED[world][name]
    most_held = sum(2 * 4 * parameter.numel() for parameter in network(tiny_job(architecture)).parameters())
    more = torch.stack([found[name] for found in in_processes(world)])
    assert len(more[0]) == 7
    assert int(more.min()) >= 0
    assert int(more[:, :FIRST_STEP].min(0).values.max()) <= BESIDE_BYTES, more.tolist()
    assert int(more.max()) <= most_held + BESIDE_BYTES, more.tolist()


def test_an_estimate_for_the_cpu() -> None:
    plan = {"precision": "fp32", "optimizer": "adamw", "checkpointing": "full"}
    job = tiny_job()
    run = recording.run(Case(job, Plan(**plan), Cluster(device=host_device(2**30))), steps=2)
    walked = timeline(run)
    assert (run.source, run.steps, run.outcome) == ("meta", 2, {"kind": "completed"})
    assert walked.peak_allocated_bytes == walked.peak_reserved_bytes == run.peaks["allocated_bytes"]
    held = walked.by_category()
    assert held["parameter"] == 4 * run.model["parameters"] + buffers(job)
    assert held["gradient"] <= 4 * run.model["parameters"]
    assert held["optimizer_state"] == 8 * run.model["parameters"] + 4 * tensors(job)


def network(job: Job) -> torch.nn.Module:
    from tonnage.step import model as models

    return models.build(job.model, dtype=torch.float32, attention=None, device=torch.device("meta"))


def buffers(job: Job) -> int:
    return sum(buffer.nbytes for buffer in network(job).buffers())


def tensors(job: Job) -> int:
    """AdamW counts its steps in a tensor of four bytes for each parameter."""
    return len(list(network(job).parameters()))


def test_what_does_not_fit_is_an_answer() -> None:
    estimate = tonnage.estimate(str(SMALL), gpu="cpu", gpu_memory=2**20, seq_len=24, micro_batch=32, precision="fp32")
    assert not estimate.fits
    assert estimate.oom is not None
    assert estimate.oom.phase in ("forward", "backward", "optimizer")
    assert estimate.peak.process_bytes <= 2**20
    assert "can't allocate memory" in estimate.oom.message


def test_the_machines_memory_is_the_capacity() -> None:
    import psutil

    estimate = tonnage.estimate(str(SMALL), gpu="cpu", seq_len=24, precision="fp32")
    assert estimate.fits
    assert (estimate.source, estimate.cluster["gpu"]) == ("meta", "cpu")
    assert estimate.cluster["capacity_bytes"] == psutil.virtual_memory().total
    assert [phase.name for phase in estimate.phases] == ["load", "forward", "backward", "other", "optimizer"]
    assert recording.NOT_SEEN in estimate.coverage.assumed


@pytest.fixture(autouse=True, scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> None:
    global SMALL
    SMALL = tmp_path_factory.mktemp("tiny") / "config.json"
    SMALL.write_text(json.dumps(TINY["llama"]))


def test_nothing_of_the_recording_stays() -> None:
    before = (torch.UntypedStorage.resize_, torch.get_rng_state, torch.autograd._engine_run_backward)
    predicted(tiny_job(), Plan(precision="fp32"))
    assert (torch.UntypedStorage.resize_, torch.get_rng_state, torch.autograd._engine_run_backward) == before
    assert type(torch.ones(1)) is torch.Tensor
    assert torch.ones(2).sum().item() == 2


def test_attention_backends_of_gpus_are_refused() -> None:
    with pytest.raises(UsageError, match="kernel of GPUs"):
        tonnage.estimate(str(SMALL), gpu="cpu", attention="flash")


def test_whole_numbers_that_are_known_decide_the_way() -> None:
    with recording.recording(torch.device("cpu"), 2**30) as (recorder, _watch):
        ids = torch.tensor([[3, 0, 3, 7]])
        ids[:, 1] = 3
        assert (ids == 3).sum().item() == 3
        assert (ids == 3).nonzero().shape == (3, 2)
        assert not recorder.read_values
        assert torch.rand(3).sum().item() == 0.0  # computed, so not known
        assert recorder.read_values


def test_shapes_that_depend_on_computed_values_are_refused() -> None:
    device = torch.device("cpu")
    with recording.recording(device, 2**30), pytest.raises(DynamicOutputShapeException):
        torch.rand(3).nonzero()


def test_sizes_and_lives_of_storages() -> None:
    """By hand: 40 bytes, a view of them, their resizing, and nothing at the end."""
    with recording.recording(torch.device("cpu"), 2**30) as (recorder, _watch):
        made = torch.zeros(10)
        view = made.view(5, 2)
        assert recorder.memory.live_bytes == 40
        del made
        assert recorder.memory.live_bytes == 40
        view.untyped_storage().resize_(0)
        assert recorder.memory.live_bytes == 0
        view.untyped_storage().resize_(80)
        assert recorder.memory.live_bytes == 80
        del view
        assert recorder.memory.live_bytes == 0
        assert recorder.memory.peak_allocated_bytes == 80
