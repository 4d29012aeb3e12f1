"""Losses in slices of tokens: precision of the head's gradient, labels that were counted elsewhere, no labels."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from networks import one_thread  # noqa: F401
from real_text import batches, network
from tonnage import Job, Plan
from tonnage.errors import UsageError
from tonnage.step.step import Step
from tonnage.step.world import World
from tonnage.techniques import chunked_loss, fused_loss, select_techniques

SLICED = ("chunked", "fused", "torch")


def with_loss(loss: str, model: Any) -> Any:
    """Return the network with that loss."""
    plan, job = Plan(loss=loss), Job()
    step = Step(job=job, plan=plan, world=World(device=torch.device("cpu")), initialise=True)
    for technique in select_techniques(job, plan):
        if technique.option == "loss":
            step = technique.apply(step)
    for change in step.changes:
        change(model)
    return model


def head_gradient(loss: str, autocast: bool) -> torch.Tensor:
    model = network(vocab_size=256)
    if loss != "plain":
        model = with_loss(loss, model)
    [[batch]] = batches(1, rows=16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**batch)
    (output[0] if isinstance(output, tuple) else output.loss).backward()
    return model.lm_head.weight.grad


@pytest.mark.parametrize("loss", ["chunked", "fused"])
def test_slices_under_autocast_lose_no_precision(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunked_loss, fused_loss):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 8)  # 64 slices
    exact = head_gradient("plain", False)
    whole, sliced = ((head_gradient(kind, True) - exact).norm() / exact.norm() for kind in ("plain", loss))
    assert sliced < 1.2 * whole < 0.01


@pytest.mark.parametrize("loss", SLICED)
def test_without_labels_the_network_answers_and_generates_as_before(loss: str) -> None:
    if loss == "torch" and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("torch has no linear_cross_entropy")
    plain, sliced = network().eval(), with_loss(loss, network().eval())
    [[batch]] = batches(1)
    ids = batch["input_ids"]
    assert torch.equal(sliced(ids).logits, plain(ids).logits)
    assert sliced(ids, labels=ids)[0].item() == pytest.approx(plain(ids, labels=ids).loss.item(), rel=1e-6)
    first, second = (
        each.generate(ids[:1, :5], max_new_tokens=4, do_sample=False, pad_token_id=0) for each in (plain, sliced)
    )
    assert torch.equal(first, second)


def test_a_head_with_adapters_is_left_to_autograd() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(network(), peft.LoraConfig(r=4, target_modules=["lm_head"]))
    with_loss("chunked", model)
    [[batch]] = batches(1)
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch)[0].backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("loss", SLICED)
def test_the_sum_is_divided_by_the_number_that_is_given(loss: str, autocast: bool) -> None:
    """transformers' Trainer counts the labels of all micro-batches of a step."""
    plain, sliced = network(), with_loss(loss, network())
    [[batch]] = batches(1)
    losses = []
    for model in (plain, sliced):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(**batch, num_items_in_batch=1000)
        losses.append(output[0] if isinstance(output, tuple) else output.loss)
        losses[-1].backward()
    # torch's linear_cross_entropy returns the dtype of autocast, bf16, which has three digits
    torch.testing.assert_close(losses[0], losses[1].float(), rtol=1e-2 if autocast else 1e-6, atol=0)
    tolerance = {"rtol": 2e-2, "atol": 1e-4} if autocast else {"rtol": 1e-4, "atol": 1e-7}
    for (name, ours), theirs in zip(sliced.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **tolerance, msg=name)


@pytest.mark.parametrize("loss", SLICED)
def test_no_labels_sum_to_zero(loss: str) -> None:
    model = with_loss(loss, network())
    [[batch]] = batches(1)
    [value] = model(input_ids=batch["input_ids"], labels=torch.full_like(batch["labels"], -100), num_items_in_batch=7)
    value.backward()
    assert value == 0
    assert all((p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize(("kind", "field"), [("gemma2", "final_logit_softcapping"), ("minicpm3", "logits_scaling")])
def test_logits_that_change_by_a_field_that_nobody_stated_need_slices_of_our_own(kind: str, field: str) -> None:
    if kind not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {kind}")
    config = AutoConfig.for_model(
        kind, **{"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UsageError, match=rf"loss=torch: {kind} changes its logits \({field}\); choose loss fused"):
        with_loss("torch", model)
    with_loss("fused", model)
