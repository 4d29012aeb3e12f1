"""What is trained: the network, its adapters and the rows, as job.json says.  Used by train.py.

Needs torch and transformers; peft for adapters, bitsandbytes for quantized weights.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset


@dataclass(frozen=True, kw_only=True)
class Job:
    """job.json; what it does not say stays None."""

    model: str
    """A Hub id or a folder."""
    seq_len: int
    """Tokens of a row."""
    weights_dtype: str
    """In which weights are loaded."""
    attn_implementation: str | None = None
    """transformers' name; None: its own choice."""
    sdpa_backend: str | None = None
    """The only backend of scaled_dot_product_attention that may be used."""
    lora: dict[str, Any] | None = None
    """Fields of peft.LoraConfig."""
    adapters_dtype: str | None = None
    """In which adapters are trained; None: in float32, as PEFT makes them."""
    quantization: dict[str, Any] | None = None
    """Fields of transformers.BitsAndBytesConfig."""
    cast_unquantized: bool = False
    """Whether what is not quantized is cast to fp32."""
    precision: str | None = None
    """Where train.py itself sees to it: bf16-mixed, fp16-mixed, bf16-true, fp16-true or fp32."""
    micro_batch: int | None = None
    """Rows of one forward pass."""
    grad_accum: int | None = None
    """Micro-batches of a step."""
    optimizer: str | None = None
    """Which one train.py makes."""
    clip_grad_norm: float | None = None
    """Norm to which gradients are scaled down."""
    checkpointing: str | None = None
    """Which layers train.py checkpoints: full, selective or every-N."""
    loss: str | None = None
    """chunked: head and loss in slices of tokens."""
    shard: str | None = None
    """How train.py divides among the ranks."""
    param_offload: bool = False
    """Whether divided parameters rest on the host."""
    replicas: int | None = None
    """Groups of ranks that each have all parameters (hsdp)."""
    sync_each_batch: bool = False
    """Whether gradients are averaged after every micro-batch."""


def read(folder: Path = Path(__file__).parent) -> Job:
    """job.json of a folder; TypeError for a key that is not known."""
    return Job(**json.loads((folder / "job.json").read_text(encoding="utf-8")))


def options() -> argparse.Namespace:
    """The command line of every train.py."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="text, or JSON lines with a field text; without it rows are made up, to try")
    parser.add_argument("--random-weights", action="store_true", help="only the configuration is read")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps on made-up rows")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher says it here as well
    return parser.parse_args()


def network(job: Job, random_weights: bool = False) -> Any:
    """The network on the host (quantized: on this process's GPU), with adapters if there are any."""
    import transformers

    chosen: dict[str, Any] = {"dtype": getattr(torch, job.weights_dtype)}
    if job.attn_implementation is not None:
        chosen["attn_implementation"] = job.attn_implementation
    if job.quantization is not None:
        chosen["quantization_config"] = transformers.BitsAndBytesConfig(**job.quantization)
        chosen["device_map"] = {"": int(os.environ.get("LOCAL_RANK", "0"))}
    if random_weights:
        made = at_random(transformers.AutoConfig.from_pretrained(job.model), chosen)
    else:
        made = transformers.AutoModelForCausalLM.from_pretrained(job.model, **chosen)
    made.config.use_cache = False  # else every forward copies keys and values, as if it were to generate
    return made.train()


def at_random(config: Any, chosen: dict[str, Any]) -> Any:
    """The network without its checkpoint; to be quantized, what it was made with takes the checkpoint's place."""
    import transformers

    loading = ("quantization_config", "device_map")
    made: Any = transformers.AutoModelForCausalLM.from_config(
        config, **{name: value for name, value in chosen.items() if name not in loading}
    )
    if "quantization_config" not in chosen:
        return made
    saved = made.state_dict()
    tensors = {name: tensor for name, tensor in [*made.named_parameters(), *made.named_buffers()] if name in saved}
    return type(made).from_pretrained(None, config=made.config, state_dict=tensors, **chosen)


def adapted(job: Job, made: Any) -> Any:
    """The network inside PEFT's, if the job has adapters."""
    if job.lora is None:
        return made
    import peft

    if job.quantization is not None:
        if job.cast_unquantized:
            made = peft.prepare_model_for_kbit_training(made, use_gradient_checkpointing=False)
        else:
            made.requires_grad_(False)
    made = peft.get_peft_model(made, peft.LoraConfig(**job.lora))
    if job.adapters_dtype is not None:
        for adapter in made.parameters():
            if adapter.requires_grad:
                adapter.data = adapter.data.to(getattr(torch, job.adapters_dtype))
    return made


@contextlib.contextmanager
def attention(job: Job) -> Iterator[None]:
    """Around the whole training: only the backend that was asked for."""
    backend: AbstractContextManager[Any] = contextlib.nullcontext()
    if job.sdpa_backend is not None:
        import transformers.integrations.sdpa_attention
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = sdpa_kernel(getattr(SDPBackend, job.sdpa_backend))
        if job.sdpa_backend == "EFFICIENT_ATTENTION":  # which takes no grouped keys and values: repeat them
            transformers.integrations.sdpa_attention.use_gqa_in_sdpa = lambda *_given: False
    with backend:
        yield


class Rows(Dataset):  # type: ignore[type-arg, misc]
    """Rows of `seq_len` tokens each, which are their own labels."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].clone()}


def rows(job: Job, data: str | None, made_up: int) -> Rows:
    """The text of a file in rows, without what is left at its end; or `made_up` rows of random tokens."""
    from transformers import AutoConfig

    if data is None:
        config = AutoConfig.from_pretrained(job.model).get_text_config()
        return Rows(torch.randint(0, config.vocab_size, (made_up, job.seq_len)))
    tokens = torch.tensor(tokenised(job, texts(Path(data))), dtype=torch.int64)
    whole = len(tokens) // job.seq_len
    return Rows(tokens[: whole * job.seq_len].view(whole, job.seq_len))


def texts(path: Path) -> list[str]:
    """The documents of a file."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line)["text"] for line in content.splitlines() if line.strip()]
    return [content]


def tokenised(job: Job, documents: list[str]) -> list[int]:
    """All documents one behind the other, each with the tokenizer's end after it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return [token for document in documents for token in [*tokenizer(document)["input_ids"], *end]]
