"""What an estimate takes for granted of a job and its plan, in words of the report's `assumed`."""

from typing import Final

from tonnage.case import Case
from tonnage.catalog.configurations import NOT_APPLIED
from tonnage.catalog.conventions import conventions_of
from tonnage.cluster import Cluster
from tonnage.job import Job
from tonnage.mesh import SHARDING, axes
from tonnage.plans import Plan

_DROPOUTS: Final = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("dropout", "dropout_rate", "attention_dropout", "activation_dropout", "hidden_dropout"),
)
"""What transformers' configurations call the parts that are dropped."""

_DROPPED: Final = {
    ("hidden_dropout_prob", "attention_probs_dropout_prob"): (
        *("bert", "camembert", "deberta", "deberta-v2", "electra", "ernie", "esm", "layoutlm", "longformer"),
        *("megatron-bert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"),
    ),
    ("dropout",): ("bart", "bigbird_pegasus", "blenderbot", "led", "marian", "mbart", "opt", "pegasus"),
    ("dropout", "attention_dropout"): ("distilbert", "m2m_100", "nllb-moe", "xglm"),
    ("dropout_rate",): ("longt5", "mt5", "switch_transformers", "t5", "umt5"),
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"): ("gpt2", "gpt_bigcode", "openai-gpt"),
    ("hidden_dropout", "attention_dropout", "activation_dropout"): ("hubert", "wav2vec2", "wavlm"),
}
"""Names of parts of which a tenth is dropped where a configuration says nothing of them, and the model types: the
defaults of transformers' configuration classes."""

_BY_DEFAULT: Final = {kind: dict.fromkeys(names, 0.1) for names, kinds in _DROPPED.items() for kind in kinds}


def assumed_of(case: Case) -> tuple[str, ...]:
    """All that a reader should know to be so, a sentence each."""
    job, plan = case.job, case.plan
    from tonnage.trainers import engine_of

    of_network = (*of_positions(job), *of_dropout(job), *engine_of(plan).assumes(job, plan))
    of_gradients = (*of_copies(plan, case.cluster), *of_accumulation(job, plan))
    return (*of_checkpoint(job), *of_gradients, *of_adapters(job, plan), *of_compiled(plan), *of_network)


def of_checkpoint(job: Job) -> tuple[str, ...]:
    """Where a configuration says that its weights are published quantized: that they are not so here."""
    _, found, quantized = job.model.source.rpartition("; its ")
    if not found or not quantized.endswith(NOT_APPLIED):
        return ()
    return (
        f"the checkpoint's {quantized}: weights are as the precision says; --method qlora has them in 4 bits, "
        "--quant int8 in 8, by bitsandbytes",
    )


def of_positions(job: Job) -> tuple[str, ...]:
    """Where sequences go on behind the last position of a configuration, as rotary positions can."""
    positions = job.model.positions
    if positions is None or job.seq_len <= positions or not job.model.config.get("vocab_size"):
        return ()
    return (
        f"sequences of {job.seq_len:,} tokens go on behind the {positions:,} positions of the configuration, which "
        "takes no memory of its own; what a network makes of them is another matter",
    )


def of_dropout(job: Job) -> tuple[str, ...]:
    """Where a configuration drops values, by what it says or by default: training codes of their own often do not."""
    config = job.model.config
    stated = {**_BY_DEFAULT.get(str(config.get("model_type")), {}), **config, **job.model.text}
    parts = {name: stated[name] for name in _DROPOUTS if isinstance(stated.get(name), float) and stated[name] > 0}
    if not parts:
        return ()
    told = ", ".join(f"{name} {part:g}" for name, part in parts.items())
    return (
        f"dropout as the configuration has it ({told}): its masks, and what it makes, are kept for backward; a "
        "config.json with zeros there says what training without it needs",
    )


def of_adapters(job: Job, plan: Plan) -> tuple[str, ...]:
    """In what adapters are, where that is less than PEFT makes them in."""

    narrow = (
        "" if job.method == "full" or conventions_of(plan.engine).keeps_adapters else plan.adapters_dtype(job.method)
    )
    if plan.weights_dtype is not None or narrow in ("", "fp32"):
        return ()
    return (
        f"adapters are in {narrow}, as the precision says, and so is what they compute; PEFT makes them in fp32 "
        "where nobody asks it not to, which keeps more for backward: --weights-dtype fp32",
    )


def of_compiled(plan: Plan) -> tuple[str, ...]:
    """Where attention is a part of what is compiled, which a package's own is not."""
    if plan.compile == "none" or plan.attention not in ("auto", "flash"):
        return ()
    return (
        "attention is torch's, inside of what is compiled; FlashAttention's package breaks each compiled layer in "
        "two, which keep more for backward (3 to 10 % more was reserved: docs/reference/accuracy.md)",
    )


def of_accumulation(job: Job, plan: Plan) -> tuple[str, ...]:
    """Where FSDP2 divides gradients and a loop of one's own accumulates them, as it may be told to."""
    waits = plan.shard in SHARDING and plan.pp == 1 and job.grad_accum > 1 and not plan.accum_sync
    if not waits or plan.engine != "tonnage":
        return ()
    return (
        "gradients wait whole on each GPU until the last micro-batch, as under accelerate's accumulate(); loops that "
        "do not ask FSDP2 for that average and divide them after each: --accum-sync",
    )


def of_copies(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """What several GPUs do that nothing was said to divide or average: on purpose, or for want of an option."""
    laid = axes(plan, cluster.gpus, cluster.gpus_per_node)
    if plan.shard != "none" or laid.data_parallel == 1:
        return ()
    together = cluster.gpus // laid.data_parallel
    who = f"{laid.data_parallel} GPUs" if together == 1 else f"{laid.data_parallel} groups of {together} GPUs"
    return (
        f"shard none: each of the {who} trains a copy of its own, and no gradients are exchanged; --shard ddp "
        "averages them, which takes buckets as large as they are; zero3 divides the copy too",
    )
