"""The network that is trained and its adapters, as job.json describes them.  Used by train.py.

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


@dataclass(frozen=True, kw_only=True)
class Job:
    """The fields of job.json; those that it leaves out stay None."""

    model: str
    """A Hub id or a folder."""
    seq_len: int
    """Tokens of a row."""
    weights_dtype: str
    """The dtype in which weights are loaded."""
    auto_class: str = "AutoModelForCausalLM"
    """transformers' class that loads the network."""
    images_dtype: str | None = None
    """The dtype in which the network gets images."""
    image_size: list[int] | None = None
    """Width and height whose product is the most pixels of an image; None: the network has a size of its own."""
    image_token: int | None = None
    """The token that stands for a part of an image."""
    attn_implementation: str | None = None
    """transformers' name; None: its own choice."""
    sdpa_backend: str | None = None
    """The only backend of scaled_dot_product_attention that may be used."""
    lora: dict[str, Any] | None = None
    """Fields of peft.LoraConfig."""
    adapters_dtype: str | None = None
    """The dtype in which adapters are trained; None: float32, as PEFT makes them."""
    quantization: dict[str, Any] | None = None
    """Fields of transformers.BitsAndBytesConfig."""
    cast_unquantized: bool = False
    """True if weights that are not quantized are cast to fp32."""
    precision: str | None = None
    """The precision, where train.py itself sets it: bf16-mixed, fp16-mixed, bf16-true, fp16-true or fp32."""
    micro_batch: int | None = None
    """Rows of one forward pass."""
    grad_accum: int | None = None
    """Micro-batches of a step."""
    optimizer: str | None = None
    """The optimizer that train.py makes."""
    clip_grad_norm: float | None = None
    """The norm to which gradients are scaled down."""
    checkpointing: str | None = None
    """The layers that train.py checkpoints: full, selective or every-N."""
    loss: str | None = None
    """chunked: head and loss in slices of tokens."""
    shard: str | None = None
    """How train.py divides the network among the ranks."""
    param_offload: bool = False
    """True if divided parameters are kept on the host."""
    replicas: int | None = None
    """Groups of ranks that each have all parameters (hsdp)."""
    compile: str | None = None
    """The parts that torch.compile compiles: layers (one by one) or model."""
    sync_each_batch: bool = False
    """True if gradients are averaged after every micro-batch."""


def read(folder: Path = Path(__file__).parent) -> Job:
    """Return job.json of a folder.  Raises TypeError for an unknown key."""
    return Job(**json.loads((folder / "job.json").read_text(encoding="utf-8")))


def options() -> argparse.Namespace:
    """Return the command line of every train.py."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="what rows.py reads; without it rows are made up, to try")
    parser.add_argument("--random-weights", action="store_true", help="only the configuration is read")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps on made-up rows")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it here as well
    return parser.parse_args()


def network(job: Job, random_weights: bool = False) -> Any:
    """Return the network on the host; a quantized one is on this process's GPU."""
    import transformers

    auto = getattr(transformers, job.auto_class)
    chosen: dict[str, Any] = {"dtype": getattr(torch, job.weights_dtype)}
    if job.attn_implementation is not None:
        chosen["attn_implementation"] = job.attn_implementation
    if job.quantization is not None:
        chosen["quantization_config"] = transformers.BitsAndBytesConfig(**job.quantization)
        chosen["device_map"] = {"": int(os.environ.get("LOCAL_RANK", "0"))}
    if random_weights:
        made = at_random(auto, transformers.AutoConfig.from_pretrained(job.model), chosen)
    else:
        made = auto.from_pretrained(job.model, **chosen)
    # Otherwise every forward pass copies keys and values as for generation.
    made.config.get_text_config().use_cache = False
    return made.train()


def at_random(auto: Any, config: Any, chosen: dict[str, Any]) -> Any:
    """Return the network with random weights; to be quantized, they are loaded in place of the checkpoint."""
    loading = ("quantization_config", "device_map")
    made: Any = auto.from_config(config, **{name: value for name, value in chosen.items() if name not in loading})
    if "quantization_config" not in chosen:
        return made
    saved = made.state_dict()
    tensors = {name: tensor for name, tensor in [*made.named_parameters(), *made.named_buffers()] if name in saved}
    return type(made).from_pretrained(None, config=made.config, state_dict=tensors, **chosen)


def adapted(job: Job, made: Any) -> Any:
    """Return the network with PEFT's adapters, if the job has any."""
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
    """Allow only the attention backend of the job, around the whole training."""
    backend: AbstractContextManager[Any] = contextlib.nullcontext()
    if job.sdpa_backend is not None:
        import transformers.integrations.sdpa_attention
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = sdpa_kernel(getattr(SDPBackend, job.sdpa_backend))
        if job.sdpa_backend == "EFFICIENT_ATTENTION":  # it takes no grouped keys and values: repeat them
            transformers.integrations.sdpa_attention.use_gqa_in_sdpa = lambda *_given: False
    with backend:
        yield
