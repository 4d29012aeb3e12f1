"""Words of other programs lead to tonnage's own, on the command line and in Python."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import typer

import tonnage as package
from tonnage import synonyms
from tonnage.catalog.devices import find_device
from tonnage.catalog.models import find_model
from tonnage.catalog.optimizers import OPTIMIZERS
from tonnage.cli import main
from tonnage.errors import UnknownDevice, UsageError
from tonnage.job import Job
from tonnage.options import Option, is_accepted, options, spell_option
from tonnage.plans import Plan
from tonnage.units import parse_length

FIELDS: Mapping[str, Option] = {
    spell_option(item.name): option for kind in (Job, Plan) for item, option in options(kind)
}


def command_options(name: str) -> set[str]:
    command = typer.main.get_command(main.app).commands[name]  # type: ignore[attr-defined]
    return {option[2:] for parameter in command.params for option in parameter.opts if option.startswith("--")}


OWN = command_options("estimate") | command_options("plan")


@pytest.mark.parametrize("name", synonyms.OPTIONS)
def test_every_name_leads_to_an_option_that_exists(name: str):
    known = synonyms.OPTIONS[name]
    assert known.option == "MODEL" or known.option in OWN
    assert name not in OWN
    for word in known.words:
        assert word == "" or known.option not in FIELDS or is_accepted(word, FIELDS[known.option].possible)


def test_names_without_effect_are_no_options():
    assert not synonyms.WITHOUT_EFFECT & (OWN | synonyms.OPTIONS.keys())


@pytest.mark.parametrize(("option", "word"), synonyms.VALUES)
def test_every_word_leads_to_values_that_are_accepted(option: str, word: str):
    possible = FIELDS[option].possible
    assert not is_accepted(word, possible)
    assert all(is_accepted(meant, possible) for meant in synonyms.VALUES[option, word].words)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_trainers_words_lead_to_the_optimizer_of_the_catalog(optimizer: Any):
    words = {(optimizer.hf_trainer or {}).get("optim"), optimizer.axolotl} - {None}
    accepted = {other.name for other in OPTIMIZERS}
    for word in words - accepted:
        known = synonyms.find_value("optimizer", word, tuple(accepted))
        named = {other.name for other in OPTIMIZERS if word in ((other.hf_trainer or {}).get("optim"), other.axolotl)}
        assert known is not None
        assert named & set(known.words)


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("--batch-size 2", "Here it is --micro-batch"),
        ("--batchsize 2", "Here it is --micro-batch"),
        ("--bs 2", "Here it is --micro-batch"),
        ("--gradientcheckpointing", "--checkpointing full"),
        ("--per_device_train_batch_size 2", "Here it is --micro-batch"),
        ("--dtype bfloat16", "--precision"),
        ("--gradient-checkpointing", "--checkpointing full"),
        ("--bf16", "--precision bf16-mixed or --precision bf16-true"),
        ("--fsdp", "--shard zero3"),
        ("--zero-stage 3", "--shard zero1 or --shard zero2 or --shard zero3"),
        ("--tensor-parallel-size 2", "--tp"),
        ("--max-model-len 8192", "--seq-len"),
        ("--load-in-4bit", "--method qlora"),
        ("--lora-r 8", "--lora-rank"),
        ("--learning-rate 1e-4", "Neither memory nor seconds depend on it"),
        ("--model gpt2", "the argument MODEL"),
        ("--precision bf16", "here it is bf16-mixed or bf16-true"),
        ("--shard fsdp", "here it is zero3"),
        ("--shard zero-3", "here it is zero3"),
        ("--shard FULL_SHARD", "here it is zero3"),
        ("--optimizer adamw_torch_fused", "here it is adamw-fused"),
        ("--optimizer AdamW-8bit", "here it is adamw-8bit"),
        ("--attention flash_attention_2", "here it is flash"),
        ("--checkpointing true", "here it is full"),
        ("--engine transformers", "here it is hf-trainer"),
    ],
)
@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_the_command_line_names_the_right_word(command: str, typed: str, right: str, capsys: Any):
    assert main.run([command, "gpt2", "--gpu", "t4", *typed.split()]) == 2
    error = capsys.readouterr().err
    assert right in error
    assert error.count("\n") == 1
    assert "image-size" not in error


@pytest.mark.parametrize("command", [["plan", "gpt2", "--gpu", "t4"], ["dry-run", "--gpu", "t4"]])
def test_plans_and_scripts_say_why_they_have_no_source(command: list[str], capsys: Any):
    assert main.run([*command, "--source", "meta", "--", "true"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "on a ghost GPU alone" in error
    assert "tonnage estimate MODEL --source meta" in error
    with pytest.raises(UsageError, match="on a ghost GPU alone"):
        package.plan("gpt2", gpu="t4", source="meta", offline=True)


@pytest.mark.parametrize("option", ["--batch-size", "--seq-len", "--lr"])
def test_a_scripts_own_options_belong_behind_the_dashes(option: str, capsys: Any):
    assert main.run(["dry-run", "--gpu", "t4", option, "2", "--", "true"]) == 2
    assert "The script sets it itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"batch_size": 2}, "here it is micro_batch"),
        ({"per_device_train_batch_size": 2}, "here it is micro_batch"),
        ({"gradient_checkpointing": True}, "here it is checkpointing='full'"),
        ({"bf16": True}, "here it is precision='bf16-mixed' or precision='bf16-true'"),
        ({"optimizer_in_bwd": True}, "here it is optimizer_in_backward=True"),
        ({"learning_rate": 1e-4}, "neither memory nor seconds depend on it"),
        ({"micro_batches": 2}, "close: micro_batch"),
        ({"precision": "bfloat16"}, "here it is bf16-mixed"),
        ({"shard": "fsdp"}, "here it is zero3"),
        ({"seq_len": "8k"}, "Give 8192"),
        ({"global_batch_tokens": "4M"}, "Give 4000000"),
        ({"micro_batch": "1k"}, "Give 1000"),
    ],
    ids=str,
)
@pytest.mark.parametrize("ask", [package.estimate, package.plan], ids=lambda ask: ask.__name__)
def test_python_names_the_right_word(ask: Any, given: dict[str, Any], right: str):
    with pytest.raises(UsageError, match=re.escape(right)):
        ask("gpt2", gpu="t4", offline=True, **given)


@pytest.mark.parametrize(
    ("typed", "tokens"), [("8k", 8192), ("128K", 131_072), ("1M", 2**20), ("1.5k", 1536), ("4096", 4096)]
)
def test_lengths_are_counted_in_powers_of_two(typed: str, tokens: int):
    assert parse_length(typed) == tokens
    assert Job(lengths=f"512,{typed}", seq_len=2**20).lengths == ("512", str(tokens))


@pytest.mark.parametrize("typed", ["0", "k", "8kk", "-1", "1.0001k", "8G"])
def test_what_is_no_length_is_refused(typed: str):
    with pytest.raises(UsageError, match="a whole number of tokens such as 8192 or 8k"):
        parse_length(typed)


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        ("llama3-8b", "llama-3-8b"),
        ("Llama3.1-8B", "llama-3.1-8b"),
        ("meta-llama-3-8b", "llama-3-8b"),
        ("llama-3.1-8b-instruct", "llama-3.1-8b"),
        ("Qwen2.5_7B", "qwen2.5-7b"),
        ("smollm2 135m", "smollm2-135m"),
        ("gpt-2", "gpt2"),
    ],
)
def test_models_are_found_by_their_letters(typed: str, model: str):
    found = find_model(typed)
    assert found is not None
    assert found.id == model


@pytest.mark.parametrize("typed", ["llama3", "someone/llama3-8b", "./llama3-8b", "gemma-3-4b-pt", ""])
def test_a_model_that_is_not_meant_alone_is_not_found(typed: str):
    """Two models are of the repository gemma-3-4b-pt."""
    assert find_model(typed) is None


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("mi300x", "an AMD card, and tonnage knows NVIDIA's only.* --gpu gb200 --gpu-memory 192GiB"),
        ("MI250", "an AMD card.*--gpu h200 --gpu-memory 128GiB"),
        ("RX 7900 XTX", "an AMD card.*--gpu rtx-3090 --gpu-memory 24GiB"),
        ("tpu-v5e", "a TPU.*--gpu rtx-4080 --gpu-memory 16GiB"),
        ("v5p", "a TPU"),
        ("gaudi3", "an Intel card"),
        ("m3-max", "an Apple GPU"),
        ("trn1", "an AWS accelerator"),
    ],
)
def test_cards_of_other_makers_are_named_as_such(typed: str, said: str):
    with pytest.raises(UnknownDevice, match=said):
        find_device(typed)


def test_no_card_of_the_catalog_is_taken_for_another_makers():
    assert [
        name for name in ("v100-16gb", "m40", "rtx-4090", "a100", "h100x", "p100") if synonyms.find_other_card(name)
    ] == []


@pytest.mark.parametrize(
    ("option", "word"),
    [
        *(("optimizer", word) for word in ("galore_adamw", "galore_adamw_8bit_layerwise", "apollo_adamw", "lomo")),
        *(("task", word) for word in ("dpo", "KTO", "grpo")),
        *(("method", "dpo"), ("loss", "kto")),
    ],
)
def test_what_no_option_models_is_unknown_and_can_be_run(option, word):
    way = synonyms.explain_unknown_value(option, word)
    assert way is not None
    assert "unknown here" in way
    assert "tonnage dry-run -- python train.py" in way
    assert synonyms.explain_unknown_value("shard", word) is None
    assert synonyms.explain_unknown_value(option, "adamw") is None


def test_options_for_what_is_not_modelled():
    for name in ("--ref-model", "--ulysses", "--sp_size", "--max-pixels", "--freeze-vit", "--optim-target-modules"):
        way = synonyms.explain_unknown_option(name)
        assert way is not None
        assert "unknown here" in way
    assert synonyms.explain_unknown_option("--gpu") is None
