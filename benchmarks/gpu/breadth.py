"""Cases of the techniques that torch alone does not have, of what happens besides steps, and of trainers."""

from __future__ import annotations

from typing import Any, Final

from case import Case, case

BASE: Final[dict[str, Any]] = {"network": "llama-3.2-1b", "seq_len": 2048, "micro_batch": 2}
"""What most cases change in one thing, as those of torch's own choices do in `matrix.py`."""

SMALL: Final[dict[str, Any]] = {"network": "smollm2-360m", "seq_len": 1024, "micro_batch": 4}
"""Where the mechanism is what counts, not the size."""

EIGHT: Final[dict[str, Any]] = {"network": "llama-3.1-8b", "seq_len": 2048, "checkpointing": "full"}


def breadth() -> list[Case]:
    """All of them, each once; those that take long come last: files, code to be compiled, weights to be quantized."""
    groups = (
        _trainers(),
        _optimizers(),
        _precisions(),
        _recomputed(),
        _losses(),
        _repeated(),
        _networks(),
        _sharded(),
        _besides(),
        _offloaded(),
        _by_inductor(),
        _compiled(),
        _quantized(),
    )
    return [one for group in groups for one in group]


def _trainers() -> list[Case]:
    """The code of trainers, each with what its users choose first."""
    trainer: dict[str, Any] = {**BASE, "engine": "hf-trainer"}
    deepspeed: dict[str, Any] = {**SMALL, "engine": "deepspeed", "optimizer": "adamw-foreach"}
    return [
        case(**trainer, traced=True, profiled=True),
        case(**trainer, precision="bf16-true", checkpointing="full"),
        case(**trainer, method="lora", traced=True),
        case(**trainer, optimizer="adamw-8bit"),
        case(**trainer, optimizer="adafactor"),
        case(**trainer, method="qlora", checkpointing="full"),
        case(**trainer, checkpointing="full", activation_offload="cpu"),
        case(**trainer, shard="zero3", traced=True),
        case(**trainer, grad_accum=2),
        case(**BASE, engine="trl", loss="chunked", traced=True),
        case(**BASE, engine="trl", loss="chunked", method="lora", checkpointing="full"),
        case(**BASE, engine="accelerate", clip_grad_norm=1.0),
        case(**BASE, engine="accelerate", shard="zero2", traced=True),
        case(**BASE, engine="accelerate", shard="zero3", checkpointing="full", activation_offload="cpu"),
        case(**deepspeed, traced=True),
        case(**deepspeed, shard="zero1", traced=True),
        case(**deepspeed, shard="zero2", traced=True),
        case(**deepspeed, shard="zero3", traced=True),
        case(**deepspeed, shard="zero3", checkpointing="full", grad_accum=2),
        case(**BASE, engine="megatron", traced=True),
        case(**BASE, engine="megatron", shard="zero1", checkpointing="full"),
    ]


def _quantized() -> list[Case]:
    """QLoRA: how weights are kept, and what is left as it was."""
    base: dict[str, Any] = {**BASE, "method": "qlora", "checkpointing": "full"}
    return [
        case(**base, quant="nf4", traced=True, profiled=True),
        case(**base, quant="nf4-double"),
        case(**base, quant="int8", traced=True),
        case(**base, unquantized_dtype="compute", precision="bf16-true"),
        case(**EIGHT, method="qlora", quant="nf4-double", micro_batch=2),
        case(
            **EIGHT, method="qlora", unquantized_dtype="compute", precision="bf16-true", optimizer="paged-adamw-8bit"
        ),
    ]


def _optimizers() -> list[Case]:
    """States in few bits or in managed memory; updates in backward."""
    names = ("adamw-8bit", "lion", "lion-8bit", "paged-adamw", "paged-adamw-8bit")
    return [
        *(case(**BASE, optimizer=name, traced=name == "adamw-8bit", profiled=name == "adamw-8bit") for name in names),
        case(**EIGHT, precision="bf16-true", optimizer="adamw-8bit"),
        case(**BASE, optimizer_in_backward=True, traced=True),
        case(**EIGHT, precision="bf16-true", optimizer="sgd", optimizer_in_backward=True),
        case(**BASE, clip_grad_norm=1.0),
        case(**BASE, clip_grad_norm=1.0, precision="fp16-mixed"),
    ]


def _precisions() -> list[Case]:
    """Dtypes of weights, gradients and products."""
    return [
        case(**BASE, precision="fp8", traced=True, profiled=True),
        case(**BASE, precision="megatron-bf16", traced=True, profiled=True),
        case(**BASE, weights_dtype="bf16"),
        case(**BASE, method="lora", precision="fp16-true"),
        case(**BASE, method="lora", lora_dropout=0.05),
        case(**BASE, method="lora", lora_targets=("q_proj", "v_proj"), lora_rank=8),
    ]


def _recomputed() -> list[Case]:
    """Every other way to run layers again."""
    return [
        case(**BASE, checkpointing="full-reentrant"),
        case(**BASE, checkpointing="attention", attention="eager"),
        case(**BASE, checkpointing="attention-module"),
        case(**BASE, checkpointing="sqrt", traced=True),
        case(**BASE, checkpointing="budget=4GiB", traced=True),
        case(**BASE, checkpointing="budget=6GiB"),
    ]


def _offloaded() -> list[Case]:
    """Activations and optimizer states on the host and in files."""
    return [
        case(**BASE, activation_offload="cpu"),
        case(**BASE, activation_offload="cpu-streamed", traced=True),
        case(**BASE, activation_offload="cpu-streamed", checkpointing="full"),
        case(**BASE, activation_offload="cpu-streamed", checkpointing="budget=4GiB"),
        case(**SMALL, activation_offload="nvme"),
        case(**BASE, optimizer_offload="cpu"),
        case(**BASE, optimizer_offload="cpu=0.5"),
        case(**SMALL, optimizer_offload="nvme"),
    ]


def _sharded() -> list[Case]:
    """FSDP2, DDP and ZeRO-1 with what users add to them."""
    return [
        case(**BASE, shard="ddp", grad_accum=2),
        case(**BASE, shard="ddp", reduce_dtype="bf16"),
        case(**BASE, shard="zero2", grad_accum=2, traced=True),
        case(**BASE, shard="zero3", grad_accum=2),
        case(**BASE, shard="zero3", precision="fp16-mixed", clip_grad_norm=1.0),
        case(**BASE, shard="zero3", reduce_dtype="bf16", allocator="expandable"),
        case(**BASE, shard="zero3", method="lora"),
        case(**BASE, shard="zero3", method="qlora", checkpointing="full"),
        case(**BASE, shard="zero1", precision="megatron-bf16"),
        case(**BASE, shard="zero3", checkpointing="full", activation_offload="cpu-streamed"),
    ]


def _losses() -> list[Case]:
    return [
        case(**BASE, loss="fused", traced=True),
        case(**BASE, loss="liger", traced=True),
        case(**BASE, outputs="step"),
        case(**BASE, outputs="loop"),
    ]


def _besides() -> list[Case]:
    """What happens besides steps, and batches of other shapes."""
    return [
        case(**BASE, packing=4),
        case(**BASE, lengths=("512", "1024", "2048")),
        case(**BASE, eval_batch=4, eval_logits=3),
        case(**BASE, generate=64, precision="bf16-true"),
        case(**BASE, save_checkpoint="full"),
        case(**BASE, resume="gpu"),
        case(**BASE, resume="cpu"),
        case(**SMALL, shard="zero3", save_checkpoint="full"),
    ]


def _networks() -> list[Case]:
    """Architectures that `matrix.py` has none of: speech, images beside text, latent and linear attention, sinks."""
    return [
        case("whisper-small", seq_len=448, micro_batch=8),
        case("qwen2.5-vl-3b", precision="bf16-true", seq_len=2048, traced=True),
        case("llava-1.5-7b", method="lora", seq_len=1024, checkpointing="full"),
        case("gemma-3-1b", seq_len=2048, micro_batch=2, traced=True),
        case("deepseek-v2-lite-4-layers", seq_len=2048, traced=True),
        case("gpt-oss-20b-3-layers", precision="bf16-true", seq_len=2048, traced=True),
        case("phi-2", precision="bf16-true", seq_len=2048, optimizer="adamw-fused"),
        case("olmo-2-7b", method="lora", seq_len=2048, checkpointing="full"),
        case("granite-3.3-2b", precision="bf16-true", seq_len=2048, checkpointing="full"),
        case("opt-1.3b", seq_len=2048, micro_batch=2),
        case("pythia-1.4b", seq_len=2048, micro_batch=2),
        case("qwen3.5-8-layers", precision="bf16-true", seq_len=2048, traced=True, profiled=True),
    ]


def _repeated() -> list[Case]:
    """DDP and its like again, also as loops run that wait for nothing.

    Whether the first step's buckets are gone when the second takes new ones differs from run to run.
    """
    return [
        *(case(**BASE, shard="ddp", time=time, traced=time == 2) for time in (2, 3)),
        *(case(**BASE, shard="ddp", awaited=False, time=time, traced=time == 1) for time in (1, 2, 3)),
        *(case(**SMALL, shard="ddp", awaited=False, time=time) for time in (1, 2)),
        case("llama-3.2-3b", precision="bf16-true", seq_len=2048, shard="ddp", awaited=False),
        case(**BASE, shard="zero1", awaited=False),
        case(**BASE, shard="zero2", awaited=False),
        case(**BASE, shard="zero3", awaited=False, traced=True),
        case(**BASE, awaited=False),
        case(**BASE, awaited=False, activation_offload="cpu-streamed"),
    ]


def _by_inductor() -> list[Case]:
    """Layers and networks under torch.compile."""
    layers: dict[str, Any] = {**BASE, "compile": "layers"}
    return [
        case(**layers, traced=True, profiled=True),
        case(**layers, checkpointing="full", traced=True),
        case(**layers, method="lora", profiled=True),
        case(**layers, precision="bf16-true", optimizer="adamw-fused", loss="chunked", profiled=True),
        case(**layers, shard="zero3"),
        case(**layers, activation_offload="cpu-streamed"),
        case(**layers, lengths=("512", "1024", "2048")),
        case(**BASE, compile="model", traced=True, profiled=True),
        case(**BASE, compile="model", engine="hf-trainer"),
        case(**{**SMALL, "compile": "layers"}),
        case("qwen3-1.7b", precision="bf16-true", seq_len=2048, micro_batch=2, compile="layers", profiled=True),
        case("gemma-2-2b", precision="bf16-true", seq_len=2048, compile="layers"),
        case(**{**EIGHT, "compile": "layers"}, precision="bf16-true", optimizer="adafactor", micro_batch=2),
        case(**{**EIGHT, "compile": "layers"}, method="lora", micro_batch=2),
        case("qwen2.5-1.5b", seq_len=4096, checkpointing="full", compile="layers"),
        case("gpt2-medium", seq_len=1024, micro_batch=8, compile="layers", profiled=True),
        case("bert-large", seq_len=512, micro_batch=16, compile="layers"),
        case("mixtral-4-layers", precision="bf16-true", seq_len=1024, compile="layers", optimizer="adafactor"),
    ]


def _compiled() -> list[Case]:
    """Kernels that are compiled when they are first used."""
    return [
        case(**BASE, attention="flex"),
        case(**SMALL, optimizer="adamw-8bit-ao"),
        case(**SMALL, engine="deepspeed", shard="zero2", traced=True),
        case(**SMALL, engine="deepspeed", shard="zero2", optimizer_offload="cpu"),
        case(**SMALL, engine="deepspeed", shard="zero3", param_offload="cpu"),
    ]
