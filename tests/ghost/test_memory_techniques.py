"""What techniques take off a card, in bytes one can add up, on the ghost."""

import dataclasses
from importlib.util import find_spec
from typing import Any

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.from_traces import Run
from tonnage.estimates.predict import estimate
from tonnage.estimates.timeline import timeline
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.workers.worker import Worker

pytestmark = pytest.mark.ghost

WIDTH, LAYERS, VOCABULARY, TOKENS = 256, 6, 1024, 512

MODEL = ModelRef(
    name="tiny",
    kind="config",
    config={
        **{"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 512},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"max_position_embeddings": 1024, "tie_word_embeddings": False},
    },
)
JOB = Job(model=MODEL, seq_len=256, micro_batch=2)
BF16 = 2
INPUT = TOKENS * WIDTH * BF16
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Found:
    """A run, and what it held."""

    run: Run

    def most(self, category: str, step: int | None = None) -> int:
        """Most bytes of one category at any moment (of one step)."""
        trace = self.run.traces[0]
        lives = [life for life in timeline(trace).lives if life.category == category]
        lives = [life for life in lives if step is None or trace.marks[life.mark].step == step]
        changes = sorted([(life.born, life.size_bytes) for life in lives] + [(x.died, -x.size_bytes) for x in lives])
        held = most = 0
        for _, change in changes:
            held += change
            most = max(most, held)
        return most

    def largest(self) -> int:
        """The largest block."""
        return max(life.size_bytes for life in timeline(self.run.traces[0]).lives)


@pytest.fixture(scope="module")
def found(worker: Worker) -> Any:
    """Runs a job under a plan in bf16, each once."""
    known: dict[Any, Found] = {}

    def run(job: Job = JOB, gpu: str = "a100-40gb", **choices: Any) -> Found:
        key = (str(dataclasses.asdict(job)), gpu, tuple(sorted(choices.items())))
        if key not in known:
            plan = Plan(**{"precision": "bf16-true", **choices})
            answer = estimate(Case(job, plan, parse_cluster(gpu)), worker=worker, steps=2)
            trace = answer.traces[0]
            assert trace.peaks["allocated_bytes"] == answer.estimate.peak.allocated_bytes
            assert answer.estimate.fits
            known[key] = Found(answer)
        return known[key]

    return run


def parameters(found: Found) -> int:
    return int(found.run.estimate.model["parameters"])


def test_checkpointing_keeps_inputs(found: Any) -> None:
    """`none` keeps all of six layers; `full` an input each and one layer, `sqrt` two inputs and three layers."""
    kept = {way: found(checkpointing=way).most("activation") for way in ("none", "full", "sqrt", "selective")}
    layer = (kept["sqrt"] - kept["full"] + 3 * INPUT) / 2
    assert kept["full"] < kept["sqrt"] < kept["none"]
    assert kept["full"] < kept["selective"] < kept["none"]
    assert 5 * INPUT < layer < 40 * INPUT
    assert found(checkpointing="attention-module").most("activation") < kept["none"]


def test_kept_outputs_are_logits_beside_backward(found: Any) -> None:
    """Of the loss itself: the logits in bf16, as fp32, and its gradient; the network is small beside them."""
    words = 1 << 17
    wide = dataclasses.replace(MODEL, name="wide", config={**MODEL.config, "vocab_size": words})
    job = dataclasses.replace(JOB, model=wide, method="lora")
    freed, kept = (found(job, outputs=word).run.estimate.peak.allocated_bytes for word in ("freed", "step"))
    assert kept - freed == TOKENS * words * BF16


def test_efficient_attention_takes_grouped_heads_repeated(found: Any) -> None:
    """transformers repeats keys and values, and the kernel keeps no scores."""
    scores = JOB.micro_batch * 8 * JOB.seq_len**2 * BF16
    efficient, maths = (found(JOB, attention=name) for name in ("efficient", "math"))
    assert maths.most("activation") - efficient.most("activation") > LAYERS * scores / 2


def test_core_attention_pays_where_there_are_scores(found: Any) -> None:
    """Eager attention keeps softmax's fp32 and bf16 scores of 8 heads in each layer: all but one layer's are gone."""
    eager = found(attention="eager").most("activation")
    again = found(attention="eager", checkpointing="attention").most("activation")
    scores = 2 * 8 * 256 * 256 * BF16
    assert eager - again >= (LAYERS - 1) * scores


WIDE = dataclasses.replace(
    JOB,
    seq_len=1024,
    micro_batch=8,
    model=dataclasses.replace(
        MODEL, name="wide", config={**MODEL.config, "hidden_size": 2048, "intermediate_size": 4096}
    ),
)
"""Layers with more for the card to do than for the host."""


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_a_budget_is_kept_and_used(found: Any, precision: str) -> None:
    most, least = (found(WIDE, precision=precision, checkpointing=way).most("activation") for way in ("none", "full"))
    for share in (0.3, 0.6, 0.9):
        budget = int(least + share * (most - least))
        held = found(WIDE, precision=precision, checkpointing=f"budget={budget}", allocator="expandable")
        assert 0.985 * budget < held.most("activation", step=1) <= budget


@pytest.mark.skipif(
    not all(map(find_spec, ("bitsandbytes", "accelerate", "peft"))),
    reason="bitsandbytes, accelerate or peft is missing",
)
def test_a_budget_is_used_where_layers_do_something_once(found: Any) -> None:
    """Layers of bitsandbytes cast their biases when they first run."""
    config = {**WIDE.model.config, "attention_bias": True}
    job = dataclasses.replace(
        WIDE, method="qlora", model=dataclasses.replace(WIDE.model, name="biased", config=config)
    )
    plan = {"precision": "bf16-mixed", "allocator": "expandable"}
    most, least = (found(job, checkpointing=way, **plan).most("activation") for way in ("none", "full"))
    budget = (most + least) // 2
    held = found(job, checkpointing=f"budget={budget}", **plan)
    assert 0.95 * budget < held.most("activation", step=1) <= budget
    assert held.run.estimate.model["run_again"]["layers_in_part"] > 0


def test_a_budget_is_used_where_a_layer_reads_whole_numbers_back(found: Any) -> None:
    """Qwen2.5-VL's tower cuts its rows by lengths that it reads from the card, forward and again."""
    small = tiny_job("qwen2_5_vl", seq_len=1024, micro_batch=4, image_size="112x112")
    tower = {**small.model.config["vision_config"], "hidden_size": 2048, "intermediate_size": 4096, "window_size": 56}
    model = dataclasses.replace(small.model, config={**small.model.config, "vision_config": tower})
    job = dataclasses.replace(small, model=model)
    most, least = (found(job, checkpointing=way).most("activation") for way in ("none", "full"))
    budget = (most + least) // 2
    held = found(job, checkpointing=f"budget={budget}")
    assert held.most("activation", step=1) <= budget
    assert held.run.estimate.model["run_again"]["layers_in_part"] > 0


def test_where_the_host_binds_layers_are_kept_whole(found: Any) -> None:
    """Looking at each operation would cost more than it spares."""
    most, least = (found(checkpointing=way).most("activation") for way in ("none", "full"))
    budget = (most + least) // 2
    held = found(checkpointing=f"budget={budget}")
    assert budget - (most - least) / LAYERS * 1.5 < held.most("activation", step=1) <= budget
    again = held.run.estimate.model["run_again"]
    assert (again["layers_in_part"], again["layers_again"]) == (0, LAYERS // 2)


def test_a_budget_sends_a_part_to_the_host(found: Any) -> None:
    """As much as the link hides: the same budget lets less run again."""
    most, least = (found(WIDE, checkpointing=way).most("activation") for way in ("none", "full"))
    budget = int(least + 0.5 * (most - least))
    plain = found(WIDE, checkpointing=f"budget={budget}")
    sending = found(WIDE, checkpointing=f"budget={budget}", activation_offload="cpu-streamed")
    again, less = (one.run.estimate.model["run_again"] for one in (plain, sending))
    assert sending.most("activation", step=1) <= budget
    assert less["seconds_fraction"] < again["seconds_fraction"] < 1
    assert less["sent_bytes"] > again["sent_bytes"] == 0
    assert sending.run.estimate.host.pinned_bytes >= 0.999 * less["sent_bytes"]  # without rounding to blocks


def test_states_go_to_the_host(found: Any) -> None:
    plain, half, none = found(), found(optimizer_offload="cpu=0.5"), found(optimizer_offload="cpu")
    states = 2 * parameters(plain) * BF16
    assert states <= plain.most("optimizer_state") < 1.1 * states
    assert none.most("optimizer_state") == 0
    assert 0.3 * states < half.most("optimizer_state") < 0.6 * states
    assert none.run.estimate.host.pinned_bytes >= 2 * parameters(plain) * BF16  # parameters and gradients
    assert none.run.estimate.peak.allocated_bytes < plain.run.estimate.peak.allocated_bytes - 0.9 * states


def test_what_rests_in_files_is_not_the_hosts(found: Any) -> None:
    job = dataclasses.replace(JOB, model=dataclasses.replace(MODEL, config={**MODEL.config, "vocab_size": 65536}))
    memory, files = (found(job, optimizer_offload=place) for place in ("cpu", "nvme"))
    assert files.run.estimate.peak.allocated_bytes == memory.run.estimate.peak.allocated_bytes
    assert files.run.estimate.host.pinned_bytes < MIB
    held, left = (
        sum(one.run.estimate.ranks[0]["host"][name] for name in ("process", "pinned", "tensors"))
        for one in (memory, files)
    )
    saved = held - left
    assert saved > 3.5 * parameters(memory) * BF16, "parameters, gradients and two moments of the larger tensors"


def test_gradients_do_not_pile_up_in_backward(found: Any) -> None:
    """The largest is that of head or embedding; two may be there at once."""
    largest = VOCABULARY * WIDTH * BF16
    assert found().most("gradient") >= parameters(found()) * BF16
    assert found(optimizer_in_backward=True).most("gradient") <= 2 * largest
    assert found(optimizer_in_backward=True).run.traces[0].steps == 2


def test_activations_wait_on_the_host(found: Any) -> None:
    job = dataclasses.replace(JOB, micro_batch=16)  # a layer's tensors are above 1 MiB
    plain = found(job)
    for kind in ("cpu", "cpu-streamed"):
        offloaded = found(job, activation_offload=kind)
        assert offloaded.most("activation") < plain.most("activation") / 3
        assert offloaded.run.estimate.host.pinned_bytes > plain.most("activation") / 2


@pytest.mark.parametrize("loss", ["chunked", "fused", "torch"])
def test_all_logits_never_exist(found: Any, loss: str) -> None:
    job = dataclasses.replace(JOB, model=dataclasses.replace(MODEL, config={**MODEL.config, "vocab_size": 16384}))
    job = dataclasses.replace(job, micro_batch=8)
    logits = 8 * 256 * 16384 * BF16
    assert found(job).largest() >= 2 * logits  # in fp32
    assert found(job, loss=loss).largest() < 2 * logits


def test_what_comes_besides_the_steps_has_phases(found: Any) -> None:
    job = dataclasses.replace(JOB, eval_batch=2, eval_logits=4, generate=3, save_checkpoint="full", resume="gpu")
    phases = {phase.name: phase.allocated_bytes for phase in found(job).run.estimate.phases}
    weights, states = (factor * parameters(found()) * BF16 for factor in (1, 2))
    assert phases["resume"] >= 2 * weights + states
    assert phases["save"] < weights + states + 20 * MIB
    logits = TOKENS * VOCABULARY * BF16
    assert phases["evaluate"] >= weights + states + (3 + 4) * logits  # joining three with the fourth
    assert weights + states < phases["generate"] < phases["evaluate"]
    assert [step.step for step in found(job).run.estimate.steps] == [1, 2]


def test_a_resumed_zero1_holds_its_states_twice(found: Any) -> None:
    """torch's ZeroRedundancyOptimizer copies what came from a file for itself, and for the optimizer that steps."""
    resumed = found(dataclasses.replace(JOB, resume="cpu"), "4xa100-40gb", shard="zero1").run
    first = found(JOB, "4xa100-40gb", shard="zero1").run
    states = 2 * parameters(found()) * BF16 / 4
    more = resumed.estimate.peak.allocated_bytes - first.estimate.peak.allocated_bytes
    assert 0.9 * states < more < 1.3 * states  # parameters are dealt out whole, and not quite evenly


@pytest.mark.parametrize(("place", "copies"), [("cpu", 0), ("gpu", 1)])
def test_divided_states_resume_beside_a_whole_checkpoint_or_none(found: Any, place: str, copies: int) -> None:
    """A part has weights, gradients and two moments, and the step that makes these as much again as they take."""
    phases = found(dataclasses.replace(JOB, resume=place), "4xa100-40gb", shard="zero3").run.estimate.phases
    allocated = {phase.name: phase.allocated_bytes for phase in phases}
    whole = parameters(found()) * BF16
    least = (3 * copies + (3 if copies else 4) / 4) * whole
    assert least < allocated["resume"] < least + whole / 2 + 2 * MIB


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_layers_keep_less_for_backward_and_the_same_between(found: Any, checkpointing: str) -> None:
    plain, compiled = (found(checkpointing=checkpointing, compile=kind).run.estimate for kind in ("none", "layers"))
    held = [{phase.name: phase.allocated_bytes for phase in each.phases} for each in (plain, compiled)]
    assert abs(held[0]["other"] - held[1]["other"]) < 64 * 1024
    kept = held[0]["forward"] - held[1]["forward"]
    if checkpointing == "none":  # each layer at least the normed inputs of attention and of its MLP in fp32
        assert kept > LAYERS * 2 * TOKENS * WIDTH * 4 / 2
    assert compiled.time["step_seconds"] < plain.time["step_seconds"]


def test_layers_compiled_in_parts_offload_what_they_keep(found: Any) -> None:
    """On a T4, attention without a kernel that keeps no scores ends the graph: hooks are called between graphs."""
    job = dataclasses.replace(JOB, micro_batch=4)
    streamed = found(job, "t4", compile="layers", activation_offload="cpu-streamed").most("activation")
    assert 0 < streamed < found(job, "t4").most("activation") / 2


def test_packed_documents_bring_a_mask(found: Any) -> None:
    assert found(dataclasses.replace(JOB, packing=4)).most("activation") > found().most("activation")


def test_synchronising_each_time_keeps_no_whole_gradients(found: Any) -> None:
    job = dataclasses.replace(JOB, grad_accum=2)
    once = found(job, "4xa100-40gb", shard="zero3").run.estimate.peak.allocated_bytes
    each = found(job, "4xa100-40gb", shard="zero3", accum_sync=True).run.estimate.peak.allocated_bytes
    assert once - each > parameters(found()) * BF16 / 2


def test_drawn_lengths_are_told_apart(worker: Worker) -> None:
    job = dataclasses.replace(JOB, lengths=("64", "200", "256"))
    few = estimate(Case(job, Plan(precision="bf16-true"), parse_cluster("a100-40gb")), worker=worker, steps=2)
    many = estimate(Case(job, Plan(precision="bf16-true"), parse_cluster("a100-40gb")), worker=worker, steps=8)
    assert any("give more --steps" in note for note in few.estimate.notes)
    assert any("with drawn lengths: " in note for note in many.estimate.notes)
    assert many.traces[0].steps == 8
