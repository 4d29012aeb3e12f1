"""What a script is, as it said itself while it was dry-run, in options of Job and Plan.

The ghost's process notes trainer, arguments, network, adapters, batches and command line from the objects as they
were built (`tonnage_recorder.script`).  Here that becomes a Job and a Plan, or one sentence why it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tonnage.errors import CannotEstimate, UsageError
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.options import is_amount
from tonnage.plans import Plan
from tonnage.trace.trace import Trace
from tonnage.trainers.hf_trainer.run import OPTIMIZERS
from tonnage.units import count

ADAMW: Final = ("adamw", "adamw-fused", "adamw-foreach", "adamw-loop")
"""Implementations of one optimizer: any may stand for any other."""

_NAMES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_HEADS: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForImageClassification")
_ENGINES: Final = {
    "trl.trainer.sft_trainer.SFTTrainer": "trl",
    "transformers.trainer_seq2seq.Seq2SeqTrainer": "hf-trainer",
    "transformers.trainer.Trainer": "hf-trainer",
}
"""Trainers whose step an engine runs, the more special ones first."""

_OPTIMS: Final = {
    **{said["optim"]: name for name, said in OPTIMIZERS.items() if "optim" in said},
    "adamw_8bit": "adamw-8bit",
    "paged_adamw": "paged-adamw",
}


class NotUnderstood(CannotEstimate):
    """A script of which no Job can be made."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A script's notes of itself."""

    said: Mapping[str, Any] = field(default_factory=dict)
    """As `tonnage_recorder.script` wrote them."""
    allocator_settings: str = ""
    """The allocator's variable as its process had it."""
    torch_version: str | None = None
    """Which torch it ran."""

    @staticmethod
    def of(trace: Trace) -> Facts:
        """Those of the process that left the trace."""
        return Facts(
            said=trace.script,
            allocator_settings=trace.allocator_settings,
            torch_version=trace.versions.get("torch"),
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        """TrainingArguments as they were built; of a loop with accelerate, what stands for them."""
        found: Mapping[str, Any] = self.said.get("arguments", {}).get("values", {})
        return self._of_loop() if self.is_loop else found

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop of its own around accelerate's Accelerator."""
        return bool(self.said.get("accelerator")) and not self.said.get("trainer")

    def _of_loop(self) -> dict[str, Any]:
        accelerator = self.said["accelerator"]
        return {
            "per_device_train_batch_size": self.said.get("batch", {}).get("sequences"),
            "gradient_accumulation_steps": accelerator["gradient_accumulation_steps"],
            "mixed_precision": accelerator["mixed_precision"],
            "bf16": accelerator["mixed_precision"] == "bf16",
            "fp16": accelerator["mixed_precision"] == "fp16",
            "gradient_checkpointing": bool(self.network.get("checkpointed")),
            "fused": bool(self.said.get("optimizer", {}).get("fused")),
        }

    @property
    def given(self) -> Sequence[str]:
        """What a loop gives its Accelerator itself, so that no launcher can say it."""
        found: Sequence[str] = self.said.get("accelerator", {}).get("given", ())
        return found

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of its command line, by their names with dashes."""
        found: Mapping[str, Any] = self.said.get("options", {})
        return found

    @property
    def network(self) -> Mapping[str, Any]:
        """Class, configuration and dtypes of its network; empty where none was seen."""
        found: Mapping[str, Any] = self.said.get("network", {})
        return found

    @property
    def trainer(self) -> str | None:
        """The class of its Trainer."""
        kinds = self.said.get("trainer")
        return kinds[0].rpartition(".")[2] if kinds else None

    @property
    def arguments(self) -> str:
        """The class of its arguments."""
        return str(self.said.get("arguments", {}).get("class", "TrainingArguments"))

    @property
    def fsdp(self) -> Mapping[str, Any] | None:
        """How accelerate divides, if it does."""
        found: Mapping[str, Any] | None = self.said.get("accelerator", {}).get("fsdp")
        return found

    @property
    def is_launchers(self) -> bool:
        """Whether sharding is said by accelerate's launcher, not by the script's own arguments."""
        return self.is_loop or (self.fsdp is not None and not self.settings.get("fsdp"))

    @property
    def is_expandable(self) -> bool:
        """Whether its allocator's segments grow."""
        return "expandable_segments:True" in self.allocator_settings


@dataclass(frozen=True, kw_only=True)
class Understood:
    """A script in the program's own words."""

    job: Job
    """With the micro-batch and the accumulation that it has."""
    plan: Plan
    """What it does now."""
    notes: tuple[str, ...]
    """What of it the job does not say."""

    @property
    def words(self) -> str:
        """One line for a reader."""
        job, plan = self.job, self.plan
        parts = [plan.precision, plan.optimizer, *([plan.shard] if plan.shard != "none" else [])]
        parts.append("no checkpointing" if plan.checkpointing == "none" else f"checkpointing {plan.checkpointing}")
        adapters = "" if job.method == "full" else f" of rank {job.lora_rank}"
        batch = f"{job.micro_batch} x {job.seq_len:,} tokens, {job.grad_accum} accumulated"
        return f"{job.method}{adapters}, {batch}, {', '.join(parts)}"

    def openly(self, said: Mapping[str, Any]) -> Plan:
        """What a plan must keep: what the user `said`, and whatever would train something else, or otherwise.

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
        return Plan(**{**kept, **said})


def seen(facts: Facts) -> str:
    """One line of what was recognised, whether or not a Job can be made of it."""
    words = []
    if facts.trainer is not None:
        words.append(f"{facts.trainer} with {facts.arguments}")
    elif facts.is_loop:
        words.append("a loop with accelerate's Accelerator")
    else:
        words.append("a loop of its own")
    if facts.network:
        total = sum(facts.network["trainable"].values()) + sum(facts.network["frozen"].values())
        words.append(f"{facts.network['class']} ({count(total)} parameters)")
    batch = facts.said.get("batch")
    if batch:
        words.append(f"batches of {batch['sequences']} x {batch['tokens']:,} tokens")
    return ", ".join(words)


def understood(facts: Facts) -> Understood:
    """The script as a Job under a Plan.  Raises NotUnderstood with one line."""
    engine = _engine(facts)
    if not facts.network:
        raise NotUnderstood("no network of transformers was seen before it ended")
    batch = _batch(facts)
    now = _plan(facts, engine)
    job = Job(model=_model(facts), seq_len=batch["tokens"], **_of_batch(facts, batch), **_of_adapters(facts))
    return Understood(job=job, plan=now, notes=tuple(_notes(facts, batch)))


def _engine(facts: Facts) -> str:
    if facts.is_loop:
        return "accelerate"
    kinds = facts.said.get("trainer")
    if kinds is None:
        raise NotUnderstood(
            "it makes neither a Trainer nor an Accelerator, so it has no settings that are known here"
        )
    for kind in kinds:
        if kind in _ENGINES:
            return _ENGINES[kind]
        if kind.startswith(("trl.", "transformers.")):
            raise NotUnderstood(f"what a step of {kind.rpartition('.')[2]} needs is not planned here")
    raise NotUnderstood(f"{kinds[0]} is no Trainer that is known here")


def _batch(facts: Facts) -> Mapping[str, Any]:
    """Shapes of the micro-batches; of a script that ran out of memory before, what its settings say."""
    batch = facts.said.get("batch")
    if batch is None:
        length = facts.settings.get("max_length")
        if not isinstance(length, int):
            raise NotUnderstood("it ended before its first batch, so the length of its sequences is not known")
        return {"sequences": facts.settings["per_device_train_batch_size"], "tokens": length}
    found: Mapping[str, Any] = batch
    return found


def _of_batch(facts: Facts, batch: Mapping[str, Any]) -> dict[str, Any]:
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
    config = {
        key: value
        for key, value in facts.network["config"].items()
        if key not in ("_name_or_path", "transformers_version", "quantization_config", "auto_map")
    }
    path = str(facts.network["config"].get("_name_or_path") or name)
    return ModelRef(
        name=path.rstrip("/").rpartition("/")[2] or name,
        kind="config",
        config={**config, "architectures": [name]},
        source="the script's own network",
    )


def _of_adapters(facts: Facts) -> dict[str, Any]:
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
        "loss": "chunked" if engine == "trl" else "plain",
        "allocator": "expandable" if facts.is_expandable else "default",
        **_precision(facts),
        **_quantized(facts, engine),
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
    """By what was built; before that, by what the settings say."""
    made = facts.said.get("optimizer")
    if made is not None and made["class"] in ("torch.optim.adamw.AdamW", "torch.optim.adam.Adam"):
        return "adamw-fused" if made["fused"] else "adamw-loop" if made["foreach"] is False else "adamw-foreach"
    said = str(facts.settings.get("optim") or str((made or {}).get("class")).rpartition(".")[2])
    if said not in _OPTIMS:
        raise NotUnderstood(f"the optimizer {said} is not planned here")
    return _OPTIMS[said]


def _precision(facts: Facts) -> dict[str, Any]:
    """Autocast by the settings, dtypes of weights as they are."""
    mixed = "bf16" if facts.settings.get("bf16") else "fp16" if facts.settings.get("fp16") else None
    network = facts.network
    if network["adapters"] is not None:
        frozen = _most(network["frozen"])
        base = {} if network["config"].get("quantization_config") or frozen is None else {"base_dtype": frozen}
        compute = _computes(network["config"].get("quantization_config")) or frozen or "fp32"
        alone = compute if compute == "fp32" else f"{compute}-true"
        return {**base, "precision": f"{mixed}-mixed" if mixed else alone}
    weights = _most(network["trainable"])
    if weights == mixed == "bf16":
        return {"precision": "bf16-mixed", "weights_dtype": weights}
    if weights == "fp32":
        return {"precision": f"{mixed}-mixed" if mixed else "fp32"}
    return {"precision": f"{weights}-true"}


def _most(elements: Mapping[str, int]) -> str | None:
    """Of floating-point dtypes the one that most elements have."""
    known = {name: number for name, number in elements.items() if name in _NAMES}
    return _NAMES[max(known, key=lambda name: known[name])] if known else None


def _computes(quantization: Mapping[str, Any] | None) -> str | None:
    return None if not quantization else _NAMES.get(str(quantization.get("bnb_4bit_compute_dtype")), None)


def _quantized(facts: Facts, engine: str) -> dict[str, Any]:
    said = facts.network["config"].get("quantization_config")
    if not said:
        return {}
    if said.get("quant_method") != "bitsandbytes":
        raise NotUnderstood(f"weights quantized by {said.get('quant_method')} are not planned here")
    kept = engine != "trl" and "float32" in facts.network["frozen"]
    double = "-double" if said.get("bnb_4bit_use_double_quant") else ""
    kind = "int8" if said.get("load_in_8bit") else f"{said.get('bnb_4bit_quant_type')}{double}"
    return {"quant": kind, "unquantized_dtype": "fp32" if kept else "compute"}


def checkpointing_word(facts: Facts) -> str:
    """What its version of transformers, or its command line, calls checkpointing."""
    words = ("activation_checkpointing", "gradient_checkpointing")
    return next((word for word in words if word in facts.settings), words[1])


def _checkpointing(facts: Facts) -> dict[str, Any]:
    word = checkpointing_word(facts)
    kwargs = facts.settings.get(f"{word}_kwargs") or {}
    if facts.settings.get(word):
        every = kwargs.get("every_n_layers") or 1
        offload = {"activation_offload": "cpu"} if kwargs.get("offload") else {}
        return {"checkpointing": f"every-{every}" if every > 1 else "full", **offload}
    return {"checkpointing": "full"} if facts.fsdp and facts.fsdp["activation_checkpointing"] else {}


def _sharding(facts: Facts) -> dict[str, Any]:
    if facts.said.get("cards_of_process", 1) > 1:
        raise NotUnderstood(
            "one process of it would use all GPUs (torch's DataParallel); start it with torchrun --nproc-per-node N"
        )
    kind = facts.said.get("accelerator", {}).get("distributed", "NO")
    if kind == "NO":
        return {}
    if kind == "MULTI_GPU":
        return {"shard": "ddp"}
    if kind != "FSDP" or facts.fsdp is None:
        raise NotUnderstood(f"accelerate divides by {kind}, whose settings are not among the script's own")
    kept = str(facts.fsdp["reshard_after_forward"]) in ("False", "2", "SHARD_GRAD_OP")
    offload = {"param_offload": "cpu"} if facts.fsdp["offload"] else {}
    return {"shard": "zero2" if kept else "zero3", **offload}


_UNCOUNTED: Final = ("use_dora", "modules_to_save", "use_qalora", "trainable_token_indices", "layer_replication")


def _notes(facts: Facts, batch: Mapping[str, Any]) -> Iterator[str]:
    settings, network = facts.settings, facts.network
    for missed in facts.said.get("missed", ()):
        yield f"Not all of it could be seen ({missed})."
    if batch.get("least_tokens", batch["tokens"]) != batch["tokens"]:
        span = f"{batch['least_tokens']:,} to {batch['tokens']:,}"
        yield f"Sequences of {span} tokens were seen; the longest are planned."
    if facts.said.get("batch") is None:
        yield "It ran out of memory before its first batch: the length of sequences is max_length."
    else:
        yield "The batches of the steps that were run are all that is known of its data; longer ones may come later."
    if network["adapters"] is None and network["frozen"]:
        yield f"{count(sum(network['frozen'].values()))} frozen parameters are planned as if they were trained."
    for name in _UNCOUNTED:
        if (network["adapters"] or {}).get(name):
            yield f"{name} of its adapters is not planned; the dry-runs have it."
    for name in ("use_liger_kernel", "torch_compile", "activation_offloading"):
        if settings.get(name):
            yield f"{name} is not planned; the dry-runs have it."
    own = [kind for kind in facts.said.get("trainer") or () if not kind.startswith(("transformers.", "trl."))]
    if own:
        yield f"{own[0].rpartition('.')[2]} is a Trainer of its own: planned as the one that it is made of."
