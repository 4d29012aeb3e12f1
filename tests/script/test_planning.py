"""Tests of the plan for a script: settings by the script's own names, tried, and read back."""

from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from notes import LOOP, facts

import estimates
from solutions import FormulaRunner
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import TrialFailed
from tonnage.planner.candidates import with_free_choices
from tonnage.planner.solution import Candidate
from tonnage.report.script import render
from tonnage.report.script_html import page
from tonnage.script import planning
from tonnage.script.facts import understood
from tonnage.script.planning import Asked, plan_script
from tonnage.script.setting_changes import make_expandable_setting
from tonnage.units import GIB, format_gib

COMMAND = ["python", "train.py", "--per_device_train_batch_size", "4"]
OPTIONS = {
    f"--{name}": {"dest": name, "action": "store", "nargs": None}
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "activation_checkpointing")
}


class Scripts:
    """A fake of dry-runs: it answers with facts, from the second run on with the settings that were given."""

    def __init__(self, first: Any, *peaks: int) -> None:
        self.first, self.peaks = first, list(peaks)
        self.asked: list[tuple[list[str], dict[str, str]]] = []

    def __call__(self, asked: Any, command: list[str], variables: Any, progress: Any) -> Any:
        self.asked.append((command, dict(variables)))
        peak = self.peaks[len(self.asked) - 1]
        found = estimates.fitting()
        cluster = {**found.cluster, "capacity_bytes": asked.cluster.device.capacity_bytes}
        fits = peak <= asked.cluster.device.capacity_bytes
        estimate = replace(found, fits=fits, cluster=cluster, peak=replace(found.peak, process_bytes=peak))
        if len(self.asked) == 1:
            return estimate, self.first
        words = dict(zip(command[2::2], command[3::2], strict=True))
        plain = {name.removeprefix("--"): int(v) if v.isdigit() else v == "True" or v for name, v in words.items()}
        settings = {**self.first.settings, **plain}
        recorded = {**self.first.recorded, "arguments": {"class": "TrainingArguments", "values": settings}}
        allocator = variables.get("PYTORCH_ALLOC_CONF", "")
        return estimate, replace(self.first, recorded=recorded, allocator_settings=allocator)


class TrialRunner(FormulaRunner):
    """The runner by formula, as a context manager."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __enter__(self) -> "TrialRunner":
        return self

    def __exit__(self, *_: Any) -> None:
        return None


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    def ran(first: Any, *peaks: int, gpu: str = "a100-80gb", command: list[str] = COMMAND, **asked: Any) -> Any:
        scripts = Scripts(first, *peaks)
        monkeypatch.setattr(planning, "_run", scripts)
        monkeypatch.setattr(planning, "TrialRunner", TrialRunner)
        given = {"stated": {}, **asked}
        found = plan_script(Asked(command=command, cluster=parse_cluster(gpu), **given))
        return found, scripts

    return ran


def test_a_script_that_does_not_fit_gets_flags_and_is_run_again(run):
    found, scripts = run(facts(options=OPTIONS), 90 * GIB, 30 * GIB)
    assert found.status == "found"
    assert [setting.where for change in found.changes for setting in change.settings].count("environment") == 1
    command, variables = scripts.asked[1]
    assert variables == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    words = dict(zip(command[2::2], command[3::2], strict=True))
    rows, times = int(words["--per_device_train_batch_size"]), int(words.get("--gradient_accumulation_steps", 2))
    assert rows * times == 8
    assert words["--optim"] == "adamw_torch_fused"
    assert found.after.not_taken == ()
    savings = [change.saves_bytes for change in found.changes]
    assert savings == sorted(savings, reverse=True)
    document = found.to_json()
    assert document["status"] == "found"
    assert document["script"]["after_command"] == command
    unexpressed = {change.technique: change for change in found.unexpressed}
    assert "accum-sync" not in unexpressed
    assert unexpressed["loss=chunked"].costs_seconds is not None


def test_an_option_given_with_its_default_value_is_kept(run):
    _, scripts = run(
        facts(options=OPTIONS), 90 * GIB, 30 * GIB, stated={"checkpointing": "none", "optimizer": "adamw"}
    )
    command, _ = scripts.asked[1]
    assert "--optim" not in command
    assert "--gradient_checkpointing" not in command


def test_param_offload_needs_a_launcher():
    for command, possible in ((COMMAND, False), (["torchrun", "--nproc-per-node", "1", *COMMAND[1:]], True)):
        asked = Asked(command=command, cluster=parse_cluster("a100-80gb"), stated={})
        known = facts(options=OPTIONS)
        question = planning.make_question(asked, understood(known), known)
        assert question.is_open("param_offload") == possible


def test_attention_is_kept_because_the_script_chooses_it():
    known = facts(options=OPTIONS)
    for without in ((), ("attention",)):
        asked = Asked(command=COMMAND, cluster=parse_cluster("t4"), stated={}, without=without)
        question = planning.make_question(asked, understood(known), known)
        assert not question.is_open("attention")
        assert with_free_choices(question).attention == "auto"
    best = Candidate(job=question.job, plan=replace(question.plan, precision="fp16-mixed"))
    assert ("attention", "efficient") in {
        (name, value) for _, name, value in planning._list_stronger(best, question.cluster)
    }
    assert planning.has_no_setting("attention", "efficient", best.job, best.plan, known, question.cluster)


def test_settings_without_a_flag_are_put_into_the_arguments(run):
    found, scripts = run(facts(), 90 * GIB, 30 * GIB, command=["python", "train.py"])
    assert scripts.asked[1][0] == ["python", "train.py"]
    assert '"optim": "adamw_torch_fused"' in scripts.asked[1][1]["TONNAGE_SETTINGS"]
    assert any(
        "optim was given as adamw_torch_fused" in words for words in found.after.not_taken
    )  # this script ignores it
    assert "TrainingArguments(optim='adamw_torch_fused')" in render(found)


def test_a_plan_that_does_not_fit_in_the_script_is_followed_by_a_smaller_one(run):
    found, scripts = run(facts(options=OPTIONS), 90 * GIB, 80 * GIB, 30 * GIB)
    assert found.status == "found"
    assert len(scripts.asked) == 3
    assert [refused.why for refused in found.failed] == ["does not fit: the script itself needs more than 80.00 GiB"]


def test_no_plan_is_advised_that_did_not_fit_in_the_script(run):
    found, _ = run(facts(options=OPTIONS), 90 * GIB, *[80 * GIB] * 3)
    assert (found.status, found.after) == ("too_large", None)
    assert len({refused.what for refused in found.failed}) == planning.MOST_TRIES


def test_if_nothing_fits_the_nearest_plan_is_shown(monkeypatch):
    scripts = Scripts(facts(options=OPTIONS), 90 * GIB)
    monkeypatch.setattr(planning, "_run", scripts)
    monkeypatch.setattr(planning, "TrialRunner", TrialRunner)
    found = plan_script(Asked(command=COMMAND, cluster=parse_cluster("rtx-3080"), stated={}))
    assert found.status == "too_large"
    near = found.solution.nearest
    said = " ".join(render(found).split())
    assert "DOES NOT FIT by none of its settings: with " in said
    assert f"it needs {format_gib(near.needed_bytes)}, which is {format_gib(near.missing_bytes)} too much" in said


def test_a_script_that_fails_with_the_changes(run, monkeypatch):
    scripts = Scripts(facts(options=OPTIONS), 90 * GIB)

    def second(*given: Any) -> Any:
        if scripts.asked:
            raise TrialFailed("unrecognized arguments: --optim")
        return scripts(*given)

    monkeypatch.setattr(planning, "_run", second)
    monkeypatch.setattr(planning, "TrialRunner", TrialRunner)
    found = plan_script(Asked(command=COMMAND, cluster=parse_cluster("a100-80gb"), stated={}))
    assert (found.status, found.failed[0].why) == ("too_large", "unrecognized arguments: --optim")


def test_a_loop_of_its_own_gets_the_allocator_setting(run):
    found, scripts = run(facts(trainer=None, accelerator=None), 90 * GIB, 70 * GIB)
    assert found.status == "unknown"
    assert scripts.asked[1] == (COMMAND, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    text = render(found)
    assert "NOT PLANNED" in text
    assert "neither a Trainer nor an Accelerator" in text


def test_a_loop_of_its_own_is_tried_with_its_own_flags(run):
    """On a card without a limit its steps are seen: a flag must have the value that they have."""
    stored = {"action": "store", "nargs": None, "default": 1}
    flags = {f"--{name}": {"dest": name, **stored} for name in ("bs", "accum")}
    first = facts(trainer=None, accelerator=None, options=flags, rows=4, passes_a_step=1)
    command = ["python", "loop.py", "--bs", "4"]
    found, scripts = run(first, 90 * GIB, 90 * GIB, 85 * GIB, 60 * GIB, command=command)
    assert (found.status, found.by_trial) == ("found", True)
    assert [words for words, _ in scripts.asked] == [
        *[command] * 3,  # as it is; without a limit; with expandable segments
        ["python", "loop.py", "--bs", "2", "--accum", "2"],
    ]
    text = " ".join(render(found).split())
    assert "--bs: 4 -> 2" in text
    assert "of its own flags those for batch size, accumulation and checkpointing are known" in text


CLASSIFIER = {"class": "LlamaForSequenceClassification"}


def test_a_trainer_without_a_plan_is_tried_until_it_fits(run):
    found, scripts = run(facts(options=OPTIONS, network=CLASSIFIER), 90 * GIB, 90 * GIB, 80 * GIB, 60 * GIB)
    assert (found.status, found.by_trial) == ("found", True)
    words = [dict(zip(command[2::2], command[3::2], strict=True)) for command, _ in scripts.asked[1:]]
    assert words[0] == {"--per_device_train_batch_size": "4", "--optim": "adamw_torch_fused"}
    assert words[1] == {**words[0], "--activation_checkpointing": "True"}
    batch = {"--per_device_train_batch_size": "2", "--gradient_accumulation_steps": "4"}
    assert words[2] == {**words[1], **batch}
    assert "by trying, without a plan: what a LlamaForSequenceClassification needs" in " ".join(render(found).split())
    assert found.to_json()["script"]["by_trial"]


def test_a_script_that_fits_gets_the_changes_that_cost_nothing(run):
    found, scripts = run(facts(network=CLASSIFIER, options=OPTIONS), 60 * GIB, 50 * GIB)
    assert (found.status, len(scripts.asked)) == ("found", 2)
    assert [change.technique for change in found.changes] == ["allocator", "optimizer"]


def test_a_script_that_never_fits(run):
    found, scripts = run(facts(network=CLASSIFIER, options=OPTIONS), *[90 * GIB] * 5)
    assert (found.status, len(scripts.asked)) == ("too_large", 5)
    assert "DOES NOT FIT  whatever was tried" in render(found)


def test_the_report_shows_both_runs(run):
    found, _ = run(facts(options=OPTIONS), 90 * GIB, 30 * GIB)
    text = render(found)
    assert "FITS  with" in text
    assert "as it is, it does not" in text
    assert "90.00 GiB" in text
    assert "30.00 GiB" in text
    assert "env PYTORCH_ALLOC_CONF=expandable_segments:True python train.py" in " ".join(text.split())


def test_the_page_shows_what_the_report_shows(run):
    found, _ = run(facts(options=OPTIONS), 90 * GIB, 30 * GIB)
    html = page(found)
    assert all(
        part in html for part in ("with the changes", "&gt; 90.00 GiB", "30.00 GiB", "expandable_segments:True")
    )
    assert all(str(setting) in unescape(html) for change in found.changes for setting in change.settings)
    evil = replace(found, seen="<script>alert(1)</script>", command=("<img src=x>",))
    assert "<script>alert" not in page(evil)
    assert "<img" not in page(evil)


def test_the_reason_for_missing_seconds_stands_below_the_changes(run):
    found, _ = run(facts(options=OPTIONS), 90 * GIB, 30 * GIB)
    why = "How fast Tesla T4 is with bf16 is not known, so neither is the step's time."
    unpriced = replace(found, solution=replace(found.solution, unpriced=why))
    assert why in " ".join(render(unpriced).split())
    assert why not in " ".join(render(found).split())


def test_the_allocator_variable_of_an_older_torch_has_its_older_name() -> None:
    older = replace(facts(), torch_version="2.9.1+cu128")
    assert make_expandable_setting(older).name == "PYTORCH_CUDA_ALLOC_CONF"
    assert make_expandable_setting(replace(older, torch_version="2.10.0")).name == "PYTORCH_ALLOC_CONF"


def test_a_loop_that_leaves_its_precision_to_the_launcher_gets_a_launcher_flag(run):
    made = {"class": "torch.optim.adamw.AdamW", "fused": False, "foreach": None}
    command = ["accelerate", "launch", "--num_processes", "1", "train.py", "data"]
    there = [*command[:4], "--mixed_precision", "bf16", *command[4:]]
    for given, after, words in (
        ([], there, "--mixed_precision: no -> bf16"),
        (["mixed_precision"], command, "Accelerator(mixed_precision='bf16')"),
    ):
        accelerator = {**LOOP, "mixed_precision": "no", "given": given}
        first = facts(trainer=None, accelerator=accelerator, optimizer=made)
        found, scripts = run(first, 90 * GIB, 30 * GIB, command=command)
        assert scripts.asked[1][0] == after
        assert words in " ".join(render(found).split())


def test_a_plan_that_fits_without_the_headroom_is_said_to_fit_barely(run):
    found, scripts = run(facts(options=OPTIONS), 90 * GIB, *[78 * GIB] * 3)
    assert len(scripts.asked) > 2  # one that leaves more was looked for
    assert found.status == "found"
    assert found.answer.peak.process_bytes == 78 * GIB > found.budget_bytes
    assert "FITS, BARELY" in render(found)
