"""Assumptions about a job, and the sentences that report them."""

from dataclasses import replace

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.families import types_with
from tonnage.estimates.assumptions import (
    _DROPOUTS,
    DEFAULT_DROPOUT,
    describe_compiled_attention,
    describe_dropout,
    describe_idle_sync,
    describe_long_sequences,
    describe_whole_gradients,
    list_assumptions,
)
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan


def test_accum_sync_with_one_micro_batch_is_said_to_do_nothing():
    job = Job(model=ModelRef(name="a", kind="config"))
    for plan in (Plan(shard="zero3", accum_sync=True), Plan(shard="ddp", accum_sync=True)):
        (sentence,) = describe_idle_sync(job, plan)
        assert sentence.startswith("accum-sync has no effect: a step has one micro-batch")
        assert describe_idle_sync(replace(job, grad_accum=2), plan) == ()
    assert describe_idle_sync(job, Plan(shard="zero3")) == ()


def test_sequences_behind_the_last_position_are_told_of() -> None:
    job = tiny_job("llama", seq_len=4096)
    longest = job.model.positions
    assert longest is not None
    assert describe_long_sequences(tiny_job("llama", seq_len=longest)) == ()
    (said,) = describe_long_sequences(tiny_job("llama", seq_len=longest + 1))
    assert f"sequences of {longest + 1:,} tokens exceed the {longest:,} positions" in said
    assert describe_long_sequences(tiny_job("vit", seq_len=10**6)) == ()


def test_dropout_of_a_configuration_is_told() -> None:
    dropping = {"resid_pdrop": 0.1, "attn_pdrop": 0.0, "text_config": {"dropout": 0.25, "attention_dropout": None}}
    job = replace(tiny_job("gpt2"), model=ModelRef(name="a", kind="config", config=dropping))
    (said,) = describe_dropout(job)
    assert "(resid_pdrop 0.1, dropout 0.25)" in said
    assert describe_dropout(tiny_job("llama")) == ()
    silent = replace(job, model=ModelRef(name="a", kind="config", config={"model_type": "bert"}))
    (said,) = describe_dropout(silent)
    assert "(hidden_dropout_prob 0.1, attention_probs_dropout_prob 0.1)" in said
    stated = {"model_type": "bert", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0}
    assert describe_dropout(replace(job, model=ModelRef(name="a", kind="config", config=stated))) == ()
    odd = ModelRef(name="a", kind="config", config={"text_config": ["x"], "dropout": "0.1"})
    assert describe_dropout(replace(job, model=odd)) == ()


@pytest.mark.parametrize("kind", types_with("default_dropout"))
def test_what_is_dropped_by_default_is_what_transformers_has(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]().to_dict()
    assert {name: made[name] for name in _DROPOUTS if made.get(name)} == dict.fromkeys(
        types_with("default_dropout")[kind], DEFAULT_DROPOUT
    )


def test_engines_tell_what_stands_for_another_kernel() -> None:
    from tonnage.catalog.devices import parse_cluster

    job, cluster = tiny_job("llama"), parse_cluster("a100-80gb")
    plans = [Plan(engine="axolotl", precision="bf16-true", attention=name) for name in ("flash", "auto")]
    told, silent = (" ".join(list_assumptions(Case(job, plan, cluster))) for plan in plans)
    assert "stands for that of the package flash-attn" in told
    assert "flash-attn" not in silent


def test_attention_inside_of_what_is_compiled_is_told() -> None:
    (said,) = describe_compiled_attention(Plan(compile="layers"))
    assert "FlashAttention's package breaks each compiled layer in two" in said
    assert (
        describe_compiled_attention(Plan())
        == describe_compiled_attention(Plan(compile="layers", attention="flex"))
        == ()
    )


def test_gradients_that_wait_whole_under_fsdp2_are_told() -> None:
    job = tiny_job("llama", grad_accum=2)
    (said,) = describe_whole_gradients(job, Plan(shard="zero3"))
    assert "each GPU holds whole gradients until the last micro-batch" in said
    for plan in (Plan(shard="ddp"), Plan(shard="zero3", accum_sync=True), Plan(shard="zero2", engine="hf-trainer")):
        assert describe_whole_gradients(job, plan) == ()
    assert describe_whole_gradients(tiny_job("llama"), Plan(shard="zero3")) == ()
