"""Random jobs under random plans: small networks of every family, and up to five options beside the sharding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from networks import TINY
from tonnage.case import Case as TrainingCase
from tonnage.case import check_unused
from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import model_names
from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.job import Job
from tonnage.mesh import make_mesh
from tonnage.model import ModelRef
from tonnage.options import Option, is_accepted, options
from tonnage.plans import Plan
from tonnage.trainers import ENGINES
from tonnage.trainers.cases import check
from tonnage.trainers.engine import ANY

ANY_SIZE = ("llava_next", "idefics3", "mistral3", "qwen2_5_vl", "qwen3_vl")
OTHERS = ("t5", "vit", "whisper", "bert", "llava", "paligemma", "mllama", "gemma3", *ANY_SIZE)
"""Networks of the tests that are more than a stack of layers for text."""

GPUS = (
    *("a100-40gb", "h100-80gb", "t4", "rtx-4090"),
    *("2xa100-40gb", "4xh100-80gb", "8xb200", "2x2xa100-80gb", "2x4xl40s"),
)
LAYERS = (3, 4, 6, 9, 12, 17, 24, 31)
PATTERNS = {
    "every-N": ("every-2", "every-3"),
    "budget=SIZE": ("budget=1MiB", "budget=6MiB", "budget=64MiB"),
    "cpu=FRACTION": ("cpu=0.3", "cpu=0.7"),
    "nvme=FRACTION": ("nvme=0.5",),
}
SLOW = ("adamw-8bit-ao", "adamw-4bit", "adamw-fp8-ao", "flex")
"""Compiled for each shape, which takes a minute."""

APART = ("engine", "tp", "pp", "cp", "ep", "pp_stages", "pp_schedule", "shard", "sequence_parallel")
"""Options of a plan that are drawn by what they mean together."""

SELDOM: dict[str, tuple[Any, ...]] = {
    "packing": (2, 3),
    "lengths": (("16", "9", "12"),),
    "eval_batch": (1, 3),
    "generate": (3,),
    "resume": ("gpu", "cpu"),
    "save_checkpoint": ("full", "sharded"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question."""

    number: str
    """What makes it again: a seed and a number."""
    job: Job
    plan: Plan
    cluster: Cluster

    def __str__(self) -> str:
        layers = self.job.model.config.get("num_hidden_layers", "some")
        said = _said(self.job) | _said(self.plan)
        return f"{self.number} {self.job.model.name} of {layers} layers on {self.cluster}: {said}"


def _said(value: Job | Plan) -> dict[str, Any]:
    """The options that have another value than their default."""
    every = {item.name: (getattr(value, item.name), item.default) for item, _ in options(type(value))}
    return {name: found for name, (found, default) in every.items() if found != default}


def families() -> tuple[str, ...]:
    """One model of the catalog for each type of stacks for text, and the other networks."""
    found = {resolve(name).config["model_type"]: name for name in model_names()}
    return (*(name for kind, name in found.items() if kind not in OTHERS), *OTHERS)


def case(
    number: str, networks: Sequence[str] = (), layers: Sequence[int] = LAYERS, engine: str | None = None
) -> Case:
    """The case of a number: the first of a series that no technique refuses, and no command line."""
    rng = random.Random(number)
    names = networks or families()
    while True:
        try:
            found = _drawn(rng, number, names, layers)
            found = found if engine is None else _in_its_words(rng, found, engine)
            make_mesh(found.plan, found.cluster.gpus, found.cluster.gpus_per_node)
            check(TrainingCase(found.job, found.plan, found.cluster))
            check_unused(_said(found.job) | _said(found.plan), found.plan, found.cluster.gpus)
        except UsageError:
            continue
        return found


def _drawn(rng: random.Random, number: str, names: Sequence[str], layers: Sequence[int]) -> Case:
    cluster = parse_cluster(rng.choice(GPUS))
    name = rng.choice(names)
    job = {"model": _network(rng, name, rng.choice(layers)), **_job(rng)}
    if name in ANY_SIZE:
        job["image_size"] = rng.choice(("32x16", "32x32"))
    plan = _plan(rng, cluster.gpus)
    job["grad_accum"] = max(job["grad_accum"], plan.get("pp", 1))
    return Case(number=number, job=Job(**job), plan=Plan(**plan), cluster=cluster)


def _network(rng: random.Random, name: str, layers: int) -> ModelRef:
    config = TINY[name] if name in OTHERS else _shrunk(rng, resolve(name).config, layers)
    return ModelRef(name=name, kind="config", config=config)


def _shrunk(rng: random.Random, config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The configuration with other sizes: all that a family does, in kilobytes."""
    width, heads = rng.choice((32, 64, 96, 192)), 4
    shared = config.get("num_key_value_heads") != config.get("num_attention_heads")
    sizes: dict[str, Any] = {
        **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), width),
        **dict.fromkeys(("intermediate_size", "ffn_dim"), rng.choice((48, 160, 512))),
        **dict.fromkeys(("num_attention_heads", "n_head"), heads),
        **dict.fromkeys(("num_hidden_layers", "n_layer"), layers),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "initial_context_length"), 1024),
        **{"num_key_value_heads": rng.choice((1, 2)) if shared else heads, "head_dim": width // heads},
        **{"vocab_size": rng.choice((61, 1000, 5003)), "moe_intermediate_size": 16, "n_routed_experts": 8},
        **{"num_local_experts": 4, "num_experts": 8, "num_experts_per_tok": 2, "topk_group": 1},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"partial_rotary_factor": 0.5, "query_pre_attn_scalar": 8, "sliding_window": rng.choice((16, 512))},
        **{"n_group": min(config.get("n_group") or 1, 2), "pad_token_id": 0},
    }
    made = {
        key: value if value is None else sizes.get(key, value)
        for key, value in config.items()
        if "token_id" not in key and key not in ("rope_scaling", "layer_types")
    }
    if config.get("layer_types"):
        made["layer_types"] = (config["layer_types"] * layers)[:layers]
    return {**made, "pad_token_id": 0}


def _job(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {
        "seq_len": rng.choice((16, 24, 64, 65, 128, 256)),
        "micro_batch": rng.choice((1, 2, 3)),
        "grad_accum": rng.choice((1, 1, 2, 3, 4)),
        "method": rng.choice(("full", "full", "full", "lora", "lora", "qlora")),
    }
    if found["method"] != "full":
        found["lora_rank"] = rng.choice((1, 5, 16))
        found["lora_dropout"] = rng.choice((0.0, 0.0, 0.1))
        found["lora_targets"] = rng.choice((("all-linear",), ("all-linear",), ("q_proj", "v_proj")))
    found |= {name: rng.choice(values) for name, values in SELDOM.items() if rng.random() < 0.06}
    if "eval_batch" in found and rng.random() < 0.4:
        found["eval_logits"] = 2
    return found


def _plan(rng: random.Random, ranks: int) -> dict[str, Any]:
    known = {item.name: option for item, option in options(Plan)}
    names = [name for name in known if name not in APART]
    found = {name: _value(rng, known[name]) for name in rng.sample(names, rng.randint(0, 5))}
    if ranks == 1:
        return found
    found["shard"] = rng.choice(("ddp", "zero1", "zero2", "zero3", "zero3", "hsdp"))
    found |= {name: 2 for name in ("tp", "pp", "cp", "ep") if rng.random() < 0.15}
    for name, needs in (("sequence_parallel", "tp"), ("pp_schedule", "pp")):
        if needs in found:
            found[name] = _value(rng, known[name])
    return found


def _value(rng: random.Random, option: Option) -> Any:
    if option.kind == "switch":
        return True
    if option.kind == "amount":
        return rng.choice((1, 0.3))
    return _word(rng, option.possible)


def _word(rng: random.Random, words: Sequence[str]) -> str:
    chosen = rng.choice([word for word in words if word not in SLOW])
    return rng.choice(PATTERNS.get(chosen, (chosen,)))


def _in_its_words(rng: random.Random, found: Case, name: str) -> Case:
    """The case run by a trainer, with what that has words for."""
    expresses = next(one for one in ENGINES if one.name == name).expresses
    if expresses is None:
        return found
    job = replace(found.job, **_expressed(rng, found.job, expresses))
    plan = replace(found.plan, **{**_expressed(rng, found.plan, expresses), "engine": name})
    if found.cluster.gpus == 1:
        plan = replace(plan, shard="none", param_offload="none")
    return replace(found, job=job, plan=plan)


def _expressed(rng: random.Random, value: Any, expresses: Any) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for item, _ in options(type(value)):
        words = expresses.get(item.name)
        if words is None:
            changes[item.name] = item.default
        elif words != ANY and (rng.random() < 0.5 or not is_accepted(str(getattr(value, item.name)), words)):
            changes[item.name] = _word(rng, words)
    return changes
