"""Jobs: the values that options accept, and how a global batch becomes micro-batches."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import UsageError
from tonnage.job import Job, check_prompt, check_sequences, check_stated
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.trainers.cases import check


@pytest.mark.parametrize(
    ("tokens", "seq_len", "ranks", "steps"),
    [
        (65_536, 4096, 8, 2),
        (4_000_000, 4000, 8, 125),  # 8 x 4,000 tokens at a time
        (4_000_000, 4096, 8, 128),  # 4M as 4 x 2**20
        (100_000, 2048, 1, 50),  # 100k as 100 x 2**10
        (2048, 2048, 1, 1),
    ],
)
def test_a_global_batch_becomes_accumulation(tokens: int, seq_len: int, ranks: int, steps: int) -> None:
    job = tiny_job("llama", seq_len=seq_len, micro_batch=1, global_batch_tokens=tokens).on_ranks(ranks)
    assert (job.grad_accum, job.global_batch_tokens) == (steps, None)


@pytest.mark.parametrize(
    ("tokens", "gpus", "sequences"),
    [
        (256_000, 8, 128),  # 256k: 125 sequences are whole too, and no eight GPUs share them
        (256_000, 5, 125),
        (258_048, 8, 126),
        (4_000_000, 32, 2048),
    ],
)
def test_a_round_batch_is_one_that_all_gpus_share(tokens: int, gpus: int, sequences: int) -> None:
    asked = tiny_job("llama", seq_len=2048, global_batch_tokens=tokens)
    assert asked.sequences_for(gpus) == sequences


@pytest.mark.parametrize("value", ["4M", 2.5, 0, True])
def test_a_number_is_a_whole_one(value: object) -> None:
    with pytest.raises(UsageError, match=r"seq-len is .*; it must be a whole number of at least 1\."):
        tiny_job("llama", seq_len=value)


def test_an_impossible_global_batch_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no multiple of 32,768 \(8 ranks x 1 x 4,096.*98,304 or 131,072"):
        tiny_job("llama", seq_len=4096, micro_batch=1, global_batch_tokens=100_001).on_ranks(8)
    with pytest.raises(UsageError, match=r"possible: 32,768\."):
        tiny_job("llama", seq_len=4096, micro_batch=1, global_batch_tokens=7).on_ranks(8)


@pytest.mark.parametrize("said", ["64, 128,200", ("64", "128", "200"), [64, 128, 200]])
def test_several_words_may_be_one_text_or_numbers(said: Any) -> None:
    assert tiny_job(lengths=said).lengths == ("64", "128", "200")
    assert tiny_job(lora_targets="q_proj,v_proj").lora_targets == ("q_proj", "v_proj")


@pytest.mark.parametrize("said", [7, (1.5,), None])
def test_other_values_than_words_are_refused(said: Any) -> None:
    with pytest.raises(UsageError, match=r"lora-targets: .* is not a list of words"):
        tiny_job(lora_targets=said)


def test_accumulation_is_given_once() -> None:
    with pytest.raises(UsageError, match="give one of them"):
        tiny_job("llama", global_batch_tokens=4096, grad_accum=2)


@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 1024), st.integers(1, 64))
def test_any_multiple_is_met_exactly(seq_len: int, micro_batch: int, ranks: int, steps: int) -> None:
    tokens = seq_len * micro_batch * ranks * steps
    job = tiny_job("llama", seq_len=seq_len, micro_batch=micro_batch, global_batch_tokens=tokens).on_ranks(ranks)
    assert job.tokens_per_micro_batch * ranks * job.grad_accum == tokens


@pytest.mark.parametrize("text", ["²", "1" * 5000, "-1", "0", "64,²", "1_0"])
def test_lengths_are_plain_numbers(text: str) -> None:
    with pytest.raises(UsageError, match="lengths"):
        tiny_job(lengths=text)


@pytest.mark.parametrize("said", [{"quant": "int8"}, {"unquantized_dtype": "compute"}], ids=str)
def test_options_of_quantized_weights_need_method_qlora(said: dict[str, Any]) -> None:
    for method in ("full", "lora"):
        with pytest.raises(UsageError, match=f"only applies to quantized weights, and method {method} has none"):
            check_stated(said, tiny_job("llama", method=method))
    check_stated(said, tiny_job("llama", method="qlora"))


def test_lengths_are_cut_only_at_a_seq_len_that_was_given() -> None:
    job = tiny_job("llama", seq_len=64, lengths=("32", "128"))
    with pytest.raises(UsageError, match=r"lengths go up to 128 tokens, .* give seq-len 128 to cut none"):
        check_stated({"lengths": "32,128"}, job)
    check_stated({"lengths": "32,128", "seq_len": 64}, job)
    check_stated({"lengths": "32,64"}, tiny_job("llama", seq_len=64, lengths=("32", "64")))


@pytest.mark.parametrize(("said", "of"), [({"images": 2}, "images"), ({"image_size": "100x100"}, "image-size")])
def test_a_text_network_takes_no_images(said: dict[str, Any], of: str) -> None:
    with pytest.raises(UsageError, match=f"{of} only applies to images, and llama reads none; leave it out"):
        check_stated(said, tiny_job("llama", **said))
    for name in ("llava", "vit", "qwen2_5_vl", "mllama"):
        check_stated(said, tiny_job(name))


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}, "max_position_embeddings": 64}, 512),
        ({"max_position_embeddings": None}, None),
        ({"text_config": "x", "n_positions": 64}, 64),
        ({}, None),
    ],
)
def test_positions_are_those_of_the_text(config: dict[str, Any], positions: int | None) -> None:
    assert ModelRef(name="a", kind="config", config=config).positions == positions


def test_more_documents_than_tokens_are_refused_before_a_ghost_starts() -> None:
    with pytest.raises(UsageError, match="packing is 65, and a sequence has 64 tokens; choose fewer documents"):
        check_sequences(tiny_job("llama", seq_len=64, packing=65), None)
    check_sequences(tiny_job("llama", seq_len=64, packing=64), None)


@pytest.mark.parametrize(
    ("name", "classes", "said"),
    [
        ("llama", ["LlamaForCausalLM"], True),
        ("llama", ["LlamaForCausalLM", 7], True),
        ("gpt2", ["GPT2LMHeadModel"], True),
        ("t5", ["T5ForConditionalGeneration"], False),  # its encoder reads the whole sequence
        ("t5", ["T5WithLMHeadModel"], False),
        ("llama", "LlamaForCausalLM", False),  # not a list, so not known
        ("llama", [], False),
        ("llama", None, False),
    ],
)
def test_a_sequence_without_a_prompt_is_refused_before_a_ghost_starts(name: str, classes: Any, said: bool) -> None:
    def job(generate: int) -> Job:
        one = tiny_job(name, seq_len=64, generate=generate)
        return replace(one, model=replace(one.model, config={**one.model.config, "architectures": classes}))

    check_sequences(job(63), None)
    if not said:
        check_sequences(job(64), None)
        return
    with pytest.raises(UsageError, match=r"generate is 64, .* 64 tokens, .*; choose at most 63, or a longer seq-len"):
        check_sequences(job(64), None)


def test_a_sequence_of_one_token_leaves_nothing_to_generate() -> None:
    with pytest.raises(UsageError, match=r"has 1 token, its prompt among them; choose a longer seq-len\."):
        check_prompt(tiny_job("llama", seq_len=1, generate=1))


def test_more_tokens_than_are_run_are_refused_before_a_ghost_starts() -> None:
    job = tiny_job("llama", seq_len=2048, micro_batch=2**16 + 1)
    with pytest.raises(UsageError, match=r"65,537 x 2,048 tokens is more than the 134,217,728 that are run"):
        check(Case(job, Plan(), parse_cluster("h100-80gb")))
    check_sequences(job, None)  # a search makes smaller micro-batches of it
