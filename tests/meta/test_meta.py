"""The portable source without a ghost: its refusals, its messages, and that it leaves nothing behind."""

import subprocess
import sys

import pytest
import torch

import tonnage
from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import GhostUnavailable, UsageError
from tonnage.estimates import predict, sources
from tonnage.estimates.estimate import Estimate
from tonnage.meta import autocast, card, choices, quantities
from tonnage.meta.step import table
from tonnage.meta.temporaries import Temporaries
from tonnage.plans import Plan

T4 = parse_cluster("t4")


def estimate(plan: Plan | None = None, **options: object) -> Estimate:
    return predict.estimate(Case(tiny_job(**options), plan or Plan(), T4), steps=1, source="meta").estimate  # type: ignore[arg-type]


def test_it_says_what_it_is() -> None:
    found = estimate()
    assert found.source == "meta"
    assert any("replica" in line for line in found.coverage.modelled)
    assert any("table made on a ghost" in line for line in found.coverage.modelled)
    assert "fake tensors" in found.coverage.run[0]


def test_its_interval_is_wider_than_that_of_the_context() -> None:
    peak = estimate().peak
    context = T4.device.context_high_bytes - T4.device.context_low_bytes
    assert peak.high_bytes - peak.low_bytes >= context + peak.reserved_bytes // 20


@pytest.mark.parametrize(
    ("plan", "options", "word"),
    [
        (Plan(shard="ddp", reduce_dtype="bf16"), {}, "reduce-dtype=bf16 and shard=ddp"),
        (Plan(attention="flex"), {}, "flex"),
        (Plan(optimizer_offload="cpu"), {}, "optimizer-offload=cpu"),
        (Plan(), {"generate": 4}, "generate=4"),
    ],
)
def test_what_it_does_not_imitate_it_refuses(plan: Plan, options: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        estimate(plan, **options)


def test_weights_on_the_host_need_a_ghost() -> None:
    plan = Plan(shard="zero3", param_offload="cpu")
    with pytest.raises(UsageError, match="source=meta with param-offload=cpu"):
        predict.estimate(Case(tiny_job(), plan, parse_cluster("2xt4")), source="meta")


def test_sources_are_named() -> None:
    with pytest.raises(UsageError, match="possible: ghost, meta"):
        tonnage.estimate("gpt2", gpu="t4", source="guess")


def test_another_torch_needs_a_ghost() -> None:
    with pytest.raises(UsageError, match="installed torch"):
        predict.estimate(Case(tiny_job(), Plan(), T4), source="meta", torch_version="2.12.0")


def test_where_no_ghost_can_run_the_error_points_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*arguments: object) -> None:
        raise GhostUnavailable("A ghost GPU needs Linux on x86-64; this is Darwin on arm64.")

    monkeypatch.setattr(sources, "Worker", unavailable)
    with pytest.raises(GhostUnavailable, match="--source meta"):
        predict.estimate(Case(tiny_job(), Plan(), T4), fresh=True)


def test_code_of_a_type_that_shares_a_folder_is_loaded_before_the_card_is_there() -> None:
    """In a new process: on import transformers checks the type of a stream."""
    job = tiny_job()
    config = {**job.model.config, "model_type": "gemma3_text", "head_dim": 8}
    program = (
        "from tonnage.case import Case; from tonnage.catalog.devices import parse_cluster; "
        "from tonnage.estimates import predict; from tonnage.job import Job; "
        "from tonnage.model import ModelRef; from tonnage.plans import Plan; "
        f"job = Job(model=ModelRef(name='text', kind='config', config={config!r}), seq_len=24); "
        "report = predict.estimate(Case(job, Plan(), parse_cluster('t4')), steps=1, source='meta'); "
        "print(report.estimate.peak.allocated_bytes)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 0


def test_nothing_of_the_card_stays() -> None:
    before = torch.cuda.is_available(), torch.cuda.device_count()
    estimate(Plan(attention="math"))
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == before
    assert torch._subclasses.FakeTensor.is_meta is torch.Tensor.is_meta
    layer = torch.nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.rand(2, 4)).sum().backward()
    assert layer.weight.grad is not None


def test_tensors_of_the_card_and_of_meta_are_told_apart() -> None:
    with card.present(T4.device) as fake, fake:
        tensor = torch.zeros(3, device="cuda:0")
        assert (tensor.is_cuda, tensor.is_meta) == (True, False)
        assert torch.nn.functional.pad(tensor, (1, 1)).device == card.CARD
        with torch.device("meta"):
            made = torch.ones(4)
            assert torch.outer(made, made).device.type == "meta"
        assert torch.tensor([1, 2], device="cuda").device == card.CARD


def test_autocast_casts_weights_once_and_keeps_lists() -> None:
    with card.present(T4.device) as fake, autocast.on_card(table()["autocast"]), choices.on_card((7, 5)), fake:
        weight = torch.nn.Parameter(torch.zeros(8, 8, device="cuda:0"))
        given = torch.zeros(2, 8, device="cuda:0")
        with torch.autocast("cuda", torch.float16):
            first, second = (torch.nn.functional.linear(given, weight) for _ in range(2))
            assert first.dtype == second.dtype == torch.float16
            assert torch.softmax(first, -1).dtype == torch.float32
            assert torch.nn.functional.layer_norm(first, (8,)).dtype == torch.float32
            assert (first + given).dtype == torch.float32
        assert torch.nn.functional.linear(given, weight).dtype == torch.float32


def test_the_table_is_about_operations_that_are_listened_to() -> None:
    inside = table()["inside"]
    assert set(inside) <= set(quantities.OF)
    for variants in inside.values():
        for entries in variants.values():
            order = [tuple(entry["capability"]) for entry in entries]
            assert order == sorted(order)


def test_layer_norms_copy_what_is_strided() -> None:
    inside = Temporaries(T4.device, table()["inside"])
    with card.present(T4.device) as fake, fake:
        rows = torch.zeros(2, 4, 8, device="cuda:0")
        columns = torch.zeros(2, 8, 4, device="cuda:0").transpose(1, 2)
        forward, backward = (
            getattr(torch.ops.aten, name).default for name in ("native_layer_norm", "native_layer_norm_backward")
        )
        assert inside.before(forward, (columns, [8])) == [2 * 4 * 8 * 4]
        assert inside.before(forward, (rows, [8])) == []
        assert inside.before(backward, (columns, columns, [8])) == [256, 256]
