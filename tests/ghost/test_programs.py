"""Real programs on the ghost: ordinary scripts that know nothing of tonnage, and what the report says of them."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tonnage.errors import TrialFailed
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.timeline import timeline
from tonnage.report import wording
from tonnage.trace.trace import Trace
from tonnage.units import format_size

pytestmark = pytest.mark.ghost

BIN = Path(sys.executable).parent
TORCHRUN = (str(BIN / "torchrun"), "--nproc-per-node")
NOT_FILLED = "host tensors were not filled with random numbers"


def consistent(answer: Any) -> tuple[Estimate, Trace]:
    """The Estimate and its Trace, which agree with each other, with torch's counters and with the program's word."""
    assert answer.error is None, f"{answer.error}\n{answer.output[-2000:]}"
    estimate, trace = answer.run.estimate, answer.run.traces[0]
    walked = timeline(trace)
    assert walked.peak_allocated_bytes == trace.peaks["allocated_bytes"] == estimate.peak.allocated_bytes > 0
    assert walked.peak_reserved_bytes == trace.peaks["reserved_bytes"] == estimate.peak.reserved_bytes
    assert sum(estimate.peak.by_category.values()) == estimate.peak.process_bytes
    assert sum(walked.by_category().values()) == walked.peak_allocated_bytes
    assert max(phase.allocated_bytes for phase in estimate.phases) == estimate.peak.allocated_bytes
    assert trace.unknown_calls == {}
    mine = [said for said in answer.printed if said.get("rank", trace.rank) == trace.rank]
    if mine and "allocated" in mine[-1]:
        assert (mine[-1]["allocated"], mine[-1]["reserved"]) == (
            walked.peak_allocated_bytes,
            walked.peak_reserved_bytes,
        )
    return estimate, trace


def phases(estimate: Estimate) -> set[str]:
    return {phase.name for phase in estimate.phases}


FAMILIES = {
    "llama": ("--precision", "bf16-true"),
    "qwen3": ("--accumulate", "2"),
    "qwen3_moe": (),
    "mixtral": ("--checkpointing",),
    "gpt2": ("--precision", "fp32"),
    "bert": ("--checkpointing",),
    "t5": ("--checkpointing", "--accumulate", "2"),
    "vit": ("--precision", "bf16-true"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_loop(dry_run: Any, family: str) -> None:
    answer = dry_run("families.py", family, *FAMILIES[family])
    estimate, trace = consistent(answer)
    assert (trace.steps, estimate.fits, trace.outcome["kind"]) == (3, True, "completed")
    assert phases(estimate) == {"load", "forward", "backward", "optimizer", "other"}
    parameters = answer.printed[-1]["parameters"]
    assert estimate.model["parameters"] == estimate.model["trainable_parameters"] == parameters
    width = 2 if "bf16-true" in FAMILIES[family] else 4
    held = timeline(trace).by_category()
    # Blocks of 512 bytes hold small parameters; buffers (rotary tables, position ids) count as parameters.
    assert parameters * width <= held["parameter"] <= parameters * width * 1.15 + 20_000
    states = {life.address: life.size_bytes for life in timeline(trace).lives if life.category == "optimizer_state"}
    assert 2 * parameters * width <= sum(states.values()) <= 2 * parameters * width * 1.15 + 20_000
    assert answer.printed[-1]["loss"] > 0, "what a kernel was to compute reads as a plausible loss"


def test_the_scaler_of_fp16_finds_no_overflow_and_steps(dry_run: Any) -> None:
    estimate, trace = consistent(dry_run("families.py", "llama", "--precision", "fp16-mixed"))
    assert trace.steps == 3
    assert "optimizer" in phases(estimate)
    assert any(life.category == "optimizer_state" for life in timeline(trace).lives)


def test_a_loop_ends_after_the_steps_that_were_asked_for(dry_run: Any) -> None:
    answer = dry_run("families.py", "llama", "--steps", "100000", steps=2)
    _, trace = consistent(answer)
    assert trace.steps == 2
    assert len(answer.printed) == 1, "its loop was ended, and what comes after it is run"


def test_the_trainer_with_adapters_checkpointing_and_accumulation(dry_run: Any, whole_session: Path) -> None:
    answer = dry_run("trainer.py", str(whole_session / "trainer"), "--lora", "--checkpointing", "--accumulate", "2")
    estimate, trace = consistent(answer)
    assert trace.steps == answer.printed[-1]["steps"] == 3
    assert estimate.model["trainable_parameters"] == 8192  # rank 4 on the seven projections of two layers
    assert "peft" in estimate.versions
    assert "accelerate" in estimate.versions
    assert estimate.host.pinned_bytes > 0, "the loader pins its batches"
    assert any(mark.phase == "recompute" for mark in trace.marks)


def test_the_trainer_with_data_loader_workers(dry_run: Any, tmp_path_factory: Any) -> None:
    answer = dry_run("trainer.py", str(tmp_path_factory.mktemp("trainer")), "--workers", "2")
    _, trace = consistent(answer)
    assert trace.steps == 3
    estimate = answer.run.estimate
    assert estimate.host.pinned_bytes > 0
    held = estimate.ranks[0]["host"]
    assert 0 < held["workers"] == estimate.host.by_category["workers"] < held["process"]


def test_accelerate_launch(dry_run: Any) -> None:
    launcher = (str(BIN / "accelerate"), "launch", "--num_processes", "1", "--mixed_precision", "bf16")
    launcher = (*launcher, "--num_machines", "1", "--dynamo_backend", "no")
    answer = dry_run("accelerated.py", launcher=launcher, steps=4)
    _, trace = consistent(answer)
    assert trace.steps == 4
    assert [said["processes"] for said in answer.printed] == [1], "what comes after its loop is run"


def test_one_rank_of_accelerate_launch_keeps_the_launchers_settings(dry_run: Any) -> None:
    """FSDP is asked for by options of the launcher, which is not run."""
    launcher = (str(BIN / "accelerate"), "launch", "--num_processes", "8", "--use_fsdp", "--fsdp_version", "2")
    answer = dry_run("accelerated.py", launcher=launcher, gpu="8xa100-40gb", rank=5, steps=2)
    estimate, trace = consistent(answer)
    assert (estimate.rank, trace.world_size) == (5, 8)
    assert {activity.name for activity in trace.activities("collective")} >= {"AllGather", "ReduceScatter"}


GLOBAL_HOOKS = "Using `torch.compile(module)` when there are global hooks on modules"


def test_a_programs_own_hooks_are_warned_of(dry_run: Any) -> None:
    assert GLOBAL_HOOKS in dry_run("compiled.py", "hooked").output


@pytest.mark.parametrize(("kind", "how"), [("qwen2_5_vl", "in-place"), ("gemma3", "whole")])
def test_a_compiled_model_of_pictures_and_words(dry_run: Any, kind: str, how: str) -> None:
    """Sizes of images are asked for between graphs that computed them; a mask's elements inside of one."""
    answer = dry_run("pictures.py", kind, how)
    assert answer.error is None, f"{answer.error}\n{answer.output[-2000:]}"
    (trace,) = answer.run.traces
    assert trace.steps == 3
    assert timeline(trace).by_category()["parameter"] >= 4 * answer.run.estimate.model["parameters"] > 0
    assert "forward" in {mark.phase for mark in trace.marks}
    assert "does not know how to trace" not in answer.output, "a warning of the ghost's own code"
    assert not any("selects every element" in text for text in answer.run.estimate.coverage.assumed)


def test_torch_compile(dry_run: Any, tmp_path_factory: Any) -> None:
    own = tmp_path_factory.mktemp("inductor")
    variables = (
        ("TORCHINDUCTOR_CACHE_DIR", str(own)),
        ("TRITON_CACHE_DIR", str(own)),
        ("TORCHINDUCTOR_COMPILE_THREADS", "1"),
    )
    answer = dry_run("compiled.py", variables=variables)
    estimate, trace = consistent(answer)
    assert GLOBAL_HOOKS not in answer.output, "of the ghost's hooks nobody is warned"
    assert list(own.iterdir()) == [], "a real run would take what was chosen by times that nobody took"
    assert trace.steps == 3
    assert any(activity.name.startswith("triton_") for activity in trace.activities()), "its own kernels run"
    held = timeline(trace).by_category()
    assert held["parameter"] >= 2 * estimate.model["parameters"]


def test_a_real_run_finds_no_kernel_that_a_ghost_compiled(dry_run: Any, tmp_path_factory: Any) -> None:
    own = tmp_path_factory.mktemp("kernels")
    _, trace = consistent(dry_run("unusual.py", "multiplies", variables=(("PYTORCH_KERNEL_CACHE_PATH", str(own)),)))
    assert any("prod" in activity.name for activity in trace.activities())
    assert trace.unknown_calls == {}
    assert list(own.iterdir()) == []


def test_gradients_of_each_example_by_torch_func(dry_run: Any) -> None:
    estimate, trace = consistent(dry_run("transforms.py"))
    assert estimate.model["parameters"] == 512 * 1024 + 1024 + 1024 * 10 + 10
    weight = 64 * 512 * 1024 * 4
    assert any(event.size_bytes == weight for event in trace.events()), "a weight's gradients of 64 examples"


def test_cuda_graphs(dry_run: Any) -> None:
    _, trace = consistent(dry_run("graphs.py", steps=10))
    assert sum(activity.kind == "graph_launch" for activity in trace.activities()) >= 6


def test_a_capture_comes_after_its_warm_ups(dry_run: Any) -> None:
    """Three steps on a stream of their own, as torch's guide warms up, are not all that the program needs."""
    estimate, trace = consistent(dry_run("graphs.py"))
    assert trace.outcome["kind"] == "completed"
    (first, _) = (note for note in estimate.notes if note.startswith("Loop "))
    assert "7 optimizer steps" in first, "three warm-ups, the captured one, three replays"
    assert sum(activity.kind == "graph_launch" for activity in trace.activities()) >= 3
    reserved = {step.step: step.reserved_bytes for step in estimate.steps}
    assert reserved[4] > max(reserved[step] for step in (1, 2, 3)), "what is captured has memory of its own"


@pytest.mark.parametrize("how", ["by-hand", "in-backward"])
def test_a_program_without_an_optimizers_steps_comes_to_an_end(dry_run: Any, how: str) -> None:
    estimate, trace = consistent(dry_run("by_hand.py", how))
    assert (trace.steps, trace.outcome["kind"]) == (0, "completed")
    assert "no optimizer makes steps here: 96 backward passes count as steps" in estimate.coverage.assumed
    weights = 4 * (256 * 512 + 512 + 512 * 256 + 256)
    assert estimate.peak.by_category["parameter"] == weights


def test_pinned_memory_is_counted(dry_run: Any) -> None:
    answer = dry_run("pinned.py")
    estimate, _ = consistent(answer)
    assert answer.printed[-1]["pinned"] == [True, True, True]
    batch = 16 * 1024 * 4
    assert (
        answer.printed[-1]["staging"] + batch
        <= estimate.host.pinned_bytes
        <= answer.printed[-1]["staging"] + 4 * batch
    )


def test_what_a_program_asks_about_the_card(dry_run: Any) -> None:
    answer = dry_run("queries.py", gpu="2xa100-40gb")
    consistent(answer)
    said = answer.printed[-1]
    assert (said["devices"], said["nvml_devices"]) == (2, 2)
    assert said["name"] == said["nvml_name"] == "NVIDIA A100-SXM4-40GB"
    assert (said["capability"], said["sms"]) == ([8, 0], 108)
    assert said["total"] == said["mem_get_info_total"] <= said["nvml_total"]
    assert said["taken"] == said["kept"]
    table, listed, queried, known, processes = said["smi"]
    assert (len(table), listed[1][:36]) == (3, "GPU 1: NVIDIA A100-SXM4-40GB (UUID: ")
    assert (known, processes) == ([f"{said['nvml_uuid']}, {said['nvml_driver']}"], ["pid, used_memory"])
    assert f"  {(said['total'] - said['mem_get_info_free']) >> 20}MiB / {said['nvml_total'] >> 20}MiB " in table[1]
    assert queried == [f"NVIDIA A100-SXM4-40GB, {said['nvml_total'] >> 20} MiB, [N/A]"]
    assert said["reserved"] < said["nvml_used"] < said["nvml_total"]


# -- ranks


@pytest.mark.parametrize(
    ("kind", "gpu", "rank"),
    [
        ("ddp", "2xa100-40gb", 1),
        ("ddp", "8x8xa100-40gb", 13),
        ("fsdp", "8xa100-40gb", 3),
        ("fsdp", "128x8xa100-40gb", 1000),
        ("hsdp", "8x8xa100-40gb", 63),
        ("tensor", "2xa100-40gb", 1),
        ("both", "8xa100-40gb", 5),
    ],
)
def test_one_rank_alone(dry_run: Any, kind: str, gpu: str, rank: int) -> None:
    answer = dry_run("parallel.py", kind, gpu=gpu, rank=rank)
    estimate, trace = consistent(answer)
    said = answer.printed[-1]
    assert (said["rank"], said["size"]) == (rank, trace.world_size) == (trace.rank, trace.world_size)
    assert estimate.rank == rank
    assert trace.steps == 3
    assert estimate.model["parameters"] == said["parameters"] == 2 * 8 * 512 * 512 + 2 * 512 * 512
    collectives = [activity for activity in trace.activities() if activity.kind == "collective"]
    assert {activity.name for activity in collectives} >= {
        "ddp": {"AllReduce"},
        "fsdp": {"AllGather", "ReduceScatter"},
        "hsdp": {"AllGather", "ReduceScatter", "AllReduce"},
        "tensor": {"AllReduce"},
        "both": {"AllGather", "ReduceScatter", "AllReduce"},
    }[kind]
    sizes = {activity.grid[0] for activity in collectives}
    assert sizes == {2, 4} if kind == "both" else sizes <= {2, 8, 64, 1024}


NETWORK = 2 * 8 * 512 * 512 + 2 * 512 * 512
"""Parameters of the network in parallel.py."""


def test_flat_parameters_are_counted_whole(dry_run: Any) -> None:
    """FSDP's first version shows each rank its part of one flat tensor."""
    estimate, trace = consistent(dry_run("parallel.py", "fsdp1", gpu="8xa100-40gb", rank=3))
    assert estimate.model["parameters"] == estimate.model["trainable_parameters"] == NETWORK
    states = [life for life in timeline(trace).lives if life.category == "optimizer_state" and life.size_bytes > 512]
    assert sum({life.address: life.size_bytes for life in states}.values()) == 2 * 4 * NETWORK / 8


def test_whole_gradients_wait_for_the_last_micro_batch(dry_run: Any) -> None:
    """Without communication FSDP2 keeps a rank's gradients whole, in the dtype in which it will reduce them."""
    _, trace = consistent(dry_run("parallel.py", "accumulating", gpu="8xa100-40gb", rank=3))
    lives = [life for life in timeline(trace).lives if life.category == "gradient"]
    steps = [sum(life.size_bytes for life in lives if trace.marks[life.mark][0] == step) for step in (1, 2)]
    assert min(steps) >= 4 * NETWORK


@pytest.mark.parametrize(("gpu", "ranks", "rank"), [("8x8xa100-40gb", 64, 13), ("128x8xa100-40gb", 1024, 1000)])
def test_one_stage_of_a_long_pipeline(dry_run: Any, gpu: str, ranks: int, rank: int) -> None:
    answer = dry_run("parallel.py", "pipeline", gpu=gpu, rank=rank)
    estimate, trace = consistent(answer)
    assert (estimate.rank, trace.world_size, trace.steps) == (rank, ranks, 3)
    assert estimate.model["parameters"] == 8 * 512 * 512
    sent = [activity for activity in trace.activities() if activity.kind == "collective"]
    assert {activity.name for activity in sent} >= {"Send", "Recv"}


def kept_when_backward_begins(trace: Trace) -> int:
    """Bytes of activations at the first event of the second step's first backward."""
    begins = next(
        index
        for index, event in enumerate(trace.events())
        if (trace.marks[event.mark].step, trace.marks[event.mark].phase) == (1, "backward")
    )
    lives = timeline(trace).lives
    return sum(life.size_bytes for life in lives if life.category == "activation" and life.born < begins < life.died)


def test_early_stages_keep_more_micro_batches(dry_run: Any) -> None:
    early, late = (consistent(dry_run("parallel.py", "pipeline", gpu="8xa100-40gb", rank=rank))[1] for rank in (1, 6))
    # one forward, one backward: seven micro-batches are under way in stage 1, two in stage 6
    assert kept_when_backward_begins(early) > 2 * kept_when_backward_begins(late) > 0


def test_the_shards_of_many_ranks_are_small(dry_run: Any) -> None:
    few = consistent(dry_run("parallel.py", "fsdp", gpu="8xa100-40gb", rank=3))[1]
    many = consistent(dry_run("parallel.py", "fsdp", gpu="128x8xa100-40gb", rank=1000))[1]

    def states(trace: Trace) -> int:
        blocks = {
            life.address: life.size_bytes for life in timeline(trace).lives if life.category == "optimizer_state"
        }
        return sum(blocks.values())

    parameters = 2 * 8 * 512 * 512 + 2 * 512 * 512
    assert states(few) == 2 * 4 * parameters / 8
    assert 0 < states(many) < states(few) / 50


def test_four_real_processes_agree(dry_run: Any) -> None:
    answer = dry_run("agree.py", launcher=(*TORCHRUN, "4"), gpu="4xa100-40gb", steps=20)
    estimate, _ = consistent(answer)
    assert sorted(said["rank"] for said in answer.printed) == [0, 1, 2, 3]
    for said in answer.printed:
        assert said["name"] == "agreed"
        assert said["sum"] == 0 + 1 + 2 + 3
        assert said["gathered"] == [0, 10, 20, 30]
        assert said["everyone"] == [0, 1, 2, 3]
        assert said["steps"] == 2, "a flag that one rank raised stopped all"
    assert [rank["rank"] for rank in estimate.ranks] == [0, 1, 2, 3]
    assert [trace.steps for trace in answer.run.traces] == [2, 2, 2, 2]


def test_a_pipeline_of_two_real_processes(dry_run: Any) -> None:
    answer = dry_run("parallel.py", "pipeline", launcher=(*TORCHRUN, "2"), gpu="2xa100-40gb")
    estimate, _ = consistent(answer)
    sizes = {said["rank"]: said["parameters"] for said in answer.printed}
    assert sizes == {0: 8 * 512 * 512, 1: 8 * 512 * 512 + 2 * 512 * 512}
    peaks = {rank["rank"]: rank["allocated_bytes"] for rank in estimate.ranks}
    assert peaks == {said["rank"]: said["allocated"] for said in answer.printed}


def test_a_stage_that_waits_for_one_that_was_stopped_is_done(dry_run: Any) -> None:
    """The first stage is stopped where its next step begins; the second waits for what it would have sent."""
    launched = {"launcher": (*TORCHRUN, "2"), "gpu": "2xa100-40gb"}
    longer = dry_run("parallel.py", "pipeline", "--steps", "5", **launched)
    estimate, _ = consistent(longer)
    assert [(trace.steps, trace.outcome["kind"]) for trace in longer.run.traces] == [(3, "completed")] * 2
    whole = dry_run("parallel.py", "pipeline", **launched).run.estimate
    assert [rank["allocated_bytes"] for rank in estimate.ranks] == [rank["allocated_bytes"] for rank in whole.ranks]


# -- more than the card has


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_running_out_of_memory(dry_run: Any, where: str) -> None:
    estimate, trace = consistent(dry_run("too_big.py", where))
    assert not estimate.fits
    assert estimate.oom is not None
    assert (estimate.oom.phase, trace.outcome["phase"]) == (where, where)
    assert estimate.oom.message.startswith("CUDA out of memory. Tried to allocate ")
    assert "GPU 0 has a total capacity of 39.49 GiB" in estimate.oom.message
    assert any("too_big.py" in frame for frame in estimate.oom.stack)
    assert trace.peaks["ooms"] == 1


def test_an_error_that_running_out_of_memory_caused_is_told_as_that(dry_run: Any) -> None:
    answer = dry_run("too_big.py", "wrapped")
    assert answer.error is None
    estimate = answer.run.estimate
    assert not estimate.fits
    assert estimate.oom is not None
    assert estimate.oom.message.startswith("CUDA out of memory. Tried to allocate 4096.00 GiB.")
    assert [frame.rpartition(" ")[2] for frame in estimate.oom.stack] == ["<module>", "main"]


def test_a_program_that_adapts_to_the_card(dry_run: Any) -> None:
    answer = dry_run("too_big.py", "adapting", steps=50)
    assert answer.error is None
    assert answer.run.estimate.fits
    assert answer.printed[-1]["micro_batch"] == 2**16
    assert answer.run.traces[0].peaks["ooms"] == 2
    [note] = [note for note in answer.run.estimate.notes if "ran out of memory 2 times and recovered" in note]
    assert note.endswith(f"after that at most {format_size(answer.printed[-1]['allocated'])} were allocated.")


@pytest.mark.parametrize("steps", [2, 3])
def test_a_program_that_skips_what_is_too_large_fits_however_many_steps_are_made(dry_run: Any, steps: int) -> None:
    """The batch before the one at which it is stopped was too large."""
    answer = dry_run("too_big.py", "skipping", steps=steps)
    assert answer.run.traces[0].steps == steps
    assert answer.run.estimate.fits
    assert any(f"ran out of memory {steps} times and recovered" in note for note in answer.run.estimate.notes)


def test_a_program_that_gives_up_says_that_memory_ran_out(dry_run: Any) -> None:
    error = dry_run("too_big.py", "giving-up").error
    assert isinstance(error, TrialFailed)
    assert "No batch size fits." in str(error)
    assert str(error).endswith("It had run out of GPU memory 1 time before.")


@pytest.mark.parametrize("how", ["exiting", "ending"])
def test_a_program_that_does_nothing_more_when_memory_has_run_out_does_not_fit(dry_run: Any, how: str) -> None:
    """Whatever its exit code: it caught the error."""
    estimate = dry_run("too_big.py", how).run.estimate
    assert not estimate.fits
    assert estimate.oom.message == "CUDA out of memory. Tried to allocate 4194304.00 MiB."
    assert estimate.oom.phase == "load"
    assert any("too_big.py" in frame for frame in estimate.oom.stack)
    assert "The program caught the out-of-memory error and ended by itself." in estimate.notes


NEARLY_FULL = {"gpu": "2xt4", "launcher": (*TORCHRUN, "2")}
NCCL_BYTES = 443 * 2**20
"""Of a communicator of two: overheads.toml, nccl.two."""


def test_nccls_buffers_are_taken_from_the_card_and_the_allocator_gives_back_its_cache(dry_run: Any) -> None:
    """Without them the request would fit beside what is cached."""
    answer = dry_run("nearly_full.py", "cached", **NEARLY_FULL)
    assert sorted(said["rank"] for said in answer.printed) == [0, 1]
    for said in answer.printed:
        assert said["taken"] == [NCCL_BYTES, 0], "at the first collective, as mem_get_info sees it"
        assert said["retries"] == 1
    assert answer.run.estimate.fits
    peak, capacity = answer.run.estimate.peak, answer.run.estimate.cluster["capacity_bytes"]
    assert peak.by_category["runtime"] > NCCL_BYTES
    assert peak.process_bytes <= capacity
    for card in answer.run.estimate.cards:
        assert card["peak_bytes"] <= capacity
        assert card["peak_bytes"] == pytest.approx(peak.process_bytes, rel=0.001)


def test_a_job_that_fits_but_for_nccls_buffers_does_not_fit(dry_run: Any) -> None:
    answer = dry_run("nearly_full.py", "full", **NEARLY_FULL)
    assert answer.error is None
    assert not answer.run.estimate.fits
    assert [rank["fits"] for rank in answer.run.estimate.ranks] == [False] * 2
    assert answer.run.estimate.oom.message.startswith("CUDA out of memory. Tried to allocate ")


def test_a_card_without_room_for_nccl_is_out_of_memory(dry_run: Any) -> None:
    answer = dry_run("nearly_full.py", "first", **NEARLY_FULL)
    assert answer.error is None
    estimate = answer.run.estimate
    assert not estimate.fits
    assert estimate.oom.message.endswith("Last error: Cuda failure 2 'out of memory'")
    assert estimate.peak.process_bytes <= estimate.cluster["capacity_bytes"], "what was refused is not counted"
    assert "no room for NCCL's buffers" in wording.need(estimate)


# -- values


def test_what_is_known_of_values_assumes_nothing(dry_run: Any) -> None:
    """Checks for NaN pass, what came from the host is known, and padding (alone) takes the masked path."""
    answer = dry_run("values.py", "isnan", "copied", "padded", "full", "first", "older", "wide")
    estimate, _ = consistent(answer)
    assert answer.printed[-1] == {
        "isnan": 1.5,
        "copied": {"first": [1, 2, -100, -100], "clone": [[1, 2, -100, -100], [5, -100, 7, 8]]},
        "padded": {"masked": [True]},
        "full": {"masked": [False]},
        "first": [True, False],  # the gradient of a loss by itself is one, of a scaled one it is not
        "older": [1, 8, 48],  # configurations of older libraries are taken
        # Of each element of the mask its two places, 8 bytes each, rounded up to 512.
        "wide": [[128_000, 2, 1, 128_000, 2_048_000], [32_000, 2, 1, 32_000, 512_000], [999, 31]],
    }
    (guessed,) = estimate.coverage.assumed  # the loss that is printed
    assert guessed.startswith("computed numbers read as plausible ones")


def test_what_is_not_known_of_values_is_assumed_and_told(dry_run: Any) -> None:
    """Checks for finite numbers pass, boolean indexing selects everything, experts get their balanced share."""
    answer = dry_run("values.py", "finite", "boolean", "experts")
    estimate, _ = consistent(answer)
    assert answer.printed[-1] == {
        "finite": True,
        "boolean": [4 * 8, 512],
        # 60 tokens x 2 choices / 8 experts; the ninth class stands for no expert and is not hit
        "experts": {"one_hot": [15] * 8, "compared": [15] * 8},
    }
    assumed = {"torch.isfinite of a computed tensor is True"}
    assert assumed < set(estimate.coverage.assumed)
    guessed = " ".join(set(estimate.coverage.assumed) - assumed)
    assert "selects every element" in guessed
    assert "balanced share" in guessed


def test_experts_that_are_counted_by_hand_get_their_balanced_share(dry_run: Any) -> None:
    """And nothing else than a router: classes and words that are predicted read as zero, what is known as it is.

    Half of the labels count as predicted.
    """
    answer = dry_run("counted_experts.py")
    estimate, _ = consistent(answer)
    said = dict(answer.printed[-1])
    assert said.pop("others") == {
        "right": 32,
        "predicted": [0] * 5,
        "end": False,
        "named": [0] * 4,
        "known": [9, False, [0, 1, 3]],
    }
    assert said.pop("kept") == []
    # 240 tokens x 2 choices / 8 experts
    assert len(said) == 13
    assert [router for router, rows in said.items() if rows != [60] * 8] == []
    assert any("balanced share" in text for text in estimate.coverage.assumed)


def test_what_is_known_says_how_large_a_result_is(dry_run: Any) -> None:
    answer = dry_run("sized.py", "known")
    estimate, _ = consistent(answer)
    assert answer.printed == (
        {
            "unique": [1, 2, 1],
            "rows": [[1, 2], [3, 4]],
            "consecutive": [3, 1, 3, 7],
            "bincount": [8],
            "one_hot": [4, 8],
            "repeated": [14, 5],
            "places": [14],
            "twice": [4, 10],
            "sparse": [3, 8],
            "close": True,
            "far": False,
            "refused": True,
        },
    )
    assert not any("unique" in text for text in estimate.coverage.assumed)


def test_how_large_a_result_of_computed_values_is_taken_to_be(dry_run: Any) -> None:
    answer = dry_run("sized.py", "computed")
    estimate, _ = consistent(answer)
    assert answer.printed[-1] == {
        "unique": [[1], [600], [1]],
        "rows": [[600, 1000], [600]],
        "bincount": [[1], [9]],
        "one_hot": [[600, 1], [600, 9]],
        "sparse": [600, 1000],
        "close": True,
        "drawn": [[600, 1000]] * 3,
    }
    said = "unique of computed values finds one value (of rows: all), and bincount and one_hot find one class"
    assert said in estimate.coverage.assumed
    assert "conditions that were computed and checked hold" in estimate.coverage.assumed


def test_sparse_tensors_where_known_values_are_followed(dry_run: Any) -> None:
    answer = dry_run("sized.py", "sparse")
    consistent(answer)
    assert answer.printed[-1] == {
        "unique": [2, 6, 14],
        "places": [[0, 1, 1], [2, 0, 2]],
        "products": [[2, 4], [2, 4]],
        "rows": [0, 1, 3],
        "isnan": True,
        "gradient": [3, 8],
    }


def test_generate_goes_on_to_its_length(dry_run: Any) -> None:
    answer = dry_run("generating.py")
    estimate, trace = consistent(answer)
    said = answer.printed[-1]
    assert said.pop("prompt") == [[3, 4, 5, 6], [7, 8, 9, 10]]
    assert said.pop("loops") == [6, 6, 6], "of the program's own"
    assert said.pop("slopes") == [[2, 12, 512]] * 2, "eager and compiled, after what is known of generation"
    assert said == {"greedy": [2, 40], "sampled": [2, 40], "lengths": [8, 8]}
    assert any("length limit" in text for text in estimate.coverage.assumed)
    assert "evaluate" in phases(estimate)
    assert trace.steps == 1


def test_experts_get_gradients_and_states(dry_run: Any) -> None:
    """Every expert is there in memory, whichever tokens a router would send it."""
    for family in ("mixtral", "qwen3_moe"):
        estimate, trace = consistent(dry_run("families.py", family, *FAMILIES[family]))
        lives = timeline(trace).lives
        gradients = {life.address: life.size_bytes for life in lives if life.category == "gradient" and life.mark > 0}
        assert sum(gradients.values()) >= 4 * estimate.model["parameters"]


@pytest.fixture(scope="session")
def only_a_configuration(tmp_path_factory: Any) -> str:
    """A folder with the config.json of a network of a billion parameters and nothing else."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048},
        **{"intermediate_size": 5504, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 4},
        **{"max_position_embeddings": 2048, "tie_word_embeddings": False},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4}))
    return str(folder)


def test_pretrained_weights_are_not_needed(dry_run: Any, only_a_configuration: str) -> None:
    answer = dry_run("pretrained.py", only_a_configuration, "--on-card")
    estimate, trace = consistent(answer)
    assert trace.steps == 2
    assert answer.printed[-1]["parameters"] == estimate.model["parameters"] > 10**9
    assert answer.printed[-1]["host_peak_bytes"] < 2 * 2**30, "2 GiB of weights never pass through the host"
    assert any("pretrained weights were not read" in text for text in estimate.coverage.assumed)


def test_a_big_model_on_the_host_is_not_filled(dry_run: Any, only_a_configuration: str) -> None:
    answer = dry_run("pretrained.py", only_a_configuration)
    estimate, _ = consistent(answer)
    assert NOT_FILLED in estimate.coverage.assumed
    assert answer.printed[-1]["host_peak_bytes"] < 2 * 2**30
    assert estimate.host.peak_bytes >= 2 * answer.printed[-1]["parameters"], "what a real one takes there"
    assert estimate.ranks[0]["host"]["loading"] >= 1.999 * answer.printed[-1]["parameters"]


def test_pretrained_weights_are_placed_on_cards_as_the_loader_does(dry_run: Any, only_a_configuration: str) -> None:
    answer = dry_run("pretrained.py", only_a_configuration, "--on-cards", gpu="2xa100-40gb")
    assert answer.error is None
    said = answer.printed[-1]
    assert (said["cards"], said["beams"]) == (2, 4)
    trace = answer.run.traces[0]
    assert 0 < trace.peaks["allocated_bytes"] < 1.5 * said["parameters"] * 2
    assert trace.device["others"][0]["allocated_bytes"] > 0.5 * said["parameters"]


@pytest.mark.skipif(not all(map(find_spec, ("bitsandbytes", "accelerate"))), reason="bitsandbytes is missing")
def test_a_checkpoint_that_is_quantized_already(dry_run: Any, only_a_configuration: str, tmp_path: Path) -> None:
    """Its configuration says how, the program does not: a quarter of the bytes, not all of them."""
    config = json.loads((Path(only_a_configuration) / "config.json").read_text())
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    answer = dry_run("pretrained.py", str(tmp_path), "--on-card")
    assert answer.error is None, answer.output[-2000:]
    assert answer.printed[-1]["packed"] == 20 * 7
    walked = timeline(answer.run.traces[0])
    embeddings = 2 * 32000 * 2048
    rest = answer.run.estimate.model["parameters"] - embeddings
    assert walked.by_category()["parameter"] < 2 * embeddings + 0.65 * rest


def test_a_checkpoint_packed_in_another_way_needs_its_files(
    dry_run: Any, only_a_configuration: str, tmp_path: Path
) -> None:
    config = json.loads((Path(only_a_configuration) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assert isinstance(dry_run("pretrained.py", str(tmp_path)).error, TrialFailed)


@pytest.mark.skipif(find_spec("diffusers") is None, reason="diffusers is missing")
def test_networks_of_diffusers_need_no_weights(dry_run: Any, tmp_path: Path) -> None:
    answer = dry_run("diffusing.py", str(tmp_path))
    estimate, trace = consistent(answer)
    assert (answer.printed[-1]["dtypes"], answer.printed[-1]["same"]) == (["torch.bfloat16"], True)
    assert (trace.steps, estimate.model["parameters"]) == (2, answer.printed[-1]["parameters"])
    assert [path.name for path in tmp_path.iterdir()] == ["unet"], "what it saved is not here"


def test_recurrent_networks_keep_what_cudnn_keeps_and_name_what_is_unknown(dry_run: Any) -> None:
    """The figures of an H200 (`op LSTM bf16 forward` in measurements/), in blocks of 512 bytes."""
    answer = dry_run("recurrent.py")
    estimate, trace = consistent(answer)
    weights, states = 8_404_992, 2 * 32_768  # torch lays bf16 weights side by side anew each time
    assert answer.printed[-1]["kept"] == 23_068_928 + 256 + weights + states
    assert trace.unknown_workspaces["modelled:cudnnGetRNNTempSpaceSizes, workspace"] == 6
    (said,) = (line for line in estimate.coverage.modelled if line.startswith("workspaces that only"))
    assert "cudnnGetRNNTempSpaceSizes, workspace (6)" in said


def test_what_a_program_saves_takes_the_place_of_nothing(dry_run: Any, tmp_path: Path) -> None:
    """Zeros must not be written over what was trained; what was saved in this run can be loaded in it."""
    for name in ("all.pt", "network.safetensors"):
        (tmp_path / name).write_text("trained for a week")
    answer = dry_run("saving.py", str(tmp_path))
    estimate, _ = consistent(answer)
    assert answer.printed[-1] == {
        "step": 2,
        "shape": [2048, 2048],
        "moments": 2,
        "loaded_bytes": 3 * 4 * (2048 * 2048 + 2048) + 2 * 512,  # and two counts of steps
        "made": [3.0, 3.0],
        "seen": ["all.pt", "network.safetensors"],
    }
    assert {path.read_text() for path in tmp_path.iterdir()} == {"trained for a week"}
    assert any(said.startswith("what was saved went into a folder") for said in estimate.coverage.assumed)
    assert estimate.ranks[0]["host"]["tensors"] >= 4 * 2048 * 2048, "safetensors copies all to the host first"


def test_zeros_are_reported_to_no_tracker(dry_run: Any, tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("NAME = 'wandb'\n")
    told = (("WANDB_MODE", "online"), ("MLFLOW_TRACKING_URI", "https://tracking.example"))
    answer = dry_run("tracking.py", str(tmp_path), variables=told)
    estimate, _ = consistent(answer)
    said = answer.printed[-1]
    assert said["mode"] == "offline"
    assert said["mlflow"].startswith("file:///")
    assert not Path(said["place"]).exists()
    assert any(line.startswith("experiment trackers worked offline") for line in estimate.coverage.assumed)


def test_what_a_program_files_away_takes_the_place_of_nothing(dry_run: Any, tmp_path: Path) -> None:
    """Renamed, linked, copied, opened, removed: checkpoints that were there stay, what the run saved is found."""
    older = ("last.pt", "best.pt", "opened.ckpt", "before.pt", "oldest.pth", "run-1/model.safetensors")
    (tmp_path / "run-1").mkdir()
    for name in older:
        (tmp_path / name).write_text("trained for a week")
    answer = dry_run("filing.py", str(tmp_path))
    estimate, _ = consistent(answer)
    assert answer.printed[-1] == {
        **{"last.pt": 1, "best.pt": 1, "step-0.pt": 0, "latest": 1, "opened.ckpt": 5, "opened": 1},
        "backup": "trained for a week",
        "there": [False, True, False],
        "long_enough": True,
    }
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == dict.fromkeys(older, "trained for a week")
    assert any(said.startswith("what was saved went into a folder") for said in estimate.coverage.assumed)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is missing")
def test_a_detector_samples_a_quarter_of_objects_and_finds_one_class_for_each_box(dry_run: Any) -> None:
    answer = dry_run("detects.py")
    estimate, _ = consistent(answer)
    (said,) = answer.printed
    assert said["boxes"][0] == 2 * 512, "as many as the sampler takes, of all that were proposed"
    assert said["masks"] == [2 * 128, 2 * 40], "of objects alone; later of what is kept"
    assert said["found"] == [40, 40]
    assert any("samplers find as many objects as they take" in line for line in estimate.coverage.assumed)


def test_a_loss_in_chunks_has_as_many_as_there_are_labels_for(dry_run: Any, tmp_path: Path) -> None:
    answer = dry_run("chunks.py", str(tmp_path))
    consistent(answer)
    assert answer.printed == ({"chunks": 3},), "700 of 1,000 labels, 256 at a time"
