"""A Solution is shown on the terminal and as a page."""

import json
from dataclasses import replace
from functools import cache

import tonnage
from solutions import FormulaRunner, question
from tonnage.planner.solve import search
from tonnage.report import plans, plans_html
from tonnage.units import GIB


@cache
def solved(**options):
    return search(question(**options), FormulaRunner(), top=3, pareto=True)


def test_first_line_has_the_best_plan():
    text = plans.render(solved(gpu="8xa100-80gb"))
    assert text.startswith("FITS  ")
    for part in ("Plans that fit", "Why", "From the baseline to the plan", "Memory against speed", "headroom"):
        assert part in text


def test_drawn_lengths_are_shown_by_the_longest():
    found = solved(gpu="8xa100-80gb")
    asked = found.question
    drawn = replace(found, question={**asked, "job": {**asked["job"], "seq_len": 4096, "lengths": ["512", "2048"]}})
    sequences = asked["sequences"]
    assert f"{sequences} sequences a step of up to 2,048 tokens" in plans.render(drawn)
    assert f"{sequences} x {asked['job']['seq_len']:,}" in plans.render(found)


def test_ascii_on_a_narrow_terminal():
    text = plans.render(solved(gpu="8xa100-80gb"), width=60, unicode=False)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 60


def test_host_memory_of_the_best_plan_is_judged():
    found = solved(gpu="8xa100-80gb", param_offload="cpu", shard="zero3")
    best = found.plans[0]
    host = best.estimate.host.with_machine(96 * GIB, {"pinned": 96 * GIB}, 128 * GIB)
    judged = replace(found, plans=(replace(best, estimate=best.estimate.with_host(host)),))
    for shown in (" ".join(plans.render(judged).split()), plans_html.page(judged)):
        assert "needs 96.00 GiB and usually has 128.00 GiB" in shown
    assert "Host memory" not in plans.render(found)  # not known there


def test_nothing_fits():
    asked = question(gpu="t4", model="llama-3.1-8b", without=("param-offload", "optimizer-offload", "checkpointing"))
    solution = search(asked, FormulaRunner(), top=1)
    text = plans.render(solution)
    assert text.startswith("DOES NOT FIT")
    assert "What would make it fit" in text
    assert "missing" in plans_html.page(solution)


def test_reason_against_all_plans_is_shown():
    asked = question("llama-3.2-1b", gpu="t4", shard="ddp", param_offload="cpu")
    solution = search(asked, FormulaRunner(), top=1)
    assert solution.status == "unsupported"
    said = "param-offload=cpu: it is a part of FSDP2, and shard is ddp"
    assert said in " ".join(plans.render(solution).split())
    assert said in plans_html.page(solution)


def test_page_is_self_contained_and_contains_its_data():
    solution = solved(gpu="8xa100-80gb")
    page = plans_html.page(solution)
    assert "<svg" in page
    assert "http" not in page.split("<body>")[1].split("<script")[0]
    data = page.split('class="tonnage-estimate">')[1].split("</script>")[0]
    assert json.loads(data)["status"] == "found"


def test_names_are_escaped():
    solution = solved(gpu="a100-80gb", model="llama-3.2-1b")
    evil = replace(solution, question={**solution.question, "model": "<script>alert(1)</script>\x1b[2J"})
    assert "<script>alert" not in plans_html.page(evil)
    assert "\x1b" not in plans.render(evil)


def test_json_has_the_fields_of_the_contract():
    document = solved(gpu="8xa100-80gb").to_json()
    json.dumps(document, allow_nan=False)
    assert document["schema_version"] == 1
    assert document["status"] == "found"
    best = document["plans"][0]
    assert {"name", "plan", "estimate", "reasons"} <= set(best)
    assert {"technique", "why", "saves_bytes", "costs_seconds"} == set(best["reasons"][0])
    assert best["estimate"]["time"]["step_seconds"] > 0


def test_executed_part_of_a_step_is_shown_in_both_views():
    solution = solved(gpu="8xa100-80gb")
    run = solution.plans[0].estimate.coverage.run[0]
    assert "steps" in run
    for shown in (" ".join(plans.render(solution).split()), plans_html.page(solution)):
        assert f"of the best plan {run}" in shown
        assert "run on the ghost" in shown


def test_found_limit_is_shown_in_both_views():
    found = solved(gpu="a100-80gb", model="llama-3.2-1b")
    said = {"find": "max-seq-len", "found": "seq-len 512", "limit": "no longer one was tried"}
    asked = replace(found, question={**found.question, **said})
    for shown in (plans.render(asked), plans_html.page(asked).split("<script")[0]):
        assert "max-seq-len: seq-len 512" in shown
        assert "no longer one was tried" in shown


def test_printing_and_notebooks_show_the_solution():
    solution = solved(gpu="8xa100-80gb")
    assert tonnage.Solution.terminal_view is plans.render
    assert str(solution) == plans.render(solution)
    assert solution._repr_html_() == plans_html.fragment(solution)
    assert plans_html.fragment(solution) in plans_html.page(solution)
    assert "\n" not in repr(solution)
