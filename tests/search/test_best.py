"""The search finds what trying everything finds, and runs little of it."""

import itertools
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from solutions import Formula, need_bytes, possible, question
from tonnage.errors import CannotEstimate, UsageError
from tonnage.planner.solution import Candidate
from tonnage.search.best import DIFFERENT, SAME_FAILURES, SMALL, SURE, Search, _at_fault, difference
from tonnage.search.depth import of_run
from tonnage.search.needs import needs_no_less
from tonnage.search.pricing import priced
from tonnage.search.reasons import reasons
from tonnage.search.solve import search
from tonnage.search.space import candidates
from tonnage.shallow.few import with_layers
from tonnage.step.model import causal_network
from tonnage.techniques import attention
from tonnage.techniques.tensor_parallel import _not_known
from tonnage.units import GIB, gib


def by_trying_everything(asked):
    """Step seconds a token of the fastest candidate that fits, and how many there were; None where none does."""
    for offload in (False, True):
        every = [one for one in candidates(asked, offload=offload) if possible(asked, one)]
        fitting = [one for one in every if need_bytes(one, asked.cluster) <= asked.budget_bytes]
        if fitting:
            return min(priced(one, asked.cluster).seconds_per_token for one in fitting)
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
    ghosts = Formula()
    found = Search(asked, ghosts, lambda text: None)
    found.run(1)
    best = by_trying_everything(asked)
    if best is None:
        assert not found.found
    else:
        assert found.found[0][0].seconds_per_token == best


def test_alternatives_are_of_different_kinds_and_slower():
    asked = question(gpu="8xh100-80gb", grad_accum=2)
    ghosts = Formula()
    found = Search(asked, ghosts, lambda text: None)
    found.run(4)
    assert len(found.found) == 4
    for (one, _), (other, _) in itertools.combinations(found.found[:3], 2):
        assert difference(one, other) >= DIFFERENT
    times = [one.seconds_per_token for one, _ in found.found]
    assert times == sorted(times)
    assert len(ghosts.asked) == len({repr(one) for one in ghosts.asked}) <= 10
    assert len(ghosts.looked) < 30


@pytest.mark.parametrize(("combinations", "worth"), [(SMALL, (0.98, 0.997)), (SMALL + 1, (0.98,))])
def test_what_is_hardly_faster_and_not_expected_to_fit_is_not_worth_its_runs(combinations, worth, monkeypatch):
    """Among many; among few whatever is faster is."""
    asked = question(gpu="8xh100-80gb", grad_accum=2)
    found = Search(asked, Formula(), lambda text: None)
    every = found._priced(list(candidates(asked)))[:combinations]
    times = [0.98, 0.997, *itertools.repeat(1.0, combinations - 2)]
    found.order = [replace(one, timing=None, place=time) for one, time in zip(every, times, strict=True)]
    quick, hardly, best, *_ = found.order
    monkeypatch.setattr(Search, "_expected_part", lambda self, one: 1.05)
    monkeypatch.setattr(found.expected, "error", lambda one: 0.1)
    assert tuple(one.place for one in found._doubtful([best])) == worth
    found.seem = [best]
    assert tuple(one.place for one in (quick, hardly) if found._would_lead(one)) == worth


def test_nobody_is_lost_between_batches():
    asked = question(gpu="a100-80gb", model="llama-3.2-1b", micro_batch=4, seq_len=1024)
    found = Search(asked, Formula(), lambda text: None)
    order = [priced(one, asked.cluster) for one in itertools.islice(candidates(asked), 5)]
    seen = []
    found.ghosts.need = found.ghosts.fit = lambda batch, *_: seen.extend(batch) or [UsageError("no") for _ in batch]
    found._verify(order, 4)
    assert sorted(map(repr, seen)) == sorted(repr(one.candidate) for one in order)
    assert next(iter(found.refused.values())).why == "no", "what was tried comes before what was not"


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
def test_as_many_tokens_of_longer_sequences_need_no_less(micro_batch, changes, expected):
    asked = question(gpu="8xa100-80gb", micro_batch=2)
    failed = Candidate(job=asked.job, plan=replace(asked.plan, shard="zero3", checkpointing="full"))
    other = Candidate(job=replace(asked.job, micro_batch=micro_batch), plan=replace(failed.plan, **changes))
    assert needs_no_less(other, failed) is expected
    if changes.get("cp"):
        assert not needs_no_less(failed, other)


def test_too_large_says_how_far_and_what_would_help():
    without = ("param-offload", "optimizer-offload", "checkpointing")
    asked = question(gpu="t4", model="llama-3.1-8b", seq_len=2048, without=without)
    solution = search(asked, Formula(), top=1)
    assert solution.status == "too_large"
    assert not solution.plans
    assert solution.nearest.missing_bytes > 0
    remedies = {remedy.what for remedy in solution.nearest.remedies}
    assert any(words.startswith("--gpu") for words in remedies)
    assert "--method qlora" in remedies or find_spec("bitsandbytes") is None


def test_reasons_and_path_explain_the_best_plan():
    solution = search(question(gpu="8xa100-80gb", without=("loss=plain",)), Formula(), top=2)
    best = solution.plans[0]
    techniques = {reason.technique.partition("=")[0] for reason in best.reasons}
    assert {"allocator", "loss", "shard"} <= techniques
    assert solution.path[0].change == "baseline"
    assert not solution.path[0].fits
    assert solution.path[-1].fits
    assert solution.path[-1].process_bytes == best.estimate.peak.process_bytes
    shard = next(reason for reason in best.reasons if reason.technique.startswith("shard="))
    assert shard.saves_bytes >= 0


class LooksTooLow(Formula):
    """Looks show 3 GiB less than whole runs need."""

    def need(self, candidates, cluster):
        return [
            replace(one, process_bytes=one.process_bytes - 3 * GIB, whole=False)
            for one in super().need(candidates, cluster)
        ]


def test_what_a_plan_needs_without_a_technique_is_told_beside_its_whole_run():
    """Where both were looked at, looks are too low by about as much: their difference is right."""
    asked = question(gpu="8xa100-80gb", without=("loss=plain",))
    exact, low = (search(asked, ghosts, top=2).plans[0] for ghosts in (Formula(), LooksTooLow()))
    assert low.estimate.peak == exact.estimate.peak
    assert [reason.saves_bytes for reason in low.reasons] == [reason.saves_bytes for reason in exact.reasons]
    assert low.reasons[0].technique == "allocator=expandable"  # which is run whole
    for reason in low.reasons[1:]:
        assert f"~{gib(low.estimate.peak.process_bytes + reason.saves_bytes)}" in reason.why
    assert not any("~" in reason.why for reason in exact.reasons)


@pytest.mark.parametrize(("layers", "itself"), [(4, False), (16, True)])
def test_a_plan_is_looked_at_beside_what_it_would_be_only_if_looks_are_of_few_layers(layers, itself):
    """A network of few layers is run whole: what the plan needs is known."""
    asked = question("llama-3.2-1b", gpu="t4")
    asked = replace(asked, job=with_layers(asked.job, layers))
    best = search(asked, Formula(), top=1).plans[0]
    looked_at = []

    class Noting(Formula):
        def need(self, candidates, cluster):
            looked_at.extend(candidates)
            return super().need(candidates, cluster)

        def fit(self, candidates, cluster, budget_bytes=None):
            run.extend(candidates)
            return super().fit(candidates, cluster, budget_bytes)

    run = []
    assert len(reasons(best, asked, Noting())) == len(looked_at) + len(run) - itself > 1
    assert (best.candidate in looked_at) == itself
    assert [one.plan for one in run] == [replace(best.candidate.plan, allocator="default")] * itself


def test_what_cannot_be_run_without_a_technique_is_said():
    class Refusing(Formula):
        def need(self, candidates, cluster):
            return [CannotEstimate("The step failed: no such kernel. Upgrade torch.") for _ in candidates]

        def fit(self, candidates, cluster, budget_bytes=None):
            return self.need(candidates, cluster)

    asked = question(gpu="8xa100-80gb")
    best = search(asked, Formula(), top=1).plans[0]
    found = reasons(best, asked, Refusing())
    assert found
    for reason in found:
        assert reason.saves_bytes is None
        assert reason.why.endswith("it cannot be run (The step failed: no such kernel).")


def test_what_every_run_says_is_said_once():
    class Kernelless(Formula):
        def need(self, candidates, cluster):
            return [CannotEstimate("torch has no kernels for this card.") for _ in candidates]

        def fit(self, candidates, cluster, budget_bytes=None):
            return self.need(candidates, cluster)

    solution = search(question(gpu="8xa100-80gb"), Kernelless(), top=1)
    assert solution.status == "unsupported"
    said = [one for one in solution.refused if "no kernels" in one.why]
    assert [one.what for one in said] == ["all"]
    assert solution.refused[0] == said[0]


def test_constraints_that_leave_nothing():
    solution = search(question(gpu="a100-80gb", without=("micro-batch=1",)), Formula(), top=1)
    assert solution.status == "unsupported"
    assert solution.refused[0].why.endswith("; with --without micro-batch=1 left out there are some")
    fixed = question(gpu="8xa100-80gb", shard="zero3", tp=1, stated=("shard", "tp"), without=("pp", "cp"))
    five = replace(fixed, job=replace(fixed.job, global_batch_tokens=5 * fixed.job.seq_len))
    why = search(five, Formula(), top=1).refused[0].why
    assert "; with --tp 1 left out there are some; all of them could share a global batch of 32,768 tokens" in why
    with pytest.raises(UsageError, match="tp 3"):
        question(gpu="8xa100-80gb", tp=3)


class Holes(Formula):
    """A loss in slices leaves holes: it needs a little more than the card, all logits a little less."""

    def _answer(self, candidate, cluster):
        made = super()._answer(candidate, cluster)
        usual = cluster.device.capacity_bytes if candidate.plan.checkpointing == "full" else 2 * 80 * GIB
        need = int(usual * (0.97 if candidate.plan.loss == "chunked" else 0.95))
        held = dict.fromkeys(made.peak.by_category, 0) | {"activation": need}
        peak = replace(made.peak, process_bytes=need, by_category=held)
        return replace(made, fits=need <= cluster.device.capacity_bytes, peak=peak)


@pytest.mark.parametrize(("without", "loss"), [((), "plain"), (("loss=plain",), None), (("loss",), "plain")])
def test_all_logits_at_once_are_tried_where_a_few_slices_nearly_fit(without, loss):
    offloads = ("activation-offload", "optimizer-offload", "param-offload")
    asked = question("llama-3.2-1b", "a100-80gb", method="lora", micro_batch=1, without=(*offloads, *without))
    ghosts = Holes()
    found = Search(asked, ghosts, lambda text: None)
    found.run(1)
    assert [one.candidate.plan.loss for one, _ in found.found] == ([loss] if loss else [])
    longer = replace(asked, job=replace(asked.job, seq_len=8192))
    found = Search(longer, ghosts, lambda text: None)
    found.run(1)
    assert bool(found.found) == ("loss" in without)  # of many slices the plain loss is not tried


class Failing(Formula):
    """What `why` names a reason against cannot be run, or not whole."""

    def __init__(self, why, *, looks=True):
        super().__init__()
        self.why, self.looks = why, looks

    def need(self, candidates, cluster):
        self.looked += candidates
        return [self._failed(one, self.looks) or of_run(self._answer(one, cluster)) for one in candidates]

    def fit(self, candidates, cluster, budget_bytes=None):
        self.asked += candidates
        return [self._failed(one, True) or self._answer(one, cluster) for one in candidates]

    def _failed(self, candidate, fails):
        words = self.why(candidate) if fails else None
        return CannotEstimate(words) if words else None


def adapters_fail(candidate):
    """They can never be run."""
    return "The step failed: no" if candidate.job.method == "lora" else None


def uncut(candidate):
    """How the network is cut for tensor parallelism is not known."""
    return "How it is cut is not known: no plan; choose tp 1." if candidate.plan.tp > 1 else None


def uncompiled(candidate):
    """Flex attention takes more of a multiprocessor's memory than there is."""
    words = "The step failed: out of resource: triton_tem_fused_flex_attention_backward_mul_1"
    return words if candidate.plan.attention == "flex" else None


@pytest.mark.parametrize(
    ("asked", "loss"),
    [
        ({"gpu": "h200", "model": "llama-3.2-1b"}, "plain"),
        ({"gpu": "h200", "model": "llama-3.2-1b", "without": ("loss=plain",)}, "chunked"),
        ({"gpu": "h200", "model": "llama-3.2-1b", "loss": "fused"}, "fused"),
        ({"gpu": "rtx-3090", "model": "llama-3.2-1b", "micro_batch": 4}, "chunked"),
        ({"gpu": "8x8xh100-80gb", "model": "llama-3.1-70b", "seq_len": 8192, "grad_accum": 8}, "chunked"),
    ],
    ids=["room", "not allowed", "said", "no room", "no faster"],
)
def test_all_logits_at_once_where_there_is_room_and_it_is_faster(asked, loss):
    asked = question(**asked)
    best = search(asked, Formula(), top=2).plans[0]
    assert best.candidate.plan.loss == loss
    assert best.estimate.peak.process_bytes <= asked.budget_bytes
    if loss == "plain":
        sliced = replace(best.candidate, plan=replace(best.candidate.plan, loss="chunked"))
        whole, slices = (priced(one, asked.cluster) for one in (best.candidate, sliced))
        assert whole.seconds_per_token < slices.seconds_per_token


class Logits(Formula):
    """Three times what is usual is needed, but of logits only what there is of them."""

    def _answer(self, candidate, cluster):
        sliced = replace(candidate, plan=replace(candidate.plan, loss="chunked"))
        one, slices = priced(candidate, cluster), priced(sliced, cluster)
        made = super()._answer(candidate, cluster)
        need = int(slices.least_bytes + 3 * slices.beyond_bytes + one.beyond_bytes - slices.beyond_bytes)
        held = dict.fromkeys(made.peak.by_category, 0) | {"activation": need}
        peak = replace(made.peak, process_bytes=need, by_category=held)
        return replace(made, fits=need <= cluster.device.capacity_bytes, peak=peak)


def test_all_logits_that_fit_are_not_refused_by_what_is_usual():
    asked = question("gpt2", "t4", seq_len=1024, micro_batch=7, only=("loss", "optimizer", "allocator"))
    best = search(asked, Logits(), top=1).plans[0]
    assert best.candidate.plan.loss == "plain"
    assert best.estimate.peak.process_bytes <= asked.budget_bytes


def test_a_method_that_always_fails_in_the_same_words_is_given_up():
    ghosts = Failing(adapters_fail)
    asked = question("llama-3.2-1b", "8xa100-80gb", method="lora", without=("tp", "pp", "cp"))
    found = Search(asked, ghosts, lambda text: None)
    found.run(3)
    assert not found.found
    assert len(ghosts.looked) + len(ghosts.asked) <= SAME_FAILURES + 2
    both = replace(asked, methods=("full", "lora"))
    found = Search(both, ghosts, lambda text: None)
    found.run(3)
    assert {one.candidate.job.method for one, _ in found.found} == {"full"}


def test_a_dimension_that_cannot_divide_the_network_is_tried_once():
    ghosts, asked = Failing(uncut), question(gpu="8xa100-40gb")
    found = Search(asked, ghosts, lambda text: None)
    found.run(4)
    assert len({repr(one) for one in ghosts.looked + ghosts.asked if one.plan.tp > 1}) <= ghosts.count
    assert found.refused["tp"].why == "How it is cut is not known: no plan; choose tp 1."
    assert found.narrowed.without == ("tp",)
    assert {one.plan.tp for one in candidates(found.narrowed)} == {1}
    said = Search(question(gpu="8xa100-40gb", tp=2), Failing(uncut), lambda text: None)
    said.run(1)
    assert not said.found
    assert said.narrowed == said.question


def test_the_nearest_plan_can_be_run():
    solution = search(question("llama-3.1-70b", "8xl4"), Failing(uncut), explain=False)
    assert solution.status == "too_large"
    assert solution.nearest is not None
    assert solution.nearest.candidate.plan.tp == 1


def test_attention_that_cannot_be_compiled_is_taken_back():
    ghosts, asked = Failing(uncompiled, looks=False), question("gemma-2-2b", "rtx-4090", method="lora")
    found = Search(asked, ghosts, lambda text: None)
    found.run(2)
    assert {one.candidate.plan.attention for one, _ in found.found} == {"auto"}
    assert len([one for one in ghosts.asked if one.plan.attention == "flex"]) <= ghosts.count
    assert "flex_attention" in found.refused["attention"].why
    said = Search(
        replace(asked, plan=replace(asked.plan, attention="flex")),
        Failing(uncompiled, looks=False),
        lambda text: None,
    )
    said.run(2)
    assert not said.found


def test_a_search_that_begins_again_finds_what_one_without_that_attention_finds():
    asked = question("gemma-2-9b", "8xa100-80gb", seq_len=8192, grad_accum=4)
    again = Search(asked, Failing(uncompiled, looks=False), lambda text: None)
    again.run(4)
    without = Search(replace(asked, without=("attention",)), Formula(), lambda text: None)
    without.run(4)
    assert [one.candidate for one, _ in again.found] == [one.candidate for one, _ in without.found] != []
    known = {id(one) for one in again.order}
    assert again.seen <= known
    assert again.impossible <= known


def test_what_is_at_fault_is_read_from_what_techniques_say():
    on = Candidate(job=question().job, plan=replace(question().plan, tp=2, pp=2, ep=2, cp=2, attention="efficient"))
    off = replace(on, plan=question().plan)
    for axis, wanted in (("tp", "Tensor parallelism"), ("pp", "A pipeline"), ("ep", "Expert parallelism")):
        with pytest.raises(CannotEstimate) as refused:
            causal_network(torch.nn.Linear(2, 2), wanted, f"{axis} 1")
        assert _at_fault(on, str(refused.value)) == axis
        assert _at_fault(off, str(refused.value)) is None
    assert _at_fault(on, str(_not_known(torch.nn.Linear(2, 2), "no plan"))) == "tp"
    with pytest.raises(CannotEstimate) as refused, attention._force_backend("efficient"):
        raise RuntimeError("No available kernel. Aborting execution.")
    assert _at_fault(on, str(refused.value)) == "attention"
    assert _at_fault(on, "Memory ran out.") is None


def test_a_guess_knows_what_a_worker_found_ahead():
    """A plan that was run ahead and does not fit is not explained, nor one that another would beat."""
    asked = question(gpu="8xh100-80gb", grad_accum=2, loss="chunked")
    ghosts, explained = Formula(), []
    found = Search(asked, ghosts, lambda text: None, lambda best: explained.append(best) or [])
    order = found._priced(list(candidates(asked)))
    quick, *others = [one for one in order if found._expected_part(one) <= SURE]
    slow = next(one for one in others if one.seconds_per_token > quick.seconds_per_token)
    found.seem = [slow, quick]
    found._foresee()
    assert explained == [quick.candidate]
    found.seem = [slow]
    found._foresee([quick])
    assert explained == [quick.candidate], "it would beat the one that seems to fit"
    answer = ghosts._answer(quick.candidate, asked.cluster)
    ghosts.made_ahead = lambda candidate, cluster: (
        replace(answer, fits=False) if candidate == quick.candidate else None
    )
    found.seem = [slow, quick]
    found._foresee()
    assert explained == [quick.candidate, slow.candidate]
