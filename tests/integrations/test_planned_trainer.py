"""A plan inside Hugging Face's Trainer trains as the Trainer alone, and leaves the network as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from networks import one_thread  # noqa: F401
from real_text import IGNORED, batches, network, pairs
from tonnage import Job, Plan
from tonnage.errors import UsageError
from tonnage.integrations.measuring import PlanReport
from tonnage.integrations.transformers import PlannedTrainer, planned
from tonnage.techniques import activation_offload, chunked_loss, disk, fused_loss
from tonnage.train.prediction import Predicted

STEPS, ACCUMULATED = 4, 3
EXACT, SUMMED = 0.0, 1e-6
"""A loss in slices is summed in another order."""

PLANS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, EXACT),
    **{
        f"checkpointing {kind}": ({"checkpointing": kind}, EXACT)
        for kind in ("full", "every-2", "sqrt", "selective", "attention", "attention-module", "budget=300KiB")
    },
    **{f"activations {place}": ({"activation_offload": place}, EXACT) for place in ("cpu", "cpu-streamed", "nvme")},
    **{f"loss {kind}": ({"loss": kind}, SUMMED) for kind in ("chunked", "fused", "torch")},
    "loss chunked, checkpointing full": ({"loss": "chunked", "checkpointing": "full"}, SUMMED),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tensors of a tiny network large enough to be sent to the host, and its tokens several slices."""
    for module in (activation_offload, disk):
        monkeypatch.setattr(module, "SMALL_BYTES", 1)
    for module in (chunked_loss, fused_loss):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 10)


def rows() -> list[dict[str, torch.Tensor]]:
    """Return sequences with unequal numbers of labels."""
    made = [
        {name: tensor[0] for name, tensor in batch.items()}
        for step in batches(STEPS, 2 * ACCUMULATED, rows=1)
        for batch in step
    ]
    for index, row in enumerate(made):
        row["labels"][: 5 * (index % 5)] = IGNORED
    return made


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    settings = {
        **{"output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3},
        **{"gradient_accumulation_steps": ACCUMULATED, "logging_steps": 1, "report_to": [], "use_cpu": True},
        **{"save_strategy": "no", "disable_tqdm": True, "optim": "adamw_torch"},
    }
    return TrainingArguments(**{**settings, **more})


def losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of the Trainer alone."""
    model = network()
    found = losses(Trainer(model, arguments(tmp_path_factory.mktemp("plain")), train_dataset=rows()))
    return found, model.state_dict()


def attached(module: torch.nn.Module) -> tuple[bool, int, int]:
    """Return whether a module has a forward of its own, and its numbers of hooks."""
    return "forward" in vars(module), len(module._forward_hooks), len(module._forward_pre_hooks)


@pytest.mark.parametrize("name", PLANS)
def test_equals_the_trainer_alone(name: str, expected: Any, tmp_path: Path) -> None:
    choices, tolerance = PLANS[name]
    model = network()
    before = {module: attached(module) for module in model.modules()}
    plan = Plan(**{"precision": "fp32", "optimizer": "adamw-foreach", **choices})
    trainer = PlannedTrainer(model, arguments(tmp_path), plan=plan, train_dataset=rows())
    found = losses(trainer)
    assert found == pytest.approx(expected[0], rel=max(tolerance, 1e-12))
    for key, weights in expected[1].items():
        torch.testing.assert_close(model.state_dict()[key], weights, rtol=0, atol=20 * tolerance, msg=key)
    report = trainer.plan_report
    assert report.steps == STEPS
    assert {effect.option for effect in report.effects} >= {"precision", "optimizer", *choices}
    assert all(effect.took_effect for effect in report.effects), report.effects
    assert {module: attached(module) for module in model.modules()} == before
    with torch.no_grad():
        assert model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 256)


@pytest.mark.parametrize("checkpointing", ["sqrt", "budget=1MiB"])
def test_decoders_with_a_configuration_of_their_own_keep_no_cache(checkpointing: str, tmp_path: Path) -> None:
    model, mine = pairs()
    plan = Plan(precision="fp32", checkpointing=checkpointing)
    trainer = PlannedTrainer(model, arguments(tmp_path, max_steps=2), plan=plan, train_dataset=mine)
    held: list[bool] = []
    model.register_forward_hook(lambda *_: held.append(model.decoder.config.use_cache))
    assert len(losses(trainer)) == 2
    assert set(held) == {False}
    assert model.decoder.config.use_cache


def test_evaluation_sees_logits(tmp_path: Path) -> None:
    seen = []
    trainer = PlannedTrainer(
        network(),
        arguments(tmp_path, eval_strategy="steps", eval_steps=2),
        plan=Plan(precision="fp32", loss="chunked", checkpointing="selective"),
        train_dataset=rows(),
        eval_dataset=rows()[:4],
        compute_metrics=lambda prediction: seen.append(prediction.predictions.shape) or {"seen": 1.0},
    )
    trainer.train()
    assert seen == [(4, 32, 256)] * 2
    assert [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def test_the_plan_wins_and_says_what_it_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(micro_batch=1, grad_accum=2)
    plan = Plan(precision="fp32", optimizer="sgd", clip_grad_norm=0.5)
    trainer = PlannedTrainer(network(), arguments(tmp_path), plan=plan, job=job, train_dataset=rows())
    assert trainer.args.per_device_train_batch_size == 1
    assert trainer.args.gradient_accumulation_steps == 2
    assert trainer.args.max_grad_norm == 0.5
    assert trainer.args.optim == "sgd"
    assert "the plan sets per_device_train_batch_size=1 (it was 2)" in capsys.readouterr().err


@pytest.mark.parametrize("loss", ["plain", "chunked", "fused"])
def test_autocast_survives_evaluations_and_a_second_training(loss: str, tmp_path: Path) -> None:
    plan = Plan(precision="bf16-mixed", optimizer="adamw-foreach", loss=loss, checkpointing="selective")
    more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    model, expected_model = network(), network()
    kinds: set[tuple[bool, torch.dtype]] = set()
    linear = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    linear.register_forward_hook(lambda module, _, output: kinds.add((module.training, output.dtype)))
    planned_one = PlannedTrainer(
        model, arguments(tmp_path, **more), plan=plan, train_dataset=rows(), eval_dataset=rows()[:4]
    )
    alone = Trainer(
        expected_model,
        arguments(tmp_path, **more, bf16=True),
        train_dataset=rows(),
        eval_dataset=rows()[:4],
    )
    for trainer in (planned_one, alone, planned_one, alone):
        trainer.train()
    assert kinds == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert all(effect.took_effect for effect in planned_one.plan_report.effects), planned_one.plan_report.effects
    found, expected = ([e["loss"] for e in t.state.log_history if "loss" in e] for t in (planned_one, alone))
    assert found == pytest.approx(expected, rel=1e-3)
    assert planned_one.evaluate()["eval_loss"] == pytest.approx(alone.evaluate()["eval_loss"], rel=1e-3)
    assert kinds == {(True, torch.bfloat16), (False, torch.bfloat16)}


def test_a_setting_without_effect_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Other(Trainer):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
            return self.optimizer

    plan = Plan(precision="fp32", optimizer="adamw-foreach")
    trainer = planned(Other)(network(), arguments(tmp_path), plan=plan, train_dataset=rows())
    trainer.train()
    assert "optimizer adamw-foreach had no effect: SGD" in capsys.readouterr().err
    assert str(trainer.plan_report).endswith("; without effect: optimizer")


def test_the_configuration_is_saved_as_it_was(tmp_path: Path) -> None:
    model = network()
    model.config.use_cache = True
    plan = Plan(precision="fp32", checkpointing="full", loss="chunked")
    settings = arguments(tmp_path, save_strategy="steps", save_steps=2)
    trainer = PlannedTrainer(model, settings, plan=plan, train_dataset=rows())
    trainer.train()
    assert model.config.use_cache
    trainer.save_model(str(tmp_path / "end"))
    for folder in ("checkpoint-2", "end"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["use_cache"], folder


def test_adapters_are_trained_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(network(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = Plan(precision="fp32", checkpointing="selective", loss="chunked")
    trainer = PlannedTrainer(model, arguments(tmp_path), plan=plan, train_dataset=rows())
    trainer.train()
    assert trainer.plan_job.method == "lora"
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all("lora_" in name for name in changed), changed
    assert all(effect.took_effect for effect in trainer.plan_report.effects), trainer.plan_report.effects


def test_measured_numbers_stand_beside_the_prediction() -> None:
    report = PlanReport(
        steps=5,
        step_seconds=0.22,
        allocated_bytes=3 << 30,
        reserved_bytes=4 << 30,
        effects=(),
        predicted=Predicted(allocated_bytes=4 << 30, reserved_bytes=4 << 30, step_seconds=0.2),
    )
    assert str(report) == (
        "plan: 5 steps, 0.22 s a step (+10.0% of predicted), 3.00 GiB allocated (-25.0% of predicted), "
        "4.00 GiB reserved (+0.0% of predicted)"
    )


@pytest.mark.parametrize(
    ("choices", "job", "message"),
    [
        ({"precision": "bf16-true"}, None, "weights are float32, and under bf16-true with method full .* bfloat16"),
        ({}, Job(method="lora"), "method is lora, and LlamaForCausalLM has no adapters"),
        ({"shard": "ddp"}, None, "shard ddp shares work .* started without torchrun"),
        ({"shard": "zero3", "param_offload": "cpu"}, None, "shard zero3 shares work .* without torchrun"),
        ({"param_offload": "cpu"}, None, "on the host under FSDP alone, and shard is none"),
        ({"checkpointing": "budget=1MiB", "activation_offload": "cpu"}, None, "a budget on the GPU has no use"),
    ],
)
def test_what_would_silently_do_something_else_is_refused(
    choices: dict[str, Any], job: Job | None, message: str, tmp_path: Path
) -> None:
    plan = Plan(**{"precision": "fp32", **choices})
    with pytest.raises(UsageError, match=message):
        PlannedTrainer(network(), arguments(tmp_path), plan=plan, job=job, train_dataset=rows())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"optimizer_in_backward": True}, "cannot carry out optimizer-in-backward True; use tonnage.apply"),
        ({"tp": 2}, "cannot carry out tp 2"),
        ({"optimizer": "muon"}, "no setting for optimizer muon; possible: .*adamw"),
        ({"precision": "megatron-bf16"}, "no setting for precision megatron-bf16"),
    ],
)
def test_what_the_trainer_cannot_do_is_refused(choices: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        PlannedTrainer(network(), arguments(tmp_path), plan=Plan(**choices), train_dataset=rows())


@pytest.mark.parametrize("loss", ["chunked", "fused", "torch"])
def test_a_loss_without_logits_is_refused_where_logits_are_needed(loss: str, tmp_path: Path) -> None:
    class Own(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(**inputs).logits.mean()

    plan, settings = Plan(precision="fp32", loss=loss), arguments(tmp_path)
    with pytest.raises(UsageError, match=f"loss {loss} returns no logits, and PlannedOwn has a compute_loss"):
        planned(Own)(network(), settings, plan=plan)
    with pytest.raises(UsageError, match="compute_loss_func is given; choose loss plain"):
        PlannedTrainer(network(), settings, plan=plan, compute_loss_func=lambda *_, **__: None)
    with pytest.raises(UsageError, match=r"label_smoothing_factor is 0\.1"):
        PlannedTrainer(network(), arguments(tmp_path, label_smoothing_factor=0.1), plan=plan)


def test_other_arguments_and_classes_are_refused(tmp_path: Path) -> None:
    (path := tmp_path / "plan.toml").write_text(
        'schema_version = 1\nmodel = "gpt2"\ngpu = "t4"\n[plan]\nprecision = "fp32"\n'
    )
    with pytest.warns(UserWarning, match="The plan is for t4, and this machine has no GPU"):
        PlannedTrainer(network(), arguments(tmp_path), plan=path)
    with pytest.raises(UsageError, match="args is a dict; give TrainingArguments"):
        PlannedTrainer(network(), {}, plan=Plan())
    with pytest.raises(UsageError, match="dict is not built on transformers' Trainer"):
        planned(dict)


def test_a_run_is_resumed_exactly(tmp_path: Path) -> None:
    plan = Plan(precision="fp32", checkpointing="selective", loss="fused")
    whole = PlannedTrainer(
        network(), arguments(tmp_path / "whole", save_strategy="steps", save_steps=2), plan=plan, train_dataset=rows()
    )
    expected = losses(whole)
    again = PlannedTrainer(network(seed=1), arguments(tmp_path / "again"), plan=plan, train_dataset=rows())
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    found = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    assert found == expected
