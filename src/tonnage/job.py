"""A job: one optimizer step of one model on batches of one shape."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args

from tonnage.errors import UnreadableFile, UsageError
from tonnage.model import ModelRef
from tonnage.options import check, fraction, length, names, number, parse_words, repr_of_changes, spell_option, word
from tonnage.units import parse_length, pluralise

Method = Literal["full", "lora", "qlora"]
METHODS: Final[tuple[str, ...]] = get_args(Method)

Resume = Literal["none", "gpu", "cpu"]
SaveCheckpoint = Literal["none", "full", "sharded"]

Words = str | Sequence[str]
"""Several words: in one text with commas between them, or a tuple or list."""

IGNORED_LABEL: Final = -100
"""The label of tokens that the loss leaves out, as in torch's cross_entropy."""

USUAL_IMAGE: Final = (1024, 768)
"""Width and height of an image if the family takes any size and the job gives none."""

_USUAL_IMAGE_TEXT: Final = "x".join(map(str, USUAL_IMAGE))

_MOST_BYTES_OF_LENGTHS: Final = 64 * 2**20

LONGEST_STEPS: Final = 2
"""Steps at the longest length before lengths are drawn: the first one creates optimizer states, the second one holds
them.
"""


_NO_MODEL: Final = ModelRef(name="", kind="config")


@dataclass(frozen=True, kw_only=True, repr=False)
class Job:
    """A model, what is trained of it, and the shape of its batches."""

    model: ModelRef = _NO_MODEL
    """The network; `tonnage.estimate` fills in the one that it is given."""
    method: Method = word(
        "full",
        "What is trained: all weights (full), LoRA adapters beside frozen weights (lora), or adapters beside frozen "
        "weights that bitsandbytes quantizes (qlora).",
        METHODS,
    )
    lora_rank: int = number(16, "Rank of the LoRA adapters.")
    lora_targets: tuple[str, ...] = names(
        ("all-linear",),
        "Modules that get LoRA adapters: q_proj,v_proj; all-linear is every linear layer but the head.",
    )
    lora_dropout: float = fraction(0.0, "Dropout probability of the inputs of LoRA adapters, from 0 to below 1.")
    seq_len: int = length(2048, "Tokens in each sequence. Models of images alone ignore it.")
    images: int = number(1, "Images in each sequence, for image-text models; 0 trains on text alone.", least=0)
    image_size: str | None = word(
        None,
        f"Pixels of an image after the processor's resizing. Default: the model's size, else {_USUAL_IMAGE_TEXT}.",
        ("WxH",),
    )
    micro_batch: int = number(1, "Sequences in one forward pass on one GPU (batch size per device).")
    grad_accum: int = number(1, "Micro-batches in each optimizer step (gradient accumulation).")

    packing: int | None = number(
        None, "Documents packed into each sequence; none attends to another. Default: no packing."
    )
    lengths: tuple[str, ...] = names(
        (),
        "Sequence lengths to draw batches from: 512,1024,4k, or a file with one length a line. The first two steps "
        "use the longest.",
    )
    eval_batch: int | None = number(None, "Also run an evaluation, with this many sequences in one forward pass.")
    eval_logits: int | None = number(
        None, "Evaluation batches whose logits are kept on the GPU, as the Trainer does to compute metrics."
    )
    generate: int | None = length(
        None, "Also generate this many tokens with a KV cache; they are the last tokens of sequences of --seq-len."
    )
    resume: Resume = word(
        "none",
        "First load weights and optimizer states from a checkpoint: not (none), or by torch.load onto the GPU (gpu) "
        "or into host memory (cpu).",
        get_args(Resume),
    )
    save_checkpoint: SaveCheckpoint = word(
        "none",
        "Also save weights and optimizer states to host memory: not (none), gathered (full), or the shard of each "
        "rank (sharded). No file is written.",
        get_args(SaveCheckpoint),
    )
    global_batch_tokens: int | None = number(
        None, "Tokens in each optimizer step on all GPUs together: 4M. It sets --grad-accum."
    )

    __repr__ = repr_of_changes

    def __post_init__(self) -> None:
        check(self)
        for name in ("lora_targets", "lengths"):
            try:
                object.__setattr__(self, name, parse_words(getattr(self, name)))
            except ValueError as error:
                raise UsageError(f"{spell_option(name)}: {error}; give words with commas between them.") from error
        if self.global_batch_tokens is not None and self.grad_accum > 1:
            raise UsageError("global-batch-tokens decides grad-accum; give one of them.")
        if self.packing is not None and self.model.config.get("is_encoder_decoder"):
            raise UsageError(
                f"{self.model.name} is an encoder-decoder, which takes no position ids; leave packing out."
            )
        if self.lengths and self.packing is not None:
            raise UsageError("lengths applies to sequences of one document each; leave packing out.")
        object.__setattr__(self, "lengths", _read_lengths(self.lengths))
        if self.eval_logits is not None and self.eval_batch is None:
            raise UsageError("eval-logits applies to an evaluation; give eval-batch as well.")

    def with_method(self, method: str) -> "Job":
        """Return the job under another method.  Raises UsageError for an unknown one."""
        changes: dict[str, Any] = {"method": method}
        return replace(self, **changes)

    @property
    def tokens_per_micro_batch(self) -> int:
        """Return the tokens of one forward pass on one rank."""
        return self.seq_len * self.micro_batch

    def sequences_for(self, gpus: int) -> int:
        """Return the sequences of the global batch: a reading of the number that `gpus` can share evenly, else any
        whole one.

        Raises UsageError if no reading is a whole number of sequences.
        """
        shared = next(self._batches(self.seq_len * gpus), None)
        return replace(self, micro_batch=1).on_ranks(1).grad_accum if shared is None else shared // self.seq_len

    def _batches(self, at_once: int) -> Iterator[int]:
        """Return the readings of the global batch, in tokens, that are multiples of `at_once`."""
        readings = () if self.global_batch_tokens is None else _read_round_number(self.global_batch_tokens)
        return (tokens for tokens in readings if tokens % at_once == 0)

    def on_ranks(self, ranks: int) -> "Job":
        """Return the job with the `grad_accum` at which `ranks` data-parallel ranks make the global batch exactly.

        Raises UsageError, with the nearest possible batches, if no whole number of micro-batches does.
        """
        if self.global_batch_tokens is None:
            return self
        at_once = self.tokens_per_micro_batch * ranks
        for tokens in self._batches(at_once):
            return replace(self, global_batch_tokens=None, grad_accum=tokens // at_once)
        below = self.global_batch_tokens // at_once
        nearest = " or ".join(f"{steps * at_once:,}" for steps in (below, below + 1) if steps)
        many = pluralise(ranks, "rank")
        raise UsageError(
            f"A global batch of {self.global_batch_tokens:,} tokens is no multiple of {at_once:,} ({many} x "
            f"{self.micro_batch} x {self.seq_len:,} tokens); possible: {nearest}."
        )


class BatchOptions(TypedDict, total=False):
    """The options of a Job without its method, as typed keywords."""

    lora_rank: int
    lora_targets: Words
    lora_dropout: float
    seq_len: int
    images: int
    image_size: str | None
    micro_batch: int
    grad_accum: int
    packing: int | None
    lengths: Words
    eval_batch: int | None
    eval_logits: int | None
    generate: int | None
    resume: Resume
    save_checkpoint: SaveCheckpoint
    global_batch_tokens: int | None


class JobOptions(BatchOptions, total=False):
    """The options of a Job as typed keywords, for functions that take options by name."""

    method: Method


def check_stated(stated: Mapping[str, Any], job: Job) -> None:
    """Raise UsageError for an option that the user gave and that has no meaning for the job.

    These are options of adapters, quantized weights or images, and lengths that the default seq-len would cut.
    """
    idle = [name for name in ("lora_rank", "lora_targets", "lora_dropout") if name in stated and job.method == "full"]
    if idle:
        raise UsageError(
            f"{spell_option(idle[0])} only applies to adapters, and method full has none; "
            "choose method lora or qlora, or leave it out."
        )
    idle = [name for name in ("quant", "unquantized_dtype") if name in stated and job.method != "qlora"]
    if idle:
        reason = f"{spell_option(idle[0])} only applies to quantized weights, and method {job.method} has none"
        raise UsageError(f"{reason}; choose method qlora, or leave it out.")
    longest = max(map(int, job.lengths), default=0)
    if "lengths" in stated and "seq_len" not in stated and longest > job.seq_len:
        raise UsageError(
            f"lengths go up to {longest:,} tokens, and sequences are cut at seq-len, which was not given and is "
            f"{job.seq_len:,}; give seq-len {longest} to cut none."
        )
    idle = [name for name in ("images", "image_size") if name in stated and not _may_read_images(job.model)]
    if idle:
        raise UsageError(
            f"{spell_option(idle[0])} only applies to images, and {job.model.name} reads none; leave it out."
        )


def _may_read_images(model: ModelRef) -> bool:
    """Return True if a network may read images: its configuration mentions them, or it is a factory's."""
    return model.kind == "factory" or _mentions_images(model.config)


def _mentions_images(fields: Mapping[str, Any]) -> bool:
    """Return True if a field, here or in a nested configuration, is named after images."""
    named = any(word in name for name in fields for word in ("image", "vision", "visual", "pixel"))
    return named or any(_mentions_images(part) for part in fields.values() if isinstance(part, Mapping))


def _read_lengths(lengths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lengths, which a file lists if a single word names one, so that a job is the same wherever it
    runs.
    """
    from tonnage.files import read_text

    texts = lengths
    if len(lengths) == 1 and not _is_length(lengths[0]):
        try:
            texts = tuple(read_text(Path(lengths[0]), _MOST_BYTES_OF_LENGTHS).split())
        except (OSError, ValueError, UnreadableFile) as error:
            raise UsageError(f"lengths: {lengths[0]} is neither a number nor a file that can be read.") from error
    try:
        numbers = tuple(str(parse_length(text)) for text in texts)
    except UsageError:
        numbers = ()
    if lengths and not numbers:
        raise UsageError("lengths are whole numbers above zero, with commas between them or in a file, one a line.")
    return numbers


def _is_length(text: str) -> bool:
    """Return True for a whole number such as 512 or 4k, which may be zero."""
    return re.fullmatch("[0-9]{1,12}[kKmM]?", text) is not None


def _read_round_number(tokens: int) -> Iterator[int]:
    """Yield what a round number of tokens may mean: 4M is 4,000,000, or 4 x 2**20 as batches are usually cut."""
    yield tokens
    for decimal, binary in ((10**6, 2**20), (10**3, 2**10)):
        if tokens % decimal == 0:
            yield tokens // decimal * binary
            return


MOST_TOKENS: Final = 2**27
"""Tokens of the largest micro-batch: its token ids and labels take 2 GiB of the host's memory."""


def check_sequences(job: Job, longest: int | None) -> None:
    """Raise UsageError for sequences that cannot exist.

    They are longer than `longest`, the network's limit (None: there is none, or it is unknown), hold more documents
    than tokens, or leave no token for the prompt before what is generated.
    """
    if longest is not None and job.seq_len > longest:
        raise beyond_positions(job, longest)
    if job.model.kind == "config" and job.packing is not None:
        check_documents(job.packing, job.seq_len)
    if _continues_prompt(job):
        check_prompt(job)


def check_documents(documents: int, length: int) -> None:
    """Raise UsageError for more documents in a sequence than it has tokens."""
    if documents > length:
        raise UsageError(f"packing is {documents}, and a sequence has {length} tokens; choose fewer documents.")


def check_tokens(job: Job) -> None:
    """Raise UsageError for a micro-batch that is too large to be made at all."""
    if job.tokens_per_micro_batch > MOST_TOKENS:
        raise UsageError(
            f"A micro-batch of {job.micro_batch:,} x {job.seq_len:,} tokens is more than the {MOST_TOKENS:,} that "
            "are run; choose less of either."
        )


_CAUSAL_ENDINGS: Final = ("ForCausalLM", "LMHeadModel")
"""Endings of transformers' names of decoder-only networks, which continue their prompt."""


def _continues_prompt(job: Job) -> bool:
    """Return True if the network is known to continue its own prompt, unlike a decoder that reads an encoder's
    output.
    """
    config = job.model.config
    classes = config.get("architectures")
    named = isinstance(classes, list) and any(str(name).endswith(_CAUSAL_ENDINGS) for name in classes)
    return named and not config.get("is_encoder_decoder")


def check_prompt(job: Job) -> None:
    """Raise UsageError if a sequence leaves no token for the prompt before what is generated."""
    if job.generate is not None and job.generate >= job.seq_len:
        fewer = f"at most {job.seq_len - 1:,}, or " if job.seq_len > 1 else ""
        tokens = pluralise(job.seq_len, "token")
        raise UsageError(
            f"generate is {job.generate:,}, and a sequence has {tokens}, its prompt among them; "
            f"choose {fewer}a longer seq-len."
        )


def beyond_positions(job: Job, longest: int) -> UsageError:
    """Return the error for sequences that are longer than a table of learned positions."""
    return UsageError(
        f"{job.model.name} has learned positions for {longest} tokens, and seq_len is {job.seq_len}; "
        f"choose at most {longest}."
    )


def read_job(document: Mapping[str, Any]) -> Job:
    """Return the Job that `dataclasses.asdict` wrote, after JSON made lists of its tuples."""
    plain = {item.name: document[item.name] for item in fields(Job) if item.name != "model"}
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    model = document["model"]
    return Job(model=ModelRef(**{**model, "dropped": tuple(model.get("dropped", ()))}), **plain)
