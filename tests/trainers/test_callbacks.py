"""Which Trainers write what they evaluate."""

from typing import Any

import pytest
import torch

from networks import tiny_job
from tonnage.errors import UsageError
from tonnage.step import model
from tonnage.trainers.hf_trainer import callbacks


def network(kind: str) -> Any:
    job = tiny_job(kind)
    return model.build(job.model, dtype=torch.float32, attention=None, device=torch.device("meta"))


@pytest.mark.parametrize(("kind", "writes"), [("t5", True), ("llama", False)])
def test_encoder_decoders_generate_in_evaluations(kind: str, writes: bool) -> None:
    module, job = network(kind), tiny_job(kind, generate=4)
    assert callbacks.evaluates_by_generating(job, module) == writes
    assert callbacks.with_evaluation(job, module).eval_batch == (job.micro_batch if writes else None)
    assert callbacks.with_evaluation(tiny_job(kind, generate=4, eval_batch=7), module).eval_batch == 7
    assert not callbacks.evaluates_by_generating(tiny_job(kind), module)


def test_logits_are_not_gathered_beside_what_is_generated() -> None:
    with pytest.raises(UsageError, match="leave generate out, or eval-logits"):
        callbacks.evaluates_by_generating(tiny_job("t5", generate=4, eval_batch=2, eval_logits=2), network("t5"))


def test_a_trainer_counts_on_from_its_checkpoint() -> None:
    assert [callbacks.last_step(tiny_job(resume=place), 3) for place in ("none", "cpu")] == [3, 4]
