"""A tokenizer of a given vocabulary that makes up tokens: for English text up to twice as many as a real one.

It merges bytes as it learned from Python's own manual, so that English words have one to three tokens; the rest of
the vocabulary is names that no text has.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MERGES = 8192
"""Tokens that are learned; learning them takes about a second."""

_CHAT = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|endoftext|>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
)
"""Tokens of the usual chat templates, which scripts look up by name."""

_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The chat template, of ChatML; models whose names say that they chat have one."""

_CHATS = ("instruct", "chat", "-it", "zephyr", "assistant", "qwen3", "gpt-oss", "phi-4", "phi-3", "tinyllama")

_ENCODERS = {"bert": {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}}
"""Special tokens of types whose configurations do not number them."""

_PLACES = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Tokens of Qwen's networks for images that their configurations number, and that their processors look up."""

_PADS = ("qwen", "smollm", "deepseek", "bert")
"""Parts of repositories' names whose tokenizers pad although the configuration numbers no token for it."""


def files(config: Mapping[str, Any], repository: str) -> dict[str, Callable[[], Any]]:
    """Return the makers of a tokenizer's files, by name; none for a network that reads no text."""
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, dict) else config
    size = text.get("vocab_size")
    if not isinstance(size, int):
        return {}
    special = _special_tokens(text, repository)
    named = {**special, **_places(text)}
    return {
        "tokenizer.json": lambda: _tokenizer(size, named),
        "tokenizer_config.json": lambda: _tokenizer_config(text, special, repository),
    }


def _special_tokens(text: Mapping[str, Any], repository: str) -> dict[str, tuple[str, int]]:
    """Return token and number of each role: bos, eos, pad, unk, cls, sep, mask."""
    model_type = str(text.get("model_type"))
    if model_type in _ENCODERS:
        return {token[1:-1].lower(): (token, number) for token, number in _ENCODERS[model_type].items()}
    roles: dict[str, tuple[str, int]] = {}
    for role, token in (("eos", "</s>"), ("bos", "<s>"), ("pad", "<pad>")):
        number = text.get(f"{role}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int):
            same = next((name for name, other in roles.values() if other == number), token)
            roles[role] = (same, number)
    if "pad" not in roles and "eos" in roles and any(part in repository.lower() for part in _PADS):
        roles["pad"] = roles["eos"]
    return roles


def _places(text: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Return token and number of the places of images and videos in a text of Qwen's networks."""
    if not str(text.get("model_type")).startswith("qwen"):
        return {}
    return {name: (token, text[name]) for name, token in _PLACES.items() if isinstance(text.get(name), int)}


def _tokenizer_config(text: Mapping[str, Any], special: Mapping[str, Any], repository: str) -> dict[str, Any]:
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    chats = any(part in repository.lower() for part in _CHATS)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions if isinstance(positions, int) else 2**20,
        **{f"{role}_token": token for role, (token, _) in special.items()},
        **({"chat_template": _TEMPLATE} if chats else {}),
    }


def _tokenizer(size: int, special: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Return the tokenizer's document, with special tokens at their numbers and everything else around them."""
    numbers = {token: number for token, number in special.values() if number < size}
    chat = [token for token in _CHAT if token not in numbers]
    document = _learned(min(_MERGES, size - len(numbers) - len(chat)))
    learned = list(document["model"]["vocab"])
    free = iter(sorted(set(range(size)) - set(numbers.values())))
    vocabulary = dict(zip([*learned, *chat], free, strict=False))
    vocabulary |= {f"<made-up-{number}>": number for number in free}
    document["model"]["vocab"] = {**vocabulary, **numbers}
    added = {**numbers, **{token: vocabulary[token] for token in chat}}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document["added_tokens"] = [
        {"id": number, "content": token, **flags} for token, number in sorted(added.items(), key=lambda item: item[1])
    ]
    if (bos := special.get("bos")) is not None and bos != special.get("eos"):
        document["post_processor"] = _beginning_with(*bos)
    return document


def _beginning_with(token: str, number: int) -> dict[str, Any]:
    """Return the step that puts a token before each text."""
    first, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _learned(size: int) -> dict[str, Any]:
    """Return the document of a tokenizer of so many merged bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    return document


def _texts() -> Iterator[str]:
    """Yield the chapters of Python's manual that come with it, or this page where they are missing."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        yield str(__doc__)
    else:
        yield from topics.values()
