"""The jobs of `train.py`, and how each contestant trains them: tonnage.apply, Hugging Face's Trainer, TRL.

All contestants of a job load the same weights from a folder and get the same rows in the same order, with the same
optimizer, learning rate and clipping.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

WARM_STEPS: Final = 2
TIMED_STEPS: Final = 8
LEARNING_RATE: Final = 1e-5
CLIP_NORM: Final = 1.0
LORA: Final[Mapping[str, Any]] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0}


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A job that all contestants train."""

    name: str
    """Its name in the records."""
    model: str
    """A model of the catalog, or a folder with a configuration."""
    seq_len: int = 2048
    """Tokens of a row; all rows are full."""
    micro_batch: int = 4
    """Rows of a micro-batch, of those whose settings are given."""
    grad_accum: int = 2
    """Micro-batches of a step."""
    method: str = "full"
    """`full`, `lora` or `qlora`."""
    weights: str = "float32"
    """Dtype of the weights."""
    against: tuple[str, ...] = ("trainer", "trainer checkpointed", "trl")
    """Other contestants."""
    fixed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Plans of tonnage by a name, with options other than those of the Trainer's own settings."""
    searched: bool = True
    """True if tonnage also trains by the plan that its search finds."""

    @property
    def precision(self) -> str:
        """The precision of the contestants' step."""
        return "bf16-mixed" if self.weights == "float32" else "bf16-true"

    @property
    def adapters(self) -> dict[str, Any]:
        """Options that say what PEFT makes of the network: adapters in fp32 beside weights as they were loaded."""
        if self.method == "full":
            return {}
        unquantized = {"unquantized_dtype": "compute"} if self.method == "qlora" else {}
        return {"lora_rank": LORA["r"], "weights_dtype": "fp32", **unquantized}


_OFFLOADED: Final = {"optimizer_offload": "cpu", "checkpointing": "full", "loss": "chunked"}

CONTESTS: Final = (
    Contest(name="1B full", model="llama-3.2-1b"),
    Contest(name="8B full, bf16 weights", model="llama-3.1-8b", micro_batch=1, grad_accum=8, weights="bfloat16"),
    Contest(name="8B LoRA", model="llama-3.1-8b", method="lora", weights="bfloat16"),
    Contest(name="8B QLoRA", model="llama-3.1-8b", method="qlora", weights="bfloat16"),
    Contest(name="1B, 32,768 tokens", model="llama-3.2-1b", seq_len=32768, micro_batch=1),
    Contest(
        name="grid of 1B",
        model="llama-3.2-1b",
        against=(),
        fixed={
            f"micro-batch {rows}, {kept}, {loss}": {"micro_batch": rows, "checkpointing": kept, "loss": loss}
            for rows in (1, 2, 4, 8)
            for kept in ("none", "full", "selective")
            for loss in ("plain", "chunked")
        },
    ),
    *(
        Contest(
            name=f"largest with offload: {model}",
            model=model,
            micro_batch=1,
            weights="bfloat16",
            against=(),
            searched=False,
            fixed={"optimizer states on the host": _OFFLOADED},
        )
        for model in ("qwen3-14b", "qwen3-32b", "llama-3.1-70b")
    ),
)


def list_contestants(contest: Contest) -> list[str]:
    """Return the names of who trains a job; `tonnage planned` needs a plan from its search."""
    own = ["tonnage, the Trainer's settings"] if contest.against else []
    searched = ["tonnage planned"] if contest.searched else []
    return [*contest.against, *own, *(f"tonnage: {name}" for name in contest.fixed), *searched]


def missing_package(contestant: str) -> str | None:
    """Return the package that a contestant needs and that is not installed."""
    return "trl" if contestant == "trl" and find_spec("trl") is None else None


def plan_of(contest: Contest, contestant: str) -> dict[str, Any]:
    """Return the options of Job and Plan by which tonnage trains with settings that are given."""
    usual = {"precision": contest.precision, "optimizer": "adamw-fused", "clip_grad_norm": CLIP_NORM}
    shape = {"micro_batch": contest.micro_batch, "grad_accum": contest.grad_accum}
    other = dict(contest.fixed.get(contestant.removeprefix("tonnage: "), {}))
    if "micro_batch" in other:
        other["grad_accum"] = contest.micro_batch * contest.grad_accum // other["micro_batch"]
    options = {**usual, **shape, **other}
    if "optimizer_offload" in other:
        options["optimizer"] = "adamw"
    return options


def run(spec: Mapping[str, Any], on_ghost: bool) -> Iterator[dict[str, Any]]:
    """Yield the parts of a contestant's record: its steps, then memory, whatever happened."""
    contest = Contest(**spec["contest"])
    torch.cuda.init()
    taken = _Taken(on_ghost)
    try:
        train = _train_by_tonnage if spec["contestant"].startswith("tonnage") else _train_by_trainer
        train(contest, spec, taken)
    except torch.OutOfMemoryError as error:
        yield {"oom": " ".join(str(error).split())[:300]}
    yield {
        "steps": taken.steps,
        "losses": taken.losses,
        **taken.speed(contest.seq_len * contest.micro_batch * contest.grad_accum),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


class _Taken:
    """What steps gave."""

    def __init__(self, on_ghost: bool) -> None:
        self._on_ghost = on_ghost
        self._began = time.perf_counter()
        self.steps = 0
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def add(self, loss: float | None) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        if self.steps >= WARM_STEPS:
            self.seconds.append(now - self._began)
        self.steps += 1
        if loss is not None and not self._on_ghost:  # which computes nothing
            self.losses.append(loss)
        self._began = now

    def speed(self, tokens: int) -> dict[str, Any]:
        """Return seconds and tokens per second; None on a ghost, whose time is none."""
        if self._on_ghost or not self.seconds:
            return {"step_seconds": None, "tokens_per_second": None}
        median = statistics.median(self.seconds)
        return {"step_seconds": median, "tokens_per_second": tokens / median}


def rows(contest: Contest, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Return the rows of all steps: the same for every contestant."""
    generator = torch.Generator().manual_seed(0)
    count = contest.micro_batch * contest.grad_accum * (WARM_STEPS + TIMED_STEPS)
    made = torch.randint(0, vocabulary, (count, contest.seq_len), generator=generator)
    return [{"input_ids": row, "labels": row} for row in made]


def _train_by_tonnage(contest: Contest, spec: Mapping[str, Any], taken: _Taken) -> None:
    import tonnage
    from tonnage.job import read_job
    from tonnage.plans import Plan

    job, plan = read_job(spec["job"]), Plan(**spec["plan"])
    network = load(contest, Path(spec["folder"]))
    trainable = tonnage.apply(plan, network, optimizer={"lr": LEARNING_RATE, "weight_decay": 0.0}, job=job)
    of_step = contest.micro_batch * contest.grad_accum
    made = rows(contest, network.config.vocab_size)
    for first in range(0, len(made), of_step):
        step = made[first : first + of_step]
        batches = [_stack(step[at : at + job.micro_batch]) for at in range(0, of_step, job.micro_batch)]
        taken.add(trainable.step(batches).loss)


def _stack(chosen: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in chosen]) for name in chosen[0]}


def _train_by_trainer(contest: Contest, spec: Mapping[str, Any], taken: _Taken) -> None:
    trainer, arguments = _trainer_class(spec["contestant"] == "trl")
    network = load(contest, Path(spec["folder"]))
    made = rows(contest, network.config.vocab_size)
    checkpointed = spec["contestant"] == "trainer checkpointed"
    newer = "activation_checkpointing" in arguments.__dataclass_fields__
    word = "activation_checkpointing" if newer else "gradient_checkpointing"
    settings: dict[str, Any] = {
        "output_dir": str(Path(spec["folder"]).parent / "trainer"),
        "max_steps": WARM_STEPS + TIMED_STEPS,
        "per_device_train_batch_size": contest.micro_batch,
        "gradient_accumulation_steps": contest.grad_accum,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": CLIP_NORM,
        "optim": "adamw_torch_fused",
        "bf16": contest.precision == "bf16-mixed",
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        word: checkpointed,
    }
    if spec["contestant"] == "trl":
        settings |= {"max_length": contest.seq_len, "dataset_kwargs": {"skip_prepare_dataset": True}}
    network.config.use_cache = False
    data: Any = made
    more: dict[str, Any] = {}
    collate = _collate
    if spec["contestant"] == "trl":
        from datasets import Dataset

        data = Dataset.from_dict({name: [row[name].tolist() for row in made] for name in made[0]})
        collate = _collate_with_mask
        more = {"processing_class": _make_tokenizer()}
    trainer(
        model=network,
        args=arguments(**settings),
        train_dataset=data,
        data_collator=collate,
        callbacks=[_callback(taken)],
        **more,
    ).train()


def _make_tokenizer() -> Any:
    """Return a tokenizer of two words: TRL wants one, also for rows of tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def _collate(chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([torch.as_tensor(row[name]) for row in chosen]) for name in ("input_ids", "labels")}


def _collate_with_mask(chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return what TRL's own collator makes of rows without padding."""
    batch = _collate(chosen)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def _trainer_class(is_trl: bool) -> tuple[Any, Any]:
    """Return a trainer that takes rows in their order, and its arguments."""
    if is_trl:
        from trl import SFTConfig as Arguments
        from trl import SFTTrainer as Trainer
    else:
        from transformers import Trainer
        from transformers import TrainingArguments as Arguments

    class Ordered(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return Ordered, Arguments


def _callback(taken: _Taken) -> Any:
    from transformers import TrainerCallback

    class Timer(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            taken.add(None)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs and not taken._on_ghost:
                taken.losses.append(logs["loss"])

    return Timer()


def load(contest: Contest, folder: Path) -> Any:
    """Return the network with the folder's weights, with adapters if the method has them; quantized on the GPU."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": getattr(torch, contest.weights)}
    if contest.method == "qlora":
        from transformers import BitsAndBytesConfig

        options["device_map"] = {"": 0}
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=False,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    network = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    if contest.method == "full":
        return network
    from peft import LoraConfig, get_peft_model

    return get_peft_model(network, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **LORA))


def write_weights(contest: Contest, folder: Path) -> None:
    """Write a folder with random weights of the model, if it is not there yet."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tonnage.catalog.configurations import resolve

    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(**resolve(contest.model, offline=True).config)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "done").touch()


def make_spec(contest: Contest, contestant: str, folder: Path, found: tuple[Any, Any] | None) -> dict[str, Any]:
    """Return what a contestant's process reads; `found` are job and plan of a search."""
    from tonnage.trainers.cases import request

    spec: dict[str, Any] = {"contest": asdict(contest), "contestant": contestant, "folder": str(folder)}
    if contestant.startswith("tonnage"):
        job, plan = found or request(
            contest.model,
            offline=True,
            method=contest.method,
            seq_len=contest.seq_len,
            **contest.adapters,
            **plan_of(contest, contestant),
        )
        spec |= {"job": asdict(job), "plan": asdict(plan)}
    return spec


def read_spec(path: str) -> dict[str, Any]:
    """Return the spec of a file."""
    spec: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return spec
