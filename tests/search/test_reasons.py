"""Why a plan is as it is: what was run whole is not contradicted by a look at a few layers."""

from dataclasses import replace

from solutions import Formula, question
from tonnage.search.reasons import looks, path, reasons
from tonnage.search.solve import search

ASKED = question("llama-3.1-8b", "4xa100-80gb", seq_len=16384)


class Optimists(Formula):
    """Looks that show less than whole runs need."""

    def need(self, candidates, cluster):
        return [
            replace(one, process_bytes=one.process_bytes // 40, bound_bytes=one.bound_bytes // 40, whole=False)
            for one in super().need(candidates, cluster)
        ]


def test_what_did_not_fit_whole_is_too_much():
    best = search(ASKED, Formula(), top=1).plans[0]
    assert best.candidate.plan.checkpointing != "none"
    ghosts = Optimists()
    without = replace(best.candidate, plan=replace(best.candidate.plan, checkpointing="none"))
    before = next(one for one in reasons(best, ASKED, ghosts) if one.technique.startswith("checkpointing"))
    ghosts.fit([without], ASKED.cluster)
    after = next(one for one in reasons(best, ASKED, ghosts) if one.technique.startswith("checkpointing"))
    assert "which fits as well" in before.why
    assert "too much" in after.why
    assert after.saves_bytes is not None
    assert before.saves_bytes is not None


def test_the_path_shows_what_was_run_whole():
    asked = question("smollm2-135m", "4xa100-80gb")
    best = search(asked, Formula(), top=1).plans[0]
    ghosts = Optimists()
    assert not any(stage.whole for stage in path(best, asked, ghosts)[:-1])
    ghosts.fit([one for one, _ in looks(best.candidate, asked)], asked.cluster)
    assert all(stage.whole for stage in path(best, asked, ghosts))


def test_each_stage_of_the_path_says_what_is_added():
    asked = question("llama-3.1-8b", "4xa100-80gb", seq_len=2048, grad_accum=4, shard="zero3")
    best = search(asked, Formula(), top=1).plans[0]
    candidate = replace(best.candidate, plan=replace(best.candidate.plan, accum_sync=True))
    changes = [stage.change for stage in path(replace(best, candidate=candidate), asked, Formula())]
    assert "accum-sync" in changes
    assert "as planned" not in changes


def test_reasons_name_what_changes_the_mathematics():
    asked = question("llama-3.2-1b", "l4", micro_batch=2, allow=("optimizer", "precision"))
    best = search(asked, Formula(), top=1).plans[0]
    plan = replace(best.candidate.plan, optimizer="adamw-8bit", precision="bf16-true")
    choice = replace(best, candidate=replace(best.candidate, plan=plan))
    found = {one.technique: one.why for one in reasons(choice, asked, Formula())}
    assert found["optimizer=adamw-8bit"].startswith("optimizer states are kept in 8 bits; with optimizer adamw ")
    fused = replace(choice, candidate=replace(best.candidate, plan=replace(plan, optimizer="adamw-fused")))
    found = {one.technique: one.why for one in reasons(fused, asked, Formula())}
    assert found["optimizer=adamw-fused"].startswith("one kernel updates all weights in place")
    assert "in 16 bits, which rounds otherwise; with precision bf16-mixed " in found["precision=bf16-true"]


def test_a_precision_that_the_card_decides_has_no_reason():
    asked = question("gpt2", "t4", seq_len=1024)
    best = search(asked, Formula(), top=1).plans[0]
    assert best.candidate.plan.precision == "fp16-mixed"
    assert not any(one.technique.startswith("precision") for one in best.reasons)
