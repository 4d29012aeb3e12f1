"""Fields of a stranger's configuration that could load code or files.

    >>> keep_inert({"model_type": "llama", "attn_implementation": "org/kernel", "vision_config": {"auto_map": {}}})
    ({'model_type': 'llama', 'vision_config': {}}, ("attn_implementation 'org/kernel'", 'vision_config.auto_map'))

transformers fetches a repository and imports it where a configuration names one: as `auto_map`, as an implementation
of attention (`org/kernel`), as a backbone.  So the values of a configuration may be numbers, and words that choose
among what is installed; whatever else could name code, a file or a repository is left out, at every depth.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final

from tonnage.printable import make_printable

_CODE: Final = frozenset(
    {
        *("auto_map", "custom_generate", "custom_pipelines", "trust_remote_code", "code_revision"),
        *("use_kernels", "kernel_config", "quantization_config", "compile_config", "assistant_model"),
        *("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"),  # timm.create_model's own
        *("attribute_map", "sub_configs", "sub_configs_defaults", "extra_files", "extra_config_files"),
    }
)
"""Fields that name or allow code, or that would replace tables of transformers' classes of configurations."""

_NOT_SHAPING: Final = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "_attn_implementation_autoset"}
)
"""Fields that say where a configuration comes from; they are left out without a word."""

_PRETRAINED: Final = frozenset({"pretrained", "use_pretrained_backbone"})
"""Switches that fetch weights, which no estimate needs: they are off."""

_LABELS: Final = frozenset({"id2label", "label2id"})
"""Tables of which only the length counts."""

_NAMES_A_PLACE: Final = re.compile(r"_(?:path|file|dir|folder|repo|url|checkpoint|module_name)$")
_PLACE: Final = re.compile(r"[/\\:\x00]")
"""Characters of paths, addresses and `org/name`; no word that chooses among what is known has one."""

_ATTENTION: Final[dict[str, str | None]] = {
    **{"eager": None, "sdpa": None, "flex_attention": None},
    **{"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"},
}
"""Implementations of attention, with the module without which transformers fetches a kernel in its place."""

_EXPERTS: Final[dict[str, str | None]] = {"eager": None, "batched_mm": None, "grouped_mm": None}
"""Implementations of experts; transformers fetches the others."""

_IMPLEMENTATIONS: Final = {"attn_implementation": _ATTENTION, "experts_implementation": _EXPERTS}

_LONGEST_PATH: Final = 80
"""Characters of a field's path in a note."""

_LONGEST_VALUE: Final = 40
"""Characters of a value in a note."""


INFINITIES: Final = ("Infinity", "-Infinity")


def parse_infinity(part: dict[str, Any]) -> Any:
    """Return the number of an infinity as transformers 5 writes it, {"__float__": "Infinity"}; others as they are."""
    return float(part["__float__"]) if len(part) == 1 and part.get("__float__") in INFINITIES else part


def keep_inert(config: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields that cannot load anything, and what was left out: each field with its path and its value."""
    dropped: list[str] = []
    return _keep_fields(config, "", dropped), tuple(dropped)


def _keep_fields(part: dict[str, Any], where: str, dropped: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in part.items():
        path = f"{where}{name}"
        if name in _NOT_SHAPING:
            continue
        if name in _PRETRAINED and value:
            kept[name] = False
        elif name in _LABELS and isinstance(value, dict) and not any(map(_is_nested, value.values())):
            kept[name] = value
        elif table := next((table for word, table in _IMPLEMENTATIONS.items() if word in name), None):
            _keep_implementation(name, value, table, path, kept, dropped)
        elif _may_load(name, value, nested=bool(where)):
            dropped.append(_describe(path, value))
        elif isinstance(value, list):
            kept[name] = [_keep_value(item, f"{path}.{index}.", dropped) for index, item in enumerate(value)]
        else:
            kept[name] = _keep_value(value, f"{path}.", dropped)
    return kept


def _keep_value(value: Any, where: str, dropped: list[str]) -> Any:
    plain = parse_infinity(value) if isinstance(value, dict) else value
    return _keep_fields(plain, where, dropped) if isinstance(plain, dict) else plain


def _keep_implementation(
    name: str, value: Any, table: dict[str, str | None], path: str, kept: dict[str, Any], dropped: list[str]
) -> None:
    """Keep an implementation that is here; of a table with one for each part, those that are."""
    if value is None or (isinstance(value, str) and _is_here(value, table)):
        kept[name] = value
    elif isinstance(value, dict):
        inner: dict[str, Any] = {}
        for part, word in value.items():
            _keep_implementation(part, word, table, f"{path}.{part}", inner, dropped)
        kept[name] = inner
    else:
        dropped.append(_describe(path, value))


def _is_here(word: str, table: dict[str, str | None]) -> bool:
    """Return True for a word of the table whose module, if it needs one, is installed."""
    if word not in table:
        return False
    module = table[word]
    return module is None or find_spec(module) is not None


def _may_load(name: str, value: Any, *, nested: bool) -> bool:
    """Return True for a field that could name code, a file or a repository.

    Inside a part, a name with an underscore before it is one of transformers' own attributes; at the top such a name
    is never given to transformers.
    """
    if name in _CODE or _PLACE.search(name):
        return True
    if nested and name.startswith("_") and isinstance(value, str | dict):
        return True
    texts = list(_texts(value))
    return any(map(_PLACE.search, texts)) or (bool(texts) and _NAMES_A_PLACE.search(name) is not None)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a value and of the lists in it; parts are looked at by themselves."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list)


def _describe(path: str, value: Any) -> str:
    path = make_printable(path[:_LONGEST_PATH])
    if not isinstance(value, str):
        return path
    return f"{path} {value[:_LONGEST_VALUE]!r}{'...' if len(value) > _LONGEST_VALUE else ''}"
