"""A user's script in options of Job and Plan, from the notes that its dry run took.

The ghost's process notes trainer, arguments, network, adapters, batches and command line from the objects as they
were built (`tonnage_recorder.script`).  `understood` makes a Job and a Plan of these notes, or raises one sentence
why it cannot.  What one trainer says is read by the `facts.py` of its folder in `tonnage.trainers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tonnage.catalog.optimizers import OPTIMIZERS
from tonnage.catalog.untrusted import keep_inert
from tonnage.errors import CannotEstimate, UsageError
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.options import is_amount
from tonnage.plans import Plan
from tonnage.trace.trace import Trace
from tonnage.trainers.accelerate import facts as accelerate
from tonnage.trainers.hf_trainer import facts as hf_trainer
from tonnage.trainers.loop import facts as plain_loop
from tonnage.trainers.trl import facts as trl
from tonnage.units import count

ADAMW: Final = tuple(
    optimizer.name for optimizer in OPTIMIZERS if (optimizer.library, optimizer.family) == ("torch", "adamw")
)
"""Implementations of one optimizer: any may stand for any other."""

_ADAMW_CLASSES: Final = ("torch.optim.adamw.AdamW", "torch.optim.adam.Adam")

_DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

_HEADS: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForImageClassification")
"""Ends of the names of networks that are planned."""

_ENGINES: Final = {**dict.fromkeys(trl.CLASSES, "trl"), **dict.fromkeys(hf_trainer.CLASSES, "hf-trainer")}
"""The engine of each Trainer whose step one runs."""

_UNPLANNED_ADAPTERS: Final = (
    "use_dora",
    "modules_to_save",
    "use_qalora",
    "trainable_token_indices",
    "layer_replication",
)
"""Settings of adapters that no plan has."""

_UNPLANNED_SETTINGS: Final = ("use_liger_kernel", "torch_compile", "activation_offloading")
"""Settings of a Trainer that the plan of a script leaves out."""


class NotUnderstood(CannotEstimate):
    """A script of which no Job can be made."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A script's notes of itself."""

    recorded: Mapping[str, Any] = field(default_factory=dict)
    """The notes as `tonnage_recorder.script` wrote them."""
    allocator_settings: str = ""
    """The allocator's variable in the script's process."""
    torch_version: str | None = None
    """The version of torch that it ran."""

    @staticmethod
    def of(trace: Trace) -> Facts:
        """Return the notes of the process that left the trace."""
        return Facts(
            recorded=trace.script,
            allocator_settings=trace.allocator_settings,
            torch_version=trace.versions.get("torch"),
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        """TrainingArguments as they were built; of a script without a Trainer, what stands for them."""
        if self.is_loop:
            return accelerate.loop_settings(self.recorded)
        if self.is_plain:
            return plain_loop.settings(self.recorded)
        values: Mapping[str, Any] = self.recorded.get("arguments", {}).get("values", {})
        return values

    @property
    def is_loop(self) -> bool:
        """True if it is a loop of its own around accelerate's Accelerator."""
        return bool(self.recorded.get("accelerator")) and not self.recorded.get("trainer")

    @property
    def is_plain(self) -> bool:
        """True if it is a loop of its own with neither a Trainer nor an Accelerator."""
        return not self.recorded.get("trainer") and not self.recorded.get("accelerator")

    @property
    def given(self) -> Sequence[str]:
        """The arguments that a loop gives its Accelerator itself, so that no launcher can set them."""
        names: Sequence[str] = self.recorded.get("accelerator", {}).get("given", ())
        return names

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of its command line, by their names with dashes."""
        options: Mapping[str, Any] = self.recorded.get("options", {})
        return options

    @property
    def network(self) -> Mapping[str, Any]:
        """Class, configuration and dtypes of its network; empty where none was seen."""
        network: Mapping[str, Any] = self.recorded.get("network", {})
        return network

    @property
    def trainer(self) -> str | None:
        """The class of its Trainer."""
        classes = self.recorded.get("trainer")
        return classes[0].rpartition(".")[2] if classes else None

    @property
    def arguments(self) -> str:
        """The class of its arguments."""
        return str(self.recorded.get("arguments", {}).get("class", "TrainingArguments"))

    @property
    def fsdp(self) -> Mapping[str, Any] | None:
        """The settings of accelerate's FSDP plugin; None without."""
        return accelerate.fsdp(self.recorded)

    @property
    def is_launchers(self) -> bool:
        """True if accelerate's launcher sets the sharding, not the script's own arguments."""
        return self.is_loop or (self.fsdp is not None and not self.settings.get("fsdp"))

    @property
    def is_expandable(self) -> bool:
        """True if its allocator has expandable segments."""
        return "expandable_segments:True" in self.allocator_settings


@dataclass(frozen=True, kw_only=True)
class Understood:
    """A script as a Job under a Plan."""

    job: Job
    """The job, with the script's micro-batch and accumulation."""
    plan: Plan
    """The plan that the script runs now."""
    notes: tuple[str, ...]
    """Parts of the script that the job leaves out."""

    @property
    def words(self) -> str:
        """One line for a reader."""
        job, plan = self.job, self.plan
        parts: list[str] = [plan.precision, plan.optimizer, *([plan.shard] if plan.shard != "none" else [])]
        parts.append("no checkpointing" if plan.checkpointing == "none" else f"checkpointing {plan.checkpointing}")
        adapters = "" if job.method == "full" else f" of rank {job.lora_rank}"
        batch = f"{job.micro_batch} x {job.seq_len:,} tokens, {job.grad_accum} accumulated"
        return f"{job.method}{adapters}, {batch}, {', '.join(parts)}"

    def openly(self, stated: Mapping[str, Any]) -> Plan:
        """Return what a plan must keep: the options that the user `stated`, and all that decide what is trained.

        Raises UsageError for a value that an option cannot have.
        """
        now = self.plan
        kept = {
            name: getattr(now, name)
            for name in (
                *("engine", "weights_dtype", "base_dtype", "quant", "unquantized_dtype"),
                *("clip_grad_norm", "attention", "loss"),
            )
        }
        if now.optimizer not in ADAMW:
            kept["optimizer"] = now.optimizer
        if now.precision != "fp32":  # which autocast makes faster
            kept["precision"] = now.precision
        return Plan(**{**kept, **stated})


def describe_recognised(facts: Facts) -> str:
    """Return one line of what was recognised, whether or not a Job can be made of it."""
    parts = []
    if facts.trainer is not None:
        parts.append(f"{facts.trainer} with {facts.arguments}")
    elif facts.is_loop:
        parts.append("a loop with accelerate's Accelerator")
    else:
        parts.append("a loop of its own")
    if facts.network:
        total = sum(facts.network["trainable"].values()) + sum(facts.network["frozen"].values())
        parts.append(f"{facts.network['class']} ({count(total)} parameters)")
    batch = facts.recorded.get("batch")
    if batch:
        parts.append(f"batches of {batch['sequences']} x {batch['tokens']:,} tokens")
    return ", ".join(parts)


def understood(facts: Facts) -> Understood:
    """Return the script as a Job under a Plan.  Raises NotUnderstood with one line."""
    engine = _engine(facts)
    if not facts.network:
        raise NotUnderstood("no network of transformers was seen before it ended")
    batch = _batch(facts)
    plan = _plan(facts, engine)
    job = Job(model=_model(facts), seq_len=batch["tokens"], **_batch_options(facts, batch), **_adapters(facts))
    return Understood(job=job, plan=plan, notes=tuple(_notes(facts, batch)))


def checkpointing_word(facts: Facts) -> str:
    """Return the name of checkpointing in the script's version of transformers, or on its command line."""
    return hf_trainer.checkpointing_word(facts.settings)


def _engine(facts: Facts) -> str:
    if facts.is_loop:
        return "accelerate"
    classes = facts.recorded.get("trainer")
    if classes is None:
        raise NotUnderstood(
            "it makes neither a Trainer nor an Accelerator; of its own flags those for batch size, accumulation and "
            "checkpointing are known here"
        )
    for name in classes:
        if name in _ENGINES:
            return _ENGINES[name]
        if name.startswith(("trl.", "transformers.")):
            raise NotUnderstood(f"what a step of {name.rpartition('.')[2]} needs is not planned here")
    raise NotUnderstood(f"{classes[0]} is no Trainer that is known here")


def _batch(facts: Facts) -> Mapping[str, Any]:
    """Return the shapes of the micro-batches; of a script that ran out of memory before, those of its settings."""
    batch: Mapping[str, Any] | None = facts.recorded.get("batch")
    if batch is not None:
        return batch
    length = facts.settings.get("max_length")
    if not isinstance(length, int):
        raise NotUnderstood("it ended before its first batch, so the length of its sequences is not known")
    return {"sequences": facts.settings["per_device_train_batch_size"], "tokens": length}


def _batch_options(facts: Facts, batch: Mapping[str, Any]) -> dict[str, Any]:
    rows = facts.settings["per_device_train_batch_size"]
    if batch["sequences"] != rows:
        raise NotUnderstood(
            f"its batches have {batch['sequences']} rows where per_device_train_batch_size says {rows}: it packs or "
            "drops some, and what a row needs is not known"
        )
    return {"micro_batch": rows, "grad_accum": facts.settings["gradient_accumulation_steps"]}


def _model(facts: Facts) -> ModelRef:
    name = facts.network["class"]
    if not name.endswith(_HEADS):
        raise NotUnderstood(f"what a {name} needs is not planned here (known: {', '.join(_HEADS)})")
    own = ("quantization_config", "auto_map")  # those that the script has followed
    config, dropped = keep_inert({key: value for key, value in facts.network["config"].items() if key not in own})
    path = str(facts.network["config"].get("_name_or_path") or name)
    return ModelRef(
        name=path.rstrip("/").rpartition("/")[2] or name,
        kind="config",
        config={**config, "architectures": [name]},
        source="the script's own network",
        dropped=dropped,
    )


def _adapters(facts: Facts) -> dict[str, Any]:
    adapters = facts.network["adapters"]
    quantized = facts.network["config"].get("quantization_config")
    if adapters is None:
        if quantized:
            raise NotUnderstood("its weights are quantized, and nothing that is trained was found")
        return {}
    if adapters.get("peft_type") != "LORA":
        raise NotUnderstood(f"adapters of the kind {adapters.get('peft_type')} are not planned here")
    targets = adapters.get("target_modules")
    names = [targets] if isinstance(targets, str) else sorted({name.rpartition(".")[2] for name in targets or ()})
    return {
        "method": "qlora" if quantized else "lora",
        "lora_rank": int(adapters["r"]),
        "lora_dropout": float(adapters.get("lora_dropout") or 0),
        "lora_targets": tuple(names),
    }


def _plan(facts: Facts, engine: str) -> Plan:
    options: dict[str, Any] = {
        "engine": engine,
        "optimizer": _optimizer(facts),
        "loss": trl.LOSS if engine == "trl" else "plain",
        "allocator": "expandable" if facts.is_expandable else "default",
        **_precision(facts),
        **_quantization(facts, engine),
        **_checkpointing(facts),
        **_sharding(facts),
    }
    norm = facts.settings.get("max_grad_norm")
    if is_amount(norm):
        options["clip_grad_norm"] = float(norm)
    if facts.network["attention"] == "eager":
        options["attention"] = "eager"
    try:
        return Plan(**options)
    except UsageError as error:
        raise NotUnderstood(str(error).rstrip(".")) from error


def _optimizer(facts: Facts) -> str:
    """Return the optimizer that was built; before that, the one of the settings."""
    built = facts.recorded.get("optimizer")
    if built is not None and built["class"] in _ADAMW_CLASSES:
        return "adamw-fused" if built["fused"] else "adamw-loop" if built["foreach"] is False else "adamw-foreach"
    name = str(facts.settings.get("optim") or str((built or {}).get("class")).rpartition(".")[2])
    if name not in hf_trainer.OPTIMIZERS:
        raise NotUnderstood(f"the optimizer {name} is not planned here")
    return hf_trainer.OPTIMIZERS[name]


def _precision(facts: Facts) -> dict[str, Any]:
    """Return autocast by the settings, and dtypes of weights as they are."""
    mixed = hf_trainer.autocast_dtype(facts.settings)
    network = facts.network
    if network["adapters"] is not None:
        frozen = _main_dtype(network["frozen"])
        quantization = network["config"].get("quantization_config")
        base = {} if quantization or frozen is None else {"base_dtype": frozen}
        compute = _compute_dtype(quantization) or frozen or "fp32"
        without_autocast = compute if compute == "fp32" else f"{compute}-true"
        return {**base, "precision": f"{mixed}-mixed" if mixed else without_autocast}
    weights = _main_dtype(network["trainable"])
    if weights == mixed == "bf16":
        return {"precision": "bf16-mixed", "weights_dtype": weights}
    if weights == "fp32":
        return {"precision": f"{mixed}-mixed" if mixed else "fp32"}
    return {"precision": f"{weights}-true"}


def _main_dtype(elements: Mapping[str, int]) -> str | None:
    """Return the floating-point dtype that most elements have."""
    known = {name: number for name, number in elements.items() if name in _DTYPES}
    return _DTYPES[max(known, key=lambda name: known[name])] if known else None


def _compute_dtype(quantization: Mapping[str, Any] | None) -> str | None:
    return None if not quantization else _DTYPES.get(str(quantization.get("bnb_4bit_compute_dtype")), None)


def _quantization(facts: Facts, engine: str) -> dict[str, Any]:
    config = facts.network["config"].get("quantization_config")
    if not config:
        return {}
    if config.get("quant_method") != "bitsandbytes":
        raise NotUnderstood(f"weights quantized by {config.get('quant_method')} are not planned here")
    is_cast = engine != "trl" and "float32" in facts.network["frozen"]  # SFTTrainer leaves it as it was loaded
    double = "-double" if config.get("bnb_4bit_use_double_quant") else ""
    kind = "int8" if config.get("load_in_8bit") else f"{config.get('bnb_4bit_quant_type')}{double}"
    return {"quant": kind, "unquantized_dtype": "fp32" if is_cast else "compute"}


def _checkpointing(facts: Facts) -> dict[str, Any]:
    by_fsdp = facts.fsdp and facts.fsdp["activation_checkpointing"]
    return hf_trainer.checkpointing(facts.settings) or ({"checkpointing": "full"} if by_fsdp else {})


def _sharding(facts: Facts) -> dict[str, Any]:
    if facts.recorded.get("cards_of_process", 1) > 1:
        raise NotUnderstood(
            "one process of it would use all GPUs (torch's DataParallel); start it with torchrun --nproc-per-node N"
        )
    try:
        return accelerate.sharding(facts.recorded)
    except CannotEstimate as error:
        raise NotUnderstood(str(error)) from error


def _notes(facts: Facts, batch: Mapping[str, Any]) -> Iterator[str]:
    settings, network = facts.settings, facts.network
    for missed in facts.recorded.get("missed", ()):
        yield f"Not all of it could be seen ({missed})."
    if batch.get("least_tokens", batch["tokens"]) != batch["tokens"]:
        span = f"{batch['least_tokens']:,} to {batch['tokens']:,}"
        yield f"Sequences of {span} tokens were seen; the longest are planned."
    if facts.recorded.get("batch") is None:
        yield "It ran out of memory before its first batch: the length of sequences is max_length."
    else:
        yield "The batches of the steps that were run are all that is known of its data; longer ones may come later."
    if network["adapters"] is None and network["frozen"]:
        yield f"{count(sum(network['frozen'].values()))} frozen parameters are planned as if they were trained."
    for name in _UNPLANNED_ADAPTERS:
        if (network["adapters"] or {}).get(name):
            yield f"{name} of its adapters is not planned; the dry-runs have it."
    for name in _UNPLANNED_SETTINGS:
        if settings.get(name):
            yield f"{name} is not planned; the dry-runs have it."
    own = [name for name in facts.recorded.get("trainer") or () if not name.startswith(("transformers.", "trl."))]
    if own:
        yield f"{own[0].rpartition('.')[2]} is a Trainer of its own: planned as the Trainer that it derives from."
