"""Suggestions are made when the numbers support them, and not otherwise."""

from dataclasses import replace

import pytest

import estimates
from tonnage.advice.suggestions_not_run import suggest
from tonnage.estimates.estimate import Estimate
from tonnage.units import GIB


def options(estimate: Estimate) -> list[str]:
    return [item.what for item in suggest(estimate)]


def with_message(old: str, new: str, **changes: object) -> Estimate:
    estimate = estimates.full_card()
    assert old in estimates.MESSAGE
    return replace(estimate, oom=replace(estimate.oom, message=estimates.MESSAGE.replace(old, new)), **changes)


def test_no_suggestions_when_it_fits():
    assert suggest(estimates.fitting()) == []


def test_expandable_segments_only_if_the_unallocated_bytes_suffice():
    assert options(estimates.full_card())[0] == "--allocator expandable"
    # 9 GiB unallocated and 0.25 GiB free: enough for 9.2 GiB, but not for 9.5 GiB.
    assert "--allocator expandable" in options(with_message("512.00 MiB", "9.20 GiB"))
    assert "--allocator expandable" not in options(with_message("512.00 MiB", "9.50 GiB"))


def test_expandable_segments_are_not_suggested_twice():
    estimate = estimates.full_card()
    assert "--allocator expandable" not in options(
        replace(estimate, plan={**estimate.plan, "allocator": "expandable"})
    )
    script = replace(estimate, plan={}, job={"command": ["x"], "allocator_settings": "expandable_segments:True"})
    assert not any("expandable_segments" in what for what in options(script))


def test_script_gets_an_environment_variable_and_no_options():
    script = replace(estimates.full_card(), plan={})
    assert options(script)[0] == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert not any(what.startswith("--") for what in options(script))
    older = replace(script, versions={"torch": "2.9.1+cu128"})  # deprecates this name, but reads no other
    assert options(older)[0] == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_script_gets_in_words_what_may_help_with_its_limit():
    # 14 GiB of weights, 14 of gradients, 28 of states and 21.5 of activations on 4 ranks.
    script = replace(estimates.full_card(), plan={}, model={"class": "LlamaForCausalLM"})
    reasons = {item.what: item.why for item in suggest(script)}
    assert "at most 21.50 GiB" in reasons["activation checkpointing"]
    assert "at most 42.00 GiB" in reasons["FSDP2 or ZeRO-3"]
    assert "at most 21.00 GiB" in reasons["an 8-bit optimizer (changes the mathematics)"]
    assert "Liger's loss, or one in slices" in reasons
    assert "Liger's loss, or one in slices" not in options(replace(script, model={"class": "ViTModel"}))
    alone = replace(script, cluster={**script.cluster, "gpus": 1})
    assert "FSDP2 or ZeRO-3" not in options(alone)


def test_limits_are_those_of_the_whole_step_where_it_is_known():
    script = replace(estimates.full_card(), plan={})
    held = {**script.peak.by_category, "activation": 100 * GIB}
    whole = replace(script, needed=replace(script.peak, by_category=held))
    assert any("at most 100.00 GiB" in item.why for item in suggest(whole))


def test_most_bytes_first():
    # 56 GiB of states on 4 ranks (42 can be saved), 42 GiB of gradients and states, 21.5 GiB of activations.
    assert options(estimates.full_card())[1:] == ["--shard zero3", "--method lora", "--checkpointing full"]


def test_sharding_is_not_suggested_for_one_card():
    estimate = estimates.full_card()
    assert "--shard zero3" not in options(replace(estimate, cluster={**estimate.cluster, "gpus": 1}))


def test_reducing_gradients_after_each_micro_batch_is_suggested():
    estimate = estimates.full_card()
    plan = {**estimate.plan, "shard": "zero3"}
    waiting = replace(estimate, plan=plan, job={**estimate.job, "grad_accum": 4})
    held = {"parameter": 10 * GIB, "gradient": 28 * GIB, "optimizer_state": 10 * GIB}
    waiting = replace(waiting, peak=replace(waiting.peak, by_category={**waiting.peak.by_category, **held}))
    assert "--accum-sync" in options(waiting)
    for other in ({"accum_sync": True}, {"engine": "deepspeed"}, {"shard": "ddp"}):
        assert "--accum-sync" not in options(replace(waiting, plan={**plan, **other}))
    assert "--accum-sync" not in options(replace(waiting, job={**estimate.job, "grad_accum": 1}))
    assert "--accum-sync" not in options(replace(waiting, cluster={**estimate.cluster, "gpus": 1}))


def test_only_settings_of_the_engine_are_suggested():
    estimate = estimates.full_card()
    assert {"--shard zero3", "--checkpointing full"} <= {*options(estimate)}
    assert options(replace(estimate, plan={**estimate.plan, "engine": "megatron"}))[1:] == [
        "--checkpointing full",
        "--micro-batch 2",
    ]


def test_options_in_use_are_not_suggested():
    estimate = estimates.full_card()
    plan = {**estimate.plan, "checkpointing": "full", "shard": "zero3", "allocator": "expandable"}
    used = replace(estimate, plan=plan, job={**estimate.job, "method": "lora", "micro_batch": 1})
    assert options(used) == []


def test_half_the_batch_keeps_the_global_batch_only_if_even():
    even = replace(estimates.full_card(), plan={"checkpointing": "full"}, job={"micro_batch": 4, "grad_accum": 3})
    odd = replace(even, job={"micro_batch": 3})
    assert [(item.what, "--grad-accum 6 keeps" in item.why) for item in suggest(even)][-1] == (
        "--micro-batch 2",
        True,
    )
    assert [(item.what, "keeps" in item.why) for item in suggest(odd)][-1] == ("--micro-batch 1", False)


def test_fused_optimizer_only_for_a_shortage_in_the_optimizer():
    estimate = estimates.full_card()
    in_step = replace(estimate, oom=replace(estimate.oom, phase="optimizer", message=""), plan={"optimizer": "adamw"})
    assert "--optimizer adamw-fused" in options(in_step)
    assert "--optimizer adamw-fused" not in options(replace(in_step, oom=estimate.oom))


CREATION_FRAME = "torch/optim/adam.py:178 _init_group"


def test_moments_are_at_stake_while_they_are_created():
    """There are no temporaries yet, and the cache is too small for the moments that follow."""
    estimate = estimates.full_card()
    held = {**estimate.peak.by_category, "gradient": 16 * GIB, "optimizer_state": 4 * GIB}
    making = replace(
        estimate,
        oom=replace(estimate.oom, phase="optimizer", step=1, stack=(CREATION_FRAME,)),
        peak=replace(estimate.peak, by_category=held),
        plan={"optimizer": "adamw", "optimizer_offload": "none"},
    )
    (suggestion,) = [item for item in suggest(making) if item.what == "--optimizer-offload cpu"]
    assert "take 32.00 GiB, of which 28.00 GiB were not created yet" in suggestion.why
    assert "--optimizer adamw-8bit" in options(making)
    assert "--optimizer adamw-fused" not in options(making)
    assert "--allocator expandable" not in options(making)
    script = replace(making, plan={})
    assert not any("expandable" in what for what in options(script)), "it would not have helped either"
    made = replace(making, peak=replace(making.peak, by_category={**held, "optimizer_state": 32 * GIB}))
    assert "--optimizer-offload cpu" not in options(made)


@pytest.mark.parametrize(
    ("shard", "engine", "wanted"),
    [
        ("none", "tonnage", ["--optimizer-offload cpu", "--optimizer adamw-8bit"]),
        ("zero1", "tonnage", ["--optimizer adamw-8bit"]),
        ("zero3", "tonnage", ["--param-offload cpu", "--optimizer adamw-8bit-ao"]),
        ("zero3", "deepspeed", ["--optimizer-offload cpu"]),
    ],
)
def test_suggestions_for_moments_depend_on_the_sharding(shard: str, engine: str, wanted: list[str]) -> None:
    """In the first backward pass no moments exist yet."""
    estimate = estimates.full_card()
    plan = {"optimizer": "adamw", "optimizer_offload": "none", "param_offload": "none", "shard": shard}
    first = replace(
        estimate,
        oom=replace(estimate.oom, phase="backward", step=1),
        peak=replace(estimate.peak, by_category={"gradient": 16 * GIB, "activation": 4 * GIB}),
        plan={**plan, "engine": engine},
    )
    suggestions = [item for item in suggest(first) if "Adam's moments" in item.why]
    assert [item.what for item in suggestions] == wanted
    assert "take 32.00 GiB or more, and were not created yet" in suggestions[0].why
    assert "--allocator expandable" not in options(first)


def test_chunked_loss_for_a_request_of_the_size_of_the_logits():
    # 4 x 4096 tokens and 128,256 words in two bytes: 3.91 GiB.
    estimate = with_message("512.00 MiB", "3.91 GiB", plan={"loss": "plain"})
    model = {**estimate.model, "vocab_size": 128256}
    assert "--loss chunked" in options(replace(estimate, model=model))
    assert "--loss chunked" not in options(replace(estimate, model={**model, "vocab_size": 32000}))
    assert "--loss chunked" not in options(estimate)


def test_suggestions_smaller_than_the_request_are_omitted():
    estimate = with_message("512.00 MiB", "22.00 GiB")  # more than the 21.5 GiB of activations
    assert "--checkpointing full" in options(estimates.full_card())
    assert "--checkpointing full" not in options(estimate)
    assert "--shard zero3" in options(estimate)


def test_temporaries_of_the_model_grow_with_the_batch_too():
    # 21.5 GiB of activations and 0.25 GiB of workspace at a peak in the backward pass; half of that can be saved.
    plan = {"checkpointing": "full", "shard": "none"}
    (item,) = [item for item in suggest(replace(estimates.full_card(), plan=plan)) if "micro-batch" in item.what]
    assert "activations and temporaries take 21.75 GiB" in item.why
    sharded = replace(estimates.full_card(), plan={**plan, "shard": "zero3"})
    (item,) = [item for item in suggest(sharded) if "micro-batch" in item.what]
    assert "activations take 21.50 GiB" in item.why


def test_expandable_segments_come_last_when_more_requests_would_follow():
    estimate = estimates.full_card()
    begun = replace(estimate, oom=replace(estimate.oom, step=1, phase="forward"))
    assert options(begun)[-1] == "--allocator expandable"
    assert options(replace(begun, oom=replace(begun.oom, phase="backward")))[0] == "--allocator expandable"


def test_another_attention_for_a_request_of_the_size_of_the_scores():
    estimate = with_message("512.00 MiB", "8.00 GiB", plan={**estimates.full_card().plan, "shard": "zero3"})
    for scores, is_suggested in ((8 * GIB, True), (4 * GIB, True), (7 * GIB, False), (None, False)):
        for sparing in ("flex", "efficient"):
            model = {**estimate.model, "scores_bytes": scores, "sparing_attention": sparing}
            assert (f"--attention {sparing}" in options(replace(estimate, model=model))) == is_suggested
