"""Attention scores that another backend would not keep, by hand."""

from dataclasses import replace

from tonnage.case import Case
from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import parse_cluster
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.techniques import choices
from tonnage.timing.scores import SPARING, avoidable_score_bytes, find_sparing_attention


def test_scores_that_another_backend_would_not_keep():
    job = Job(model=resolve("gpt-oss-20b", offline=True), seq_len=8192)
    h100, t4 = parse_cluster("8xh100-80gb"), parse_cluster("t4")
    assert (
        avoidable_score_bytes(Case(job, Plan(shard="zero3"), h100)) == 64 * 8192**2 * 2
    )  # what runs out in eager code
    assert avoidable_score_bytes(Case(job, Plan(attention="flex"), h100)) is None
    assert avoidable_score_bytes(Case(job, Plan(), t4)) is None
    llama = replace(job, model=resolve("llama-3.1-8b", offline=True))
    assert avoidable_score_bytes(Case(llama, Plan(attention="eager"), h100)) is None
    assert avoidable_score_bytes(Case(llama, Plan(), h100)) is None
    assert avoidable_score_bytes(Case(llama, Plan(precision="fp16-mixed"), t4)) == 32 * 8192**2 * 2
    assert find_sparing_attention(Case(llama, Plan(precision="fp16-mixed"), t4)) == "efficient"


def test_sparing_backends_are_values_of_the_option():
    assert set(SPARING) <= set(choices("attention"))
