"""The cases that are run on a real GPU and on the ghost, the most informative first."""

from __future__ import annotations

from typing import Any

from breadth import breadth
from case import Case, case


def _anchors() -> list[Case]:
    """One of each kind, and the examples of the README."""
    one = "llama-3.2-1b"
    eight: dict[str, Any] = {"precision": "bf16-true", "seq_len": 4096}
    return [
        case(one, seq_len=2048, micro_batch=2, traced=True, profiled=True),
        case(one, precision="bf16-true", seq_len=2048, micro_batch=2, traced=True),
        case(one, method="lora", seq_len=2048, micro_batch=2, traced=True),
        case("llama-3.1-8b", **eight, traced=True, profiled=True),
        case("llama-3.1-8b", **eight, limit_gib=78.69, traced=True),
        case("llama-3.1-8b", **eight, limit_gib=78.69, allocator="expandable", traced=True),
        case("llama-3.1-8b", method="lora", **eight, checkpointing="full", traced=True, profiled=True),
        case("gpt2-medium", seq_len=1024, micro_batch=8, traced=True),
        case("qwen3-1.7b", seq_len=2048, micro_batch=2, traced=True),
        case("bert-large", seq_len=512, micro_batch=16, traced=True),
        case("vit-large", micro_batch=64, traced=True),
        case("t5-base", seq_len=512, micro_batch=8, traced=True),
        case("mixtral-4-layers", precision="bf16-true", seq_len=2048, traced=True),
        case("gemma-2-2b", precision="bf16-true", seq_len=2048, traced=True),
        case("tinyllama-1.1b", seq_len=1024, micro_batch=4, traced=True),
    ]


def _llama_2_triple() -> list[Case]:
    """The optimizer's own temporaries: foreach costs one more copy of the weights at the step."""
    return [
        case("llama-2-7b", precision="bf16-true", optimizer=optimizer, seq_len=2048)
        for optimizer in ("adamw-loop", "adamw-foreach", "adamw-fused")
    ]


def _one_choice_at_a_time() -> list[Case]:
    """Around one base case, every value of every option."""
    base: dict[str, Any] = {"network": "llama-3.2-1b", "seq_len": 2048, "micro_batch": 2}
    single: list[dict[str, Any]] = [
        *({"precision": value} for value in ("fp16-mixed", "fp32")),
        *({"optimizer": value} for value in ("adamw-loop", "adamw-fused", "sgd", "sgd-plain", "adafactor", "muon")),
        *({"checkpointing": value} for value in ("full", "every-2", "selective")),
        *({"attention": value} for value in ("eager", "math", "flash", "cudnn")),
        {"loss": "chunked"},
        {"grad_accum": 4},
        {"allocator": "expandable"},
        *({"shard": value} for value in ("ddp", "zero1", "zero2", "zero3")),
        {"method": "lora", "precision": "bf16-true"},
        {"method": "lora", "precision": "fp16-mixed"},
        {"method": "lora", "precision": "fp32"},
        {"method": "lora", "base_dtype": "fp32"},
        {"method": "lora", "checkpointing": "full"},
    ]
    return [case(**base, **one, traced=_is_informative(one)) for one in single]


def _is_informative(choice: dict[str, Any]) -> bool:
    values = set(choice.values())
    return bool(values & {"fp32", "muon", "adafactor", "eager", "flash", "full", "selective", "chunked", "zero3"})


def _sequences() -> list[Case]:
    """How activations and attention workspaces grow."""
    return [
        *(case("llama-3.2-1b", seq_len=seq, micro_batch=1) for seq in (512, 1024, 4096, 8192)),
        *(case("llama-3.2-1b", seq_len=seq, checkpointing="full", loss="chunked") for seq in (4096, 8192)),
        *(case("smollm2-360m", seq_len=1000, micro_batch=batch) for batch in (1, 3, 7)),
        *(case("smollm2-135m", seq_len=seq, micro_batch=4, attention="eager") for seq in (512, 1023)),
    ]


def _models() -> list[Case]:
    """Every other architecture, full and with adapters."""
    mixed: list[Case] = []
    for network, seq, batch in (
        ("llama-3.2-3b", 2048, 1),
        ("qwen2.5-1.5b", 2048, 2),
        ("tinyllama-1.1b", 2048, 2),
        ("smollm2-135m", 1024, 8),
        ("smollm2-360m", 1024, 8),
        ("modernbert-base", 1024, 8),
        ("qwen3-moe-8-layers", 2048, 1),
    ):
        mixed += [case(network, seq_len=seq, micro_batch=batch)]
        mixed += [case(network, seq_len=seq, micro_batch=batch, precision="bf16-true", checkpointing="full")]
    lora = [
        case(network, method="lora", seq_len=seq, micro_batch=2, checkpointing=checkpointing)
        for network, seq in (("qwen2.5-1.5b", 2048), ("qwen2.5-7b", 2048), ("llama-3.1-8b", 2048))
        for checkpointing in ("none", "full")
    ]
    return [*mixed, *lora, *_encoders()]


def _encoders() -> list[Case]:
    return [
        case("bert-large", seq_len=512, micro_batch=16, precision="fp32"),
        case("bert-large", seq_len=384, micro_batch=12, checkpointing="full"),
        case("bert-large", seq_len=128, micro_batch=64, precision="fp16-mixed", optimizer="adamw-fused"),
        case("vit-large", micro_batch=64, precision="fp32"),
        case("vit-large", micro_batch=128, precision="bf16-true", checkpointing="full"),
        case("t5-base", seq_len=512, micro_batch=8, precision="fp32", optimizer="adafactor"),
        case("t5-base", seq_len=512, micro_batch=16, precision="bf16-true", checkpointing="full"),
        case("gpt2-medium", seq_len=1024, micro_batch=8, precision="bf16-true", attention="eager"),
        case("gpt2-medium", seq_len=1024, micro_batch=8, attention="efficient", traced=True),
        case("gpt2-medium", seq_len=1024, micro_batch=8, attention="flash"),
        case("gpt2-medium", seq_len=1024, micro_batch=16, checkpointing="full"),
        case("gpt2-medium", seq_len=1024, micro_batch=8, precision="fp32", optimizer="sgd"),
    ]


def _full_cards() -> list[Case]:
    """Close to a limit: retries, fragmentation, genuine out-of-memory errors."""
    return [
        case("llama-3.2-1b", seq_len=2048, micro_batch=4, limit_gib=23.5, checkpointing="full"),
        case("llama-3.2-1b", seq_len=2048, micro_batch=2, limit_gib=31.5),
        case("llama-3.2-1b", seq_len=2048, micro_batch=2, limit_gib=31.5, allocator="expandable"),
        case("llama-3.2-1b", seq_len=2048, micro_batch=2, limit_gib=24, traced=True),
        case("llama-3.2-3b", precision="bf16-true", seq_len=2048, limit_gib=31, checkpointing="full", traced=True),
        case("llama-3.1-8b", method="lora", precision="bf16-true", seq_len=4096, limit_gib=39.5),
        case("gpt2-medium", seq_len=1024, micro_batch=8, limit_gib=26.5, traced=True),
        case("qwen3-1.7b", seq_len=2048, micro_batch=2, limit_gib=45.5),
        case("qwen3-1.7b", seq_len=2048, micro_batch=2, limit_gib=45.5, allocator="expandable"),
        case("smollm2-360m", seq_len=1024, micro_batch=8, limit_gib=24),
        *_eight_billion_on_80_gb(),
    ]


def _eight_billion_on_80_gb() -> list[Case]:
    """What an H100 leaves after the context (79.19 - 0.75 GiB): fragmentation decides; other lengths around it."""
    eight: dict[str, Any] = {"precision": "bf16-true", "limit_gib": 78.44}
    return [
        case("llama-3.1-8b", **eight, seq_len=4096, traced=True),
        case("llama-3.1-8b", **eight, seq_len=4096, allocator="expandable", traced=True),
        case("llama-3.1-8b", **eight, seq_len=4224),
        case("llama-3.1-8b", **eight, seq_len=4352),
        case("llama-3.1-8b", **eight, seq_len=4352, allocator="expandable"),
        case("llama-3.1-8b", **eight, seq_len=4608, allocator="expandable"),
    ]


def _big() -> list[Case]:
    eight: dict[str, Any] = {"precision": "bf16-true", "seq_len": 4096}
    return [
        case("llama-3.1-8b", **eight, optimizer="adamw-fused", checkpointing="full", profiled=True),
        case("llama-3.1-8b", **eight, optimizer="adamw-fused", shard="zero3", checkpointing="full"),
        case("llama-3.1-8b", **eight, optimizer="adafactor", micro_batch=2, checkpointing="full"),
        case("llama-3.1-8b", precision="bf16-true", seq_len=8192, checkpointing="selective", optimizer="adamw-fused"),
        case("llama-3.1-8b", precision="bf16-true", seq_len=8192, checkpointing="full", loss="chunked"),
        case("qwen2.5-7b", precision="bf16-true", seq_len=2048, optimizer="adamw-fused"),
        case("llama-2-7b", method="lora", precision="bf16-true", seq_len=4096, checkpointing="none"),
        case("llama-3.2-3b", seq_len=4096, checkpointing="full", grad_accum=4),
        case("gemma-2-2b", seq_len=4096, precision="bf16-true", checkpointing="full"),
        case("smollm2-360m", seq_len=2048, micro_batch=2, shard="zero3", param_offload="cpu"),
        case("gemma-2-2b", method="lora", seq_len=1024, micro_batch=2, attention="eager"),
        case("mixtral-4-layers", method="lora", precision="bf16-true", seq_len=2048, checkpointing="full"),
    ]


def matrix() -> list[Case]:
    """All cases in the order in which they are run, each once."""
    groups = (
        _anchors(),
        _llama_2_triple(),
        _one_choice_at_a_time(),
        _models(),
        _full_cards(),
        _sequences(),
        _big(),
        breadth(),
    )
    return list({one.name: one for group in reversed(groups) for one in reversed(group)}.values())[::-1]
