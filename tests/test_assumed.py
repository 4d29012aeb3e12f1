"""What is taken for granted of a job, and told."""

from dataclasses import replace

from networks import tiny_job
from tonnage.assumed import of_dropout, of_positions
from tonnage.job import ModelRef


def test_sequences_behind_the_last_position_are_told_of() -> None:
    job = tiny_job("llama", seq_len=4096)
    longest = job.model.positions
    assert longest is not None
    assert of_positions(tiny_job("llama", seq_len=longest)) == ()
    (said,) = of_positions(tiny_job("llama", seq_len=longest + 1))
    assert f"sequences of {longest + 1:,} tokens go on behind the {longest:,} positions" in said
    assert of_positions(tiny_job("vit", seq_len=10**6)) == ()


def test_dropout_of_a_configuration_is_told() -> None:
    dropping = {"resid_pdrop": 0.1, "attn_pdrop": 0.0, "text_config": {"dropout": 0.25, "attention_dropout": None}}
    job = replace(tiny_job("gpt2"), model=ModelRef(name="a", kind="config", config=dropping))
    (said,) = of_dropout(job)
    assert "(resid_pdrop 0.1, dropout 0.25)" in said
    assert of_dropout(tiny_job("llama")) == ()
    odd = ModelRef(name="a", kind="config", config={"text_config": ["x"], "dropout": "0.1"})
    assert of_dropout(replace(job, model=odd)) == ()
