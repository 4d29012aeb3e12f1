"""The dtypes of weights and of averaged gradients, beside plain PyTorch."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from networks import one_thread, tiny_job  # noqa: F401
from on_cpu import alone  # noqa: F401
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.plans import Plan
from tonnage.step.step import ReadyStep
from tonnage.techniques import build, refusals


def ready(plan: Plan) -> ReadyStep:
    torch.manual_seed(0)
    return build(tiny_job(), plan, device="cpu", initialise=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_under_autocast(dtype: torch.dtype) -> None:
    made = ready(Plan(precision="bf16-mixed", weights_dtype="bf16" if dtype == torch.bfloat16 else "fp32"))
    batch = made.next_batch()
    made.micro_batch(batch)
    plain = ready(Plan(precision="fp32")).model
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(dtype)  # Module.to would cast rotary frequencies as well
    plain.load_state_dict(made.model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        plain(**batch).loss.backward()
    for (name, ours), theirs in zip(made.model.named_parameters(), plain.parameters(), strict=True):
        assert ours.dtype == ours.grad.dtype == dtype, name
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


@pytest.mark.parametrize(
    ("precision", "reduce_dtype", "expected"),
    [
        ("bf16-mixed", None, torch.float32),
        ("bf16-mixed", "bf16", torch.bfloat16),
        ("bf16-true", None, None),
        ("bf16-true", "fp32", torch.float32),
    ],
)
def test_fsdp_averages_in_the_dtype(precision: str, reduce_dtype: str | None, expected: torch.dtype | None) -> None:
    made = ready(Plan(precision=precision, reduce_dtype=reduce_dtype, shard="zero3"))
    assert made.model._get_fsdp_state()._mp_policy.reduce_dtype == expected  # type: ignore[operator]
    made.run(1)


def test_ddp_compresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's hooks need NCCL: only which one is registered is checked."""
    registered = []
    monkeypatch.setattr(DistributedDataParallel, "register_comm_hook", lambda *_, hook, **__: registered.append(hook))
    for name in (None, "bf16", "fp16"):
        ready(Plan(precision="fp32", shard="ddp", reduce_dtype=name))
    assert registered == [default_hooks.bf16_compress_hook, default_hooks.fp16_compress_hook]


@pytest.mark.parametrize(
    ("method", "plan", "reason"),
    [
        ("lora", {"weights_dtype": "fp16", "precision": "bf16-true"}, "weights compute in their own dtype"),
        ("full", {"weights_dtype": "fp32", "precision": "bf16-true"}, "weights compute in their own dtype"),
        ("full", {"weights_dtype": "fp16", "precision": "fp16-mixed"}, "does not unscale fp16"),
        ("lora", {"weights_dtype": "bf16", "precision": "fp16-mixed"}, "does not unscale bf16"),
        ("full", {"reduce_dtype": "bf16"}, "shard is none"),
        ("full", {"reduce_dtype": "fp32", "shard": "ddp"}, "own dtype or a smaller one"),
    ],
)
def test_refusals(method: str, plan: dict[str, str], reason: str) -> None:
    (refusal,) = refusals(Case(tiny_job(method=method), Plan(**plan), parse_cluster("8xh100-80gb")))
    assert reason in refusal.reason
