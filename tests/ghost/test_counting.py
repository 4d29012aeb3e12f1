"""What the operations of a step work, as they are counted on the ghost."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.predict import estimate
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.report import wording
from tonnage.techniques import build
from tonnage.trace.operations import Operation, StepOperations
from tonnage.workers.worker import Worker

pytestmark = pytest.mark.ghost

CARD = parse_cluster("h200")
LAUNCHED = (1, 2, 3, 4, 5, 13)
COLLECTIVE = 12


def operations(worked: StepOperations) -> Iterator[Operation]:
    """One by one, in order."""
    return (worked.operations[number] for number, _, _ in worked.places())


def flops(worked: StepOperations) -> Counter[str]:
    """Of products and attention, by phase."""
    found: Counter[str] = Counter()
    for one in operations(worked):
        found[one.phase] += one.flops
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_products_are_those_that_torch_counts_on_the_cpu(worker: Worker, name: str) -> None:
    job, plan = tiny_job(name), Plan(precision="fp32", attention="eager")
    found = flops(worker.count_operations(job, plan, CARD))
    with FlopCounterMode(display=False) as counter:
        build(job, plan, device="cpu").run(1)
    assert sum(found.values()) == counter.get_total_flops()
    assert 1.5 * found["forward"] < found["backward"] <= 2 * found["forward"]


def test_all_that_a_step_launches_is_an_operations_or_known_to_be_none(worker: Worker) -> None:
    worked = worker.count_operations(tiny_job("llama"), Plan(), CARD)
    inside = {place for _, first, last in worked.places() for place in range(first, last)}
    launched = [place for place, record in enumerate(worked.records()) if record.kind in LAUNCHED]
    assert len(launched) > 100
    assert len([place for place in launched if place not in inside]) <= 0.02 * len(launched)
    assert sum(one.kernels for one in operations(worked)) == len([place for place in launched if place in inside])


def test_layers_that_run_again_do_so_in_their_own_phase(worker: Worker) -> None:
    plain = flops(worker.count_operations(tiny_job("llama"), Plan(), CARD))
    again = flops(worker.count_operations(tiny_job("llama"), Plan(checkpointing="full"), CARD))
    assert plain["recompute"] == 0
    assert 0 < again["recompute"] < again["forward"] == plain["forward"]
    assert again["backward"] == plain["backward"]


def test_bytes_of_the_optimizer_are_those_of_its_weights(worker: Worker) -> None:
    """A fused AdamW reads weight, gradient and two states, and writes three of them: 28 bytes a weight."""
    worked = worker.count_operations(tiny_job("llama"), Plan(optimizer="adamw-fused"), CARD)
    moved = sum(one.bytes for one in operations(worked) if one.name == "_fused_adamw_")
    parameters = estimate(Case(tiny_job("llama"), Plan(), CARD), worker=worker).estimate.model["parameters"]
    assert moved == pytest.approx(28 * parameters, rel=0.01)


def test_divided_weights_are_counted_as_this_rank_has_them(worker: Worker) -> None:
    """FSDP2's and tensor parallelism's tensors do their operations by plain ones."""
    cluster = parse_cluster("4xh200")
    whole = flops(worker.count_operations(tiny_job("llama"), Plan(), CARD))
    sharded = worker.count_operations(tiny_job("llama"), Plan(shard="zero3"), cluster)
    assert flops(sharded) == whole
    names = {record.name for record in sharded.records() if record.kind == COLLECTIVE}
    assert names == {"AllGather", "ReduceScatter"}
    halved = flops(worker.count_operations(tiny_job("llama"), Plan(tp=2), replace(cluster, gpus_per_node=2)))
    assert sum(halved.values()) == pytest.approx(sum(whole.values()) / 2, rel=0.01)


LINEAR = {
    **{"model_type": "qwen3_5_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 61},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
"""Three of four layers have linear attention: a kind whose dimensions do not say its seconds."""


def test_a_network_of_unknown_dimensions_gets_seconds_where_they_are_asked_for(worker: Worker) -> None:
    job = replace(tiny_job("llama"), model=ModelRef(name="linear", kind="config", config=LINEAR))
    assert estimate(Case(job, Plan(), CARD), worker=worker).estimate.time["step_seconds"] is None
    found = estimate(Case(job, Plan(), CARD), worker=worker, counting=True).estimate
    assert found.time["low_seconds"] < found.time["step_seconds"] < found.time["high_seconds"]
    assert found.time["tokens_per_second_per_gpu"] == pytest.approx(48 / found.time["step_seconds"])
    assert any("operations of a step, counted as they were launched" in one for one in found.coverage.modelled)
    again = estimate(Case(job, Plan(), CARD), worker=worker, counting=True).estimate
    assert again.time == found.time
    assert any("cached by an earlier run" in one for one in again.coverage.run)
    assert again.peak == found.peak


def test_a_script_gets_the_seconds_of_a_further_step(dry_run: Any) -> None:
    """Two matrices of 4 M weights and 512 rows: 3 products of each but the first one's input gradient."""
    answer = dry_run("further.py", "goes-on", gpu="h200", seconds=True)
    found = answer.run.estimate
    assert answer.run.traces[0].steps == 3
    worked = answer.run.traces[0].worked
    assert sum(flops(worked).values()) == 5 * 2 * 512 * 1024 * 4096
    time = found.time
    assert 0 < time["low_seconds"] < time["step_seconds"] < time["high_seconds"] < 0.1
    assert time["tokens_per_second_per_gpu"] is None
    assert 0 < time["mfu"] < 1
    assert "MFU" in wording.pace(found)


def test_a_product_whose_result_has_another_dtype_is_counted(dry_run: Any) -> None:
    """torch's own formulas take no dtype, and TRL's SFTTrainer multiplies so in every step."""
    answer = dry_run("further.py", "widens", gpu="h200", seconds=True)
    assert "Traceback" not in answer.output
    assert answer.run.estimate.time["step_seconds"] > 0
    assert sum(flops(answer.run.traces[0].worked).values()) == 5 * 2 * 512 * 1024 * 4096 + 2 * 64**3


def test_a_step_that_follows_known_numbers_is_counted(dry_run: Any) -> None:
    """What its backward does with them has been computed on the host before it is counted, and is not once more."""
    answer = dry_run("further.py", "chooses", gpu="h200", seconds=True)
    assert "Traceback" not in answer.output
    assert answer.run.estimate.time["step_seconds"] > 0


def test_a_second_epoch_after_the_counted_step_is_no_further_loop(dry_run: Any) -> None:
    answer = dry_run("further.py", "fetches-ahead", gpu="h200", seconds=True)
    assert answer.run.estimate.time["step_seconds"] > 0
    assert answer.run.traces[0].script["further"]["loops"] == []


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("ends", "ended before it"),
        ("fails", "ended before it"),
        ("gives-up", "ended before it"),
        ("counts", "ended before it"),
        ("compiled", "code that torch.compile made cannot be counted"),
    ],
)
def test_what_becomes_of_a_further_step_changes_no_answer(dry_run: Any, how: str, why: str) -> None:
    answer = dry_run("further.py", how, gpu="h200", seconds=True)
    assert answer.error is None, answer.output
    found = answer.run.estimate
    assert found.fits
    assert answer.run.traces[0].steps == 3
    assert found.time["step_seconds"] is None
    assert any(why in one for one in found.coverage.modelled)


@pytest.mark.parametrize(
    ("how", "is_timed", "phase"),
    [
        ("sums", True, "backward"),
        ("evaluates", True, "evaluate"),
        ("evaluates-soon", False, "evaluate"),
        ("evaluates-with-graph", False, "forward"),
        ("copies", False, "other"),
    ],
)
def test_a_counted_step_adds_nothing_to_the_memory(dry_run: Any, how: str, is_timed: bool, phase: str) -> None:
    """While operations are counted, torch adds gradients out of place; and what comes behind is run without."""
    counted, plain = (
        dry_run("further.py", how, gpu="h200", seconds=seconds).run.estimate for seconds in (True, False)
    )
    assert counted.peak.phase == phase
    assert counted.peak.by_category == plain.peak.by_category
    assert (counted.phases, counted.steps[:3]) == (plain.phases, plain.steps[:3])
    assert (counted.time["step_seconds"] is not None) == is_timed


def test_a_program_that_runs_only_once_keeps_its_answer(dry_run: Any, tmp_path: Path) -> None:
    """It is run again since its evaluation needs more than its steps, and finds what the first run wrote."""
    found = dry_run("further.py", "runs-once", str(tmp_path / "out"), gpu="h200", seconds=True).run.estimate
    assert found.peak.phase == "evaluate"
    assert found.peak.allocated_bytes > 2**15 * (1024 + 2 * 4096) * 4
    assert any("may be too high" in note and "FileExistsError" in note for note in found.notes)


def test_several_stacks_are_counted_and_keep_their_wide_interval(worker: Worker) -> None:
    time = estimate(Case(tiny_job("t5"), Plan(), CARD), worker=worker, counting=True).estimate.time
    assert time["low_seconds"] <= 0.7 * time["step_seconds"]
    assert time["high_seconds"] >= 1.7 * time["step_seconds"]
