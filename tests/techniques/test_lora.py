"""What PEFT cannot adapt is a wrong option, said in its words and ours."""

from typing import Any

import pytest

from networks import tiny_job
from tonnage.errors import UsageError
from tonnage.plans import Plan
from tonnage.step import step as steps


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gpt2", {"lora_targets": ("q_proj", "v_proj")}, "Target modules .* not found"),
        ("mixtral", {"lora_dropout": 0.1}, "lora_dropout"),
    ],
)
def test_what_peft_cannot_adapt_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"PEFT cannot adapt {name}: .*{said}.*--lora-targets"):
        steps.build(tiny_job(name, method="lora", **options), Plan(), device="cpu")
