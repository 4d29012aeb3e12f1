"""The decisions of tuning, with outcomes that are made up."""

from dataclasses import replace

import pytest

from networks import tiny_job
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.tuning.decisions import Tuned, tune
from tonnage.tuning.outcome import Outcome, worst

CARD = 100


def start(micro_batch: int = 1, grad_accum: int = 8, **plan: object) -> Candidate:
    job = replace(tiny_job("llama"), micro_batch=micro_batch, grad_accum=grad_accum)
    return Candidate(job=job, plan=Plan(**plan))


def card(candidate: Candidate, *, fixed: int = 20, per_row: int = 18) -> Outcome:
    """Return what a card of 100 bytes says: states and rows take memory, larger micro-batches are faster."""
    saved = 0.5 if candidate.plan.checkpointing == "full" else 1.0
    saved *= 0.5 if candidate.plan.activation_offload != "none" else 1.0
    states = fixed / 4 if candidate.plan.optimizer_offload == "cpu" else fixed
    needed = int(states + per_row * saved * candidate.job.micro_batch)
    if needed > CARD:
        return Outcome(ended="out_of_memory", moment="step 1", message="more", capacity_bytes=CARD)
    speed = 10.0 * candidate.job.micro_batch / (1 + candidate.job.micro_batch) * saved
    return Outcome(
        ended="finished",
        moment="save",
        step_seconds=1 / speed,
        tokens_per_second=speed,
        reserved_bytes=needed,
        capacity_bytes=CARD,
    )


def tuned(*starts: Candidate, **card_options: int) -> Tuned:
    named = [(f"predicted {rank}", candidate) for rank, candidate in enumerate(starts, 1)]
    return tune(named, lambda candidate: card(candidate, **card_options), is_possible=lambda candidate: True)


def sizes(found: Tuned) -> list[int]:
    return [trial.candidate.job.micro_batch for trial in found.trials]


def test_the_micro_batch_grows_to_the_last_that_holds() -> None:
    found = tuned(start())
    assert sizes(found) == [1, 2, 4, 8]
    assert [trial.outcome.holds for trial in found.trials] == [True, True, True, False]
    assert found.best is not None
    assert (found.best.candidate.job.micro_batch, found.best.candidate.job.grad_accum) == (4, 2)


def test_a_full_card_is_not_asked_for_more() -> None:
    assert sizes(tuned(start(), per_row=38)) == [1, 2]  # 96 of 100 bytes


def test_techniques_are_added_until_it_holds() -> None:
    found = tuned(start(micro_batch=2, grad_accum=1), fixed=95, per_row=62)
    assert [trial.why for trial in found.trials] == [
        "predicted 1",
        "out of memory: micro-batch 1",
        "out of memory: checkpointing full",
        "out of memory: activations on the host",
        "out of memory: optimizer states on the host",
        "memory is left: micro-batch 2",
    ]
    assert found.best is not None
    assert found.best.candidate.plan.optimizer_offload == "cpu"


def test_nothing_holds() -> None:
    found = tuned(start(), fixed=1000)
    assert found.best is None
    assert len(found.trials) == 4


def test_each_start_is_tried_and_the_fastest_wins() -> None:
    slow, fast = start(micro_batch=8, grad_accum=1, checkpointing="full"), start(micro_batch=4, grad_accum=2)
    found = tuned(slow, fast)
    assert found.best is not None
    assert found.best.candidate == fast
    assert len(found.trials) == 3


def test_a_larger_micro_batch_that_is_slower_ends_the_growth() -> None:
    def slows(candidate: Candidate) -> Outcome:
        speed = {1: 5.0, 2: 9.0, 4: 6.0}[candidate.job.micro_batch]
        return Outcome(ended="finished", moment="save", step_seconds=1.0, tokens_per_second=speed)

    found = tune([("predicted 1", start())], slows, is_possible=lambda candidate: True)
    assert sizes(found) == [1, 2, 4]
    assert found.best is not None
    assert found.best.candidate.job.micro_batch == 2


def test_the_number_of_trials_is_bounded() -> None:
    found = tune([("predicted 1", start())], card, is_possible=lambda candidate: True, most_trials=2)
    assert len(found.trials) == 2


def test_combinations_that_are_refused_are_not_tried() -> None:
    found = tune(
        [("predicted 1", start())],
        lambda candidate: card(candidate, fixed=90),
        is_possible=lambda candidate: candidate.plan.checkpointing == "none",
    )
    assert len(found.trials) == 1


@pytest.mark.parametrize("order", [0, 1])
def test_memory_that_ran_out_on_one_rank_decides(order: int) -> None:
    peer = Outcome(ended="failed", moment="step 1", message="connection closed by peer")
    full = Outcome(ended="out_of_memory", moment="step 1", message="CUDA out of memory")
    assert worst([peer, full][:: 1 if order else -1]) == full


def test_the_slowest_rank_and_the_fullest_card_are_reported() -> None:
    one = Outcome(ended="finished", moment="save", step_seconds=1.0, reserved_bytes=9, capacity_bytes=10)
    two = Outcome(ended="finished", moment="save", step_seconds=2.0, reserved_bytes=5, capacity_bytes=20)
    both = worst([one, two])
    assert (both.step_seconds, both.reserved_bytes, both.capacity_bytes) == (2.0, 9, 10)
