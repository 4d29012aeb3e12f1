"""The scripts that exports hand out, as far as a CPU runs them: network, adapters, rows, checkpointing, the loss."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from networks import TINY, tiny_job
from tonnage.plans import Plan
from tonnage.step import model
from tonnage.techniques.chunked_loss import logits
from tonnage.trainers import job_file


@pytest.fixture
def scripts(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """job.py, loop.py and rows.py in a folder of their own, imported as a train.py beside them does it."""
    folder = tmp_path_factory.mktemp("exported")
    for name in ("job", "loop", "rows"):
        (folder / f"{name}.py").write_text(job_file.script(name).text)
    monkeypatch.syspath_prepend(str(folder))
    yield tuple(importlib.import_module(name) for name in ("job", "loop", "rows"))
    for name in ("job", "loop", "rows"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_loss_in_slices_is_that_of_a_network_that_sees(
    name: str, scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, loop, _ = scripts
    (tmp_path / "config.json").write_text(json.dumps(TINY[name]))
    said = job.Job(
        model=str(tmp_path),
        seq_len=24,
        weights_dtype="float32",
        auto_class="AutoModelForImageTextToText",
        loss="chunked",
    )
    monkeypatch.setattr(loop, "SLICE_TOKENS", 5)
    network = job.network(said, random_weights=True)
    assert network.config.get_text_config().use_cache is False
    batch = model.batch(tiny_job(name), network, torch.float32)
    plain = network(**batch).loss
    [loss] = loop.in_slices(said, network)(**batch)
    assert torch.allclose(loss, plain)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "granite", "logits_scaling": 4.0},
        {"model_type": "hyperclovax", "logits_scaling": 4.0},
        {"model_type": "falcon_h1", "lm_head_multiplier": 0.25},
        {"model_type": "muse", "output_multiplier": 3.0, "final_logit_softcapping": 2.0},
        {"model_type": "recurrent_gemma", "logits_soft_cap": 2.0},
        {"model_type": "xlstm", "output_logit_soft_cap": 2.0},
    ],
    ids=lambda fields: fields["model_type"],
)
def test_a_loss_in_slices_scales_logits_as_the_plan_does(scripts: Any, fields: dict[str, Any]) -> None:
    _, loop, _ = scripts
    config = SimpleNamespace(**fields)
    config.get_text_config = lambda: config
    network = SimpleNamespace(config=config, get_output_embeddings=lambda: torch.nn.Identity())
    hidden, targets = torch.linspace(-3, 3, 12).view(3, 4), torch.tensor([0, 3, 2])
    expected = torch.nn.functional.cross_entropy(logits(network, hidden), targets, reduction="sum")
    torch.testing.assert_close(loop._summed(network, hidden, targets), expected)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**TINY["llama"], "architectures": ["LlamaForCausalLM"]}))
    return str(tmp_path)


def test_a_loss_in_slices_is_the_networks_own(scripts: Any, llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, loop, _ = scripts
    said = job.Job(model=llama, seq_len=16, weights_dtype="float32", loss="chunked", checkpointing="selective")
    monkeypatch.setattr(loop, "SLICE_TOKENS", 5)
    network = job.network(said, random_weights=True)
    ids = torch.randint(0, 61, (2, 16))
    ids[0, 3] = -100
    batch = {"input_ids": ids.clamp(min=0), "labels": ids}
    plain = network(**batch).loss
    plain.backward()
    expected = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad()
    [loss] = loop.in_slices(said, loop.checkpointed(said, network))(**batch)
    loss.backward()
    assert torch.allclose(loss, plain)
    for parameter, wanted in zip(network.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, wanted, atol=1e-6)
    assert network.config.use_cache is False


def test_adapters_alone_are_trained(scripts: Any, llama: str) -> None:
    pytest.importorskip("peft")
    job, loop, _ = scripts
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    said = job.Job(model=llama, seq_len=16, weights_dtype="bfloat16", lora=lora, checkpointing="every-2")
    network = loop.checkpointed(said, job.adapted(said, job.network(said, random_weights=True)))
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert {name.rpartition("lora_")[0].rpartition("q_proj.")[1] for name in trained} == {"q_proj."}
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    update = loop.optimizer(said, list(trained.values()))
    assert type(update).__name__ == "AdamW"


def test_what_is_quantized_needs_no_checkpoint_to_be_tried(scripts: Any, llama: str) -> None:
    """Random weights take the checkpoint's place in transformers' own loader."""
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    bits = transformers.BitsAndBytesConfig(load_in_4bit=True)
    chosen = {"dtype": torch.bfloat16, "quantization_config": bits, "device_map": "cpu"}
    made = scripts[0].at_random(
        transformers.AutoModelForCausalLM, transformers.AutoConfig.from_pretrained(llama), chosen
    )
    assert made.model.layers[0].mlp.up_proj.weight.dtype is torch.uint8
    assert not any(parameter.is_meta for parameter in made.parameters())


def test_deepspeeds_launcher_may_say_the_rank(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--local_rank=0", "--steps", "2"])
    assert scripts[0].options().steps == 2


def test_rows_are_full_and_of_the_text(
    scripts: Any, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    class Letters:
        eos_token_id = 0

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    job, _, rows_of = scripts
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: Letters())
    (tmp_path / "t.jsonl").write_text('{"text": "abc"}\n\n{"text": "de"}\n')
    said = job.Job(model=llama, seq_len=3, weights_dtype="float32")
    rows = rows_of.dataset(said, str(tmp_path / "t.jsonl"), made_up=1)
    assert rows.tokens.tolist() == [[97, 98, 99], [0, 100, 101]]
    assert rows[0]["labels"].tolist() == [97, 98, 99]
    assert rows.batch([rows[0], rows[1]])["input_ids"].tolist() == [[97, 98, 99], [0, 100, 101]]
    assert rows_of.dataset(said, None, made_up=5).tokens.shape == (5, 3)


def test_an_unknown_key_is_an_error(scripts: Any, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(
        '{"model": "x", "seq_len": 1, "weights_dtype": "float32", "sharding": "zero3"}'
    )
    with pytest.raises(TypeError, match="sharding"):
        scripts[0].read(tmp_path)


@pytest.mark.parametrize(("shard", "expected"), [("zero3", "bfloat16"), ("zero2", "bfloat16"), ("ddp", None)])
def test_what_is_divided_is_quantized_into_the_dtype_of_computation(shard: str, expected: str | None) -> None:
    """As PEFT's page on FSDP and QLoRA has it; whole weights stay bytes."""
    said = job_file.quantization(tiny_job(method="qlora"), Plan(shard=shard))
    assert said is not None
    assert said.get("bnb_4bit_quant_storage") == expected
