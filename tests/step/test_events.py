"""Evaluation and generation beside the steps: when they run, and their effect on the network."""

from typing import Any

import pytest
import torch

from networks import one_thread, tiny_job  # noqa: F401
from on_cpu import alone, ready  # noqa: F401
from tonnage.errors import CannotEstimate, UsageError
from tonnage.step import events


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(events, "_listeners", [])
    events.listen(names.append)
    return names


def test_everything_comes_once_before_the_last_step(heard: list[str]) -> None:
    job = tiny_job(eval_batch=3, generate=4, save_checkpoint="full")
    ready(job).run(3, lambda index: heard.append(f"step {index}"))
    besides = ["evaluate", "", "generate", "", "save", ""]
    assert heard == ["step 0", "step 1", *besides, "step 2"]
    heard.clear()
    ready(job).run(1, lambda index: heard.append(f"step {index}"))
    assert heard == ["step 0", *besides]


def test_an_occasion_within_another_has_its_part_of_it(heard: list[str]) -> None:
    with events.phase("evaluate"), events.phase("generate"):
        heard.append("inside")
    assert heard == ["evaluate", "generate", "inside", "evaluate", ""]


def test_nothing_is_asked_for_by_default(heard: list[str]) -> None:
    ready(tiny_job()).run(2)
    assert heard == []


def test_evaluation_runs_batches_of_its_own_without_gradients() -> None:
    made = ready(tiny_job(eval_batch=3, eval_logits=2))
    seen: list[tuple[Any, bool, bool]] = []
    made.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(
            (kwargs["input_ids"].shape, torch.is_grad_enabled(), module.training)
        ),
        with_kwargs=True,
    )
    events.evaluate(made)
    assert seen == [((3, 24), False, False)] * 2
    assert made.model.training


def test_logits_cannot_be_kept_where_there_are_none() -> None:
    with pytest.raises(CannotEstimate, match="choose loss plain"):
        events.evaluate(ready(tiny_job(eval_batch=1, eval_logits=1), loss="chunked"))


@pytest.mark.parametrize(("name", "loss"), [("llama", "fused"), ("t5", "plain"), ("whisper", "plain")])
def test_generation_goes_on_to_its_length_with_a_cache(name: str, loss: str) -> None:
    made = ready(tiny_job(name, generate=5), checkpointing="full", loss=loss)
    lengths: list[int] = []
    head: Any = made.model.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_hook(lambda module, arguments, output: lengths.append(arguments[0].shape[1]))
    events.generate(made)
    assert len(lengths) == 5
    assert lengths[1:] == [1] * 4, "each further token alone: the rest is in the cache"
    made.run(1)


@pytest.mark.parametrize(("name", "method"), [("llama", "full"), ("llama", "lora"), ("gemma3", "lora")])
def test_a_divided_network_generates_within_its_adapters(name: str, method: str) -> None:
    """Parameters outside all layers (the embedding) are gathered by the outermost module, which PEFT's `generate`
    bypasses.
    """
    pytest.importorskip("peft")
    made = ready(tiny_job(name, method=method, generate=4), shard="zero3")
    made.run(1)


def test_logits_are_those_of_an_evaluation() -> None:
    with pytest.raises(UsageError, match="give eval-batch"):
        tiny_job(eval_logits=2)
