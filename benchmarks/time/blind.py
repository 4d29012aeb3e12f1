"""Steps that others published and no code was calibrated on: what was answered first, and what is answered now.

Each row was written down with its configuration before anything was predicted; `first` is the answer of that day.
Two constants of cards rest on some of them since (docs/reference/time.md).
What a source leaves unsaid is assumed here, in its adapter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.time.fit import predicted
from benchmarks.time.rows import ROOT, Raw, Row, read

from tonnage.catalog.devices import find_device
from tonnage.catalog.models import find_model
from tonnage.cluster import Cluster, Device
from tonnage.mesh import Mesh
from tonnage.timing.kinds import read_shape
from tonnage.timing.shape import Shape
from tonnage.timing.software import Software, software
from tonnage.timing.timing import model_flops
from tonnage.timing.work import Work

BLIND = ROOT / "measurements" / "published" / "blind"


def load(path: Path = BLIND) -> list[Row]:
    """All rows."""
    return [ADAPTERS[raw["source_repo"]](raw) for raw in read(path)]


def answers(rows: list[Row]) -> Iterator[tuple[Row, float, float]]:
    """Each row with the errors (predicted / measured - 1) of the first answer and of today's."""
    for row in rows:
        now = predicted(row, code_of(row))
        yield row, row.raw.get("first", now) / row.seconds - 1, now / row.seconds - 1


def code_of(row: Row) -> Software:
    """What ran it: the code of its name, or what torch.compile or Liger's kernels make of that, of which no Plan
    knows: passes are fused, and as long over their bytes as those of another fused code."""
    found = software(row.software)
    if not (row.raw.get("compiled") or row.raw.get("liger")):
        return found
    return replace(found, fused=True, memory_factor=software("megatron-deepspeed").memory_factor)


def _gpt(layers: int, hidden: int, heads: int, vocab: int, **known: Any) -> Shape:
    """GPT-2's layers: layer norms, GELU, learned positions, the head is the embedding."""
    values: dict[str, Any] = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "head_dim": hidden // heads,
        "value_dim": hidden // heads, "intermediate": 4 * hidden, "gated": False, "vocab": vocab, "tied": True,
        "rms_norm": False, "rotary": 0.0, "biases": "all", "parts": 1,
    }  # fmt: skip
    return Shape(**values | known)


# ---- Modalities: FSDP on two supercomputers


@cache
def _cards() -> dict[str, tuple[Device, float]]:
    """The cards of two supercomputers, and bytes per second of their network for each.

    Leonardo (arXiv:2307.16885): an A100 of 124 multiprocessors and 1.64 TB/s, 400 Gb/s for four; MareNostrum 5: an
    H100 with 64 GB of HBM2e, 2.02 TB/s, 800 Gb/s for four.
    """
    a100, h100 = find_device("a100-80gb"), find_device("h100-80gb")
    flops = 312e12 * 124 / 108
    wide = replace(
        a100,
        bandwidth_bytes_per_second=1640e9,
        sms=124,
        peak_flops=replace(a100.peak_flops, bf16=flops, fp16=flops),
    )
    narrow = replace(h100, bandwidth_bytes_per_second=2020e9)
    return {"Leonardo": (wide, 12.5e9), "MareNostrum 5": (narrow, 25e9)}


_MODALITIES = {"2.7": (32, 2560, 32), "6.7": (32, 4096, 32), "13": (40, 5120, 40), "28": (52, 6656, 52)}
"""Layers, width and heads: 12 L h^2 and L h s of each size follow from its MFU at two lengths; heads are taken to be
80 and 128 wide."""


def _modalities(raw: Raw) -> Row:
    """FSDP with weights in fp32, everything else in bf16, flash attention, layers of GPT-2's width with 50,304 words.

    Layers are those of the 2.7B network that its authors trained: torch's layer norms, rotary positions, SwiGLU in
    three products, no biases, the width by `SwiGLU`'s rule (ai_24_demo/configs/text_generation_config_torch.yaml at
    6398d620); the first answers took GPT-2's own.
    """
    device, network = _cards()[raw["cluster"]]
    gpus = raw["n_gpus"]
    hybrid = raw["sharding"] == "HYBRID_SHARD" and gpus > 4
    axes = Mesh(dp_replicate=gpus // 4, dp_shard=4) if hybrid else Mesh(dp_shard=gpus)
    work = Work(
        seq_len=raw["seq_len"], micro_batch=raw["micro_batch"], axes=axes, dtype="bf16", weight_bytes=4,
        gradient_bytes=2, autocast=False, checkpointing="full" if raw["checkpointed"] else "none",
        attention="flash", optimizer="adamw", clipped=True, shard="hsdp" if hybrid else "zero3",
    )  # fmt: skip
    return Row(
        source=f"Modalities, {raw['cluster']}", software="eager", model=f"{raw['size']}B",
        cluster_name=raw["cluster"], work=work,
        shape=_swiglu(*_MODALITIES[raw["size"]]),
        cluster=_cluster(device, gpus, 4, network),
        seconds=work.micro_batch * gpus / raw["samples_per_second"], raw=raw,
    )  # fmt: skip


def _swiglu(layers: int, hidden: int, heads: int) -> Shape:
    inner = -(-(8 * hidden // 3) // 256) * 256
    return _gpt(layers, hidden, heads, 50304, intermediate=inner, gated=True, rotary=1.0, biases="", parts=3)


def _cluster(device: Device, gpus: int, per_node: int = 8, network: float | None = None) -> Cluster:
    cluster = Cluster(device=device, gpus_per_node=min(gpus, per_node), nodes=-(-gpus // per_node))
    return cluster if network is None else replace(cluster, network_bytes_per_second=network)


# ---- BLOOM's first measurements: Megatron-DeepSpeed


def _bigscience(raw: Raw) -> Row:
    """fp16, attention that keeps scores, layers recomputed, ZeRO-1; on Jean Zay four adapters of 100 Gb/s a machine,
    of 8 A100 or 4 V100."""
    data = raw["dp"]
    work = Work(
        seq_len=raw["seq_len"], micro_batch=raw["micro_batch"],
        grad_accum=raw["global_batch"] // (raw["micro_batch"] * data),
        axes=Mesh(pp=raw["pp"], dp_replicate=data, tp=raw["tp"]), sequence_parallel=False, dtype=raw["dtype"],
        weight_bytes=2, gradient_bytes=2, autocast=False, accumulated_bytes=6,
        checkpointing="full" if raw["checkpointed"] else "none", attention="eager", optimizer="adamw-fused",
        clipped=True, shard="zero1",
    )  # fmt: skip
    a100 = raw["gpu"].startswith("a100")
    cluster = (
        _cluster(find_device("a100-80gb"), raw["n_gpus"], 8, 6.25e9)
        if a100
        else _cluster(find_device(raw["gpu"]), raw["n_gpus"], 4, 12.5e9)
    )
    shape = _gpt(raw["layers"], raw["hidden"], raw["heads"], raw["vocab"], dropout=True, positions=raw["seq_len"])
    return Row(
        source=f"BigScience, {'A100' if a100 else 'V100'}", software="megatron-deepspeed",
        model=f"{raw['layers']} x {raw['hidden']}, {raw['heads']} heads", cluster_name=raw["gpu"], shape=shape,
        work=work, cluster=cluster, seconds=raw["seconds"], raw=raw,
    )  # fmt: skip


# ---- Qwen3 235B by Megatron, its own developers' and XTuner's


def _qwen3(raw: Raw) -> Row:
    """Megatron's core: experts not divided, each layer's balance forced, fused loss.

    The first and the last stage have a layer less.  An H800 has 200 GB/s of NVLink and is an H100 otherwise.
    """
    tp, pp, cp, stages = raw["tp"], raw["pp"], raw.get("cp", 1), raw.get("vp", 1)
    data = raw["n_gpus"] // (tp * pp * cp)
    each = 96 // pp
    device = find_device("h100-80gb")
    if raw["gpu"] == "h800":
        device = replace(device, nvlink_bytes_per_second=200e9)
    again = "experts" if raw["recompute"] == "norms and experts" else raw["recompute"]
    work = Work(
        seq_len=raw["seq_len"], micro_batch=raw["micro_batch"],
        grad_accum=raw["global_batch"] // (raw["micro_batch"] * data),
        axes=Mesh(pp=pp, dp_replicate=data, cp=cp, tp=tp, ep=raw["ep"]),
        schedule="interleaved" if stages > 1 else "1f1b", virtual_stages=stages,
        stage_layers=(each - 1, *(each,) * (pp - 2), each - 1), sequence_parallel=True, tensor_beside=False,
        dtype="bf16", weight_bytes=2, autocast=False, accumulated_bytes=4, checkpointing=again, attention="cudnn",
        experts_whole=True, experts_overlapped=raw.get("overlapped", False), loss="fused",
        experts_once=raw["dispatcher"] == "deepep",
        optimizer="adamw-fused", clipped=True, shard="zero1",
    )  # fmt: skip
    shape = _catalog("qwen3-235b-a22b")
    cluster = _cluster(device, raw["n_gpus"])
    if "seconds" in raw:
        seconds = raw["seconds"]
    else:  # TFLOP/s a GPU by Megatron's count, which leaves out what the causal mask hides
        half = 6 * shape.layers * shape.query_width * raw["seq_len"] * work.step_tokens
        seconds = (model_flops(shape, work) - half) / raw["tflops"] / 1e12 / raw["n_gpus"]
    return Row(
        source="Qwen3 235B, " + ("XTuner, H800" if raw["gpu"] == "h800" else "Megatron, H100"), software="megatron",
        model="qwen3-235b", cluster_name=raw["gpu"], shape=shape, work=work, cluster=cluster, seconds=seconds,
        raw=raw,
    )  # fmt: skip


def _catalog(name: str) -> Shape:
    known = find_model(name)
    assert known is not None
    return read_shape(known.config())


# ---- BERT on SQuAD: NVIDIA's example, by NVIDIA and by Lambda


def _squad(raw: Raw) -> Row:
    """Half-precision weights with fp32 copies in the optimizer, or all in fp32 (tf32 from Ampere on); attention that
    keeps scores; a head of two words.  In fp32 the code takes its own Adam, a loop over tensors (BertAdam)."""
    device = find_device(raw["gpu"])
    half, tensor_cores = raw["dtype"] == "fp16", device.capability >= (8, 0)
    layers, hidden, heads = {"bert-base": (12, 768, 12), "bert-large": (24, 1024, 16)}[raw["model"]]
    shape = _gpt(
        layers, hidden, heads, 0, causal=False, dropout=True, ends_in_norm=True, parts=3,
        extra_parameters=(30528 + 512 + 2) * hidden,
    )  # fmt: skip
    gpus = raw["n_gpus"]
    work = Work(
        seq_len=raw["seq_len"], micro_batch=raw["micro_batch"], axes=Mesh(dp_replicate=gpus),
        dtype="fp16" if half else "tf32" if tensor_cores else "fp32", weight_bytes=2 if half else 4,
        gradient_bytes=2 if half else 4, autocast=False, attention="eager",
        optimizer="adamw-fused" if half else "adamw-loop", clipped=True,
        shard="ddp" if gpus > 1 else "none",
    )  # fmt: skip
    who = "Lambda" if raw["source_repo"].startswith("lambdal") else "NVIDIA"
    return Row(
        source=f"BERT on SQuAD, {who}", software="eager", model=raw["model"], cluster_name=raw["gpu"], shape=shape,
        work=work, cluster=_cluster(device, gpus),
        seconds=raw["micro_batch"] * gpus / raw["sequences_per_second"], raw=raw,
    )  # fmt: skip


# ---- torchtune on one GPU


def _torchtune(raw: Raw) -> Row:
    """bf16 throughout, full sequences of packed documents; most of it compiled.  What is offloaded goes on a
    stream of its own, the default of `OffloadActivations` since torch 2.5."""
    adapters = raw["method"] != "full"
    work = Work(
        seq_len=raw["seq_len"], micro_batch=raw["micro_batch"], axes=Mesh(), dtype="bf16", weight_bytes=2,
        gradient_bytes=2, autocast=False, lora_rank=raw.get("rank", 0), quantized=raw["method"] == "qlora",
        checkpointing="full" if raw.get("checkpointed") else "none", loss=raw.get("loss", "plain"),
        optimizer=raw.get("optimizer", "adamw"), activation_offload=raw.get("offloaded", False),
        copies_beside=True, packing=8,
    )  # fmt: skip
    return Row(
        source=f"torchtune, {'adapters' if adapters else 'full'}", software="eager", model=raw["model"],
        cluster_name=raw["gpu"], shape=_catalog(raw["model"]), work=work,
        cluster=_cluster(find_device(raw["gpu"]), 1),
        seconds=work.step_tokens / raw["tokens_per_second"], raw=raw,
    )  # fmt: skip


# ---- long sequences under DeepSpeed


def _ml_engineering(raw: Raw) -> Row:
    """Llama 3.1 8B under DeepSpeed's ZeRO, one sequence a card, FlashAttention 3 or 4 in the place of cuDNN's.

    TFLOP/s a GPU by its own count (benchmark.py): products with all weights but the embedding's, and the half of
    attention that the causal mask leaves.
    """
    shape, seq_len, stage = _catalog("llama-3.1-8b"), raw["seq_len"], raw["stage"]
    work = Work(
        seq_len=seq_len, micro_batch=1, axes=Mesh(dp_shard=raw["n_gpus"]), dtype="bf16", weight_bytes=2,
        gradient_bytes=2, main_weights=True, autocast=False, checkpointing="full" if raw["checkpointed"] else "none",
        attention="cudnn", loss="liger" if raw.get("liger") else "plain", optimizer="adamw-fused", clipped=True,
        shard=f"zero{stage}", weights_stay=stage == 2, averages_each=True, optimizer_offload=float(raw["offload"]),
    )  # fmt: skip
    products = 6 * (shape.parameters - shape.vocab * shape.hidden) * seq_len
    scores = 6 * seq_len**2 * shape.query_width * shape.layers
    return Row(
        source="ml-engineering, " + ("Adam on the host" if raw["offload"] else "ZeRO-2"), software="eager",
        model="llama-3.1-8b", cluster_name=raw["gpu"], shape=shape, work=work,
        cluster=_cluster(find_device(raw["gpu"]), raw["n_gpus"]),
        seconds=(products + scores) / raw["tflops"] / 1e12, raw=raw,
    )  # fmt: skip


ADAPTERS: dict[str, Callable[[Raw], Row]] = {
    "Modalities/modalities": _modalities,
    "bigscience-workshop/bigscience": _bigscience,
    **dict.fromkeys(("yanring/Megatron-MoE-ModelZoo", "InternLM/xtuner"), _qwen3),
    **dict.fromkeys(("lambdal/deeplearning-benchmark", "NVIDIA/DeepLearningExamples"), _squad),
    "pytorch/torchtune": _torchtune,
    "stas00/ml-engineering": _ml_engineering,
}


def remember(path: Path = BLIND) -> None:
    """Write today's answers into rows that have none yet."""
    for file in sorted(path.glob("*.jsonl")):
        common: Raw = {}
        lines = []
        for text in file.read_text().splitlines():
            raw = json.loads(text)
            if "all" in raw:
                common = raw["all"]
            elif "first" not in raw:
                row = ADAPTERS[common["source_repo"]]({**common, **raw})
                raw["first"] = float(f"{predicted(row, code_of(row)):.4g}")
            lines.append(json.dumps(raw))
        file.write_text("\n".join(lines) + "\n")
