"""Adapters that PEFT refuses are an error of an option."""

from typing import Any

import pytest

from networks import tiny_job
from tonnage.errors import UsageError
from tonnage.estimates.assumptions import describe_narrow_adapters
from tonnage.plans import Plan
from tonnage.techniques import build


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gpt2", {"lora_targets": ("q_proj", "v_proj")}, "Target modules .* not found"),
        ("mixtral", {"lora_dropout": 0.1}, "lora_dropout"),
    ],
)
def test_what_peft_cannot_adapt_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"PEFT cannot adapt {name}: .*{said}.*--lora-targets"):
        build(tiny_job(name, method="lora", **options), Plan(), device="cpu")


@pytest.mark.parametrize(
    ("plan", "method", "said"),
    [
        (Plan(precision="bf16-true"), "lora", True),
        (Plan(precision="bf16-true", weights_dtype="fp32"), "lora", False),
        (Plan(precision="bf16-true", engine="hf-trainer"), "lora", False),
        (Plan(), "lora", False),
        (Plan(precision="bf16-true"), "full", False),
    ],
)
def test_adapters_narrower_than_peft_makes_them_are_said(plan: Plan, method: str, said: bool) -> None:
    assert (
        any("adapters are in bf16" in line for line in describe_narrow_adapters(tiny_job(method=method), plan))
        == said
    )
