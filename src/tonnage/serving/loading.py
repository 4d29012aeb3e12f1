"""A model folder loaded and run by transformers, in a process of its own, with the bytes that it takes.

    python -m tonnage.serving.loading '{"folder": "llama", "quantization": "nf4", "tokens": 8, ...}' FILE

The file gets the measured bytes as JSON, or the error.  No code of the folder is executed, and only safetensors
files are read.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tonnage.catalog.configurations import read_config
from tonnage.catalog.untrusted import keep_inert
from tonnage.recorder.tonnage_recorder.tensors import plain_tensors, tensors_in
from tonnage.serving.quantization import BITSANDBYTES

_WORD: Final = 1
"""Token that prompts consist of."""


class Incomplete(Exception):
    """A folder that lacks tensors of its network."""


class NoCard(Exception):
    """A device that this machine does not have."""


def main(arguments: list[str]) -> int:
    """Load, generate, write what was measured, and return 0; an error is written too."""
    wanted, file = json.loads(arguments[0]), Path(arguments[1])
    try:
        found = measure(**wanted)
    except Exception as error:
        out_of_memory = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
        words = " ".join(str(error).split())
        found = {"error": f"{type(error).__name__}: {words[:400]}", "out_of_memory": out_of_memory}
        found |= {"is_incomplete": isinstance(error, Incomplete), "lacks_card": isinstance(error, NoCard)}
    file.write_text(json.dumps(found), encoding="utf-8")
    return 0


def measure(*, folder: str, quantization: str | None, device: str, prompt: int, tokens: int) -> dict[str, Any]:
    """Return the bytes of the loaded network and of its KV cache after `tokens` tokens were generated.

    `quantization` is one of BITSANDBYTES; None: as the folder has it.  `device` may be `auto`.
    """
    import torch
    import transformers

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise NoCard(f"torch {torch.__version__} finds no GPU of NVIDIA on this machine")
    how: dict[str, Any] = {}
    if quantization is not None:
        how["quantization_config"] = transformers.BitsAndBytesConfig(**BITSANDBYTES[quantization])
    config = _read_config(folder)
    stated = getattr(config.get_text_config(), "dtype", None)
    model, keys = _class_of(config).from_pretrained(
        folder,
        config=config,
        dtype=torch.float16 if stated == torch.float16 else torch.bfloat16,
        device_map=device,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        **how,
    )
    lacking = sorted(keys["missing_keys"]) + sorted(str(key) for key in keys.get("mismatched_keys", ()))
    if lacking:
        raise Incomplete(f"{len(lacking)} tensors of the network are not in the folder, such as {lacking[0]}")
    on_card = torch.device(device).type == "cuda"
    found = {
        "device": torch.cuda.get_device_name() if on_card else "cpu",
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "footprint_bytes": int(model.get_memory_footprint()),
        "weights_bytes": held_bytes([*model.parameters(), *model.buffers()]),
        "allocated_bytes": torch.cuda.memory_allocated() if on_card else None,
    }
    answer = model.generate(
        torch.full((1, prompt), _WORD, device=device),
        attention_mask=torch.ones((1, prompt), dtype=torch.long, device=device),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=_WORD,
        return_dict_in_generate=True,
    )
    caches = [tensor for layer in answer.past_key_values.layers for tensor in tensors_in(vars(layer), torch.Tensor)]
    return found | {
        "generated": int(answer.sequences.shape[1]) - prompt,
        "kv_cache_bytes": held_bytes(tensor for tensor in caches if tensor.ndim > 1),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if on_card else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_card else None,
    }


def _read_config(folder: str) -> Any:
    """Return the folder's configuration without what could load code; how its weights are stored is kept."""
    import transformers

    content = read_config(Path(folder) / "config.json")
    config = transformers.AutoConfig.for_model(**keep_inert(content)[0])
    if stored := content.get("quantization_config"):
        config.quantization_config = keep_inert(stored)[0]
    return config


def _class_of(config: Any) -> Any:
    """Return the class that loads a network of this configuration and generates text."""
    import transformers

    for kind in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    raise ValueError(f"transformers {transformers.__version__} has no {config.model_type!r} network that generates")


def held_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the memory of tensors, with the scales of quantized ones, each memory once."""
    storages = {}
    for tensor in tensors:
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
