"""MODEL as a user writes it, resolved to a configuration without running or importing anything.

A catalog name, a folder with a config.json, a config.json, a Hub repository `org/name`, or
`package.module:factory`, which stays a reference: it is imported only in the process that builds the model.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final, NoReturn

from tonnage.catalog.models import find_model, known_model_names
from tonnage.catalog.spelling import closest
from tonnage.errors import UnknownModel, UnreadableModel
from tonnage.model import ModelRef
from tonnage.units import MIB, size

LARGEST_FILE_BYTES: Final = 16 * MIB
"""No config.json is larger: with 21,843 class labels ViT's has 1.5 MiB."""

_FACTORY = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_DOWNLOAD_SECONDS: Final = 10
_DEEPEST: Final = 32

_LIMITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"), 10_000
    ),
    **dict.fromkeys(("n_layer", "n_layers", "depth", "depths", "num_blocks"), 10_000),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_sizes", "hidden_dim"), 10**6),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "num_key_value_heads"), 10**5),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_kv_heads"), 10**5),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "kv_lora_rank", "q_lora_rank"), 10**6),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "moe_intermediate_size"), 10**7),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 10**7),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 10**5),
    **dict.fromkeys(("vocab_size", "type_vocab_size"), 10**8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 10**9),
    **dict.fromkeys(("image_size", "patch_size", "num_channels", "num_labels"), 10**6),
}
"""Fields that count something in a network, with a number beyond any network that was ever built."""

_MAY_BE_ZERO: Final = frozenset(
    {
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "type_vocab_size"),
        *("encoder_layers", "decoder_layers", "num_decoder_layers"),
    }
)
"""Dense members of a family with experts (Granite 4), models without segments (DeBERTa), half an encoder-decoder."""

_SIZES: Final = (
    *("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_sizes", "hidden_dim"),
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "depth", "depths", "num_blocks"),
)
"""Fields of which a configuration has at least one; without any, a default network would be sized instead."""

_HEADS: Final = (("hidden_size", "num_attention_heads"), ("n_embd", "n_head"), ("dim", "n_heads"))
_HEAD_SIZES: Final = ("head_dim", "d_kv", "kv_channels", "attention_head_size", "qk_nope_head_dim")
_NOT_THE_NETWORK: Final = ("auto_map", "_name_or_path", "transformers_version", "quantization_config")


def resolve(model: str | PathLike[str], *, offline: bool = False) -> ModelRef:
    """The network that `model` names; the forms are tried in the order given at the top.

    A catalog name wins over a folder of the same name (write `./gpt2` for the folder).  Code that a repository
    carries (`auto_map`) is never run: the class comes from transformers, by `model_type`.
    Raises UnknownModel and UnreadableModel.
    """
    if not isinstance(model, str | PathLike):
        raise UnknownModel(
            f"A model is given by its name, and this is a {type(model).__name__}: networks are built in a process of "
            "their own. Write a function that returns it, and say package.module:function."
        )
    model = fspath(model)
    known = find_model(model)
    if known is not None:
        return ModelRef(
            name=known.id,
            kind="config",
            config=known.config(),
            source=f"catalog: {known.config_url} ({known.date})",
        )
    path = _path(model)
    if path is not None:
        return _from_path(path)
    if is_factory(model):
        return ModelRef(name=model, kind="factory", factory=model, source=f"factory {model}")
    if _HUB_ID.fullmatch(model) and not model.endswith(".json"):
        return _from_hub(model, offline)
    return _unknown(model)


NOT_APPLIED: Final = "quantization is not applied"
"""How the source of a configuration ends whose weights are published quantized."""


def is_factory(model: str) -> bool:
    """Whether it is `package.module:function`, which is imported and called."""
    return _FACTORY.fullmatch(model) is not None


def _path(model: str) -> Path | None:
    """The existing file or folder of that name, or None."""
    if not model.strip():
        return None
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, not a file name at all, ~ of no user
        return None


_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
"""How files of weights end."""


def _from_path(path: Path) -> ModelRef:
    """The configuration of a folder or file."""
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise UnreadableModel(f"{str(path)!r} is a folder without config.json; give the model's own folder or file.")
    if file.suffix.lower() in _WEIGHTS:
        raise UnreadableModel(
            f"{str(file)!r} is a file of weights, which are not read; give the config.json beside it, or the folder."
        )
    config = read_config(file)
    folder = file.resolve().parent.name
    return _reference(folder if file.name == "config.json" and folder else file.stem, config, str(file))


def _reference(name: str, config: dict[str, Any], where: str) -> ModelRef:
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else None
    note = f"; its {method} {NOT_APPLIED}" if method else ""
    shaping = {key: value for key, value in config.items() if key not in _NOT_THE_NETWORK}
    return ModelRef(name=name, kind="config", config=shaping, source=where + note)


def _from_hub(name: str, offline: bool) -> ModelRef:
    """The config.json of a Hub repository, and only that file: from the Hub's cache, or downloaded into it."""
    from huggingface_hub import errors

    try:
        file = _cached(name) or (None if offline else _downloaded(name))
    except errors.GatedRepoError:
        raise UnknownModel(
            f"{name} is gated on the Hub: accept its licence there and run `hf auth login`, or give a config.json."
        ) from None
    except errors.RepositoryNotFoundError:
        return _unknown(name, "The Hub has no repository of that name (or it is private). ")
    except errors.RemoteEntryNotFoundError:
        raise UnknownModel(f"{name} on the Hub has no config.json; give package.module:factory instead.") from None
    except errors.HFValidationError:
        return _unknown(name)
    except Exception as error:  # no network in its many forms: httpx's, OS errors, offline mode
        return _unknown(name, f"The Hub was not reached ({type(error).__name__}), and its cache has no such model. ")
    if file is None:
        return _unknown(name, "Offline, and the Hub's cache has no such model. ")
    return _reference(name, read_config(Path(file)), f"https://huggingface.co/{name}")


def _cached(name: str) -> str | None:
    from huggingface_hub import errors, hf_hub_download

    try:
        return str(hf_hub_download(name, "config.json", local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return None


def _downloaded(name: str) -> str:
    """Asks once whether the Hub answers, because a download without network is tried for half a minute."""
    from huggingface_hub import constants, get_session, hf_hub_download

    get_session().head(constants.ENDPOINT, timeout=_DOWNLOAD_SECONDS)
    return str(hf_hub_download(name, "config.json", etag_timeout=_DOWNLOAD_SECONDS))


def _unknown(model: str, reason: str = "") -> NoReturn:
    near = closest(model, known_model_names(), limit=5)
    names = list(dict.fromkeys(found.id for found in map(find_model, near) if found is not None))[:3]
    hint = f"Close: {', '.join(names)}. " if names else ""
    shown = model if len(model) <= 80 else model[:77] + "..."
    raise UnknownModel(
        f"Unknown model {shown!r}. {reason}{hint}Possible: "
        "a name of `tonnage models`, a folder, a config.json, org/name, package.module:factory."
    )


def read_config(file: Path) -> dict[str, Any]:
    """A config.json, checked: it is a configuration, and its sizes are those of a network.

    Raises UnreadableModel with the field, its value and what is possible.
    """
    config = _parse(file, _read(file))
    if not isinstance(config, dict):
        kind = "a list" if isinstance(config, list) else "a single value"
        raise UnreadableModel(f"{str(file)!r} holds {kind} where a configuration has named fields.")
    if _depth(config) > _DEEPEST:
        raise UnreadableModel(f"{str(file)!r} is nested more than {_DEEPEST} levels deep; no configuration is.")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UnreadableModel(f"{str(file)!r} has no model_type (e.g. llama), so its architecture is not known.")
    architectures = config.get("architectures")
    if architectures is not None and not _are_texts(architectures):
        raise UnreadableModel(f"{str(file)!r}: architectures is {_shown(architectures)}; it must be a list of names.")
    parts = list(_parts(config))
    named = any("model_type" in part for part in parts[1:])  # parts of their types' usual sizes, as SigLIP's base
    if not named and not any(field in part for part in parts for field in _SIZES):
        raise UnreadableModel(
            f"{str(file)!r} states neither the width nor the depth of the network (hidden_size, num_hidden_layers, "
            "...)."
        )
    for part in parts:
        _check_part(part, str(file))
    return config


def _read(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise UnreadableModel(f"{str(file)!r} is not a regular file.")
        with file.open("rb") as stream:
            content = stream.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise UnreadableModel(f"{str(file)!r} cannot be read: {error.strerror or type(error).__name__}.") from None
    if len(content) > LARGEST_FILE_BYTES:
        raise UnreadableModel(f"{str(file)!r} is larger than {size(LARGEST_FILE_BYTES)}; no config.json is.")
    return content


def _parse(file: Path, content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"), parse_constant=_constant, object_hook=_infinite)
    except json.JSONDecodeError as error:
        raise UnreadableModel(
            f"{str(file)!r} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except RecursionError:
        raise UnreadableModel(f"{str(file)!r} is nested too deeply for a configuration.") from None
    except UnicodeDecodeError:
        raise UnreadableModel(f"{str(file)!r} is not text in UTF-8.") from None
    except ValueError as error:
        raise UnreadableModel(f"{str(file)!r} holds a number that cannot be read: {str(error)[:80]!r}.") from None


def _constant(text: str) -> float:
    """`Infinity`, as Mamba's limits of time steps have it; whatever is not a number is refused."""
    if text not in _INFINITE:
        raise ValueError(f"{text} is not JSON")
    return float(text)


_INFINITE: Final = ("Infinity", "-Infinity")


def _infinite(part: dict[str, Any]) -> Any:
    """The same as transformers 5 writes it: {"__float__": "Infinity"}."""
    return float(part["__float__"]) if len(part) == 1 and part.get("__float__") in _INFINITE else part


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _depth(value: Any) -> int:
    """Levels of nesting, counted without recursion."""
    level, depth = [value], 0
    while level:
        inner = (
            entry.values() if isinstance(entry, dict) else entry for entry in level if isinstance(entry, dict | list)
        )
        level, depth = [value for entries in inner for value in entries], depth + 1
    return depth


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration and the configurations inside it (text_config, vision_config, encoder, ...)."""
    yield config
    for key, value in config.items():
        inner = isinstance(value, dict) and (key.endswith("config") or "model_type" in value)
        if inner and key not in _NOT_THE_NETWORK:
            yield from _parts(value)


def _check_part(part: dict[str, Any], where: str) -> None:
    for field, most in _LIMITS.items():
        value = part.get(field)
        for number in value if isinstance(value, list) else [value]:
            _check_count(where, field, number, most)
    for width, heads in _HEADS:
        if not any(part.get(field) is not None for field in _HEAD_SIZES):
            _check_divisible(where, part, width, heads)
    _check_divisible(where, part, "num_attention_heads", "num_key_value_heads")


def _check_count(where: str, field: str, value: Any, most: int) -> None:
    """None is `not set`, which several architectures allow."""
    least = 0 if field in _MAY_BE_ZERO else 1
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most):
        return
    raise UnreadableModel(
        f"{where!r}: {field} is {_shown(value)}; it must be a whole number from {least} to {most:,}."
    )


def _check_divisible(where: str, part: dict[str, Any], whole: str, parts: str) -> None:
    number, divisor = part.get(whole), part.get(parts)
    if isinstance(number, int) and isinstance(divisor, int) and number % divisor:
        raise UnreadableModel(f"{where!r}: {whole} {number} is not divisible by {parts} {divisor}.")


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
