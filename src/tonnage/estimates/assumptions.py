"""Assumptions about a job and its plan, as sentences for the report's `assumed`."""

from typing import Final

from tonnage.case import Case
from tonnage.catalog.configurations import NOT_APPLIED
from tonnage.catalog.conventions import conventions_of
from tonnage.catalog.families import types_with
from tonnage.cluster import Cluster
from tonnage.job import Job
from tonnage.mesh import SHARDING, make_mesh
from tonnage.plans import Plan

_DROPOUTS: Final = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("dropout", "dropout_rate", "attention_dropout", "activation_dropout", "hidden_dropout"),
)
"""Fields with dropout probabilities in transformers' configurations."""

DEFAULT_DROPOUT: Final = 0.1
"""Probability of the trait `default_dropout`."""


def list_assumptions(case: Case) -> tuple[str, ...]:
    """Return all that a reader should know to be assumed, a sentence each."""
    job, plan = case.job, case.plan
    from tonnage.trainers import engine_of

    sentences = (
        case.assumed,
        describe_quantized_checkpoint(job),
        describe_dropped_fields(job),
        describe_copies(plan, case.cluster),
        describe_whole_gradients(job, plan),
        describe_narrow_adapters(job, plan),
        describe_idle_sync(job, plan),
        describe_compiled_attention(plan),
        describe_long_sequences(job),
        describe_dropout(job),
        engine_of(plan).assumes(job, plan),
    )
    return tuple(sentence for group in sentences for sentence in group)


def describe_quantized_checkpoint(job: Job) -> tuple[str, ...]:
    """Return a sentence if the weights are published quantized and not used so here."""
    _, separator, quantized = job.model.source.rpartition("; its ")
    if not separator or not quantized.endswith(NOT_APPLIED):
        return ()
    return (
        f"the checkpoint's {quantized}: weights are as the precision says; --method qlora quantizes them to 4 bits, "
        "--quant int8 to 8, by bitsandbytes",
    )


def describe_idle_sync(job: Job, plan: Plan) -> tuple[str, ...]:
    """Return a sentence if accum-sync has no effect; `job` has its accumulation steps decided."""
    if not plan.accum_sync or job.grad_accum > 1:
        return ()
    return (
        "accum-sync has no effect: a step has one micro-batch (grad-accum 1), and gradients are averaged after it "
        "anyway",
    )


_SHOWN: Final = 5
"""Fields that a sentence names."""


def describe_dropped_fields(job: Job) -> tuple[str, ...]:
    """Return a sentence if fields of the configuration were left out because they could load code or files."""
    dropped = job.model.dropped
    if not dropped:
        return ()
    more = f" and {len(dropped) - _SHOWN} more" if len(dropped) > _SHOWN else ""
    return (
        f"left out of the configuration, as it could load code or files: {', '.join(dropped[:_SHOWN])}{more}; the "
        "network is the one that transformers builds without it",
    )


def describe_long_sequences(job: Job) -> tuple[str, ...]:
    """Return a sentence if sequences exceed the configuration's positions, as rotary positions allow."""
    positions = job.model.positions
    if positions is None or job.seq_len <= positions or not job.model.config.get("vocab_size"):
        return ()
    return (
        f"sequences of {job.seq_len:,} tokens exceed the {positions:,} positions of the configuration; that takes no "
        "memory of its own, but says nothing about how well the network handles them",
    )


def describe_dropout(job: Job) -> tuple[str, ...]:
    """Return a sentence if a configuration uses dropout, stated or by default: training codes often do not."""
    config = job.model.config
    defaults = dict.fromkeys(types_with("default_dropout").get(str(config.get("model_type")), ()), DEFAULT_DROPOUT)
    stated = {**defaults, **config, **job.model.text}
    parts = {name: stated[name] for name in _DROPOUTS if isinstance(stated.get(name), float) and stated[name] > 0}
    if not parts:
        return ()
    listed = ", ".join(f"{name} {part:g}" for name, part in parts.items())
    return (
        f"dropout as in the configuration ({listed}): its masks and results are kept for backward; for training "
        "without it, set zeros there in a config.json",
    )


def describe_narrow_adapters(job: Job, plan: Plan) -> tuple[str, ...]:
    """Return a sentence if adapters have a narrower dtype than PEFT gives them."""

    narrow = (
        "" if job.method == "full" or conventions_of(plan.engine).keeps_adapters else plan.adapters_dtype(job.method)
    )
    if plan.weights_dtype is not None or narrow in ("", "fp32"):
        return ()
    return (
        f"adapters are in {narrow}, as the precision says, and so is what they compute; PEFT's default is fp32, "
        "which keeps more for backward: --weights-dtype fp32",
    )


def describe_compiled_attention(plan: Plan) -> tuple[str, ...]:
    """Return a sentence if attention is a part of what is compiled, unlike a package's own kernel."""
    if plan.compile == "none" or plan.attention not in ("auto", "flash"):
        return ()
    return (
        "attention is torch's and is compiled with its layer; FlashAttention's package breaks each compiled layer in "
        "two, which keep more for backward (3 to 10 % more was reserved: docs/reference/accuracy.md)",
    )


def describe_whole_gradients(job: Job, plan: Plan) -> tuple[str, ...]:
    """Return a sentence if our own loop accumulates whole gradients under FSDP2, which can also shard them."""
    waits = plan.shard in SHARDING and plan.pp == 1 and job.grad_accum > 1 and not plan.accum_sync
    if not waits or plan.engine != "tonnage":
        return ()
    return (
        "each GPU holds whole gradients until the last micro-batch, as under accelerate's accumulate(); loops that "
        "do not ask FSDP2 for that average and shard them after each: --accum-sync",
    )


def describe_copies(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Return a sentence if several GPUs train copies without exchanging gradients."""
    layout = make_mesh(plan, cluster.gpus, cluster.gpus_per_node)
    if plan.shard != "none" or layout.data_parallel == 1:
        return ()
    gpus_per_copy = cluster.gpus // layout.data_parallel
    copies = (
        f"{layout.data_parallel} GPUs"
        if gpus_per_copy == 1
        else f"{layout.data_parallel} groups of {gpus_per_copy} GPUs"
    )
    return (
        f"shard none: each of the {copies} trains a copy of its own, and no gradients are exchanged; --shard ddp "
        "averages them, with buckets of the same size; zero3 shards the copy too",
    )
