"""Resolves the MODEL that a user writes to a configuration, without running or importing anything.

MODEL is a catalog name, a folder with a config.json, a config.json, a Hub repository `org/name`, or
`package.module:factory`.  A factory stays a reference: it is imported only in the process that builds the model.
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
from tonnage.catalog.untrusted import INFINITIES, keep_inert, parse_infinity
from tonnage.errors import UnknownModel, UnreadableModel
from tonnage.model import SCRIPT_SUFFIXES, ModelRef
from tonnage.units import MIB, format_size

LARGEST_FILE_BYTES: Final = 16 * MIB
"""Limit of a config.json's size; ViT's with 21,843 class labels has 1.5 MiB."""

_FACTORY = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_DOWNLOAD_SECONDS: Final = 10
_MAX_DEPTH: Final = 32

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
"""Fields that count something in a network, each with an upper limit beyond any network ever built."""

_MAY_BE_ZERO: Final = frozenset(
    {
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "type_vocab_size"),
        *("encoder_layers", "decoder_layers", "num_decoder_layers"),
    }
)
"""Fields that are 0 in dense members of a family with experts (Granite 4), in models without segments (DeBERTa) and
in one half of an encoder-decoder."""

_SIZE_FIELDS: Final = (
    *("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_sizes", "hidden_dim"),
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "depth", "depths", "num_blocks"),
)
"""Fields of which a configuration needs at least one; without any, the type's default network would be estimated."""

_WIDTHS_AND_HEADS: Final = (("hidden_size", "num_attention_heads"), ("n_embd", "n_head"), ("dim", "n_heads"))
_HEAD_SIZE_FIELDS: Final = ("head_dim", "d_kv", "kv_channels", "attention_head_size", "qk_nope_head_dim")
_NO_PARTS: Final = ("auto_map", "quantization_config")
"""Fields that hold dicts which describe no part of the network."""


def resolve(model: str | PathLike[str], *, offline: bool = False) -> ModelRef:
    """Return a reference to the network that `model` names; its forms are tried in the order given at the top.

    A catalog name wins over a folder of the same name (write `./gpt2` for the folder).  Code that a file names is
    never run: the class comes from transformers, by `model_type`, and other fields choose among what is installed.
    Raises UnknownModel and UnreadableModel.
    """
    if not isinstance(model, str | PathLike):
        raise UnknownModel(
            f"MODEL must be a name, not a {type(model).__name__}, because another process builds the network. "
            "Write a function that returns it, and give package.module:function."
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
    path = _find_path(model)
    if path is not None:
        return _from_path(path)
    if is_factory(model):
        return ModelRef(name=model, kind="factory", factory=model, source=f"factory {model}")
    if _HUB_ID.fullmatch(model) and not model.endswith(".json"):
        return _from_hub(model, offline)
    return _raise_unknown(model)


NOT_APPLIED: Final = "quantization is not applied"
"""Last words of `ModelRef.source` for a configuration whose weights are published quantized."""


def is_factory(model: str) -> bool:
    """Return True for `package.module:function`, which is imported and called."""
    return _FACTORY.fullmatch(model) is not None


def _find_path(model: str) -> Path | None:
    """Return the existing file or folder of that name, or None."""
    if not model.strip():
        return None
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, not a file name at all, ~ of an unknown user
        return None


_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


def _from_path(path: Path) -> ModelRef:
    """Return the model of a folder or a config.json."""
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise UnreadableModel(f"{str(path)!r} is a folder without config.json; give the model's own folder or file.")
    if file.suffix.lower() in SCRIPT_SUFFIXES:
        raise UnreadableModel(
            f"{str(file)!r} is a script, not a model; run it after two dashes: tonnage dry-run -- python train.py."
        )
    if file.suffix.lower() == ".toml":
        raise UnreadableModel(f"{str(file)!r} is no configuration; a plan file is given as --plan {file}.")
    if file.suffix.lower() in _WEIGHT_SUFFIXES:
        raise UnreadableModel(
            f"{str(file)!r} is a file of weights, which are not read; give the config.json beside it, or the folder."
        )
    config = read_config(file)
    folder = file.resolve().parent.name
    return _make_reference(folder if file.name == "config.json" and folder else file.stem, config, str(file))


def _make_reference(name: str, config: dict[str, Any], origin: str) -> ModelRef:
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else None
    note = f"; its {method} {NOT_APPLIED}" if method else ""
    stated = {key: value for key, value in config.items() if key != "quantization_config"}
    shaping, dropped = keep_inert(stated)
    return ModelRef(name=name, kind="config", config=shaping, source=origin + note, dropped=dropped)


def _from_hub(name: str, offline: bool) -> ModelRef:
    """Return the model of a Hub repository.

    Only its config.json is read, from the Hub's cache or downloaded into it.
    """
    from huggingface_hub import errors

    try:
        file = _find_cached(name) or (None if offline else _download(name))
    except errors.GatedRepoError:
        raise UnknownModel(
            f"{name} is gated on the Hub: accept its licence there and run `hf auth login`, or give a config.json."
        ) from None
    except errors.RepositoryNotFoundError:
        return _raise_unknown(name, "The Hub has no repository of that name (or it is private). ")
    except errors.RemoteEntryNotFoundError:
        raise UnknownModel(f"{name} on the Hub has no config.json; give package.module:factory instead.") from None
    except errors.HFValidationError:
        return _raise_unknown(name)
    except Exception as error:  # the many forms of a missing network: httpx's errors, OS errors, offline mode
        reason = f"The Hub was not reached ({type(error).__name__}), and its cache has no such model. "
        return _raise_unknown(name, reason)
    if file is None:
        return _raise_unknown(name, "Offline, and the Hub's cache has no such model. ")
    return _make_reference(name, read_config(Path(file)), f"https://huggingface.co/{name}")


def find_config_file(model: str) -> Path | None:
    """Return the config.json of a folder, of a file, or of a cached Hub repository; None for another model."""
    path = _find_path(model)
    if path is not None:
        return path / "config.json" if path.is_dir() else path
    if not _HUB_ID.fullmatch(model) or model.endswith(".json"):
        return None
    cached = _find_cached(model)
    return None if cached is None else Path(cached)


def _find_cached(name: str) -> str | None:
    from huggingface_hub import errors, hf_hub_download

    try:
        return str(hf_hub_download(name, "config.json", local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return None


def _download(name: str) -> str:
    """Download a repository's config.json and return its path.

    One request tests the connection first, because a download without network is retried for half a minute.
    """
    from huggingface_hub import constants, get_session, hf_hub_download

    get_session().head(constants.ENDPOINT, timeout=_DOWNLOAD_SECONDS)
    return str(hf_hub_download(name, "config.json", etag_timeout=_DOWNLOAD_SECONDS))


def _raise_unknown(model: str, reason: str = "") -> NoReturn:
    """Raise UnknownModel with the closest catalog names and the possible forms."""
    near = closest(model, known_model_names(), limit=5)
    names = list(dict.fromkeys(known.id for known in map(find_model, near) if known is not None))[:3]
    hint = f"Close: {', '.join(names)}. " if names else ""
    shown = model if len(model) <= 80 else model[:77] + "..."
    if not reason and ("/" in model or model.endswith((".json", *SCRIPT_SUFFIXES))):
        reason = "There is no such file or folder. "
    raise UnknownModel(
        f"Unknown model {shown!r}. {reason}{hint}Possible: "
        "a name of `tonnage models`, a folder, a config.json, org/name, package.module:factory."
    )


def read_config(file: Path) -> dict[str, Any]:
    """Return the content of a config.json after a check that its sizes can be those of a network.

    Raises UnreadableModel with the field, its value and the possible values.
    """
    config = _parse_json(file, _read_content(file))
    if not isinstance(config, dict):
        kind = "a list" if isinstance(config, list) else "a single value"
        raise UnreadableModel(f"{str(file)!r} holds {kind} where a configuration has named fields.")
    if _measure_depth(config) > _MAX_DEPTH:
        raise UnreadableModel(f"{str(file)!r} is nested more than {_MAX_DEPTH} levels deep; no configuration is.")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UnreadableModel(f"{str(file)!r} has no model_type (e.g. llama), so its architecture is not known.")
    architectures = config.get("architectures")
    if architectures is not None and not _is_list_of_texts(architectures):
        raise UnreadableModel(
            f"{str(file)!r}: architectures is {_show_value(architectures)}; it must be a list of names."
        )
    parts = list(_iterate_parts(config))
    has_typed_parts = any("model_type" in part for part in parts[1:])  # whose types have default sizes: SigLIP's base
    if not has_typed_parts and not any(field in part for part in parts for field in _SIZE_FIELDS):
        raise UnreadableModel(
            f"{str(file)!r} states neither the width nor the depth of the network (hidden_size, num_hidden_layers, "
            "...)."
        )
    for part in parts:
        _check_part(part, str(file))
    return config


def _read_content(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise UnreadableModel(f"{str(file)!r} is not a regular file.")
        with file.open("rb") as stream:
            content = stream.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise UnreadableModel(f"{str(file)!r} cannot be read: {error.strerror or type(error).__name__}.") from None
    if len(content) > LARGEST_FILE_BYTES:
        raise UnreadableModel(f"{str(file)!r} is larger than {format_size(LARGEST_FILE_BYTES)}; no config.json is.")
    return content


def _parse_json(file: Path, content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"), parse_constant=_parse_constant, object_hook=parse_infinity)
    except json.JSONDecodeError as error:
        raise UnreadableModel(
            f"{str(file)!r} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except RecursionError:
        raise UnreadableModel(f"{str(file)!r} is nested too deeply for a configuration.") from None
    except UnicodeDecodeError:
        raise UnreadableModel(f"{str(file)!r} is not UTF-8 text.") from None
    except ValueError as error:
        raise UnreadableModel(f"{str(file)!r} holds a number that cannot be read: {str(error)[:80]!r}.") from None


def _parse_constant(text: str) -> float:
    """Return the number of `Infinity`, which Mamba's time-step limits have.  Raises ValueError for NaN."""
    if text not in INFINITIES:
        raise ValueError(f"{text} is not JSON")
    return float(text)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _measure_depth(value: Any) -> int:
    """Return the levels of nesting, counted without recursion."""
    level, depth = [value], 0
    while level:
        inner = (
            entry.values() if isinstance(entry, dict) else entry for entry in level if isinstance(entry, dict | list)
        )
        level, depth = [value for entries in inner for value in entries], depth + 1
    return depth


def _iterate_parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the configuration and the configurations inside it (text_config, vision_config, encoder, ...)."""
    yield config
    for key, value in config.items():
        is_configuration = isinstance(value, dict) and (key.endswith("config") or "model_type" in value)
        if is_configuration and key not in _NO_PARTS:
            yield from _iterate_parts(value)


def _check_part(part: dict[str, Any], file: str) -> None:
    for field, most in _LIMITS.items():
        value = part.get(field)
        for number in value if isinstance(value, list) else [value]:
            _check_count(file, field, number, most)
    for width, heads in _WIDTHS_AND_HEADS:
        if not any(part.get(field) is not None for field in _HEAD_SIZE_FIELDS):
            _check_divisible(file, part, width, heads)
    _check_divisible(file, part, "num_attention_heads", "num_key_value_heads")


def _check_count(file: str, field: str, value: Any, most: int) -> None:
    """Raise UnreadableModel for a value that is no possible count; None means `not set`, which some types allow."""
    least = 0 if field in _MAY_BE_ZERO else 1
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most):
        return
    raise UnreadableModel(
        f"{file!r}: {field} is {_show_value(value)}; it must be a whole number from {least} to {most:,}."
    )


def _check_divisible(file: str, part: dict[str, Any], whole: str, parts: str) -> None:
    number, divisor = part.get(whole), part.get(parts)
    if isinstance(number, int) and isinstance(divisor, int) and number % divisor:
        raise UnreadableModel(f"{file!r}: {whole} {number} is not divisible by {parts} {divisor}.")


def _show_value(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
