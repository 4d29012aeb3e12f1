"""Reasons and the decision path: a whole run counts more than a probe of a few layers."""

from dataclasses import replace

from solutions import FormulaRunner, question
from tonnage.estimates.estimate import Host
from tonnage.planner.decision_path import list_stages, trace_path
from tonnage.planner.reasons import explain_choice
from tonnage.planner.solve import search
from tonnage.units import GIB

ASKED = question("llama-3.1-8b", "4xa100-80gb", seq_len=16384)


class OptimisticProbes(FormulaRunner):
    """Probes show less than whole runs need."""

    def probe(self, candidates, cluster):
        return [
            replace(
                one, process_bytes=one.process_bytes // 400, uncached_bytes=one.uncached_bytes // 400, whole=False
            )
            for one in super().probe(candidates, cluster)
        ]


def test_whole_run_that_did_not_fit_counts_more_than_a_probe():
    best = search(ASKED, FormulaRunner(), top=1).plans[0]
    assert best.candidate.plan.checkpointing != "none"
    runner = OptimisticProbes()
    without = replace(best.candidate, plan=replace(best.candidate.plan, checkpointing="none"))
    before = next(one for one in explain_choice(best, ASKED, runner) if one.technique.startswith("checkpointing"))
    runner.run_whole([without], ASKED.cluster)
    after = next(one for one in explain_choice(best, ASKED, runner) if one.technique.startswith("checkpointing"))
    assert "which fits as well" in before.why
    assert "too much" in after.why
    assert after.saves_bytes is not None
    assert before.saves_bytes is not None


class FullHost(FormulaRunner):
    """Whole runs need more host memory than there is."""

    def find_estimate(self, candidate, cluster):
        host = Host(peak_bytes=GIB, pinned_bytes=0).with_machine(96 * GIB, {}, 64 * GIB)
        return replace(self._answer(candidate, cluster), fits=True).with_host(host)


def test_what_does_not_fit_on_the_host_is_too_much():
    asked = question("smollm2-135m", "4xa100-80gb")
    best = search(asked, FormulaRunner(), top=1).plans[0]
    reasons = explain_choice(best, asked, FullHost())
    assert reasons
    assert all("96.00 GiB of host memory on each machine, too much" in one.why for one in reasons)


def test_path_shows_whole_runs():
    asked = question("smollm2-135m", "4xa100-80gb")
    best = search(asked, FormulaRunner(), top=1).plans[0]
    runner = OptimisticProbes()
    assert not any(stage.whole for stage in trace_path(best, asked, runner)[:-1])
    runner.run_whole([candidate for _, candidate in list_stages(best.candidate, asked)], asked.cluster)
    assert all(stage.whole for stage in trace_path(best, asked, runner))


def test_each_stage_names_what_is_added():
    asked = question("llama-3.1-8b", "4xa100-80gb", seq_len=2048, grad_accum=4, shard="zero3")
    best = search(asked, FormulaRunner(), top=1).plans[0]
    candidate = replace(best.candidate, plan=replace(best.candidate.plan, accum_sync=True))
    changes = [stage.change for stage in trace_path(replace(best, candidate=candidate), asked, FormulaRunner())]
    assert "accum-sync" in changes
    assert "as planned" not in changes


def test_reasons_name_changes_of_the_mathematics():
    asked = question("llama-3.2-1b", "l4", micro_batch=2, allow=("optimizer", "precision"))
    best = search(asked, FormulaRunner(), top=1).plans[0]
    plan = replace(best.candidate.plan, optimizer="adamw-8bit", precision="bf16-true")
    choice = replace(best, candidate=replace(best.candidate, plan=plan))
    reasons = {one.technique: one.why for one in explain_choice(choice, asked, FormulaRunner())}
    assert reasons["optimizer=adamw-8bit"].startswith("optimizer states are kept in 8 bits; with optimizer adamw ")
    fused = replace(choice, candidate=replace(best.candidate, plan=replace(plan, optimizer="adamw-fused")))
    reasons = {one.technique: one.why for one in explain_choice(fused, asked, FormulaRunner())}
    assert reasons["optimizer=adamw-fused"].startswith("one kernel updates all weights in place")
    assert "in 16 bits, which rounds otherwise; with precision bf16-mixed " in reasons["precision=bf16-true"]


def test_precision_decided_by_the_card_has_no_reason():
    asked = question("gpt2", "t4", seq_len=1024)
    best = search(asked, FormulaRunner(), top=1).plans[0]
    assert best.candidate.plan.precision == "fp16-mixed"
    assert not any(one.technique.startswith("precision") for one in best.reasons)
