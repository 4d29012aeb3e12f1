"""A plan inside a loop around accelerate trains as the loop alone, and leaves the network as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from networks import one_thread  # noqa: F401
from real_text import batches, network, pairs
from tonnage import Job, Plan
from tonnage.errors import UsageError
from tonnage.integrations.accelerate import PlannedAccelerator
from tonnage.techniques import activation_offload, chunked_loss

STEPS, ACCUMULATED = 4, 3
PLANS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 0.0),
    "selective": ({"checkpointing": "selective"}, 0.0),
    "budget": ({"checkpointing": "budget=300KiB"}, 0.0),
    "on the host": ({"activation_offload": "cpu-streamed"}, 0.0),
    "attention": ({"checkpointing": "attention"}, 0.0),
    "chunked": ({"loss": "chunked", "checkpointing": "full"}, 1e-6),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALL_BYTES", 1)
    monkeypatch.setattr(chunked_loss, "CHUNK_TOKENS", 10)
    AcceleratorState._reset_state(reset_partial_state=True)


def rows() -> list[dict[str, torch.Tensor]]:
    return [batch for step in batches(STEPS, ACCUMULATED, rows=2) for batch in step]


def train(accelerator: Accelerator, model: Any, optimizer: Any) -> list[float]:
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(rows(), batch_size=None)
    )
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of the loop alone."""
    model = network()
    alone = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    found = train(alone, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return found, model.state_dict()


@pytest.mark.parametrize("name", PLANS)
def test_equals_the_loop_alone(name: str, expected: Any) -> None:
    choices, tolerance = PLANS[name]
    model = network()
    model.config.use_cache = True
    before = {module: ("forward" in vars(module), len(module._forward_hooks)) for module in model.modules()}
    plan = Plan(**{"precision": "fp32", "optimizer": "adamw-foreach", **choices})
    accelerator = PlannedAccelerator(plan, cpu=True, gradient_accumulation_steps=ACCUMULATED)
    found = train(accelerator, model, accelerator.make_optimizer(model, {"lr": 1e-3}))
    assert found == pytest.approx(expected[0], rel=max(tolerance, 1e-12))
    for key, weights in expected[1].items():
        torch.testing.assert_close(model.state_dict()[key], weights, rtol=0, atol=20 * tolerance, msg=key)
    report = accelerator.plan_report
    assert report.steps == STEPS
    assert {effect.option for effect in report.effects} >= {"precision", "optimizer", *choices}
    assert all(effect.took_effect for effect in report.effects), report.effects
    assert not model.config.use_cache
    model.eval()
    with torch.no_grad():
        assert model(**rows()[0]).logits.shape[-1] == 256
    accelerator.end_training()
    assert model.config.use_cache
    assert {module: ("forward" in vars(module), len(module._forward_hooks)) for module in model.modules()} == before


@pytest.mark.parametrize("checkpointing", ["sqrt", "budget=1MiB"])
def test_decoders_with_a_configuration_of_their_own_keep_no_cache(checkpointing: str) -> None:
    model, mine = pairs()
    plan = Plan(precision="fp32", checkpointing=checkpointing)
    accelerator = PlannedAccelerator(plan, cpu=True)
    made = accelerator.make_optimizer(model, {"lr": 1e-3})
    loader = torch.utils.data.DataLoader(mine, batch_size=2)
    prepared, optimizer, loader = accelerator.prepare(model, made, loader)
    for batch in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch).loss)
            optimizer.step()
    assert not model.decoder.config.use_cache
    accelerator.end_training()
    assert model.decoder.config.use_cache


def test_an_optimizer_of_another_kind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    accelerator = PlannedAccelerator(Plan(precision="fp32"), cpu=True, gradient_accumulation_steps=ACCUMULATED)
    train(accelerator, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert "had no effect: SGD" in capsys.readouterr().err


def test_the_plan_file_sets_the_accelerator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    text = '[job]\nmicro_batch = 4\ngrad_accum = 5\n[plan]\nprecision = "bf16-mixed"\n'
    path.write_text(f'schema_version = 1\nmodel = "gpt2"\ngpu = "cpu"\n{text}')
    accelerator = PlannedAccelerator(path, cpu=True, mixed_precision="no")
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 5
    assert "the plan sets mixed_precision='bf16' (it was 'no')" in capsys.readouterr().err
    accelerator.prepare(network(), torch.utils.data.DataLoader(rows(), batch_size=2))
    assert "batches have 2 rows, and the plan was made for 4" in capsys.readouterr().err
    path.write_text(path.read_text().replace('"cpu"', '"t4"'))
    with pytest.warns(UserWarning, match=r"The plan is for t4, and this machine has no GPU"):
        PlannedAccelerator(path, cpu=True)


@pytest.mark.parametrize(
    ("choices", "job", "message"),
    [
        ({"optimizer_in_backward": True}, None, "cannot carry out optimizer-in-backward True; possible: False"),
        ({"tp": 2}, None, "cannot carry out tp 2"),
        ({"optimizer": "muon"}, None, "cannot carry out optimizer muon; possible: .*adamw"),
        ({"shard": "ddp"}, None, "shard ddp shares work .* started without torchrun"),
        ({"precision": "bf16-true"}, None, "weights are float32, and under bf16-true .* bfloat16"),
        ({}, Job(method="lora"), "method is lora, and LlamaForCausalLM has no adapters"),
    ],
)
def test_what_cannot_be_done_is_refused(choices: dict[str, Any], job: Job | None, message: str) -> None:
    plan = Plan(**{"precision": "fp32", **choices})
    with pytest.raises(UsageError, match=message):
        PlannedAccelerator(plan, job, cpu=True).prepare(network())


def test_the_network_is_prepared_first() -> None:
    accelerator = PlannedAccelerator(Plan(precision="fp32"), cpu=True)
    with pytest.raises(UsageError, match="Prepare the network first"), accelerator.accumulate():
        pass
    accelerator.prepare(network())
    with pytest.raises(UsageError, match="another was prepared before"):
        accelerator.prepare(network())
