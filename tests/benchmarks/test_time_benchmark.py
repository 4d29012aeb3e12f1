"""The time model beside measured steps: what is in the catalog stays as good as it was, and regret by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from benchmarks.gpu.packed import unpack
from benchmarks.gpu.recorded import asked
from benchmarks.gpu.recorded import card as card_of
from benchmarks.time import blind, coverage, kinds, regret
from benchmarks.time.alternatives import Prospect
from benchmarks.time.calibration import CALIBRATIONS, known, toml
from benchmarks.time.fit import errors, fit, predicted, summary
from benchmarks.time.recipes import completed, of_experts, of_release
from benchmarks.time.rows import OWN, UNSEEN, Left, load, own, own_stacks, read

from tonnage.catalog.devices import find_device
from tonnage.mesh import Mesh
from tonnage.timing.compiled import layer
from tonnage.timing.kinds import read_shape
from tonnage.timing.operations import Slice
from tonnage.timing.rates import card, seconds
from tonnage.timing.software import Software
from tonnage.timing.timing import time_step
from tonnage.timing.work import Work


@pytest.fixture(scope="module")
def rows():
    return [row for row in load()[0] + own()[0] if row.ran]


@pytest.mark.parametrize(
    ("source", "most_median", "most_p90"),
    [
        ("own H200", 0.06, 0.22),
        ("fms-acceleration (HF Trainer)", 0.09, 0.19),
        ("vTrain, one machine", 0.06, 0.20),
        ("vTrain, several machines", 0.10, 0.25),
        ("llm-foundry", 0.05, 0.12),
        ("NeMo, dense", 0.11, 0.25),
    ],
)
def test_steps_are_predicted_as_well_as_docs_say(rows, source, most_median, most_p90):
    mine = [row for row in rows if row.source == source][::3]
    found = summary(errors(mine, known(mine[0].software)))
    assert found["median"] <= most_median
    assert found["p90"] <= most_p90


def test_kernels_of_our_own_steps_are_near_what_the_cards_tables_say():
    """By which products and attention of the eager code are what they are (calibration.py)."""
    found = list(kinds.kinds())
    assert {one.card for one in found} == {"h200", "h100-80gb"}
    eager = known("eager")
    for factor, name in ((eager.matmul_factor, "products"), (eager.attention_factor, "attention")):
        assert median(getattr(one, name) for one in found) == pytest.approx(factor, rel=0.15)
    assert all(0 < one.idle < 0.06 for one in found)


def test_networks_of_other_kinds_are_as_far_off_as_the_docs_say():
    shares = [1 + error for _, error in own_stacks()]
    lowest, highest = (f"{found(shares):.2f}" for found in (min, max))
    page = (Path(__file__).parents[2] / "docs" / "reference" / "time.md").read_text(encoding="utf-8")
    assert f"six own steps: {lowest} to {highest} of measured" in page
    assert len(shares) == 6


def test_a_card_that_nothing_was_calibrated_on_is_predicted_as_well():
    mine, _ = own(UNSEEN)
    assert {row.source for row in mine} == {"own H100"}
    found = summary(errors(mine, known("eager")))
    assert found["rows"] > 90
    assert found["median"] <= 0.08
    assert found["p90"] <= 0.25


def test_most_measured_steps_are_within_the_interval(rows):
    mine = [row for row in rows if row.source == "own H200"]
    eager = known("eager")
    inside = [eager.low_factor <= 1 / (1 + error) <= eager.high_factor for error in errors(mine, eager)]
    assert 0.75 < sum(inside) / len(inside) < 0.99


def test_blind_steps_are_within_the_interval_as_often_as_it_says():
    judged = coverage.blindly()
    shares = coverage.shares(judged)
    assert sum(share.rows for share in shares) == len(judged)
    assert all(0.75 < share.inside < 0.95 for share in shares if share.rows > 15)
    assert {(share.kind, share.place) for share in shares} >= {("dense", "one GPU"), ("experts", "several machines")}


def test_a_step_is_inside_its_interval_or_not(rows):
    (row,) = [row for row in rows if row.source == "own H200"][:1]
    told = [coverage.shares([(row, error, known("eager"))])[0].inside for error in (0.0, 0.5, -0.5)]
    assert told == [1, 0, 0]


def test_attention_on_our_card_takes_what_single_operations_took():
    facts = [raw for raw in read(OWN) if "seconds" in raw and str(raw.get("fact", "")).startswith("op sdpa")]
    device = find_device("h200")
    reached = {name: parts for name, *parts in card(device).attention}
    compared = []
    for raw in facts:
        found = re.match(
            r"op sdpa (cudnn|flash) bf16 b1 h32/\d+ s(4096|8192) d128 causal (forward|back)", raw["fact"]
        )
        if found is None:
            continue
        backward, tokens = found[3] == "back", int(found[2])
        flops = 2 * 32 * tokens**2 * 128 * (2.5 if backward else 1)
        filled = tokens / (tokens + card(device).attention_half_tokens)
        seconds = flops / (device.peak_flops.bf16 * reached[found[1]][backward] * filled)
        compared.append(seconds / raw["seconds"])
    assert len(compared) == 12
    assert all(0.85 < ratio < 1.1 for ratio in compared)


def test_every_left_out_row_has_a_reason():
    _, left = load()
    assert all(reason and count for reasons in left.values() for reason, count in reasons.items())


def test_common_fields_hold_for_the_rows_after_them(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"all": {"a": 1, "b": 2}}\n{"b": 3}\n{"c": 4}\n')
    assert read(file) == [{"a": 1, "b": 3}, {"a": 1, "b": 2, "c": 4}]


def test_a_fit_finds_the_factor_that_rows_were_made_with(rows):
    mine = [row for row in rows if row.source == "llm-foundry"][::20]
    truth = replace(known("llm-foundry"), matmul_factor=1.5)
    made = [
        replace(row, seconds=row.seconds * (1 + error)) for row, error in zip(mine, errors(mine, truth), strict=True)
    ]
    found = fit(made, replace(truth, matmul_factor=1.0), ["matmul_factor"])
    assert found.matmul_factor == pytest.approx(1.5, rel=0.05)


def test_what_rows_do_not_tell_stays_at_the_first_guess(rows):
    """A field moves as far as its doublings are worth it: a high price keeps it."""
    mine = [row for row in rows if row.source == "llm-foundry"][::20]
    start = replace(known("llm-foundry"), matmul_factor=1.5)
    free, dear = (fit(mine, start, ["matmul_factor"], prior=prior).matmul_factor for prior in (0.0, 10.0))
    assert free < 1.2
    assert dear == 1.5


def test_tables_are_printed_as_toml_reads_them():
    import tomllib

    table = tomllib.loads(toml(Software(name="own", fused=True, kernel_seconds=1.25e-5)))["software"][0]
    assert table == {"name": "own", "fused": True, "kernel_seconds": 1.25e-5}
    assert set(CALIBRATIONS) >= {"eager", "nanotron"}


def test_regret_by_hand(rows):
    row = next(row for row in rows if row.software == "nanotron" and row.work.axes.tp == 1 and row.work.axes.pp == 1)
    slow = replace(
        row, work=replace(row.work, axes=Mesh(dp_replicate=row.work.axes.dp_replicate, tp=1), micro_batch=1)
    )
    found = [regret.Candidate(row=row, speed=100.0), regret.Candidate(row=slow, speed=80.0)]
    cell = regret.cell(("one", 8), found, known("nanotron"), regret.Stalls(), oracle=True)
    assert cell.three == cell.five == 1.0
    assert cell.first in (0.8, 1.0)
    assert cell.crashed == 0


def test_alternatives_use_other_dimensions_first():
    rows = [
        SimpleNamespace(work=SimpleNamespace(axes=Mesh(tp=tp, pp=pp))) for tp, pp in ((1, 1), (1, 1), (2, 1), (4, 2))
    ]
    prospects = [Prospect(speed=speed) for speed in (90.0, 100.0, 80.0, 70.0)]
    assert regret.of_each_kind(rows, prospects, 3) == (1, 2, 3)
    assert regret.of_each_kind(rows, prospects, 5) == (1, 2, 3, 0)


def test_picks_of_the_grid_reach_most_of_the_best(rows):
    grid = [row for row in load()[0] if row.software == "nanotron"]
    cells = regret.table(grid, lambda model: known("nanotron"))
    first, three, five = regret.means(cells)
    assert first > 0.9
    assert three > 0.97
    assert five > 0.99
    assert median(cell.first for cell in cells) > 0.95
    assert sum(cell.crashed for cell in cells) == 0
    assert regret.refused(grid, known("nanotron")) < 0.05


def test_what_may_not_run_or_stall_is_expected_to_be_slower(rows):
    code = known("nanotron")
    pipeline = next(r for r in rows if r.software == "nanotron" and r.work.axes.pp == 4 and r.cluster.nodes == 16)
    risky, safe = (regret.prospect(pipeline, code, regret.Stalls(per_machine=chance)) for chance in (0.5, 0.0))
    assert risky.expected < 0.5 * safe.expected
    assert safe.expected == pytest.approx(safe.runs * pipeline.work.step_tokens / predicted(pipeline, code))
    fuller = replace(pipeline, cluster=replace(pipeline.cluster, device=find_device("a10g")))
    assert regret.runs(fuller, code) < regret.runs(pipeline, code) <= 1


def test_chances_of_stalls_are_those_of_the_runs_that_tell(rows):
    code = known("nanotron")
    mine = [row for row in rows if row.software == "nanotron" and row.work.axes.pp == 4]
    some = next(row for row in mine if row.cluster.nodes == 16 and row.work.axes.tp == 1)
    many = next(row for row in mine if row.cluster.nodes == 64 and row.work.axes.tp == 4)
    for row, chance in ((some, 1 / (4 * 16)), (many, 0.0)):  # the latter stalls as a rule
        quiet, slow = (predicted(row, like) for like in (regret.calm(code), regret.stalling(code)))
        seen = [replace(row, seconds=seconds) for seconds in (quiet, quiet, quiet, slow)]
        assert regret.Stalls.seen(seen, code).per_machine == pytest.approx(chance)
    assert regret.Stalls.seen([], code) == regret.Stalls()
    assert regret.Stalls(per_machine=0.01).of(some, code) == pytest.approx(1 - 0.99**16)
    assert regret.Stalls().of(many, code) == 1.0
    averaging = next(
        row for row in rows if row.software == "nanotron" and row.work.axes.pp == 1 and row.cluster.nodes == 64
    )
    assert regret.Stalls().of(averaging, code) == 1.0
    within = next(row for row in mine if row.cluster.nodes == 1 and row.work.axes.tp == 1)
    assert regret.Stalls(per_machine=0.01).of(within, code) == 0.0


def test_recipes_by_network_card_and_release():
    row = {
        "model": "Qwen3_235B_a22B",
        "gpu_norm": "GB200",
        "precision": "MXFP8",
        "pp": 8,
        "ep": 32,
        "phase": "pretrain",
    }
    row["source_repo"] = "NVIDIA-NeMo/Megatron-Bridge"
    old, new = ({**row, "notes": f"container {release} NeMo Container"} for release in ("26.04.01", "26.06"))
    assert of_experts(old) == {"captured": "part", "experts_whole": True, "experts_once": True}
    assert of_experts(new)["captured"] == "all"
    assert of_experts(new)["experts_fused"]
    hopper = of_experts({**new, "gpu_norm": "H100", "precision": "FP8"})
    assert hopper == {"experts_overlapped": True, "experts_whole": True, "experts_once": False}
    b300 = {**row, "gpu_norm": "B300"}
    sent = [of_experts({**b300, "notes": f"container {release} "})["experts_once"] for release in ("26.02", "26.04")]
    assert sent == [False, True]
    assert of_experts({**new, "model": "Grok 1 314b"}) == {"experts_even": True}
    deepseek = of_experts({**old, "model": "DeepSeekV3", "gpu_norm": "B300", "pp": 16})
    assert deepseek["stage_layers"] == (4,) * 15 + (2,)
    assert sum(deepseek["stage_layers"]) == 61 + 1
    assert deepseek["checkpointing"] == "latent"


def test_what_tables_do_not_say_and_have_wrong_is_the_recipes():
    launcher = {"source_repo": "NVIDIA/NeMo-Framework-Launcher", "phase": "pretrain", "precision": "fp8", "pp": 4}
    mixtral = completed({**launcher, "model": "MIXTRAL-8x7B"})
    assert (mixtral["precision"], mixtral["ep"]) == ("bf16", 8)
    assert completed({**launcher, "model": "LLAMA2-13B"})["vp"] == 10
    assert completed({**launcher, "model": "LLAMA2-13B", "vp": 5})["vp"] == 5
    assert of_release({**launcher, "model": "Nemotron-8B"})["loss"] == "plain"
    assert of_release({**launcher, "model": "Nemotron-8B", "source_repo": "NVIDIA/NeMo"})["loss"] == "compiled"
    assert "packing" in of_release({**launcher, "model": "LLAMA2-7B", "phase": "sft"})


def test_a_layout_of_another_batch_is_left_out():
    assert issubclass(Left, Exception)
    assert any("another global batch" in reason for reason in load()[1]["vinjn/nanotron-ultrascale-playbook"])


def test_each_blind_row_keeps_its_first_answer_and_no_code_is_calibrated_on_one():
    rows = blind.load()
    assert len(rows) > 400
    assert all(row.raw["first"] > 0 and row.seconds > 0 for row in rows)
    calibrating = {row.raw["source_repo"] for row in load()[0]}
    assert not calibrating & {row.raw["source_repo"] for row in rows}
    answers = [abs(now) for _, _, now in blind.answers(rows[::7])]
    assert median(answers) < 0.15


def test_first_answers_are_written_once(tmp_path):
    (tmp_path / "torchtune.jsonl").write_text(
        '{"all": {"source_repo": "pytorch/torchtune", "micro_batch": 2, "seq_len": 2048, "method": "full"}}\n'
        '{"model": "llama-3.1-8b", "gpu": "rtx-4090", "tokens_per_second": 1650}\n'
    )
    blind.remember(tmp_path)
    (row,) = blind.load(tmp_path)
    assert row.raw["first"] == pytest.approx(predicted(row, known("eager")), rel=1e-3)
    before = (tmp_path / "torchtune.jsonl").read_text()
    blind.remember(tmp_path)
    assert (tmp_path / "torchtune.jsonl").read_text() == before


RECORDED = Path(__file__).parents[2] / "measurements" / "h200-2026-11-26.jsonl"


def test_optimizers_take_as_long_as_in_their_recorded_steps():
    """Of Llama 3.2 1B, in whose steps everything else is alike."""
    records = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    of_bitsandbytes = re.compile(r"llama-3.2-1b/full/bf16-mixed/(lion|paged|adamw-8bit).*/ckpt-none/seq2048/mb2")
    off = {}
    for record in records:
        if of_bitsandbytes.fullmatch(record.get("case", "")):
            (job, plan), cluster = asked(record), card_of(record)
            shape = read_shape(job.model.config)
            found = time_step(shape, Work.of(job, plan, cluster), cluster, known("eager"))
            off[plan.optimizer] = found.step_seconds / record["timing"]["median_seconds"] - 1
    assert set(off) == {"lion", "lion-8bit", "adamw-8bit", "paged-adamw", "paged-adamw-8bit"}
    assert max(abs(part) for part in off.values()) < 0.07, off


def test_steps_with_the_loss_in_slices_are_met() -> None:
    """By tonnage's own code, which does more twice than the product, and by TRL's, which does not."""
    off = {}
    for name in ("h200-2026-11-20.jsonl", "h200-2026-11-26.jsonl"):
        for line in RECORDED.with_name(name).read_text().splitlines():
            record = json.loads(line)
            if "/loss-chunked" in record.get("case", "") and record.get("timing"):
                (job, plan), cluster = asked(record), card_of(record)
                found = time_step(read_shape(job.model.config), Work.of(job, plan, cluster), cluster, known("eager"))
                off[record["case"]] = found.step_seconds / record["timing"]["median_seconds"] - 1
    assert sum(case.endswith("engine-trl") for case in off) == 2
    assert len(off) == 6
    assert max(abs(part) for part in off.values()) < 0.03, off


COMPILED = RECORDED.with_name("h200-2026-11-26b.jsonl")
TAUGHT = (
    "llama-3.2-1b/full/bf16-mixed/adamw/ckpt-none/seq2048/mb2/compile-layers",
    "llama-3.2-1b/full/bf16-mixed/adamw/ckpt-none/seq2048/mb2/compile-model",
    "llama-3.2-1b/full/bf16-true/adamw-fused/ckpt-none/seq2048/mb2/loss-chunked/compile-layers",
    "llama-3.2-1b/lora/bf16-mixed/adamw/ckpt-none/seq2048/mb2/compile-layers",
    "smollm2-360m/full/bf16-mixed/adamw/ckpt-none/seq1024/mb4/compile-layers",
)
"""The steps in which bytes, the loss, and the host's seconds were counted."""


def test_compiled_steps_that_taught_nothing_are_as_far_off_as_the_docs_say():
    off = {}
    for line in COMPILED.read_text().splitlines():
        record = json.loads(line)
        if "/compile-" in record["case"] and record.get("timing"):
            (job, plan), cluster = asked(record), card_of(record)
            found = time_step(read_shape(job.model.config), Work.of(job, plan, cluster), cluster, known("eager"))
            off[record["case"]] = found.step_seconds / record["timing"]["median_seconds"] - 1
    assert set(TAUGHT) <= set(off)
    others = sorted(abs(part) for case, part in off.items() if case not in TAUGHT)
    assert len(others) == 12
    within = sum(part < 0.08 for part in others)
    said = f"median {100 * median(others):.1f} %, {within} of 12 within 8 %"
    assert said in (Path(__file__).parents[2] / "docs" / "reference" / "time.md").read_text()


GAVE = {
    "lora/bf16-mixed/adamw/ckpt-none/seq2048/mb2/shard-zero3": "FSDP2's host, for each tensor",
    "qlora/bf16-mixed/adamw/ckpt-full/seq2048/mb2/shard-zero3": "the same of quantized tensors",
    "qlora/bf16-mixed/adamw/ckpt-full/seq2048/mb2/quant-int8": "LLM.int8's host",
    "full/bf16-mixed/adamw-8bit-ao/ckpt-none/seq1024/mb4": "torchao's launches",
}
"""Ends of the names of steps, and what was read off them."""


def test_steps_that_gave_a_constant_are_met() -> None:
    off = {}
    for line in (RECORDED.read_text() + COMPILED.read_text()).splitlines():
        record = json.loads(line)
        end = record.get("case", "").partition("/")[2]
        if end in GAVE:
            (job, plan), cluster = asked(record), card_of(record)
            found = time_step(read_shape(job.model.config), Work.of(job, plan, cluster), cluster, known("eager"))
            off[GAVE[end]] = found.step_seconds / record["timing"]["median_seconds"] - 1
    assert set(off) == set(GAVE.values())
    assert max(abs(part) for part in off.values()) < 0.1, off


COUNTED = (
    "llama-3.2-1b/full/bf16-mixed/adamw/ckpt-none/seq2048/mb2/compile-layers",
    "llama-3.2-1b/full/bf16-true/adamw-fused/ckpt-none/seq2048/mb2/loss-chunked/compile-layers",
)
"""Steps on whose kernels the bytes of compiled layers were counted, those without adapters, which multiply too."""


def test_inductors_kernels_take_as_long_as_the_bytes_that_were_counted() -> None:
    """What is between products at the memory's rate, and the least of each kernel."""
    records = {line["case"]: line for line in map(json.loads, COMPILED.read_text().splitlines())}
    lines = COMPILED.with_name("h200-2026-11-26b.events.jsonl").read_text().splitlines()
    events = {line["case"]: line for line in map(json.loads, lines)}
    for name in COUNTED:
        kernels = unpack(events[name]["kernels"])
        pairs = zip(kernels["name"], kernels["duration"], strict=True)
        real = sum(duration for number, duration in pairs if "triton" in kernels["names"][number]) / 1e9
        (job, plan), cluster = asked(records[name]), card_of(records[name])
        shape, work = read_shape(job.model.config), Work.of(job, plan, cluster)
        part = Slice(
            tokens=work.tokens, seq_len=work.seq_len, residual_bytes=4 if work.autocast else 2, backend="cudnn",
            casts=work.autocast, compiled=True,
        )  # fmt: skip
        passes = layer(shape, part)
        between = [op for op in (*passes.forward, *passes.backward) if op.family not in ("matmul", "attention")]
        found = seconds(between, cluster.device, card(cluster.device), backend="cudnn", seq_len=work.seq_len)
        assert found.total * shape.layers == pytest.approx(real, rel=0.12), name
