"""What is to be done: one optimizer step of one model on batches of one shape."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tonnage.errors import UnreadableFile, UsageError
from tonnage.model import ModelRef
from tonnage.options import check, fraction, names, number, spelled, word, words
from tonnage.units import counted

METHODS: Final = ("full", "lora", "qlora")

IGNORED_LABEL: Final = -100
"""What stands in place of a label that the loss leaves out, as torch's cross_entropy has it."""

USUAL_IMAGE: Final = (1024, 768)
"""Width and height of an image where the family takes any and the job does not say."""

_USUAL: Final = "x".join(map(str, USUAL_IMAGE))

_MOST_BYTES_OF_LENGTHS: Final = 64 * 2**20

LONGEST_STEPS: Final = 2
"""Steps at the longest length before lengths are drawn: the first makes optimizer states, the second holds them."""


_UNSAID: Final = ModelRef(name="", kind="config")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, what is trained of it, and the shape of its batches."""

    model: ModelRef = _UNSAID
    """The network; `tonnage.estimate` fills in the one that it is given."""
    method: str = word("full", "Which parameters are trained.", METHODS)
    lora_rank: int = number(16, "Rank of LoRA's adapters.")
    lora_targets: tuple[str, ...] = names(("all-linear",), "Modules that get adapters; or all-linear.")
    lora_dropout: float = fraction(0.0, "Part of the adapters' inputs that is dropped in training.")
    seq_len: int = number(2048, "Tokens of one sequence (image models: ignored).")
    images: int = number(1, "Images of one sequence (image-text models); 0: text alone.", least=0)
    image_size: str | None = word(
        None, f"Pixels of an image as the network gets it; default: the network's own, else {_USUAL}.", ("WxH",)
    )
    micro_batch: int = number(1, "Sequences of one forward pass on one rank.")
    grad_accum: int = number(1, "Micro-batches of one optimizer step.")

    packing: int | None = number(None, "Documents in each sequence; none attends to another.")
    lengths: tuple[str, ...] = names((), "Lengths to draw sequences from after two steps of the longest; or a file.")
    eval_batch: int | None = number(None, "Also evaluate, with so many sequences of a forward pass.")
    eval_logits: int | None = number(None, "Batches of an evaluation whose logits are gathered on the card.")
    generate: int | None = number(None, "Also generate so many tokens, at the end of sequences of seq-len.")
    resume: str = word(
        "none", "Begin from a checkpoint that torch.load brings to the card, or to the host.", ("none", "gpu", "cpu")
    )
    save_checkpoint: str = word(
        "none", "Also save weights and optimizer states: gathered, or each rank's part.", ("none", "full", "sharded")
    )
    global_batch_tokens: int | None = number(
        None, "Tokens of one optimizer step on all ranks, in place of --grad-accum: 4M."
    )

    def __post_init__(self) -> None:
        check(self)
        for name in ("lora_targets", "lengths"):
            try:
                object.__setattr__(self, name, words(getattr(self, name)))
            except ValueError as error:
                raise UsageError(f"{spelled(name)}: {error}; give words with commas between them.") from error
        if self.global_batch_tokens is not None and self.grad_accum > 1:
            raise UsageError("global-batch-tokens decides grad-accum; give one of them.")
        if self.packing is not None and self.model.config.get("is_encoder_decoder"):
            raise UsageError(f"{self.model.name} is an encoder-decoder, which takes no positions; leave packing out.")
        if self.lengths and self.packing is not None:
            raise UsageError("lengths are those of sequences with one document each; leave packing out.")
        object.__setattr__(self, "lengths", _numbers(self.lengths))
        if self.eval_logits is not None and self.eval_batch is None:
            raise UsageError("eval-logits are those of an evaluation; give eval-batch as well.")

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of one forward pass on one rank."""
        return self.seq_len * self.micro_batch

    def sequences_for(self, gpus: int) -> int:
        """Of the global batch: of what a round number may mean, what `gpus` can share evenly, else whole sequences.

        Raises UsageError where it is no whole number of them.
        """
        shared = next(self._batches(self.seq_len * gpus), None)
        return replace(self, micro_batch=1).on_ranks(1).grad_accum if shared is None else shared // self.seq_len

    def _batches(self, at_once: int) -> Iterator[int]:
        """The readings of the global batch, in tokens, that are a multiple of so many."""
        readings = () if self.global_batch_tokens is None else _readings(self.global_batch_tokens)
        return (tokens for tokens in readings if tokens % at_once == 0)

    def on_ranks(self, ranks: int) -> "Job":
        """The job with `grad_accum` such that `ranks` data-parallel ranks make the global batch exactly.

        Raises UsageError, with the nearest batches, where no whole number of micro-batches does.
        """
        if self.global_batch_tokens is None:
            return self
        at_once = self.tokens_per_micro_batch * ranks
        for tokens in self._batches(at_once):
            return replace(self, global_batch_tokens=None, grad_accum=tokens // at_once)
        below = self.global_batch_tokens // at_once
        nearest = " or ".join(f"{steps * at_once:,}" for steps in (below, below + 1) if steps)
        many = counted(ranks, "rank")
        raise UsageError(
            f"A global batch of {self.global_batch_tokens:,} tokens is no multiple of {at_once:,} ({many} x "
            f"{self.micro_batch} x {self.seq_len:,} tokens); possible: {nearest}."
        )


def check_said(said: Mapping[str, Any], job: Job) -> None:
    """Raise UsageError for an option that was said and means nothing to the job (of adapters, quantized weights,
    images) and for lengths that would be cut where nobody said it."""
    idle = [name for name in ("lora_rank", "lora_targets", "lora_dropout") if name in said and job.method == "full"]
    if idle:
        raise UsageError(
            f"{spelled(idle[0])} is of adapters, and method full has none; say method lora or qlora, or leave it out."
        )
    idle = [name for name in ("quant", "unquantized_dtype") if name in said and job.method != "qlora"]
    if idle:
        said_so = f"{spelled(idle[0])} is of quantized weights, and method {job.method} has none"
        raise UsageError(f"{said_so}; say method qlora, or leave it out.")
    longest = max(map(int, job.lengths), default=0)
    if "lengths" in said and "seq_len" not in said and longest > job.seq_len:
        raise UsageError(
            f"lengths go up to {longest:,} tokens, and sequences are cut at seq-len, which nobody said and is "
            f"{job.seq_len:,}; say seq-len {longest} to cut none."
        )
    idle = [name for name in ("images", "image_size") if name in said and not _may_see(job.model)]
    if idle:
        raise UsageError(f"{spelled(idle[0])} is about images, and {job.model.name} reads none; leave it out.")


def _may_see(model: ModelRef) -> bool:
    """Whether a network may read images: one whose configuration says anything of them, or a factory's."""
    return model.kind == "factory" or _of_images(model.config)


def _of_images(fields: Mapping[str, Any]) -> bool:
    about = any(word in name for name in fields for word in ("image", "vision", "visual", "pixel"))
    return about or any(_of_images(part) for part in fields.values() if isinstance(part, Mapping))


def _numbers(lengths: tuple[str, ...]) -> tuple[str, ...]:
    """The lengths, or those in the file that a single word names, so that a job is the same wherever it is run."""
    from tonnage.files import read_text

    texts = lengths
    if len(lengths) == 1 and not _is_number(lengths[0]):
        try:
            texts = tuple(read_text(Path(lengths[0]), _MOST_BYTES_OF_LENGTHS).split())
        except (OSError, ValueError, UnreadableFile) as error:
            raise UsageError(f"lengths: {lengths[0]} is neither a number nor a file that can be read.") from error
    if (lengths and not texts) or not all(_is_number(text) and int(text) > 0 for text in texts):
        raise UsageError("lengths are whole numbers above zero, with commas between them or in a file, one a line.")
    return texts


def _is_number(text: str) -> bool:
    """Whether it is a whole number in plain digits, of a size that means something."""
    return re.fullmatch("[0-9]{1,12}", text) is not None


def _readings(tokens: int) -> Iterator[int]:
    """What a round number of tokens may mean: 4M is 4,000,000, or 4 x 2**20 as batches are usually cut."""
    yield tokens
    for decimal, binary in ((10**6, 2**20), (10**3, 2**10)):
        if tokens % decimal == 0:
            yield tokens // decimal * binary
            return


MOST_TOKENS: Final = 2**27
"""Of a micro-batch: its token ids and labels then take 2 GiB of the host's memory."""


def check_sequences(job: Job) -> None:
    """Raise UsageError for sequences that cannot be: longer than what is known of a table of learned positions, of
    more documents than tokens, or without a token before what is generated."""
    longest = job.model.learned_positions
    if longest is not None and job.seq_len > longest:
        raise beyond_positions(job, longest)
    if job.model.kind == "config" and job.packing is not None:
        check_documents(job.packing, job.seq_len)
    if _writes_on(job):
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


_WRITE_ON: Final = ("ForCausalLM", "LMHeadModel")
"""How transformers' names of networks end that write on where a prompt ends."""


def _writes_on(job: Job) -> bool:
    """Whether the network is known to write on where its prompt ends, and not what another part of it has read."""
    config = job.model.config
    classes = config.get("architectures")
    named = isinstance(classes, list) and any(str(name).endswith(_WRITE_ON) for name in classes)
    return named and not config.get("is_encoder_decoder")


def check_prompt(job: Job) -> None:
    """Raise UsageError where a sequence leaves no token for the prompt before what is generated."""
    if job.generate is not None and job.generate >= job.seq_len:
        fewer = f"at most {job.seq_len - 1:,}, or " if job.seq_len > 1 else ""
        tokens = counted(job.seq_len, "token")
        raise UsageError(
            f"generate is {job.generate:,}, and a sequence has {tokens}, its prompt among them; "
            f"choose {fewer}a longer seq-len."
        )


def beyond_positions(job: Job, longest: int) -> UsageError:
    """Of sequences that a table of learned positions has no room for."""
    return UsageError(
        f"{job.model.name} has learned positions for {longest} tokens, and seq_len is {job.seq_len}; "
        f"choose at most {longest}."
    )
