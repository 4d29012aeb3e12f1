"""SGLang itself in a dry-run, where TONNAGE_SGLANG_PYTHON names a Python that has it; else skipped.

It pins a torch of its own, so that it needs another environment.
"""

import os
from pathlib import Path
from typing import Any

import pytest

import tonnage

PYTHON = os.environ.get("TONNAGE_SGLANG_PYTHON", "")

pytestmark = pytest.mark.skipif(
    not Path(PYTHON).is_file(),
    reason="SGLang pins a torch of its own; TONNAGE_SGLANG_PYTHON names a Python that has it",
)


@pytest.mark.parametrize(
    "settings",
    [
        {"eager": True},
        {},  # with graphs of prefill and decode, whose kernels are compiled at run time
        {"gpu": "2xh100-80gb", "tp": 2},
        {"model": "deepseek-v2-lite"},
    ],
    ids=str,
)
def test_the_closed_form_is_near_the_engine(settings: dict[str, Any]) -> None:
    asked = {"model": "llama-3.1-8b", "task": "serve", "gpu": "h100-80gb", "max_len": 8192, **settings}
    answer = tonnage.estimate(**asked, engine="sglang", engine_python=PYTHON)
    assert answer.ran is not None
    assert answer.serving.engine.startswith("sglang ")
    assert answer.serving.kv_cache_tokens == pytest.approx(answer.estimate.serving.kv_cache_tokens, rel=0.003)
