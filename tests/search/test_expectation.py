"""What runs so far say of candidates that were not run."""

from dataclasses import replace

from solutions import question
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.search.expectation import Expectation
from tonnage.search.pricing import priced
from tonnage.units import GIB


def candidate(micro_batch=1, **plan):
    asked = question(gpu="8xh100-80gb", grad_accum=1)
    job = replace(asked.job, micro_batch=micro_batch)
    return priced(Candidate(job=job, plan=Plan(**{"shard": "zero3", "checkpointing": "full", **plan})), asked.cluster)


def test_the_nearest_run_corrects_what_is_usual():
    expected, one = Expectation(), candidate()
    assert expected.bytes(one) == one.least_bytes + one.beyond_bytes
    expected.learn(one, 40 * GIB)
    assert round(expected.bytes(one)) == 40 * GIB
    assert expected.bytes(candidate(2)) > 40 * GIB
    assert expected.error(one) < expected.error(candidate(2)) < expected.error(candidate(tp=2, precision="fp32"))


def test_whole_runs_say_what_looks_of_their_kind_do_not_show():
    expected, one, other = Expectation(), candidate(), candidate(2)
    expected.look(one, 40 * GIB)
    expected.look(other, 60 * GIB)
    assert round(expected.bytes(other)) == 60 * GIB
    assert expected.beyond(other, unknown=1.5) == 1.5
    expected.learn(one, 44 * GIB)
    assert expected.beyond(other) == 1.1
    assert round(expected.bytes(other)) == round(66 * GIB)
    assert round(expected.bytes(one)) == 44 * GIB, "what was run whole is known"
    assert expected.beyond(candidate(tp=2)) == 1.0, "another kind"


def test_runs_that_divide_weights_otherwise_say_what_is_beside_them():
    expected, one, other = Expectation(), candidate(), candidate(shard="zero2")
    expected.look(one, int(one.least_bytes + 2 * one.beyond_bytes))
    assert round(expected.bytes(other)) == round(other.least_bytes + 2 * other.beyond_bytes)
    assert expected.error(other) == Expectation().error(other), "how near is not known"
    far = candidate(8, shard="zero2")
    assert expected.bytes(far) == far.least_bytes + far.beyond_bytes
    expected.look(other, other.least_bytes)
    assert expected.bytes(other) == other.least_bytes, "a run like it says more"
