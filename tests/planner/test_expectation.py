"""Earlier runs correct what candidates are expected to need."""

from dataclasses import replace

from solutions import question
from tonnage.planner.expectation import Expectation
from tonnage.planner.pricing import price_candidate
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.units import GIB


def candidate(micro_batch=1, **plan):
    asked = question(gpu="8xh100-80gb", grad_accum=1)
    job = replace(asked.job, micro_batch=micro_batch)
    return price_candidate(
        Candidate(job=job, plan=Plan(**{"shard": "zero3", "checkpointing": "full", **plan})), asked.cluster
    )


def test_nearest_run_corrects_the_usual_extra():
    expected, one = Expectation(), candidate()
    assert expected.bytes(one) == one.bound_bytes + one.extra_bytes
    expected.add_whole_run(one, 40 * GIB)
    assert round(expected.bytes(one)) == 40 * GIB
    assert expected.bytes(candidate(2)) > 40 * GIB
    assert expected.error(one) < expected.error(candidate(2)) < expected.error(candidate(tp=2, precision="fp32"))


def test_whole_runs_correct_probes_of_their_kind():
    expected, one, other = Expectation(), candidate(), candidate(2)
    expected.add_probe(one, 40 * GIB)
    expected.add_probe(other, 60 * GIB)
    assert round(expected.bytes(other)) == 60 * GIB
    assert expected.whole_to_probe(other, unknown=1.5) == 1.5
    expected.add_whole_run(one, 44 * GIB)
    assert expected.whole_to_probe(other) == 1.1
    assert round(expected.bytes(other)) == round(66 * GIB)
    assert round(expected.bytes(one)) == 44 * GIB, "the candidate itself was run whole"
    assert expected.whole_to_probe(candidate(tp=2)) == 1.0, "another kind"


def test_runs_with_another_sharding_correct_the_usual_extra():
    expected, one, other = Expectation(), candidate(), candidate(shard="zero2")
    expected.add_probe(one, int(one.bound_bytes + 2 * one.extra_bytes))
    assert round(expected.bytes(other)) == round(other.bound_bytes + 2 * other.extra_bytes)
    assert expected.error(other) == Expectation().error(other), "the error is not known"
    far = candidate(8, shard="zero2")
    assert expected.bytes(far) == far.bound_bytes + far.extra_bytes
    expected.add_probe(other, other.bound_bytes)
    assert expected.bytes(other) == other.bound_bytes, "a similar run counts more"
