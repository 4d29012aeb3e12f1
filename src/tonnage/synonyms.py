"""Other programs' words for tonnage's options, their values, and cards that tonnage does not know: one table of each.

    >>> find_option("per_device_train_batch_size").option
    'micro-batch'
    >>> find_value("precision", "bf16").words
    ('bf16-mixed', 'bf16-true')

The spellings are those of transformers' TrainingArguments, TRL, PEFT, accelerate, DeepSpeed, torchtune, torchtitan,
axolotl, LLaMA-Factory, Lightning, Megatron-LM and vLLM.  They are never taken for tonnage's own words, because most
have several meanings; the message about an unknown word names the right one, in Python as on the command line.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Synonym:
    """The name in tonnage of an option, or a value of one, that another program has under another name."""

    option: str
    """tonnage's option, without dashes; `MODEL` for the argument."""
    words: tuple[str, ...] = ()
    """The values that are meant; empty: the value is the user's number or word."""
    note: str = ""
    """A hint for the reader who has to choose, as the rest of a sentence; empty: none."""

    @property
    def choices(self) -> str:
        """Return the values that are meant, for a sentence."""
        return self._with_note(" or ".join(self.words))

    @property
    def on_command_line(self) -> str:
        """Return the option as the command line has it: `--precision bf16-mixed or --precision bf16-true`."""
        if self.option == "MODEL":
            return "the argument MODEL, which has no option before it"
        return self._with_note(" or ".join(f"--{self.option} {word}".rstrip() for word in self.words or ("",)))

    @property
    def in_python(self) -> str:
        """Return the option as Python has it: `precision='bf16-mixed' or precision='bf16-true'`."""
        if self.option == "MODEL":
            return "the first argument, model"
        name = self.option.replace("-", "_")
        values = (repr(word) if word else "True" for word in self.words)
        return self._with_note(" or ".join(f"{name}={value}" for value in values) or name)

    def _with_note(self, text: str) -> str:
        return f"{text} ({self.note})" if self.note else text


_OPTION_ROWS: Final[tuple[tuple[str, str, tuple[str, ...], str], ...]] = (
    ("model model-name model-name-or-path model-id model-path base-model", "MODEL", (), ""),
    (
        "batch bs batch-size per-gpu-batch-size per-device-train-batch-size per-gpu-train-batch-size "
        "per-device-batch-size micro-batch-size mbs "
        "train-micro-batch-size-per-gpu micro-batch-size-per-gpu local-batch-size device-batch-size train-batch",
        "micro-batch",
        (),
        "sequences in one forward pass on one GPU",
    ),
    (
        "gradient-accumulation-steps gradient-accumulation accumulate-grad-batches grad-accum-steps accum-steps "
        "accumulation-steps gas num-microbatches",
        "grad-accum",
        (),
        "",
    ),
    (
        "global-batch-size train-batch-size total-batch-size effective-batch-size gbs max-tokens-per-batch",
        "global-batch-tokens",
        (),
        "tokens of one step on all GPUs, which are sequences x seq-len",
    ),
    (
        "seq-length seqlen sequence-length sequence-len max-seq-length max-seq-len max-length cutoff-len "
        "context-length context-len context ctx ctx-len model-max-length max-model-len block-size n-ctx "
        "max-sequence-length encoder-seq-length",
        "seq-len",
        (),
        "",
    ),
    ("per-device-eval-batch-size eval-batch-size val-batch-size", "eval-batch", (), ""),
    ("sample-packing packed-sequences packed use-packing", "packing", (), "documents in each sequence"),
    ("max-new-tokens", "generate", (), ""),
    ("finetuning-type training-method tuner peft-method adapter peft use-peft", "method", (), ""),
    ("lora use-lora", "method", ("lora",), ""),
    ("qlora load-in-4bit 4bit use-4bit quantize", "method", ("qlora",), "with --quant nf4"),
    ("load-in-8bit 8bit", "method", ("qlora",), "with --quant int8"),
    ("full full-finetune full-finetuning fft", "method", ("full",), ""),
    ("lora-r r rank-r lora-dim", "lora-rank", (), ""),
    ("lora-target-modules target-modules lora-modules lora-target", "lora-targets", (), ""),
    ("bnb-4bit-quant-type quant-type quantization-bit", "quant", (), ""),
    (
        "dtype torch-dtype model-dtype data-type mixed-precision mixed-precision-training amp autocast "
        "compute-dtype half-precision-backend mp",
        "precision",
        (),
        "bf16-mixed has fp32 weights, bf16-true has bf16 weights",
    ),
    ("bf16 bfloat16 use-bf16", "precision", ("bf16-mixed", "bf16-true"), "with fp32 or with bf16 weights"),
    ("fp16 float16 half use-fp16", "precision", ("fp16-mixed", "fp16-true"), "with fp32 or with fp16 weights"),
    ("fp32 float32 tf32", "precision", ("fp32",), ""),
    ("fp8 float8", "precision", ("fp8",), ""),
    ("params-dtype param-dtype master-weights-dtype", "weights-dtype", (), ""),
    ("reduce-scatter-dtype grad-reduce-dtype communication-data-type mixed-precision-reduce", "reduce-dtype", (), ""),
    ("optim optimiser optimizer-name optimizer-type", "optimizer", (), ""),
    ("adam8bit adam-8bit use-8bit-adam adamw-8bit", "optimizer", ("adamw-8bit",), ""),
    ("fused-adam fused adamw-torch-fused", "optimizer", ("adamw-fused",), ""),
    (
        "gradient-checkpointing activation-checkpointing activation-checkpoint checkpoint-activations "
        "enable-activation-checkpointing use-gradient-checkpointing recompute recompute-activations ac ac-mode "
        "activation-checkpoint-mode recompute-granularity",
        "checkpointing",
        ("full", "selective"),
        "every layer recomputed, or all but its matrix products and attention",
    ),
    (
        "activation-offloading enable-activation-offloading offload-activations cpu-activation",
        "activation-offload",
        ("cpu",),
        "",
    ),
    ("optimizer-in-bwd fused-backward", "optimizer-in-backward", ("",), ""),
    ("offload-optimizer optimizer-cpu-offload offload-optimizer-device", "optimizer-offload", ("cpu",), ""),
    (
        "cpu-offload offload-params offload-param offload-param-device fsdp-cpu-offload fsdp-offload-params offload",
        "param-offload",
        ("cpu",),
        "parameters; --optimizer-offload cpu moves optimizer states alone",
    ),
    (
        "fsdp fsdp2 fully-shard full-shard use-fsdp fsdp-sharding-strategy",
        "shard",
        ("zero3", "hsdp"),
        "over all GPUs, or within each machine",
    ),
    (
        "zero zero-stage zero-optimization stage ds-stage deepspeed-stage sharding-strategy sharding",
        "shard",
        ("zero1", "zero2", "zero3"),
        "optimizer states; also gradients; also parameters",
    ),
    ("zero-1", "shard", ("zero1",), ""),
    ("zero-2", "shard", ("zero2",), ""),
    ("zero-3 zero3 fsdp-full-shard", "shard", ("zero3",), ""),
    ("ddp data-parallel distributed use-ddp", "shard", ("ddp",), ""),
    (
        "data-parallel-shard-degree dp-shard data-parallel-replicate-degree dp-replicate",
        "shard",
        ("zero3", "hsdp"),
        "data-parallel ranks are those that tp, pp and cp leave",
    ),
    ("strategy distributed-type", "shard", (), ""),
    (
        "tensor-parallel-size tensor-parallel tensor-parallel-degree tensor-model-parallel-size tp-size tp-degree",
        "tp",
        (),
        "",
    ),
    (
        "pipeline-parallel-size pipeline-parallel pipeline-parallel-degree pipeline-model-parallel-size pp-size",
        "pp",
        (),
        "",
    ),
    (
        "context-parallel-size context-parallel context-parallel-degree cp-size cp-degree sequence-parallel-size",
        "cp",
        (),
        "",
    ),
    (
        "expert-parallel-size expert-parallel expert-model-parallel-size expert-parallel-degree ep-size ep-degree "
        "enable-expert-parallel",
        "ep",
        (),
        "",
    ),
    (
        "max-grad-norm gradient-clipping gradient-clip-val clip-grad clip-gradients grad-clip max-norm grad-norm",
        "clip-grad-norm",
        (),
        "",
    ),
    ("attn-implementation attn attention-backend attention-implementation attn-impl", "attention", (), ""),
    (
        "flash-attention flash-attn use-flash-attn use-flash-attention use-flash-attention-2 flash-attention-2 fa2",
        "attention",
        ("flash",),
        "",
    ),
    ("sdp-attention sdpa", "attention", ("auto",), ""),
    ("use-liger-kernel use-liger liger-kernel liger enable-liger-kernel", "loss", ("liger",), ""),
    ("chunked-cross-entropy loss-type num-output-chunks", "loss", ("chunked",), ""),
    ("torch-compile use-torch-compile", "compile", ("layers", "model"), "each layer, or the whole network"),
    ("expandable-segments pytorch-cuda-alloc-conf", "allocator", ("expandable",), ""),
    ("deepspeed use-deepspeed ds-config", "engine", ("deepspeed",), ""),
    ("trainer framework backend", "engine", (), ""),
    ("resume-from-checkpoint", "resume", ("gpu", "cpu"), "where torch.load puts the checkpoint"),
    (
        "num-gpus n-gpus ngpus num-devices devices nproc-per-node nproc num-processes world-size gpu-count "
        "num-gpus-per-node trainer-n-gpus",
        "gpus",
        (),
        "",
    ),
    ("nnodes num-nodes nodes num-machines", "gpu", (), "machines x GPUs in front of the name: 4x8xh100-80gb"),
    ("device gpu-type gpu-name accelerator card hardware", "gpu", (), ""),
    ("vram gpu-mem gpu-ram memory max-memory", "gpu-memory", (), ""),
    ("ram cpu-memory host-ram", "host-memory", (), ""),
    ("max-steps num-steps max-train-steps train-iters", "steps", (), ""),
    ("output out-file output-file", "save", (), ""),
    ("local-files-only", "offline", ("",), ""),
)
"""Option names of other programs, tonnage's option, the values that are meant, a note."""

OPTIONS: Final[Mapping[str, Synonym]] = {
    name: Synonym(option=option, words=words, note=note)
    for names, option, words, note in _OPTION_ROWS
    for name in names.split()
}
"""tonnage's option by another program's name of it, in lower case with dashes."""

_OPTIONS_WITHOUT_DASHES: Final = {name.replace("-", ""): synonym for name, synonym in OPTIONS.items()}

WITHOUT_EFFECT: Final = frozenset(
    {
        *("learning-rate", "lr", "min-lr", "weight-decay", "warmup-steps", "warmup-ratio", "lr-scheduler-type"),
        *("lr-scheduler", "adam-beta1", "adam-beta2", "beta1", "beta2", "adam-epsilon", "eps", "momentum"),
        *("lora-alpha", "alpha", "seed", "num-train-epochs", "num-epochs", "epochs", "logging-steps"),
        *("save-steps", "eval-steps", "output-dir", "report-to", "run-name", "dataset", "data", "dataset-name"),
        *("train-file", "wandb-project"),
    }
)
"""Options of other programs on which neither the memory nor the seconds of a step depend."""

_TRAIN_ROWS: Final = (
    ("learning-rate peak-lr", "lr"),
    ("num-train-epochs num-epochs", "epochs"),
    ("steps num-steps max-train-steps train-iters total-steps", "max-steps"),
    ("output-dir output save", "out"),
    ("dataset dataset-name train-file train-data data-path", "data"),
    ("eval-file validation-file val-data eval-dataset", "eval-data"),
    ("eval-steps val-check-interval", "eval-every"),
    ("save-steps checkpoint-every", "save-every"),
    ("save-total-limit", "keep"),
    ("lr-scheduler-type lr-scheduler", "schedule"),
    ("warmup-ratio warmup", "warmup-steps"),
    ("report-to", "log"),
    ("resume-from-checkpoint", "resume"),
    ("model-name-or-path model-name model-path", "model"),
    ("tokenizer-name tokenizer-path", "tokenizer"),
)
"""Other programs' names of the options of `tonnage train`, and its own."""

_VALUE_ROWS: Final[tuple[tuple[str, str, tuple[str, ...], str], ...]] = (
    (
        "precision",
        "bf16 bfloat16 torch.bfloat16 true mixed amp auto",
        ("bf16-mixed", "bf16-true"),
        "fp32 weights under autocast, as the Trainer's bf16=True; or bf16 weights, as torch_dtype=bfloat16",
    ),
    (
        "precision",
        "fp16 float16 torch.float16 half 16",
        ("fp16-mixed", "fp16-true"),
        "with fp32 or with fp16 weights",
    ),
    ("precision", "bf16-amp bf16-autocast amp-bf16", ("bf16-mixed",), ""),
    ("precision", "16-mixed fp16-amp amp-fp16", ("fp16-mixed",), ""),
    ("precision", "16-true", ("fp16-true",), ""),
    ("precision", "bf16-pure pure-bf16", ("bf16-true",), ""),
    ("precision", "no float32 torch.float32 32 32-true full float tf32", ("fp32",), ""),
    ("precision", "float8 fp8-mixed te transformer-engine", ("fp8",), ""),
    (
        "shard",
        "fsdp fsdp1 fsdp2 full-shard fully-shard stage3 stage-3 zero-stage-3 3 deepspeed fully-sharded",
        ("zero3",),
        "",
    ),
    ("shard", "shard-grad-op stage2 stage-2 zero-stage-2 2", ("zero2",), ""),
    ("shard", "stage1 stage-1 zero-stage-1 1 zero", ("zero1",), ""),
    ("shard", "hybrid-shard hybrid hybrid-shard-zero2", ("hsdp",), ""),
    ("shard", "no-shard dp data-parallel replicate distributed multi-gpu 0 zero0", ("ddp",), ""),
    ("optimizer", "adam adamw-torch adamw-hf", ("adamw", "adamw-foreach"), "adamw is torch's own choice"),
    ("optimizer", "adamw-torch-fused fused fused-adam fusedadam adamw-apex-fused", ("adamw-fused",), ""),
    ("optimizer", "foreach adamw-torch-foreach", ("adamw-foreach",), ""),
    ("optimizer", "for-loop", ("adamw-loop",), ""),
    ("optimizer", "adamw-bnb-8bit adamw8bit adam8bit adam-8bit 8bit 8bit-adam bnb-adamw8bit", ("adamw-8bit",), ""),
    ("optimizer", "paged-adamw-32bit pagedadamw", ("paged-adamw",), ""),
    ("optimizer", "pagedadamw8bit paged-adam-8bit", ("paged-adamw-8bit",), ""),
    ("optimizer", "lion-32bit", ("lion",), ""),
    ("optimizer", "lion8bit", ("lion-8bit",), ""),
    ("optimizer", "ao-adamw-8bit adamw-torch-8bit", ("adamw-8bit-ao",), ""),
    ("optimizer", "ao-adamw-4bit adamw-torch-4bit adamw4bit", ("adamw-4bit",), ""),
    ("optimizer", "ao-adamw-fp8", ("adamw-fp8-ao",), ""),
    (
        "checkpointing",
        "true yes on gradient activation all unsloth everything uniform block",
        ("full",),
        "",
    ),
    ("checkpointing", "false no off", ("none",), ""),
    ("checkpointing", "op selective-op sac", ("selective",), ""),
    ("checkpointing", "reentrant use-reentrant", ("full-reentrant",), ""),
    ("attention", "sdpa default torch", ("auto",), ""),
    (
        "attention",
        "flash-attention-2 flash-attention-3 flash-attention flash-attn flash2 fa2 fa3 flash-2",
        ("flash",),
        "",
    ),
    ("attention", "flex-attention", ("flex",), ""),
    ("attention", "xformers mem-efficient memory-efficient", ("efficient",), ""),
    ("loss", "cross-entropy ce default", ("plain",), ""),
    ("loss", "liger-kernel", ("liger",), ""),
    ("loss", "cut-cross-entropy cce fused-linear-cross-entropy", ("fused", "liger"), "no logits are kept"),
    ("method", "sft finetune fine-tune full-finetune fft pretrain all", ("full",), ""),
    ("method", "4bit qlora-4bit bnb int4", ("qlora",), ""),
    ("method", "peft adapter adapters", ("lora",), ""),
    ("compile", "true yes on inductor default max-autotune reduce-overhead", ("layers", "model"), ""),
    ("compile", "false no off", ("none",), ""),
    ("engine", "hf transformers huggingface trainer hftrainer llama-factory llamafactory", ("hf-trainer",), ""),
    (
        "engine",
        "pytorch torch torchrun fsdp ddp custom native lightning torchtune unsloth nanotron",
        ("tonnage",),
        "a plain PyTorch loop, the nearest",
    ),
    ("engine", "megatron-lm megatron-bridge nemo", ("megatron",), ""),
    ("engine", "sfttrainer sft", ("trl",), ""),
    ("quant", "4bit int4 4", ("nf4",), ""),
    ("quant", "8bit llm.int8 8", ("int8",), ""),
    ("quant", "double double-quant nf4-dq", ("nf4-double",), ""),
    ("allocator", "expandable-segments expandable-segments:true", ("expandable",), ""),
    ("allocator", "native", ("default",), ""),
    ("param-offload", "true yes on host ram", ("cpu",), ""),
    ("optimizer-offload", "true yes on host ram", ("cpu",), ""),
    ("activation-offload", "true yes on host ram", ("cpu",), ""),
    ("pp-schedule", "interleaved1f1b interleaved-1f1b", ("interleaved",), ""),
    ("pp-schedule", "one-f-one-b pipedream", ("1f1b",), ""),
    ("resume", "true yes on", ("gpu", "cpu"), ""),
    ("save-checkpoint", "true yes on full-state-dict", ("full",), ""),
    ("save-checkpoint", "sharded-state-dict distributed", ("sharded",), ""),
    *(
        (option, f"{dtype} torch.{dtype} {short}", (words,), "")
        for option in ("weights-dtype", "reduce-dtype", "base-dtype")
        for dtype, short, words in (
            ("bfloat16", "brain", "bf16"),
            ("float16", "half", "fp16"),
            ("float32", "float", "fp32"),
        )
    ),
)
"""An option, other programs' values of it, tonnage's values, a note."""

VALUES: Final[Mapping[tuple[str, str], Synonym]] = {
    (option, spelling): Synonym(option=option, words=words, note=note)
    for option, spellings, words, note in _VALUE_ROWS
    for spelling in spellings.split()
}
"""tonnage's values by option and another program's word, in lower case with dashes."""


NO_SOURCE: Final = (
    "A search and a script run on a ghost GPU alone: meta takes some ten seconds for each of a search's candidates, "
    "and fake tensors cannot run a script's own CUDA code. For one plan: tonnage estimate MODEL --source meta."
)
"""Why plans and dry-runs have no option `source`."""


@dataclass(frozen=True, kw_only=True)
class OtherCards:
    """Cards of one maker that tonnage does not know."""

    pattern: str
    """Regular expression of their names, in lower case with dashes."""
    kind: str
    """A noun for them in a sentence: `an AMD card`."""
    gib: tuple[tuple[str, int], ...] = ()
    """Parts of names and the memory that such a card has, in GiB; the first that matches counts."""


OTHER_CARDS: Final = (
    OtherCards(
        pattern=r"(amd-|instinct-|radeon-)*(mi-?\d{2,3}.*|rx-?\d{4}.*|w[67]\d00.*|gfx\d+.*|rocm|(amd|radeon|instinct).*)",
        kind="an AMD card",
        gib=(
            *(("mi355", 288), ("mi350", 288), ("mi325", 256), ("mi300a", 128), ("mi300", 192), ("mi250", 128)),
            *(
                ("mi210", 64),
                ("mi100", 32),
                ("7900-xtx", 24),
                ("7900xtx", 24),
                ("7900", 20),
                ("6900", 16),
                ("w7900", 48),
            ),
            ("w7800", 32),
        ),
    ),
    OtherCards(
        pattern=r"(google-|cloud-)*(tpu.*|v[2-6][ep]?(-\d+)?|trillium|ironwood)",
        kind="a TPU",
        gib=(
            ("v5p", 95),
            ("v5e", 16),
            ("v6e", 32),
            ("trillium", 32),
            ("ironwood", 192),
            ("v4", 32),
            ("v3", 32),
            ("v2", 16),
        ),
    ),
    OtherCards(
        pattern=r"(intel-)*(gaudi.*|hpu.*|arc-?.*|max-1[15]\d0|pvc|xpu)",
        kind="an Intel card",
        gib=(("gaudi3", 128), ("gaudi-3", 128), ("gaudi2", 96), ("gaudi-2", 96), ("gaudi", 32), ("1550", 128)),
    ),
    OtherCards(
        pattern=r"(apple-)*(m[1-5](-?(pro|max|ultra))?|mps|apple.*|metal)",
        kind="an Apple GPU, which shares the memory of its machine",
    ),
    OtherCards(
        pattern=r"(aws-)*(trn\d.*|trainium.*|inf\d.*|inferentia.*|neuron)",
        kind="an AWS accelerator",
        gib=(("trn2", 96), ("trainium2", 96), ("trn1", 32), ("trainium", 32)),
    ),
    OtherCards(
        pattern=r"(huawei-)*(ascend.*|910[a-d]?|npu)", kind="an Ascend card", gib=(("910", 64), ("ascend", 64))
    ),
)
"""Makers other than NVIDIA; memory as in their data sheets."""


def normalise(name: str) -> str:
    """Return a name in lower case, with dashes inside and none in front."""
    return name.strip().lower().lstrip("-").replace("_", "-").replace(" ", "-")


def find_option(name: str) -> Synonym | None:
    """Return what tonnage calls an option of another program, with its dashes or without; None if none has it."""
    word = normalise(name)
    return OPTIONS.get(word) or _OPTIONS_WITHOUT_DASHES.get(word.replace("-", ""))


def find_train_option(name: str) -> str | None:
    """Return what `tonnage train` calls an option of another program; None if no program in the table has it."""
    return next((own for names, own in _TRAIN_ROWS if normalise(name) in names.split()), None)


def is_without_effect(name: str) -> bool:
    """Return True for an option of another program that changes neither memory nor seconds."""
    return normalise(name) in WITHOUT_EFFECT


_BY_REWARDS: Final = "training by preferences or rewards"

_NOT_MODELLED: Final[tuple[tuple[str, str, str], ...]] = (
    ("task", r"dpo|kto|orpo|simpo|cpo|ipo|grpo|ppo|rloo|reward|online-dpo|gkd", _BY_REWARDS),
    ("method", r"dpo|kto|orpo|simpo|grpo|ppo|reward", _BY_REWARDS),
    ("loss", r"dpo|kto|orpo|simpo|ipo", "training by preferences"),
    ("optimizer", r"galore.*|apollo.*|lomo|adalomo|grokadamw|schedule-free.*|stable-adamw", "this optimizer"),
)
"""Words of other programs for what no option of tonnage models: the option, a pattern, and what it is."""

ANOTHER_WAY: Final = (
    "tonnage has no model of {what}, so its memory is unknown here; a script that does it can be run: "
    "tonnage dry-run -- python train.py (docs/how-to/ask-with-a-script.md)"
)
"""The way to ask about a word that no option models."""

_NOT_MODELLED_OPTIONS: Final = (
    (r"ref(erence)?-model|precompute-ref-log-probs", "a reference model"),
    (r"ulysses(-size|-degree)?|sp(-size)?", "Ulysses sequence parallelism"),
    (r"optim-target-modules|galore-rank", "GaLore and APOLLO"),
    (r"(num-)?frames|fps|videos?", "videos"),
    (r"freeze(-vision(-tower)?|-vit|-llm)?", "parts that are frozen"),
    (r"max-pixels", "a limit of pixels (--image-size is the size behind the processor, --images the number)"),
)
"""Options of other programs for what tonnage does not model: a pattern, and what it is."""


def explain_unknown_value(option: str, value: str) -> str | None:
    """Return what to do about another program's word that no value of the option means; None for any other word."""
    word = normalise(value)
    for name, pattern, what in _NOT_MODELLED:
        if name == option and re.fullmatch(pattern, word):
            return ANOTHER_WAY.format(what=what)
    return None


def explain_unknown_option(name: str) -> str | None:
    """Return what to do about another program's option that none of tonnage's means; None for any other option."""
    word = normalise(name.lstrip("-"))
    what = next((what for pattern, what in _NOT_MODELLED_OPTIONS if re.fullmatch(pattern, word)), None)
    return None if what is None else ANOTHER_WAY.format(what=what)


def find_value(option: str, value: str, possible: tuple[str, ...] = ()) -> Synonym | None:
    """Return the values of `option` that another program's word means.

    A word that differs from one of `possible` in its dashes or capitals alone means that one.
    """
    word = normalise(value)
    known = VALUES.get((option, word))
    if known is not None:
        return known
    alike = tuple(name for name in possible if _letters(name) == _letters(word))
    return Synonym(option=option, words=alike) if alike else None


def _letters(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def find_other_card(name: str) -> tuple[OtherCards, int | None] | None:
    """Return the maker of a card that is not NVIDIA's, and the card's memory in GiB if it is known."""
    word = normalise(name)
    for cards in OTHER_CARDS:
        if re.fullmatch(cards.pattern, word):
            return cards, next((gib for part, gib in cards.gib if part in word), None)
    return None
