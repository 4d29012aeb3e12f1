"""Measured steps as the time model needs them: what was computed where, and the seconds it took.

The rows keep the field names of the collection they come from; each adapter says what its source leaves unsaid.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.recorded import asked, card
from benchmarks.time import recipes
from benchmarks.time.networks import shape_of

from tonnage.case import Case
from tonnage.catalog.devices import find_device
from tonnage.cluster import Cluster, Device
from tonnage.errors import TonnageError
from tonnage.estimates.step_time import price
from tonnage.mesh import Mesh
from tonnage.timing.kinds import read_shape
from tonnage.timing.shape import Shape
from tonnage.timing.work import Work

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "measurements" / "published" / "throughput"
OWN = ROOT / "measurements" / "h200-2026-11-20.jsonl"
UNSEEN = ROOT / "measurements" / "h100-2026-11-26.jsonl"
"""The same steps on another card, which nothing was calibrated on."""

Raw = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured step."""

    source: str
    """Who measured it."""
    software: str
    """The Software that ran it."""
    model: str
    """The network: what is left out together."""
    cluster_name: str
    """The machines: what is left out together."""
    shape: Shape
    work: Work
    cluster: Cluster
    seconds: float
    """Of one step; 0 where it did not run."""
    raw: Raw
    """As published."""

    @property
    def ran(self) -> bool:
        """Whether it finished."""
        return self.seconds > 0


class Left(Exception):
    """Why a row is not used, in a few words."""


def read(path: Path) -> list[Raw]:
    """The rows of a file of JSON lines, compressed or not, or of all files of a folder.

    A line `{"all": {...}}` gives fields to all rows after it that do not have them.
    """
    if path.is_dir():
        return [row for file in sorted(path.glob("*.jsonl")) for row in read(file)]
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    rows: list[Raw] = []
    common: Raw = {}
    for line in text.splitlines():
        row = json.loads(line)
        if "all" in row:
            common = row["all"]
        else:
            rows.append({**common, **row})
    return rows


def load(path: Path = PUBLISHED) -> tuple[list[Row], dict[str, dict[str, int]]]:
    """All rows that can be computed, and by source how many are left out for which reason."""
    rows: list[Row] = []
    left: dict[str, dict[str, int]] = {}
    for raw in read(path):
        try:
            rows.append(ADAPTERS[raw["source_repo"]](raw))
        except KeyError as missing:
            _count(
                left,
                raw,
                "not of a source with an adapter"
                if raw["source_repo"] not in ADAPTERS
                else f"does not say {missing}",
            )
        except Left as reason:
            _count(left, raw, str(reason))
        except TonnageError as error:
            _count(left, raw, str(error))
    return rows, left


def _count(left: dict[str, dict[str, int]], raw: Raw, reason: str) -> None:
    reasons = left.setdefault(raw["source_repo"], {})
    reasons[reason] = reasons.get(reason, 0) + 1


def _device(card: str) -> Device:
    """The card, also one that the catalog does not have.

    GB300: a B300 of 1.4 kW, 15, 5 and 2.5 PFLOP/s with 4, 8 and 16 bits (GB300 NVL72's figures, 72 of them).
    """
    if card != "gb300":
        return find_device(card)
    known = find_device("b300")
    return replace(known, peak_flops=replace(known.peak_flops, fp4=15000e12, fp8=5000e12, bf16=2500e12))


def _cluster(card: str, gpus: int, per_node: int = 8, **known: Any) -> Cluster:
    nodes = max(1, gpus // per_node)
    return Cluster(device=_device(card), gpus_per_node=min(gpus, per_node), nodes=nodes, **known)


def _noted(raw: Raw, name: str) -> int:
    found = re.search(rf"{name}=([0-9]+)", raw["notes"])
    if found is None:
        raise Left(f"{name} is not stated")
    return int(found[1])


def _gpt(raw: Raw, heads: int, vocab: int, **known: Any) -> Shape:
    """GPT-2's layers: layer norms, GELU, learned positions."""
    h = raw["hidden"]
    values: dict[str, Any] = {
        "layers": raw["layers"], "hidden": h, "heads": heads, "kv_heads": heads, "head_dim": h // heads,
        "value_dim": h // heads, "intermediate": 4 * h, "gated": False, "vocab": vocab, "tied": True,
        "rms_norm": False, "rotary": 0.0, "positions": raw["seq_len"], "dropout": True, "biases": "all", "parts": 1,
    }  # fmt: skip
    return Shape(**values | known)


def _vtrain(raw: Raw) -> Row:
    """Megatron-DeepSpeed, fp16, every layer recomputed, attention that keeps scores, DDP without overlap."""
    heads = _noted(raw, "attention heads")
    axes = Mesh(pp=raw["pp"], dp_replicate=raw["dp"], tp=raw["tp"])
    work = Work(
        seq_len=raw["seq_len"], micro_batch=raw["micro_batch"],
        grad_accum=raw["global_batch"] // (raw["micro_batch"] * raw["dp"]), axes=axes, sequence_parallel=False,
        dtype="fp16", weight_bytes=2, gradient_bytes=2, main_weights=True, autocast=False, accumulated_bytes=6,
        checkpointing="full", attention="eager", optimizer="adamw-fused", clipped=True, shard="ddp",
    )  # fmt: skip
    several = raw["n_gpus"] > 8
    return Row(
        source="vTrain, several machines" if several else "vTrain, one machine",
        software="megatron-deepspeed", model=f"{raw['layers']} x {raw['hidden']}",
        cluster_name="several" if several else "one",
        shape=_gpt(raw, heads, 51200), work=work, cluster=_cluster("a100-80gb", raw["n_gpus"]),
        seconds=raw["iter_time_s"], raw=raw,
    )  # fmt: skip


def _foundry(raw: Raw) -> Row:
    """llm-foundry: MPT under FSDP, flash attention (Triton), bf16 or autocast with fp32 weights gathered as bf16."""
    heads, vocab = _noted(raw, "heads"), _noted(raw, "vocab")
    pure = raw["precision"].endswith("PURE")
    work = Work(
        seq_len=raw["seq_len"], micro_batch=raw["micro_batch"], grad_accum=raw["grad_accum"],
        axes=Mesh(dp_shard=raw["n_gpus"]), dtype="bf16", weight_bytes=4, gradient_bytes=2 if pure else 4,
        autocast=False, checkpointing="full" if raw["activation_checkpointing"] == "full" else "none",
        attention="flash", loss="fused", optimizer="adamw", clipped=True, shard="zero3",
    )  # fmt: skip
    name = raw["gpu"].lower()
    card = "h100-80gb" if "h100" in name else "a100-40gb" if "40" in name else "a100-80gb"
    network = {"a100": 25e9, "h100": 50e9}[card[:4]]
    tokens = raw["tokens_per_sec_per_gpu"] * raw["n_gpus"]
    if not tokens:
        raise Left("no throughput")
    return Row(
        source="llm-foundry", software="llm-foundry", model=raw["model"], cluster_name=card,
        shape=_gpt(raw, heads, vocab, dropout=False, biases="", positions=0), work=work,
        cluster=_cluster(card, raw["n_gpus"], network_bytes_per_second=network),
        seconds=work.step_tokens / tokens, raw=raw,
    )  # fmt: skip


def nanotron_shape(raw: Raw) -> Shape:
    """The playbook's Llama: as many key as query heads, 131,072 words, tied below an inner width of 10,000."""
    heads, inner = _noted(raw, "heads"), _noted(raw, "ffn")
    h = raw["hidden"]
    return Shape(
        layers=raw["layers"], hidden=h, heads=heads, kv_heads=heads, head_dim=h // heads, value_dim=h // heads,
        intermediate=inner, gated=True, vocab=131072, tied=inner < 10000, parts=1,
    )  # fmt: skip


def _nanotron(raw: Raw) -> Row:
    """nanotron: bf16 weights, fp32 main weights and accumulated gradients, sequence parallelism."""
    axes = Mesh(pp=raw["pp"], dp_replicate=raw["dp"], tp=raw["tp"])
    work = Work(
        seq_len=raw["seq_len"], micro_batch=raw["micro_batch"], grad_accum=raw["grad_accum"], axes=axes,
        sequence_parallel=True, dtype="bf16", weight_bytes=2, gradient_bytes=4, autocast=False, accumulated_bytes=10,
        attention="flash", optimizer="adamw-fused", clipped=True,
        shard="zero1" if raw["sharding"] == "ZeRO-1" else "ddp",
    )  # fmt: skip
    if work.step_tokens != raw["global_batch"] * raw["seq_len"]:
        raise Left("another global batch than the grid's 256 sequences: another job than its cell's")
    speed = raw.get("tokens_per_sec_per_gpu") or 0
    return Row(
        source="ultrascale playbook", software="nanotron", model=raw["model"], cluster_name="hopper",
        shape=nanotron_shape(raw), work=work, cluster=_cluster("h100-80gb", raw["n_gpus"]),
        seconds=work.step_tokens / (speed * raw["n_gpus"]) if raw["status"] == "ok" and speed else 0.0, raw=raw,
    )  # fmt: skip


_CARDS = {"H100": "h100-80gb", "B200": "b200", "GB200": "gb200", "B300": "b300", "GB300": "gb300"}
_DTYPES = {
    **dict.fromkeys(("bf16", "BF16"), "bf16"),
    **dict.fromkeys(("fp8", "FP8", "MXFP8", "FP8-CS", "FP8-MX", "fp8_mx", "fp8 current scaling"), "fp8"),
    **dict.fromkeys(("NVFP4", "nvfp4"), "fp4"),
}


def _megatron(raw: Raw) -> Row:
    """NeMo and Megatron-Bridge: Transformer Engine, sequence parallelism, distributed optimizer, exchanges
    overlapped."""
    raw = recipes.completed(raw)
    shape = shape_of(raw["model"], raw.get("layers"))
    if shape is None:
        raise Left("network not in the catalog or our list")
    if shape.latent_rank:  # DeepSeek is trained to predict two tokens: a layer and the head once more
        shape = replace(shape, layers=shape.layers + 1, predicted=2)
    card, dtype = _CARDS.get(raw["gpu_norm"]), _DTYPES.get(raw.get("precision") or "")
    if card is None or dtype is None:
        raise Left(f"card or precision not known here ({raw['gpu_norm']}, {raw.get('precision')})")
    if not (raw.get("micro_batch") and raw.get("global_batch") and raw.get("seq_len") and raw.get("tp")):
        raise Left("batch, length or layout not stated")
    adapters = re.search("lora|peft", (raw["phase"] + raw["model"]).lower())
    if adapters or "Megatron-FSDP" in (raw.get("sharding") or ""):
        raise Left("LoRA or Megatron-FSDP: too few rows of their own")
    if recipes.regressed(raw):
        raise Left("its container's cuDNN is known to be slow (cudnn-frontend#256)")
    tp, pp, cp = raw["tp"], raw.get("pp") or 1, raw.get("cp") or 1
    data = raw["n_gpus"] // (tp * pp * cp)
    if data * tp * pp * cp != raw["n_gpus"] or raw["global_batch"] % (raw["micro_batch"] * data):
        raise Left("layout does not divide the GPUs or the batch")
    work = Work(
        seq_len=raw["seq_len"], micro_batch=raw["micro_batch"],
        grad_accum=raw["global_batch"] // (raw["micro_batch"] * data),
        axes=Mesh(pp=pp, dp_replicate=data, cp=cp, tp=tp, ep=raw.get("ep") or 1),
        schedule="interleaved" if raw.get("vp") else "1f1b", virtual_stages=raw.get("vp") or 1,
        sequence_parallel=True, dtype=dtype, weight_bytes=2, autocast=False, accumulated_bytes=4,
        optimizer="adamw-fused", clipped=True, shard="zero1", **recipes.of_release(raw),
        **(recipes.of_experts(raw) if shape.experts else {}),
    )  # fmt: skip
    speed = raw.get("tokens_per_sec_per_gpu")
    if not speed:
        raise Left("no throughput")
    sources = {"NVIDIA/dgxc-benchmarking": "dgxc-benchmarking", "NVIDIA-NeMo/Megatron-Bridge": "Megatron-Bridge"}
    return Row(
        source=f"{sources.get(raw['source_repo'], 'NeMo')}, {'experts' if shape.experts else 'dense'}",
        software="megatron", model=f"{shape.hidden} x {shape.intermediate} x {shape.experts}",
        cluster_name=raw["gpu_norm"],
        shape=shape, work=work, cluster=_cluster(card, raw["n_gpus"], 64 if raw["gpu_norm"].startswith("GB") else 8),
        seconds=work.step_tokens / (speed * raw["n_gpus"]), raw=raw,
    )  # fmt: skip


def _fms(raw: Raw) -> Row:
    """The HF Trainer: weights in 16 bits, every layer recomputed, FSDP on two cards; LoRA of the attention (taken for
    that of all linear modules), also beside weights of 4 bits by bitsandbytes.  The transformers of then re-entered.
    """
    shape = shape_of(raw["model"])
    if shape is None:
        raise Left("network not in the catalog or our list")
    gpus, lora = raw["n_gpus"], raw["phase"].endswith("lora")
    work = Work(
        seq_len=raw["seq_len"], micro_batch=raw["micro_batch"], grad_accum=raw["grad_accum"],
        axes=Mesh(dp_shard=gpus), dtype="bf16", weight_bytes=2, gradient_bytes=2, autocast=False,
        lora_rank=16 if lora else 0, quantized="bnb" in raw["notes"], checkpointing="full", optimizer="adamw",
        repeats_to_end=True, clipped=True, shard="zero3" if gpus > 1 else "none",
    )  # fmt: skip
    return Row(
        source="fms-acceleration (HF Trainer)", software="eager", model=raw["model"], cluster_name="a100",
        shape=shape, work=work, cluster=_cluster("a100-80gb", gpus),
        seconds=work.step_tokens / (raw["tokens_per_sec_per_gpu"] * gpus), raw=raw,
    )  # fmt: skip


def _internevo(raw: Raw) -> Row:
    """InternEvo: bf16, flash attention, ZeRO-1 over all data-parallel ranks or groups of them."""
    shape = shape_of(raw["model"])
    if shape is None or not raw.get("tokens_per_sec_per_gpu") or not raw.get("seq_len"):
        raise Left("no throughput or no length")
    data = raw["n_gpus"] // (raw["tp"] * raw["pp"])
    work = Work(
        seq_len=raw["seq_len"], micro_batch=raw["micro_batch"], grad_accum=raw["grad_accum"],
        axes=Mesh(pp=raw["pp"], dp_replicate=data, tp=raw["tp"]), sequence_parallel=False, dtype="bf16",
        weight_bytes=2, gradient_bytes=2, autocast=False, accumulated_bytes=6, attention="flash",
        checkpointing="full" if raw["activation_checkpointing"] == "full" else "none",
        optimizer="adamw-fused", clipped=True, shard="zero1",
    )  # fmt: skip
    return Row(
        source="InternEvo", software="internevo", model=raw["model"], cluster_name="a100", shape=shape, work=work,
        cluster=_cluster("a100-80gb", raw["n_gpus"]),
        seconds=work.step_tokens / (raw["tokens_per_sec_per_gpu"] * raw["n_gpus"]), raw=raw,
    )  # fmt: skip


def _mist(raw: Raw) -> Row:
    """Steps that Mist's authors measured: their own code, and Aceso's on clusters that Aceso's authors did not have.

    Of pipelines only those whose stages have equally many GPUs; what each stage runs again is taken on average.
    """
    card = {"L4": "l4", "A10G": "a10g", "A100": "a100-40gb"}[raw["gpu_norm"]]
    mist = "Mist" in raw["phase"] and "Aceso" not in raw["phase"]
    if mist:
        stages = json.loads(re.search(r"=(\[\[.*\]\])", raw["sharding"])[1])  # type: ignore[index]
        layouts = {tuple(stage[:3]) for stage in stages}
        if len(layouts) > 1 or any(stage[6:10] != [0.0] * 4 for stage in stages):
            raise Left("stages differ, or something is offloaded")
        micro_batch, data, tp = next(iter(layouts))
        again = _fractions(raw["activation_checkpointing"])
        fraction = sum(again[: len(stages)]) / raw["layers"]
    else:
        gpus = json.loads(re.search(r"stage gpus=(\[[^\]]*\])", raw["notes"])[1])  # type: ignore[index]
        if len(set(gpus)) > 1 or not raw.get("tp"):
            raise Left("stages differ")
        micro_batch, tp = raw["micro_batch"], raw["tp"]
        data = gpus[0] // tp
        fraction = sum(_fractions(raw["activation_checkpointing"])) / raw["pp"]
    llama = raw["model"].startswith("llama")
    heads = {2048: 32, 2560: 32, 4096: 32, 5120: 40, 6144: 48, 8192: 64}[raw["hidden"]]
    known = {"gated": True, "rms_norm": True, "rotary": 1.0, "dropout": False, "biases": "", "tied": False}
    inner = {2048: 5504, 2560: 6912}.get(raw["hidden"], 4 * raw["hidden"])
    work = Work(
        seq_len=raw["seq_len"], micro_batch=micro_batch, grad_accum=raw["global_batch"] // (micro_batch * data),
        axes=Mesh(pp=raw["pp"], dp_replicate=data, tp=tp), sequence_parallel=False, dtype="fp16", weight_bytes=2,
        gradient_bytes=2, autocast=False, accumulated_bytes=6, checkpointing="full", checkpointed_fraction=fraction,
        attention="flash" if "flash_attn=True" in raw["notes"] else "eager", optimizer="adamw-fused", shard="ddp",
    )  # fmt: skip
    return Row(
        source="Mist's own code" if mist else "Aceso's code, measured by Mist's authors",
        software="megatron-deepspeed", model=raw["model"], cluster_name=f"{card}, Mist's",
        shape=_gpt(raw, heads, 51200, **({**known, "intermediate": inner} if llama else {})), work=work,
        cluster=_cluster(card, raw["n_gpus"]), seconds=raw["iter_time_s"], raw=raw,
    )  # fmt: skip


def _fractions(text: str) -> list[float]:
    """The first list of numbers in a text."""
    found = re.search(r"\[([^\]]*)\]", text)
    return [float(number) for number in found[1].split(",")] if found else []


ADAPTERS: dict[str, Callable[[Raw], Row]] = {
    "VIA-Research/vTrain": _vtrain,
    "mosaicml/llm-foundry": _foundry,
    "vinjn/nanotron-ultrascale-playbook": _nanotron,
    **dict.fromkeys(
        ("NVIDIA/NeMo", "NVIDIA/NeMo-Framework-Launcher", "NVIDIA/dgxc-benchmarking", "NVIDIA-NeMo/Megatron-Bridge"),
        _megatron,
    ),
    "InternLM/InternEvo": _internevo,
    "foundation-model-stack/fms-acceleration": _fms,
    "Dazz993/Mist": _mist,
}


def own(path: Path = OWN) -> tuple[list[Row], dict[str, int]]:
    """A card's own recorded steps in transformers' eager code; and those left out by reason."""
    rows: list[Row] = []
    left: dict[str, int] = {}
    for raw in _timed(path):
        try:
            rows.append(_own(raw))
        except TonnageError as error:
            reason = str(error).split(";")[0]
            left[reason] = left.get(reason, 0) + 1
    return rows, left


def _timed(path: Path) -> list[Raw]:
    return [raw for raw in read(path) if raw.get("timing")]


def _own(raw: Raw) -> Row:
    job, plan = asked(raw)
    cluster = card(raw)
    name = cluster.device.id.partition("-")[0]
    return Row(
        source=f"own {name.upper()}", software="eager", model=job.model.name, cluster_name=name,
        shape=read_shape(job.model.config), work=Work.of(job, plan, cluster), cluster=cluster,
        seconds=raw["timing"]["median_seconds"], raw=raw,
    )  # fmt: skip


def own_stacks(path: Path = OWN) -> list[tuple[str, float]]:
    """Case and error (predicted / measured - 1) of our own steps of networks of other kinds, not calibrated."""
    said = [(raw, *asked(raw)) for raw in _timed(path)]
    return [
        (raw["case"], price(Case(job, plan, card(raw))).step_seconds / raw["timing"]["median_seconds"] - 1)
        for raw, job, plan in said
        if job.model.config.get("model_type") in ("vit", "t5")
    ]
