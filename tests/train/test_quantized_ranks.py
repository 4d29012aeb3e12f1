"""QLoRA under FSDP2: two real processes (gloo) divide layers in 4 bits, against one process without sharding."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import tonnage
from networks import one_thread  # noqa: F401
from real_ranks import run_ranks
from real_text import batches, network
from tonnage import Job, Plan
from tonnage.errors import UsageError

STEPS, MICRO_BATCHES, WORLD = 4, 4, 2


def quantized(folder: str, storage: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_quant_storage=storage,
    )
    options = {"dtype": torch.float32, "quantization_config": config, "device_map": "cpu"}
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def trained(folder: str, shard: str, world: int, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights; the bits of packed ones, which may be no numbers."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    base = prepare_model_for_kbit_training(quantized(folder), use_gradient_checkpointing=False)
    torch.manual_seed(5)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    plan = Plan(precision="fp32", quant="nf4", shard=shard, optimizer="sgd")
    trainable = tonnage.apply(plan, model, {"lr": 0.1}, job=Job(method="qlora", lora_rank=4))
    each = MICRO_BATCHES // world
    losses = [trainable.step(step[rank * each :][:each]).loss for step in batches(STEPS, MICRO_BATCHES)]
    assert all(effect.took_effect for effect in trainable.took_effect()), trainable.took_effect()
    trainable.save_pretrained(Path(folder) / f"adapters-{world}")
    state = trainable.unapply().state_dict()
    return losses, {name: tensor.clone().view(torch.int32) for name, tensor in state.items() if tensor.dim() > 1}


def rank_main(rank: int, world: int, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    torch.save(trained(folder, "zero3", world, rank), Path(folder) / f"rank{rank}")


def test_divided_layers_in_four_bits_train_as_whole_ones() -> None:
    pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    with tempfile.TemporaryDirectory() as folder:
        network(torch.float32, hidden_size=64, intermediate_size=64).save_pretrained(folder)
        run_ranks(rank_main, WORLD, folder)
        ranks = [torch.load(Path(folder) / f"rank{rank}", weights_only=False) for rank in range(WORLD)]
        losses, weights = trained(folder, "none", 1, 0)
        assert (Path(folder) / "adapters-2" / "adapter_model.safetensors").is_file()
        plan, packed = Plan(precision="fp32", quant="nf4", shard="zero3"), quantized(folder, torch.uint8)
        with pytest.raises(UsageError, match=r"kept in float32; load .*bnb_4bit_quant_storage=torch\.float32"):
            tonnage.apply(plan, packed, job=Job(method="qlora"))
    for of_rank, state in ranks:
        assert of_rank == pytest.approx(losses, rel=1e-6)
        assert state.keys() == weights.keys()
        for name, bits in weights.items():
            if "lora_" in name:
                values = [each.view(torch.float32) for each in (state[name], bits)]
                torch.testing.assert_close(*values, rtol=0, atol=1e-6, msg=name)
            else:
                assert torch.equal(state[name], bits), name
