"""The search finds what trying everything finds, with few runs."""

import itertools
import operator
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from solutions import FormulaRunner, need_bytes, possible, question, without_host_limit
from tonnage.errors import CannotEstimate, UsageError
from tonnage.model import ModelRef
from tonnage.planner.alternatives import DIFFERENT, difference
from tonnage.planner.candidate_pool import SMALL, CandidatePool
from tonnage.planner.candidates import list_candidates
from tonnage.planner.dominance import needs_at_least
from tonnage.planner.pricing import price_candidate
from tonnage.planner.probe import need_of
from tonnage.planner.reasons import explain_choice
from tonnage.planner.refusals import SAME_FAILURES, find_broken_option
from tonnage.planner.search import Search
from tonnage.planner.search_space import LOSSES
from tonnage.planner.solution import Candidate
from tonnage.planner.solve import search
from tonnage.shallow.depths import with_layers
from tonnage.step.model import build, causal_network
from tonnage.techniques import attention
from tonnage.techniques.tensor_parallel import _not_known
from tonnage.units import GIB, format_gib


def by_trying_everything(asked):
    """Return the seconds a token of the fastest candidate that fits; None if none does."""
    for offload in (False, True):
        every = [one for one in list_candidates(asked, offload=offload) if possible(asked, one)]
        fitting = [one for one in every if need_bytes(one, asked.cluster) <= asked.budget_bytes]
        if fitting:
            return min(price_candidate(one, asked.cluster).seconds_per_token for one in fitting)
    return None


ASKED = [
    {"gpu": "a100-80gb", "model": "llama-3.2-1b"},
    {"gpu": "a100-80gb", "model": "llama-3.2-1b", "micro_batch": 8},
    {"gpu": "l4", "model": "llama-3.2-1b", "micro_batch": 4},
    {"gpu": "t4", "model": "llama-3.2-1b"},
    {"gpu": "4xa100-40gb", "model": "llama-3.1-8b"},
    {"gpu": "8xa100-80gb", "model": "llama-3.1-8b", "grad_accum": 4},
    {"gpu": "8xh100-80gb", "model": "mixtral-8x7b"},
    {"gpu": "2x8xh100-80gb", "model": "qwen2.5-32b", "seq_len": 8192},
    {"gpu": "8xl4", "model": "llama-3.1-8b", "without": ("tp", "pp", "cp")},
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda options: f"{options['model']}-{options['gpu']}")
def test_equal_to_trying_everything(asked):
    asked = question(**asked)
    runner = FormulaRunner()
    found = Search(asked, runner, lambda text: None)
    found.run(1)
    best = by_trying_everything(asked)
    if best is None:
        assert not found.found
    else:
        assert found.found[0].priced.seconds_per_token == best


def test_alternatives_differ_and_are_slower():
    asked = question(gpu="8xh100-80gb", grad_accum=2)
    runner = FormulaRunner()
    found = Search(asked, runner, lambda text: None)
    found.run(4)
    assert len(found.found) == 4
    plans = [fit.priced.candidate for fit in found.found]
    assert any(  # one of them may be there for its room
        all(difference(*pair) >= DIFFERENT for pair in itertools.combinations(three, 2))
        for three in itertools.combinations(plans, 3)
    )
    times = [one.seconds_per_token for one, _ in found.found]
    assert times == sorted(times)
    assert len(runner.whole_runs) == len({repr(one) for one in runner.whole_runs}) <= 10
    assert len(runner.probes) < 30


@pytest.mark.parametrize(("combinations", "worth"), [(SMALL, (0.98, 0.997)), (SMALL + 1, (0.98,))])
def test_doubtful_candidates_must_be_faster_by_enough(combinations, worth, monkeypatch):
    """Among many candidates; among few any faster one is run."""
    asked = question(gpu="8xh100-80gb", grad_accum=2)
    found = Search(asked, FormulaRunner(), lambda text: None)
    pool = found.pool
    every = pool.price(list(list_candidates(asked)))[:combinations]
    times = [0.98, 0.997, *itertools.repeat(1.0, combinations - 2)]
    pool.order = [replace(one, timing=None, rank=time) for one, time in zip(every, times, strict=True)]
    quick, hardly, best, *_ = pool.order
    monkeypatch.setattr(CandidatePool, "expected_part", lambda self, one: 1.05)
    monkeypatch.setattr(pool.expectation, "error", lambda one: 0.1)
    assert tuple(one.rank for one in pool.list_doubtful([best])) == worth
    assert tuple(one.rank for one in (quick, hardly) if pool.is_worthwhile(one, [best])) == worth


def test_every_candidate_is_probed_until_enough_fit():
    asked = question(gpu="a100-80gb", model="llama-3.2-1b", micro_batch=4, seq_len=1024)
    found = Search(asked, FormulaRunner(), lambda text: None)
    order = [price_candidate(one, asked.cluster) for one in itertools.islice(list_candidates(asked), 5)]
    seen = []

    def fail(batch, *_):
        seen.extend(batch)
        return [UsageError("no") for _ in batch]

    found.runner.probe = found.runner.run_whole = fail
    found._search_likely(order, 4)
    assert sorted(map(repr, seen)) == sorted(repr(one.candidate) for one in order)
    assert next(iter(found.refusals.refused.values())).why == "no", "failures are reported first"


@pytest.mark.parametrize(
    ("micro_batch", "changes", "expected"),
    [
        (2, {}, True),
        (4, {"cp": 2}, True),
        (8, {"cp": 4, "checkpointing": "selective"}, True),
        (2, {"cp": 2}, False),
        (8, {"cp": 2, "tp": 2}, False),
        (2, {"checkpointing": "full"}, True),
        (1, {"checkpointing": "selective"}, False),
    ],
)
def test_context_parallel_candidates_need_at_least_as_much(micro_batch, changes, expected):
    asked = question(gpu="8xa100-80gb", micro_batch=2)
    failed = Candidate(job=asked.job, plan=replace(asked.plan, shard="zero3", checkpointing="full"))
    other = Candidate(job=replace(asked.job, micro_batch=micro_batch), plan=replace(failed.plan, **changes))
    assert needs_at_least(other, failed) is expected
    if changes.get("cp"):
        assert not needs_at_least(failed, other)


def test_too_large_reports_missing_bytes_and_remedies():
    without = ("param-offload", "optimizer-offload", "checkpointing")
    asked = question(gpu="t4", model="llama-3.1-8b", seq_len=2048, without=without)
    solution = search(asked, FormulaRunner(), top=1)
    assert solution.status == "too_large"
    assert not solution.plans
    assert solution.nearest.missing_bytes > 0
    remedies = {remedy.what for remedy in solution.nearest.remedies}
    assert any(words.startswith("--gpu") for words in remedies)
    assert "--method qlora" in remedies or find_spec("bitsandbytes") is None


def test_reasons_and_path_explain_the_best_plan():
    without = ("loss=plain", "allocator=default")
    solution = search(question(gpu="8xa100-80gb", without=without), FormulaRunner(), top=2)
    best = solution.plans[0]
    techniques = {reason.technique.partition("=")[0] for reason in best.reasons}
    assert {"allocator", "loss", "shard"} <= techniques
    assert solution.path[0].change == "baseline"
    assert not solution.path[0].fits
    assert solution.path[-1].fits
    assert solution.path[-1].process_bytes == best.estimate.peak.process_bytes
    shard = next(reason for reason in best.reasons if reason.technique.startswith("shard="))
    assert shard.saves_bytes >= 0


class LowProbes(FormulaRunner):
    """Probes show 3 GiB less than whole runs need."""

    def probe(self, candidates, cluster):
        return [
            replace(one, process_bytes=one.process_bytes - 3 * GIB, whole=False)
            for one in super().probe(candidates, cluster)
        ]


def test_need_without_a_technique_is_relative_to_the_whole_run():
    """Two probes are too low by about as much, so their difference is right."""
    asked = question(gpu="8xa100-80gb", without=("loss=plain", "allocator=default"))
    exact, low = (search(asked, runner, top=2).plans[0] for runner in (FormulaRunner(), LowProbes()))
    assert low.estimate.peak == exact.estimate.peak
    assert [reason.saves_bytes for reason in low.reasons] == [reason.saves_bytes for reason in exact.reasons]
    assert low.reasons[0].technique == "allocator=expandable"  # is run whole
    for reason in low.reasons[1:]:
        assert f"~{format_gib(low.estimate.peak.process_bytes + reason.saves_bytes)}" in reason.why
    assert not any("~" in reason.why for reason in exact.reasons)


@pytest.mark.parametrize(("layers", "itself"), [(4, False), (16, True)])
def test_plan_itself_is_probed_only_if_few_layers_are(layers, itself):
    """A shallow network is probed whole, and what the plan needs is known."""
    asked = question("llama-3.2-1b", gpu="t4", without=("checkpointing=every-4", "checkpointing=every-2"))
    asked = replace(asked, job=with_layers(asked.job, layers))
    best = search(asked, FormulaRunner(), top=1).plans[0]
    probed = []

    class Recorder(FormulaRunner):
        def probe(self, candidates, cluster):
            probed.extend(candidates)
            return super().probe(candidates, cluster)

        def run_whole(self, candidates, cluster, budget_bytes=None):
            run.extend(candidates)
            return super().run_whole(candidates, cluster, budget_bytes)

    run = []
    assert len(explain_choice(best, asked, Recorder())) == len(probed) + len(run) - itself > 1
    assert (best.candidate in probed) == itself
    has_segments = best.candidate.plan.allocator == "expandable"
    assert [one.plan for one in run] == [replace(best.candidate.plan, allocator="default")] * (
        itself and has_segments
    )


def test_reason_says_what_cannot_be_run():
    class Refusing(FormulaRunner):
        def probe(self, candidates, cluster):
            return [CannotEstimate("The step failed: no such kernel. Upgrade torch.") for _ in candidates]

        def run_whole(self, candidates, cluster, budget_bytes=None):
            return self.probe(candidates, cluster)

    asked = question(gpu="8xa100-80gb")
    best = search(asked, FormulaRunner(), top=1).plans[0]
    reasons = explain_choice(best, asked, Refusing())
    assert reasons
    for reason in reasons:
        assert reason.saves_bytes is None
        assert reason.why.endswith("it cannot be run (The step failed: no such kernel).")


def test_common_failure_is_reported_once():
    class Kernelless(FormulaRunner):
        def probe(self, candidates, cluster):
            return [CannotEstimate("torch has no kernels for this card.") for _ in candidates]

        def run_whole(self, candidates, cluster, budget_bytes=None):
            return self.probe(candidates, cluster)

    solution = search(question(gpu="8xa100-80gb"), Kernelless(), top=1)
    assert solution.status == "unsupported"
    said = [one for one in solution.refused if "no kernels" in one.why]
    assert [one.what for one in said] == ["all"]
    assert solution.refused[0] == said[0]


def test_constraints_without_any_combination():
    solution = search(question(gpu="a100-80gb", without=("micro-batch=1",)), FormulaRunner(), top=1)
    assert solution.status == "unsupported"
    assert solution.refused[0].why.endswith("; with --without micro-batch=1 left out there are some")
    fixed = question(gpu="8xa100-80gb", shard="zero3", tp=1, stated=("shard", "tp"), without=("pp", "cp"))
    five = replace(fixed, job=replace(fixed.job, global_batch_tokens=5 * fixed.job.seq_len))
    why = search(five, FormulaRunner(), top=1).refused[0].why
    assert "; with --tp 1 left out there are some; all of them could share a global batch of 32,768 tokens" in why
    with pytest.raises(UsageError, match="tp 3"):
        question(gpu="8xa100-80gb", tp=3)


class Failing(FormulaRunner):
    """Candidates for which `why` returns a message cannot be run, or not whole."""

    def __init__(self, why, *, probes_fail=True):
        super().__init__()
        self.why, self.probes_fail = why, probes_fail

    def probe(self, candidates, cluster):
        self.probes += candidates
        return [self._failed(one, self.probes_fail) or need_of(self._answer(one, cluster)) for one in candidates]

    def run_whole(self, candidates, cluster, budget_bytes=None):
        self.whole_runs += candidates
        return [self._failed(one, True) or self._answer(one, cluster) for one in candidates]

    def _failed(self, candidate, fails):
        words = self.why(candidate) if fails else None
        return CannotEstimate(words) if words else None


def adapters_fail(candidate):
    """Adapters can never be run."""
    return "The step failed: no" if candidate.job.method == "lora" else None


def uncut(candidate):
    """The network has no plan for tensor parallelism."""
    return "How it is cut is not known: no plan; choose tp 1." if candidate.plan.tp > 1 else None


def uncompiled(candidate):
    """Flex attention needs more shared memory than the card has."""
    words = "The step failed: out of resource: triton_tem_fused_flex_attention_backward_mul_1"
    return words if candidate.plan.attention == "flex" else None


@pytest.mark.parametrize(
    ("asked", "losses"),
    [
        ({"gpu": "h200", "model": "llama-3.2-1b"}, ("plain",)),
        ({"gpu": "h200", "model": "llama-3.2-1b", "without": ("loss=plain",)}, ("fused",)),
        ({"gpu": "h200", "model": "llama-3.2-1b", "loss": "torch"}, ("torch",)),
        ({"gpu": "rtx-3090", "model": "llama-3.2-1b", "micro_batch": 4}, ("fused", "liger", "torch")),
        ({"gpu": "8xa100-40gb", "model": "llama-3.1-8b", "tp": 8}, ("plain", "chunked")),
        ({"gpu": "h200", "model": "llama-3.2-1b", "engine": "hf-trainer"}, ("plain", "liger")),
    ],
    ids=["room", "not allowed", "said", "no room", "divided", "trainer"],
)
def test_loss_is_the_fastest_that_fits(asked, losses):
    asked = question(**asked)
    best = search(asked, FormulaRunner(), top=2).plans[0]
    assert best.candidate.plan.loss in losses
    assert best.estimate.peak.process_bytes <= asked.budget_bytes
    for loss in LOSSES if asked.is_open("loss") else ():
        other = replace(best.candidate, plan=replace(best.candidate.plan, loss=loss))
        if asked.is_allowed("loss", loss) and possible(asked, other):
            needs_more = need_bytes(other, asked.cluster) > asked.budget_bytes
            seconds = (price_candidate(one, asked.cluster).seconds_per_token for one in (other, best.candidate))
            assert needs_more or operator.ge(*seconds)


class Logits(FormulaRunner):
    """Runs need three times the usual extra, but only the logits themselves on top of the chunked loss."""

    def _answer(self, candidate, cluster):
        sliced = replace(candidate, plan=replace(candidate.plan, loss="chunked"))
        one, slices = price_candidate(candidate, cluster), price_candidate(sliced, cluster)
        made = super()._answer(candidate, cluster)
        need = int(slices.bound_bytes + 3 * slices.extra_bytes + one.extra_bytes - slices.extra_bytes)
        held = dict.fromkeys(made.peak.by_category, 0) | {"activation": need}
        peak = replace(made.peak, process_bytes=need, by_category=held)
        return replace(made, fits=need <= cluster.device.capacity_bytes, peak=peak)


def test_plain_loss_is_probed_whatever_is_usual():
    asked = question("gpt2", "t4", seq_len=1024, micro_batch=7, only=("loss", "optimizer", "allocator"))
    best = search(asked, Logits(), top=1).plans[0]
    assert best.candidate.plan.loss == "plain"
    assert best.estimate.peak.process_bytes <= asked.budget_bytes


def test_method_that_always_fails_is_given_up():
    runner = Failing(adapters_fail)
    asked = question("llama-3.2-1b", "8xa100-80gb", method="lora", without=("tp", "pp", "cp"))
    found = Search(asked, runner, lambda text: None)
    found.run(3)
    assert not found.found
    assert len(runner.probes) + len(runner.whole_runs) <= SAME_FAILURES + 2
    both = replace(asked, methods=("full", "lora"))
    found = Search(both, runner, lambda text: None)
    found.run(3)
    assert {one.candidate.job.method for one, _ in found.found} == {"full"}


def test_broken_dimension_is_tried_once():
    runner, asked = Failing(uncut), question(gpu="8xa100-40gb")
    found = Search(asked, runner, lambda text: None)
    found.run(4)
    assert len({repr(one) for one in runner.probes + runner.whole_runs if one.plan.tp > 1}) <= runner.worker_count
    assert found.refusals.refused["tp"].why == "How it is cut is not known: no plan; choose tp 1."
    assert found.narrowed.without == ("tp",)
    assert {one.plan.tp for one in list_candidates(found.narrowed)} == {1}
    said = Search(question(gpu="8xa100-40gb", tp=2), Failing(uncut), lambda text: None)
    said.run(1)
    assert not said.found
    assert said.narrowed == said.question


def test_nearest_plan_can_be_run():
    solution = search(without_host_limit(question("llama-3.1-70b", "8xl4")), Failing(uncut), explain=False)
    assert solution.status == "too_large"
    assert solution.nearest is not None
    assert solution.nearest.candidate.plan.tp == 1


def test_broken_attention_is_dropped():
    runner, asked = Failing(uncompiled, probes_fail=False), question("gemma-2-2b", "rtx-4090", method="lora")
    found = Search(asked, runner, lambda text: None)
    found.run(2)
    assert {one.candidate.plan.attention for one, _ in found.found} == {"auto"}
    assert len([one for one in runner.whole_runs if one.plan.attention == "flex"]) <= runner.worker_count
    assert "flex_attention" in found.refusals.refused["attention"].why
    said = Search(
        replace(asked, plan=replace(asked.plan, attention="flex")),
        Failing(uncompiled, probes_fail=False),
        lambda text: None,
    )
    said.run(2)
    assert not said.found


def test_restarted_search_finds_what_one_without_that_attention_finds():
    asked = question("gemma-2-9b", "8xa100-80gb", seq_len=8192, grad_accum=4)
    again = Search(asked, Failing(uncompiled, probes_fail=False), lambda text: None)
    again.run(4)
    without = Search(replace(asked, without=("attention",)), FormulaRunner(), lambda text: None)
    without.run(4)
    assert [one.candidate for one, _ in again.found] == [one.candidate for one, _ in without.found] != []
    known = set(again.pool.order)
    assert again.pool.tried <= known
    assert again.pool.impossible <= known


def test_broken_option_is_found_by_the_message():
    on = Candidate(job=question().job, plan=replace(question().plan, tp=2, pp=2, ep=2, cp=2, attention="efficient"))
    off = replace(on, plan=question().plan)
    for axis, wanted in (("tp", "Tensor parallelism"), ("pp", "A pipeline"), ("ep", "Expert parallelism")):
        with pytest.raises(CannotEstimate) as refused:
            causal_network(torch.nn.Linear(2, 2), wanted, f"{axis} 1")
        assert find_broken_option(on, str(refused.value)) == axis
        assert find_broken_option(off, str(refused.value)) is None
    assert find_broken_option(on, str(_not_known(torch.nn.Linear(2, 2), "no plan"))) == "tp"
    with pytest.raises(CannotEstimate) as refused, attention._force_backend("efficient"):
        raise RuntimeError("No available kernel. Aborting execution.")
    assert find_broken_option(on, str(refused.value)) == "attention"
    assert find_broken_option(on, "Memory ran out.") is None
    fields = {"model_type": "gemma2", "num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 64}
    unstated = ModelRef(name="g", kind="config", config=fields)  # it caps its scores by default
    with pytest.raises(UsageError, match="has no sdpa attention") as refused:
        build(unstated, dtype=torch.bfloat16, attention="sdpa", device=torch.device("meta"))
    assert find_broken_option(on, str(refused.value)) == "attention"
