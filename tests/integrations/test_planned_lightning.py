"""A plan inside Lightning's Trainer trains as the Trainer alone; without it the import says what to install."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from networks import one_thread  # noqa: F401
from real_ranks import drop_like_others, run_ranks
from real_text import batches, network, pairs
from tonnage import Plan
from tonnage.errors import UsageError

STEPS, ACCUMULATED = 3, 2
HAS_LIGHTNING = find_spec("lightning") is not None or find_spec("pytorch_lightning") is not None
needs_lightning = pytest.mark.skipif(not HAS_LIGHTNING, reason="needs lightning")


@pytest.mark.skipif(HAS_LIGHTNING, reason="lightning is installed")
def test_without_lightning_one_line_says_what_to_install() -> None:
    with pytest.raises(UsageError, match="pip install lightning"):
        import tonnage.integrations.lightning  # noqa: F401


def rows(shares: int = 1) -> list[dict[str, torch.Tensor]]:
    return [batch for step in batches(STEPS, ACCUMULATED * shares, rows=2) for batch in step]


def make_module(model: Any) -> Any:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = model
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.network(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            assert self.network(**batch).logits.shape[-1] == 256

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=True)

    return Module()


def fit(folder: Path, model: Any, mine: list[dict[str, torch.Tensor]] | None = None, **settings: Any) -> Any:
    import lightning.pytorch as lightning

    quiet: dict[str, Any] = {
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "default_root_dir": str(folder)},
        **{"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
    }
    module = make_module(model)
    loader = torch.utils.data.DataLoader(rows() if mine is None else mine, batch_size=None)
    lightning.Trainer(**{**quiet, **settings}).fit(module, loader, loader)
    return module


@needs_lightning
@pytest.mark.parametrize("checkpointing", ["sqrt", "budget=1MiB"])
def test_decoders_with_a_configuration_of_their_own_keep_no_cache(checkpointing: str, tmp_path: Path) -> None:
    from tonnage.integrations.lightning import PlanCallback

    model, mine = pairs()
    callback = PlanCallback(Plan(precision="fp32", optimizer="adamw-foreach", checkpointing=checkpointing))
    mine = [{name: tensor[None] for name, tensor in row.items()} for row in mine]
    settings = {"callbacks": [callback], "limit_val_batches": 0}
    assert len(fit(tmp_path, model, mine, **settings).losses) == len(mine)
    assert model.decoder.config.use_cache


@needs_lightning
@pytest.mark.parametrize(
    ("choices", "tolerance"),
    [
        ({"checkpointing": "selective"}, 0.0),
        ({"checkpointing": "budget=300KiB"}, 0.0),
        ({"checkpointing": "full", "loss": "chunked"}, 1e-6),
        ({"activation_offload": "cpu-streamed"}, 0.0),
    ],
)
def test_equals_the_trainer_alone(choices: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    from tonnage.integrations.lightning import PlanCallback, plan_arguments

    alone, model = network(), network()
    expected = fit(tmp_path, alone, accumulate_grad_batches=ACCUMULATED)
    before = {module: ("forward" in vars(module), len(module._forward_hooks)) for module in model.modules()}
    plan = Plan(**{"precision": "fp32", "optimizer": "adamw-foreach", **choices})
    callback = PlanCallback(plan)
    found = fit(tmp_path, model, accumulate_grad_batches=ACCUMULATED, callbacks=[callback], **plan_arguments(plan))
    assert found.losses == pytest.approx(expected.losses, rel=max(tolerance, 1e-12))
    for key, weights in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], weights, rtol=0, atol=20 * tolerance, msg=key)
    report = callback.plan_report
    assert report.steps == STEPS
    assert {effect.option for effect in report.effects} >= {"precision", "optimizer", *choices}
    assert all(effect.took_effect for effect in report.effects), report.effects
    assert {module: ("forward" in vars(module), len(module._forward_hooks)) for module in model.modules()} == before


@needs_lightning
def test_a_trainer_with_other_settings_is_refused(tmp_path: Path) -> None:
    from tonnage.integrations.lightning import PlanCallback, plan_arguments

    path = tmp_path / "plan.toml"
    path.write_text('schema_version = 1\nmodel = "gpt2"\ngpu = "t4"\n[plan]\nprecision = "fp32"\n')
    with pytest.warns(UserWarning, match="The plan is for t4, and this machine has no GPU"):
        fit(tmp_path, network(), callbacks=[PlanCallback(path)], **plan_arguments(path))
    for choices, message in (
        ({"precision": "bf16-mixed"}, "The plan needs precision='bf16-mixed', and the Trainer has '32-true'"),
        ({"precision": "fp32", "clip_grad_norm": 0.5}, "needs gradient_clip_val=0.5, and the Trainer has None"),
    ):
        with pytest.raises(UsageError, match=message):
            fit(tmp_path, network(), callbacks=[PlanCallback(Plan(**choices))])
    for choices, message in (
        ({"shard": "zero1"}, "cannot carry out shard zero1 as it was estimated; possible: none, ddp, zero2, zero3"),
        ({"shard": "zero3", "param_offload": "cpu"}, "cannot carry out param-offload cpu"),
        ({"shard": "zero3", "precision": "fp16-mixed"}, "cannot carry out precision fp16-mixed"),
        ({"tp": 2}, "cannot carry out tp 2"),
        ({"optimizer_in_backward": True}, "optimizer-in-backward True"),
    ):
        with pytest.raises(UsageError, match=message):
            plan_arguments(Plan(**choices))


SHARDED: dict[str, dict[str, Any]] = {
    "zero3": {"shard": "zero3", "checkpointing": "full", "clip_grad_norm": 0.3},
    "zero2": {"shard": "zero2", "loss": "chunked"},
    "zero2 on four": {"shard": "zero2", "clip_grad_norm": 0.3},
    "hsdp on four": {"shard": "hsdp", "checkpointing": "full", "clip_grad_norm": 0.3},
}


@needs_lightning
@pytest.mark.parametrize("name", drop_like_others(SHARDED, ("zero2", "zero2 on four", "hsdp on four")))
def test_sharded_ranks_equal_one(name: str, tmp_path: Path) -> None:
    """Ranks with a share of the rows each, whose gradients are averaged; and what cannot be divided is refused."""
    choices, ranks = SHARDED[name], 4 if name.endswith("four") else 2
    alone = network()
    limit = choices.get("clip_grad_norm")
    fit(tmp_path, alone, rows(ranks), accumulate_grad_batches=ranks * ACCUMULATED, gradient_clip_val=limit)
    run_ranks(fit_sharded, ranks, choices, tmp_path)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt")
        for key, weights in alone.state_dict().items():
            torch.testing.assert_close(found[key], weights, rtol=0, atol=2e-6, msg=key)


def fit_sharded(rank: int, world: int, choices: dict[str, Any], folder: Path) -> None:
    from tonnage.integrations.lightning import PlanCallback, plan_arguments

    nodes = 2 if choices["shard"] == "hsdp" else 1
    node, local = divmod(rank, world // nodes)
    started = {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node, "WORLD_SIZE": world}
    started["LOCAL_WORLD_SIZE"] = world // nodes
    os.environ |= {name: str(value) for name, value in started.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test"}
    plan = Plan(precision="fp32", optimizer="adamw-foreach", **choices)
    settings: dict[str, Any] = {
        **{"devices": world // nodes, "num_nodes": nodes},
        "accumulate_grad_batches": ACCUMULATED,
        "use_distributed_sampler": False,
    }
    callback, model = PlanCallback(plan), network()
    before = {name: type(module) for name, module in model.named_modules()}
    mine = rows(world)[rank::world]
    fit(folder, model, mine, **settings, callbacks=[callback], **plan_arguments(plan))
    report = callback.plan_report
    assert {effect.option for effect in report.effects} >= {"shard", "optimizer", "precision"}
    assert all(effect.took_effect for effect in report.effects), report.effects
    assert {name: type(module) for name, module in model.named_modules()} == before
    torch.save(model.state_dict(), folder / f"{rank}.pt")
    if rank == 1:
        torch.nn.init.zeros_(model.lm_head.weight)
    with pytest.raises(UsageError, match="The ranks have networks with different weights"):
        fit(folder, model, mine, **settings, callbacks=[PlanCallback(plan)], **plan_arguments(plan))
    with pytest.raises(UsageError, match="needs Lightning's ModelParallelStrategy, and the Trainer has DDPStrategy"):
        fit(
            folder,
            network(),
            **settings,
            callbacks=[PlanCallback(plan)],
            **{**plan_arguments(plan), "strategy": "ddp"},
        )


@needs_lightning
def test_the_older_package_is_taken_too() -> None:
    code = "import sys; sys.modules['lightning'] = None; import tonnage.integrations.lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (find_spec("pytorch_lightning") is not None), done.stderr
