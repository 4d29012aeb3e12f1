"""Trainers' own code on the ghost, beside tonnage's loop and beside arithmetic."""

import dataclasses
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from networks import TINY as TINY_OF_TESTS
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, UsageError
from tonnage.estimates.from_traces import Run
from tonnage.estimates.predict import estimate
from tonnage.estimates.timeline import timeline
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.trainers import engine_of
from tonnage.trainers.packages import find_version
from tonnage.workers.worker import Worker

pytestmark = pytest.mark.ghost

MIB = 2**20
VOCABULARY, WIDTH = 16384, 256
TINY = ModelRef(
    name="tiny",
    kind="config",
    config={
        **{"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 512},
        **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"max_position_embeddings": 1024, "tie_word_embeddings": False},
    },
)
JOB = Job(model=TINY, seq_len=256, micro_batch=2)


def run(worker: Worker, engine: str, gpu: str = "a100-40gb", job: Job = JOB, rank: int = 0, **plan: Any) -> Run:
    """An estimate whose walk agrees with torch's counters, of three steps."""
    packages = engine_of(Plan(engine=engine)).packages or ("torch",)
    missing = [package for package in packages if find_version(package) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    found = estimate(Case(job, Plan(engine=engine, **plan), parse_cluster(gpu)), worker=worker, rank=rank)
    trace, walked = found.traces[0], timeline(found.traces[0])
    assert walked.peak_allocated_bytes == trace.peaks["allocated_bytes"]
    assert walked.peak_reserved_bytes == trace.peaks["reserved_bytes"]
    assert (trace.steps, trace.unknown_calls) == (3, {})
    assert found.estimate.versions.get(packages[0].replace("-", "."))
    return found


def test_trainer_and_accelerate_peak_where_the_plain_loop_does(worker: Worker) -> None:
    """One GPU, fused AdamW: the casts of outputs are gone when backward peaks; gradients' norms stay small."""
    plain = run(worker, "tonnage", optimizer="adamw-fused").estimate
    for engine, optimizer in (("hf-trainer", "adamw"), ("accelerate", "adamw-fused")):
        theirs = run(worker, engine, optimizer=optimizer).estimate
        assert theirs.peak.phase == plain.peak.phase == "backward"
        assert theirs.peak.allocated_bytes == pytest.approx(plain.peak.allocated_bytes, abs=64 * 1024), engine
        assert theirs.peak.by_category["optimizer_state"] == pytest.approx(8 * PARAMETERS, rel=0.01)


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed"])
def test_a_loop_that_keeps_what_the_network_returned_has_logits_through_backward(worker: Worker, engine: str) -> None:
    freed, kept = (
        run(worker, engine, outputs=outputs, optimizer="adamw-foreach").estimate.peak.allocated_bytes
        for outputs in ("freed", "step")
    )
    width = 4 if engine == "accelerate" else 2  # which casts what the forward returns
    assert kept - freed == pytest.approx(512 * VOCABULARY * width, rel=0.1)


@pytest.mark.parametrize("shard", ["zero2", "zero3"])
def test_a_trainer_divides_a_quantized_network_that_is_loaded_whole(worker: Worker, shard: str) -> None:
    """Each rank loads and quantizes all of it; what a rank holds at the optimizer's step is what our loop holds."""
    pytest.importorskip("bitsandbytes")
    job = dataclasses.replace(JOB, method="qlora", lora_rank=4)
    ours, theirs = (
        {
            phase.name: phase.allocated_bytes
            for phase in run(worker, engine, "4xa100-40gb", job, **plan).estimate.phases
        }
        for engine, plan in (
            ("tonnage", {"shard": shard, "optimizer": "adamw-fused"}),
            ("hf-trainer", {"shard": shard}),
        )
    )
    assert theirs["optimizer"] == pytest.approx(ours["optimizer"], abs=MIB)
    assert theirs["load"] > ours["load"]


def _parameters() -> int:
    heads = WIDTH * WIDTH * 2 + WIDTH * WIDTH // 2 * 2  # queries and output, grouped keys and values
    layer = heads + 3 * WIDTH * 512 + 2 * WIDTH
    return 2 * layer + 2 * VOCABULARY * WIDTH + WIDTH


PARAMETERS = _parameters()


def test_the_trainer_under_ddp_copies_logits(worker: Worker) -> None:
    """It has DDP look for unused parameters, so DDP clones what the forward returns: logits, in fp32."""
    logits_bytes = 2 * 256 * VOCABULARY * 4
    plain = run(worker, "tonnage", "8xa100-40gb", optimizer="adamw-fused", shard="ddp")
    theirs = run(worker, "hf-trainer", "8xa100-40gb", shard="ddp", rank=3)
    assert theirs.traces[0].rank == 3
    assert _peak(theirs, "forward") - _peak(plain, "forward") >= logits_bytes // 4


def _peak(found: Run, phase: str) -> int:
    [peak] = [phase_peak for phase_peak in found.estimate.phases if phase_peak.name == phase]
    return peak.allocated_bytes


def test_fsdp_of_the_trainer_and_of_accelerate_are_one(worker: Worker) -> None:
    trainer, own = (
        run(worker, engine, "8xa100-40gb", rank=3, shard="zero3", optimizer="adamw-fused").estimate.peak
        for engine in ("hf-trainer", "accelerate")
    )
    assert trainer.by_category["optimizer_state"] == pytest.approx(8 * PARAMETERS / 8, rel=0.02)
    assert own.allocated_bytes == pytest.approx(trainer.allocated_bytes, abs=64 * 1024)


def test_quantized_networks_under_accelerate_are_the_plain_loops(worker: Worker) -> None:
    pytest.importorskip("bitsandbytes")
    job = dataclasses.replace(JOB, method="qlora", lora_rank=4)
    plain, theirs = (run(worker, engine, job=job).estimate.peak for engine in ("tonnage", "accelerate"))
    assert theirs.allocated_bytes == plain.allocated_bytes


@pytest.mark.parametrize("engine", ["hf-trainer", "accelerate", "deepspeed"])
def test_images_are_what_a_processor_makes_of_them(worker: Worker, engine: str) -> None:
    """Of Qwen-VL all patches of all images in one list, which grows with the images as the plain loop's does."""
    model = ModelRef(name="tiny", kind="config", config=TINY_OF_TESTS["qwen2_5_vl"])
    job = Job(model=model, seq_len=256, micro_batch=2, image_size="56x56")
    plain, theirs = (
        run(worker, name, job=job, optimizer=optimizer, precision="fp32").estimate.peak.allocated_bytes
        for name, optimizer in (("tonnage", "adamw-fused"), (engine, "adamw"))
    )
    assert theirs == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize(
    ("engine", "rows"), [("accelerate", {"packing": 3}), ("hf-trainer", {"lengths": ("256", "64")})], ids=str
)
def test_rows_are_the_plain_loops(worker: Worker, engine: str, rows: dict[str, Any]) -> None:
    """Packed ones with a mask of blocks; of drawn lengths the longest first, whatever the sampler shuffles."""
    job = dataclasses.replace(JOB, **rows)
    plain, theirs = (
        run(worker, name, job=job, optimizer=optimizer, attention="eager").estimate.peak.allocated_bytes
        for name, optimizer in (("tonnage", "adamw-fused"), (engine, "adamw-fused"))
    )
    full = run(worker, engine, optimizer="adamw-fused", attention="eager").estimate.peak.allocated_bytes
    assert theirs == pytest.approx(plain, abs=128 * 1024)
    assert theirs >= full


def test_gradients_averaged_each_time_are_not_kept_whole(worker: Worker) -> None:
    """By the Trainer's accelerator_config as by accelerate's own plugin; parts of them are what two ranks keep."""
    job = dataclasses.replace(JOB, grad_accum=3)
    plan: dict[str, Any] = {"shard": "zero3", "optimizer": "adamw-fused"}
    each, by_accelerate = (
        run(worker, engine, "8xa100-40gb", job, accum_sync=True, **plan) for engine in ("hf-trainer", "accelerate")
    )
    once = run(worker, "hf-trainer", "8xa100-40gb", job, **plan)
    assert _peak(each, "backward") == pytest.approx(_peak(by_accelerate, "backward"), abs=64 * 1024)
    assert _peak(once, "backward") - _peak(each, "backward") > PARAMETERS


def test_deepspeed_takes_packed_rows(worker: Worker) -> None:
    alone, packed = (
        _peak(run(worker, "deepspeed", job=dataclasses.replace(JOB, packing=packing), attention="eager"), "forward")
        for packing in (None, 2)
    )
    assert packed > alone, "a mask of blocks, and positions"


@pytest.mark.parametrize("batches", [2, 4])
def test_the_trainer_gathers_logits_for_its_metrics(worker: Worker, batches: int) -> None:
    """In fp32, those of all batches but the last twice: once as they were, once joined to the last one's."""
    job = dataclasses.replace(JOB, eval_batch=2, eval_logits=batches)
    found = run(worker, "hf-trainer", job=job)
    logits_bytes = 2 * 256 * VOCABULARY * 4
    held = (1 + 2) * 4 * PARAMETERS  # weights and both moments
    joined = (2 * batches - 1) * logits_bytes
    assert 0 < _peak(found, "evaluate") - held - joined < 2 * logits_bytes
    assert "evaluate" not in {phase.name for phase in run(worker, "hf-trainer").estimate.phases}


def test_the_trainer_evaluates_rows_of_full_length_once(worker: Worker) -> None:
    job = dataclasses.replace(JOB, eval_batch=8, lengths=("64",))
    found = run(worker, "hf-trainer", job=job)
    alone = run(worker, "tonnage", job=job, optimizer="adamw-fused")
    assert _peak(found, "evaluate") == pytest.approx(_peak(alone, "evaluate"), abs=8 * 256 * VOCABULARY * 4)
    assert _peak(found, "evaluate") > _peak(found, "backward")
    phases = [phase for phase, _ in groupby(mark.phase for mark in found.traces[0].marks)]
    assert phases.count("evaluate") == 1
    assert phases[phases.index("evaluate") :].count("optimizer") == 1, "of three steps one comes after it"


def test_the_trainer_saves_without_more_memory_and_leaves_no_file(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights, moments and what optimizers are asked for; under FSDP gathered one by one."""
    monkeypatch.chdir(tmp_path)
    job = dataclasses.replace(JOB, save_checkpoint="full")
    for gpu, shard in (("a100-40gb", "none"), ("2xa100-40gb", "ddp"), ("2xa100-40gb", "zero3")):
        plain, saved = (run(worker, "hf-trainer", gpu, job=each, shard=shard) for each in (JOB, job))
        assert _peak(plain, "backward") == pytest.approx(_peak(saved, "backward"), abs=64 * 1024)
        held = 12 * PARAMETERS / (2 if shard == "zero3" else 1)
        buckets = 4 * PARAMETERS if shard == "ddp" else 0
        one_more = 4 * VOCABULARY * WIDTH * 2 if shard == "zero3" else 0
        assert 0 <= _peak(saved, "save") - held - buckets <= one_more + 17 * MIB, shard  # cuBLAS keeps 16
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed"])
def test_other_loops_save_after_their_last_step(worker: Worker, engine: str) -> None:
    job = dataclasses.replace(JOB, save_checkpoint="sharded" if engine == "deepspeed" else "full")
    found = run(worker, engine, "2xa100-40gb", job=job, shard="zero3")
    assert [phase for phase, _ in groupby(mark.phase for mark in found.traces[0].marks)].count("save") == 1
    assert 0 < _peak(found, "save") < _peak(found, "backward")


@pytest.mark.parametrize(("shard", "place"), [("none", "cpu"), ("ddp", "gpu"), ("zero3", "cpu")])
def test_the_trainer_resumes_with_the_states_of_an_earlier_run(worker: Worker, shard: str, place: str) -> None:
    """They are there in the first step, whose peak is then that of all."""
    gpu = "a100-40gb" if shard == "none" else "2xa100-40gb"
    begun = run(worker, "hf-trainer", gpu, shard=shard)
    resumed = run(worker, "hf-trainer", gpu, job=dataclasses.replace(JOB, resume=place), shard=shard)
    states = 8 * PARAMETERS / (2 if shard == "zero3" else 1)
    first = {name: one.estimate.steps[0].allocated_bytes for name, one in (("begun", begun), ("resumed", resumed))}
    assert first["resumed"] - first["begun"] > 0.5 * states
    assert resumed.estimate.peak.allocated_bytes == pytest.approx(begun.estimate.peak.allocated_bytes, rel=0.02)
    assert _peak(resumed, "resume") > states
    with pytest.raises(UsageError, match=f"choose resume {place}"):
        run(
            worker,
            "hf-trainer",
            gpu,
            job=dataclasses.replace(JOB, resume="cpu" if place == "gpu" else "gpu"),
            shard=shard,
        )


@pytest.mark.parametrize(
    ("engine", "shard", "place", "rank", "bytes_each"),
    [
        ("accelerate", "ddp", "gpu", 1, 4 + 8 + 4),  # weights, moments, DDP's buckets
        ("accelerate", "zero3", "cpu", 1, (4 + 8 + 8) / 2),  # moments that torch makes, and those that come in
        ("deepspeed", "zero2", "cpu", 1, 2 + 12 / 2),
    ],
)
def test_other_loops_resume_before_their_first_step(
    worker: Worker, engine: str, shard: str, place: str, rank: int, bytes_each: float
) -> None:
    """With what this rank saved, and with what rank 0 saves for all."""
    job = dataclasses.replace(JOB, resume=place)
    found = run(worker, engine, "2xa100-40gb", job, rank, shard=shard, optimizer="adamw-foreach")
    phases = [phase for phase, _ in groupby(mark.phase for mark in found.traces[0].marks)]
    assert phases.count("resume") == 1
    assert phases.index("resume") < phases.index("forward")
    assert _peak(found, "resume") == pytest.approx(bytes_each * PARAMETERS, rel=0.02)
    first, *_, last = (step.allocated_bytes for step in found.estimate.steps)
    assert first == pytest.approx(last, rel=0.05)


@pytest.mark.parametrize(("engine", "rank"), [("hf-trainer", 1), ("accelerate", 0)])
def test_a_rank_alone_saves_its_part(worker: Worker, engine: str, rank: int) -> None:
    """Which copies to the host as it is: nothing is gathered."""
    job = dataclasses.replace(JOB, save_checkpoint="sharded")
    found = run(worker, engine, "2xa100-40gb", job, rank, shard="zero3")
    assert 0 < _peak(found, "save") - 12 * PARAMETERS / 2 <= 17 * MIB  # cuBLAS keeps 16


def test_of_whole_files_the_first_rank_reads_all(worker: Worker) -> None:
    job = dataclasses.replace(JOB, resume="cpu", save_checkpoint="full")
    with pytest.raises(CannotEstimate, match=r"What rank 1 is sent of whole files is not known.*choose rank 0"):
        run(worker, "accelerate", "2xa100-40gb", job, rank=1, shard="zero3")


@pytest.mark.parametrize(("engine", "held"), [("hf-trainer", 12), ("accelerate", 12), ("deepspeed", 14), ("trl", 12)])
def test_networks_generate_beside_the_optimizers_states(worker: Worker, engine: str, held: int) -> None:
    """By their own `generate`, in eval mode: beside what is held a small cache, and logits of one token."""
    job = dataclasses.replace(JOB, generate=8)
    found = run(worker, engine, job=job, loss="chunked" if engine == "trl" else "plain")
    phases = [phase for phase, _ in groupby(mark.phase for mark in found.traces[0].marks)]
    assert phases.count("generate") == 1
    casts_bytes = 0 if engine == "deepspeed" else 2 * (PARAMETERS - VOCABULARY * WIDTH)  # autocast's, in a forward
    beside = _peak(found, "generate") - held * PARAMETERS - casts_bytes - 16 * MIB  # which cuBLAS keeps
    assert 0 < beside < 4 * MIB


def test_encoder_decoders_generate_where_the_trainer_evaluates(worker: Worker) -> None:
    model = ModelRef(name="tiny", kind="config", config=TINY_OF_TESTS["t5"])
    found = run(worker, "hf-trainer", job=Job(model=model, seq_len=32, generate=4))
    phases = [phase for phase, _ in groupby(mark.phase for mark in found.traces[0].marks)]
    assert phases[phases.index("evaluate") :][:3] == ["evaluate", "generate", "evaluate"]
    assert phases.count("generate") == 1


def test_the_trainer_has_ligers_kernels_or_says_that_there_are_none(worker: Worker) -> None:
    pytest.importorskip("liger_kernel")
    plain, liger = (run(worker, "hf-trainer", loss=loss).estimate.peak.allocated_bytes for loss in ("plain", "liger"))
    assert plain - liger > 2 * 256 * VOCABULARY * 4, "the logits' bytes in fp32"
    job = Job(model=ModelRef(name="tiny", kind="config", config=TINY_OF_TESTS["gpt2"]), seq_len=16)
    with pytest.raises(CannotEstimate, match="Liger has no kernels for gpt2"):
        run(worker, "hf-trainer", job=job, loss="liger")


def test_a_trainer_cannot_resume_what_does_not_fit(worker: Worker) -> None:
    big = dataclasses.replace(JOB, resume="cpu", seq_len=1024, micro_batch=512)
    with pytest.raises(CannotEstimate, match="leave resume out to see why"):
        run(worker, "hf-trainer", "t4", job=big, precision="fp16-mixed")


@pytest.mark.parametrize("engine", ["hf-trainer", "accelerate", "trl"])
def test_ranks_share_sequences_as_in_our_loop(worker: Worker, engine: str) -> None:
    """FSDP2 divides over those that share one, too."""
    job, loss = dataclasses.replace(JOB, seq_len=1024), "chunked" if engine == "trl" else "plain"
    plan = {"shard": "zero3", "loss": loss, "optimizer": "adamw-fused"}
    theirs, ours, alone = (
        run(worker, name, "4xa100-40gb", job=job, **plan, **more).estimate
        for name, more in ((engine, {"cp": 2}), ("tonnage", {"cp": 2, "reduce_dtype": "bf16"}), (engine, {}))
    )
    one, other, whole = (
        {phase.name: phase.allocated_bytes for phase in each.phases} for each in (theirs, ours, alone)
    )
    assert theirs.peak.by_category["optimizer_state"] == pytest.approx(
        ours.peak.by_category["optimizer_state"], rel=0.01
    )
    if engine != "trl":  # whose slices of the loss are smaller
        assert one["forward"] == pytest.approx(other["forward"], rel=0.02)
        head_bytes = 2 * VOCABULARY * WIDTH  # which stays gathered in our loop
        assert one["backward"] == pytest.approx(other["backward"] - head_bytes, rel=0.01)
    assert one["forward"] < 0.7 * whole["forward"]
    with pytest.raises(UsageError, match="under FSDP2 alone, and shard is ddp; choose shard zero3"):
        run(worker, engine, "4xa100-40gb", job=job, shard="ddp", cp=2, loss=loss)


def test_sfts_packed_rows_are_one_without_padding(worker: Worker) -> None:
    """Two rows of 256 tokens are one of 512, whose scores are twice as many."""
    rows = dataclasses.replace(JOB, packing=2, eval_batch=2)
    packed, plain = (run(worker, "trl", job=job, loss="chunked", attention="eager") for job in (rows, JOB))
    scores_bytes = 8 * 256 * 256 * 4 * 2
    assert _peak(packed, "forward") - _peak(plain, "forward") > scores_bytes
    assert _peak(packed, "evaluate") < _peak(packed, "backward")


def test_sft_trains_a_quantized_network_as_loaded_or_as_prepared(worker: Worker) -> None:
    pytest.importorskip("bitsandbytes")
    job = dataclasses.replace(JOB, method="qlora", lora_rank=4)
    loaded, prepared = (
        run(worker, "trl", job=job, loss="chunked", unquantized_dtype=dtype).estimate.peak.by_category["parameter"]
        for dtype in ("compute", "fp32")
    )
    beside = 2 * VOCABULARY * WIDTH + 5 * WIDTH  # embedding, head and norms, 2 bytes more for each
    assert prepared - loaded == pytest.approx(2 * beside, rel=0.01)


def test_sounds_reach_deepspeed_in_its_dtype(worker: Worker) -> None:
    model = ModelRef(name="tiny", kind="config", config=TINY_OF_TESTS["whisper"])
    assert run(worker, "deepspeed", job=Job(model=model, seq_len=16)).estimate.fits


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "vit"])
def test_sft_takes_rows_of_tokens_alone(worker: Worker, kind: str) -> None:
    """Its collator would leave images out without a word."""
    job = Job(model=ModelRef(name="tiny", kind="config", config=TINY_OF_TESTS[kind]), seq_len=16)
    with pytest.raises(CannotEstimate, match="SFTTrainer on tokenised rows needs a causal language model"):
        run(worker, "trl", job=job, loss="chunked")


def test_adapters_of_sft_that_fit_nowhere_are_told_as_everywhere(worker: Worker) -> None:
    pytest.importorskip("peft")
    job = dataclasses.replace(JOB, method="lora", lora_targets=("nowhere",))
    with pytest.raises(UsageError, match="PEFT cannot adapt tiny: Target modules"):
        run(worker, "trl", job=job, loss="chunked")


def test_offload_of_the_trainer_pins_shards_and_gradients(worker: Worker) -> None:
    """fp32 both, of an 8th of the parameters; norms of gradients are reduced on the host."""
    found = run(worker, "hf-trainer", "8xa100-40gb", rank=3, shard="zero3", param_offload="cpu").estimate
    assert found.peak.by_category["optimizer_state"] == 0
    assert found.host.pinned_bytes == pytest.approx(8 * PARAMETERS / 8, rel=0.05)


def test_adapters_of_the_trainer(worker: Worker) -> None:
    job = dataclasses.replace(JOB, method="lora", lora_rank=4, grad_accum=2)
    found = run(worker, "hf-trainer", job=job, checkpointing="every-2").estimate
    assert 0 < found.model["trainable_parameters"] < found.model["parameters"] / 10


def test_axolotl_keeps_embeddings_head_and_norms_in_fp32(worker: Worker) -> None:
    """2 bytes more for each weight of theirs and 4 for its moments; FSDP2 divides them as they were loaded."""
    plan = {"precision": "bf16-true", "checkpointing": "full"}
    whole = 2 * VOCABULARY * WIDTH + 5 * WIDTH
    theirs, trainers = (run(worker, engine, **plan).estimate for engine in ("axolotl", "hf-trainer"))
    for category, more in (("parameter", 2), ("optimizer_state", 4)):
        grown = theirs.peak.by_category[category] - trainers.peak.by_category[category]
        assert grown == pytest.approx(more * whole, rel=0.02), category
    sharded = run(worker, "axolotl", "8xa100-40gb", shard="zero3", **plan).estimate
    assert sharded.peak.by_category["optimizer_state"] == pytest.approx(4 * PARAMETERS / 8, rel=0.02)


@pytest.mark.parametrize(
    ("shard", "weights", "ranks"), [("ddp", 2.0, 1), ("zero1", 2.0, 8), ("zero2", 2.0, 8), ("zero3", 2 / 8, 8)]
)
def test_bytes_of_zero(worker: Worker, shard: str, weights: float, ranks: int) -> None:
    """Of 8 GPUs that divide, a rank holds 12P/8 bytes of fp32 weights and moments; 2P, or 2P/8, of bf16 weights."""
    found = run(worker, "deepspeed", "8xa100-40gb", rank=3, shard=shard).estimate
    held = found.peak.by_category
    assert held["optimizer_state"] == pytest.approx(12 * PARAMETERS / ranks, rel=0.02)
    assert held["parameter"] >= weights * PARAMETERS
    if shard != "zero3":
        assert held["parameter"] == pytest.approx(weights * PARAMETERS, rel=0.02)
    assert any("FusedAdam" in text for text in found.coverage.assumed)


def test_offload_of_deepspeed_pins_host_memory(worker: Worker) -> None:
    """Stage 2 with its optimizer on the host: 4P/8 bytes of fp32 weights and as many of gradients are pinned."""
    found = run(worker, "deepspeed", "8xa100-40gb", rank=3, shard="zero2", optimizer_offload="cpu").estimate
    assert found.peak.by_category["optimizer_state"] == 0
    assert found.host.pinned_bytes >= 8 * PARAMETERS / 8


def test_sft_never_makes_all_logits(worker: Worker) -> None:
    job = dataclasses.replace(JOB, seq_len=1024)
    plain, theirs = (
        run(worker, "hf-trainer", job=job).estimate,
        run(worker, "trl", job=job, loss="chunked").estimate,
    )
    assert theirs.peak.allocated_bytes < plain.peak.allocated_bytes


def test_torchtitan_divides_moments(worker: Worker) -> None:
    """On 8 GPUs a rank holds 8P/8 bytes of them, and so with tensor parallelism, which divides activations too."""
    options = {"attention": "flash", "shard": "zero3", "checkpointing": "selective"}
    whole, halves = (
        run(worker, "torchtitan", "8xa100-40gb", rank=3, tp=tp, **options).estimate.peak.by_category for tp in (1, 2)
    )
    assert whole["optimizer_state"] == pytest.approx(8 * PARAMETERS / 8, rel=0.02)
    assert halves["optimizer_state"] == pytest.approx(8 * PARAMETERS / 8, rel=0.02)
    assert halves["activation"] < 0.6 * whole["activation"]


def test_torchtitan_compiles_its_blocks(worker: Worker) -> None:
    """Fewer tensors wait for backward; weights and moments stay.

    Steps are long enough to need more than the first one with what Inductor times kernels on, after which torchtitan
    has torch's counters begin anew.
    """
    options = {"attention": "flash", "shard": "zero3"}
    job = dataclasses.replace(JOB, seq_len=1024, micro_batch=4)
    plain, compiled = (
        run(worker, "torchtitan", "8xa100-40gb", job, rank=3, compile=kind, **options).estimate.peak.by_category
        for kind in ("none", "layers")
    )
    assert compiled["activation"] < plain["activation"]
    assert compiled["optimizer_state"] == pytest.approx(plain["optimizer_state"], rel=0.01)


def test_megatrons_bytes_of_a_parameter(worker: Worker) -> None:
    """bf16 weights, fp32 gradients, and fp32 weights and moments, of which each of N ranks has an Nth with zero1."""
    options = {"precision": "megatron-bf16"}
    whole, divided = (run(worker, "megatron", "8xa100-40gb", shard=shard, **options) for shard in ("ddp", "zero1"))
    held = whole.estimate.peak.by_category
    assert [held[part] / PARAMETERS for part in ("parameter", "gradient", "optimizer_state")] == pytest.approx(
        [2, 4, 12], rel=0.01
    )
    assert divided.estimate.peak.by_category["optimizer_state"] == pytest.approx(12 * PARAMETERS / 8, rel=0.05)


def test_megatrons_stages_hold_what_is_theirs(worker: Worker) -> None:
    """Two stages of tensor-parallel halves: a layer and the embedding, or as many bytes of the head, on each rank."""
    job = dataclasses.replace(JOB, grad_accum=4)
    found = run(worker, "megatron", "8xa100-40gb", rank=7, job=job, shard="zero1", tp=2, pp=2).estimate
    assert found.peak.by_category["parameter"] == pytest.approx(2 * PARAMETERS / 4, rel=0.02)
    assert found.peak.by_category["gradient"] == pytest.approx(4 * PARAMETERS / 4, rel=0.02)


GROUPED = TINY.config
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "tied": {**GROUPED, "tie_word_embeddings": True, "vocab_size": 16001},
    "mistral": {**GROUPED, "model_type": "mistral", "sliding_window": 64},
    "qwen2": {**GROUPED, "model_type": "qwen2"},
    "qwen3": {**GROUPED, "model_type": "qwen3", "head_dim": 64},
    "mixtral": {**GROUPED, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **GROUPED,
        **EXPERTS,
        **{"model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 192},
    },
    "qwen3_moe": {**GROUPED, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 8, "head_dim": 64},
    "sparse": {
        **GROUPED,
        **EXPERTS,
        **{"model_type": "qwen3_moe", "num_experts": 8, "head_dim": 64, "mlp_only_layers": [0]},
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 8193, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256},
}


WIDE = {"intermediate_size": 8192, "moe_intermediate_size": 8192}
"""Of networks whose buffers are so large that blocks of whole 2 MiB are hardly more."""


def hugging_faces(config: dict[str, Any]) -> int:
    """Parameters of the network that transformers builds, tied ones once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in made.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_megatrons_network_is_hugging_faces(worker: Worker, family: str) -> None:
    """But for rows of the vocabulary up to the next multiple of 128, in embedding and head."""
    config = FAMILIES[family]
    job = dataclasses.replace(JOB, model=ModelRef(name=family, kind="config", config=config))
    tied = config.get("tie_word_embeddings", family == "gpt2")
    padding = -config["vocab_size"] % 128 * WIDTH * (1 if tied else 2)
    assert run(worker, "megatron", job=job).estimate.model["parameters"] == hugging_faces(config) + padding


@pytest.mark.parametrize(("shard", "copies", "copies_of_experts"), [("ddp", 1, 1), ("zero1", 4, 2)])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_megatrons_experts_are_dealt_out(
    worker: Worker, family: str, shard: str, copies: int, copies_of_experts: int
) -> None:
    """Of four ranks two share the experts: two ranks have the same ones, four have the rest, whose states are divided
    among as many."""
    config = {**FAMILIES[family], **WIDE}
    job = dataclasses.replace(JOB, model=ModelRef(name=family, kind="config", config=config))
    experts = 2 * 3 * WIDTH * 8192 * config.get("num_experts", config.get("num_local_experts", 0)) // 2
    rest = hugging_faces(config) - 2 * experts
    found = run(worker, "megatron", "4xa100-40gb", job, rank=3, shard=shard, ep=2, precision="megatron-bf16").estimate
    held = found.peak.by_category
    assert found.model["parameters"] == rest + experts
    assert held["parameter"] == pytest.approx(2 * (rest + experts), rel=0.01)
    assert held["gradient"] == pytest.approx(4 * (rest + experts), rel=0.01)
    states = 12 * (rest / copies + experts / copies_of_experts)
    assert held["optimizer_state"] == pytest.approx(states, rel=0.02)
    assert any("Transformer Engine" in text for text in found.coverage.assumed)
    assert any("balanced share" in text for text in found.coverage.assumed)


@pytest.mark.parametrize(("family", "tp"), [("qwen2", 2), ("qwen3", 4)])
def test_megatrons_ranks_divide_matrices(worker: Worker, family: str, tp: int) -> None:
    """Norms, and those of queries and keys, are whole on each rank; of qwen2's biases each has its part."""
    config = {**FAMILIES[family], "intermediate_size": 65536}
    job = dataclasses.replace(JOB, model=ModelRef(name=family, kind="config", config=config))
    found = run(worker, "megatron", "8xa100-40gb", job, rank=1, shard="zero1", tp=tp, precision="megatron-bf16")
    norms = 5 * WIDTH + (2 * 2 * 64 if family == "qwen3" else 0)
    a_rank = (hugging_faces(config) - norms) // tp + norms
    held = found.estimate.peak.by_category
    assert found.estimate.model["parameters"] == a_rank
    assert held["parameter"] == pytest.approx(2 * a_rank, rel=0.01)
    assert held["gradient"] == pytest.approx(4 * a_rank, rel=0.01)
    assert held["optimizer_state"] == pytest.approx(12 * a_rank / (8 / tp), rel=0.02)


def test_megatrons_stages_hold_their_kinds_of_layers(worker: Worker) -> None:
    """The first of two has a layer without experts and the embedding, the last one with experts and the head."""
    config = {**FAMILIES["sparse"], "vocab_size": 16384}
    job = dataclasses.replace(JOB, model=ModelRef(name="sparse", kind="config", config=config), grad_accum=2)
    first, last = (
        run(worker, "megatron", "2xa100-40gb", job, rank=rank, pp=2).estimate.model["parameters"] for rank in (0, 1)
    )
    assert first + last == hugging_faces(config)
    experts, dense, router = 3 * WIDTH * 128 * 8, 3 * WIDTH * 512, 8 * WIDTH
    assert last - first == experts + router - dense + WIDTH  # and the last norm


def test_megatrons_experts_take_their_share_of_the_tokens(worker: Worker) -> None:
    """Whoever has half of the experts gets the tokens of two ranks for them: as many as without dividing."""
    job = dataclasses.replace(JOB, model=ModelRef(name="tiny", kind="config", config=FAMILIES["mixtral"]))
    whole, halves = (
        run(worker, "megatron", "4xa100-40gb", job, shard="zero1", ep=ep).estimate.peak.by_category for ep in (1, 2)
    )
    assert halves["activation"] == pytest.approx(whole["activation"], rel=0.25)


@pytest.mark.parametrize("offload", [{"optimizer_offload": "nvme"}, {"param_offload": "nvme"}])
def test_what_deepspeed_keeps_in_files_is_neither_on_the_card_nor_written(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: dict[str, str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = run(worker, "deepspeed", "8xa100-40gb", rank=3, shard="zero3", **offload).estimate
    host = run(worker, "deepspeed", "8xa100-40gb", rank=3, shard="zero3", **dict.fromkeys(offload, "cpu")).estimate
    assert found.peak.by_category["optimizer_state"] == 0
    assert found.peak.allocated_bytes == pytest.approx(host.peak.allocated_bytes, rel=0.02)
    assert found.host.pinned_bytes < host.host.pinned_bytes
    assert any("files of tensors were not written" in text for text in found.coverage.assumed)
