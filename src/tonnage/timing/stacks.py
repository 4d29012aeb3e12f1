"""Networks of more than one stack of layers: images, sounds, encoders with decoders, images beside text.

Each stack is a Shape that sees sequences of its own length; a step runs them one after the other.  The letters are
those of `tonnage.timing.shape`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tonnage.errors import UnknownNetwork
from tonnage.job import USUAL_IMAGE, Job
from tonnage.model import text_part
from tonnage.timing.kinds import read_shape
from tonnage.timing.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One stack, and what it sees of each sequence of the batch."""

    name: str
    """In words."""
    shape: Shape
    seq_len: int
    """Tokens (patches, frames) that see each other."""
    sequences: int = 1
    """Of this stack for each one of the batch: the images of a text."""


def stacks(job: Job) -> tuple[Stack, ...]:
    """The stacks of a job's network.  Raises UnknownNetwork with one line for a kind that is not known."""
    config = job.model.config
    kind = str(config.get("model_type"))
    reader = _READERS.get(kind)
    if reader is None:
        return (Stack(name="layers", shape=read_shape(config), seq_len=job.seq_len),)
    try:
        return reader(job, config)
    except KeyError as missing:
        raise UnknownNetwork(f"The configuration of this {kind} network does not say {missing}.") from None


def _plain(**known: Any) -> Shape:
    """Layers that see tokens in both directions, without words: layer norms, biases, no gate."""
    heads, h = known["heads"], known["hidden"]
    values: dict[str, Any] = {
        **{"kv_heads": heads, "head_dim": h // heads, "value_dim": h // heads, "gated": False},
        **{"vocab": 0, "tied": True, "causal": False, "rms_norm": False, "rotary": 0.0, "biases": "all", "parts": 3},
    }
    return Shape(**values | known)


# -- images


def _vit(job: Job, config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """An image classifier; its tokens are patches and one for the class."""
    patches = (_first(config.get("image_size", 224)) // _first(config.get("patch_size", 16))) ** 2
    return (Stack(name="images", shape=_patched(config, patches + 1), seq_len=patches + 1),)


def _patched(config: Mapping[str, Any], positions: int) -> Shape:
    """Layers over the patches of an image; the patches' own product is counted with the weights beside layers."""
    h, side = config["hidden_size"], _first(config.get("patch_size", 16))
    return _plain(
        layers=config["num_hidden_layers"],
        hidden=h,
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        positions=positions,
        dropout=bool(config.get("hidden_dropout_prob")),
        extra_parameters=(config.get("num_channels", 3) * side**2 + 1) * h + config.get("num_labels", 0) * (h + 1),
    )


def _first(size: Any) -> int:
    return int(size[0] if isinstance(size, (list, tuple)) else size)


# -- an encoder and a decoder


def _t5(job: Job, config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """T5: as many tokens in as out; scores have a bias of their distance."""
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    layers = config.get("num_layers", 6)
    known = {
        "hidden": config.get("d_model", 512),
        "heads": config.get("num_heads", 8),
        "head_dim": config.get("d_kv", 64),
        "value_dim": config.get("d_kv", 64),
        "intermediate": config.get("d_ff", 2048),
        "gated": gated,
        "rms_norm": True,
        "biases": "",
        "biased_scores": True,
        "dropout": bool(config.get("dropout_rate", 0.1)),
    }
    decoder = {"layers": config.get("num_decoder_layers") or layers, "vocab": config.get("vocab_size", 32128)}
    tied = bool(config.get("tie_word_embeddings", True))
    return (
        Stack(name="encoder", shape=_plain(**known, layers=layers), seq_len=job.seq_len),
        *_decoder(job, {**known, **decoder, "causal": True, "tied": tied}),
    )


def _whisper(job: Job, config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """Whisper: an encoder over half as many positions as frames, which two convolutions make."""
    h, frames = config["d_model"], config["max_source_positions"]
    dropout = bool(config.get("dropout"))
    encoder = _plain(
        layers=config["encoder_layers"],
        hidden=h,
        heads=config["encoder_attention_heads"],
        intermediate=config["encoder_ffn_dim"],
        dropout=dropout,
        extra_parameters=3 * h * (config["num_mel_bins"] + h) + 2 * h + frames * h,
    )
    decoder = {
        **{"layers": config["decoder_layers"], "hidden": h, "heads": config["decoder_attention_heads"]},
        **{"intermediate": config["decoder_ffn_dim"], "vocab": config["vocab_size"], "causal": True},
        **{"positions": config["max_target_positions"], "dropout": dropout},
    }
    return (Stack(name="encoder", shape=encoder, seq_len=frames), *_decoder(job, decoder))


def _decoder(job: Job, known: Mapping[str, Any]) -> tuple[Stack, ...]:
    """A decoder, and its attention to what the encoder saw: layers without a feed-forward network, one norm each.

    That attention's keys and values are taken to be as many as its queries.
    """
    decoder = _plain(**known)
    across = replace(
        decoder, intermediate=0, gated=False, vocab=0, positions=0, causal=False, norms=1, biased_scores=False
    )
    return (
        Stack(name="attention to the encoder", shape=across, seq_len=job.seq_len),
        Stack(name="decoder", shape=decoder, seq_len=job.seq_len),
    )


# -- images beside text


def _images_and_text(job: Job, config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """A tower over each image, and a decoder over text in which images have their places."""
    text = text_part(config)
    kind = str(text.get("model_type") or config["model_type"]).removesuffix("_text")
    kind = _WORDS.get(kind, kind)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    shape = read_shape({**text, "model_type": kind, **({} if tied is None else {"tie_word_embeddings": tied})})
    words = Stack(name="text", shape=shape, seq_len=job.seq_len)
    if not job.images:
        return (words,)
    vision = config["vision_config"]
    tower = _any_size(job, vision) if "depth" in vision else _one_size(vision)
    return (replace(tower, sequences=job.images), words)


_WORDS: Final = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "gemma3": "gemma3_text",
    "llava": "llama",
}
"""Whose layers those for text are, where a configuration does not say it: transformers' own defaults."""


def _one_size(vision: Mapping[str, Any]) -> Stack:
    """A tower for images of one size (CLIP, SigLIP)."""
    patches = (_first(vision["image_size"]) // _first(vision["patch_size"])) ** 2
    return Stack(name="images", shape=_patched(vision, patches), seq_len=patches)


def _any_size(job: Job, vision: Mapping[str, Any]) -> Stack:
    """Qwen's tower: patches of images of any size, most layers within windows, and a head that merges patches."""
    side, merged = vision["patch_size"], vision.get("spatial_merge_size", 2)
    width, height = (int(part) for part in job.image_size.split("x")) if job.image_size else USUAL_IMAGE
    unit = side * merged
    patches = max(1, round(width / unit)) * max(1, round(height / unit)) * merged**2
    h = vision.get("hidden_size") or vision["embed_dim"]
    window, whole = vision.get("window_size"), len(vision.get("fullatt_block_indexes", ()))
    gated = vision.get("hidden_act") == "silu"
    joined = merged**2 * h
    return Stack(
        name="images",
        shape=_plain(
            layers=vision["depth"],
            hidden=h,
            heads=vision["num_heads"],
            intermediate=vision.get("intermediate_size") or int(h * vision.get("mlp_ratio", 4)),
            gated=gated,
            rms_norm=gated,
            rotary=1.0,
            parts=1,
            window=(window // side) ** 2 if window else None,
            window_fraction=1 - whole / vision["depth"] if window else 0.0,
            extra_parameters=3 * vision.get("temporal_patch_size", 2) * side**2 * h
            + joined * (joined + vision.get("out_hidden_size", vision.get("hidden_size", h))),
        ),
        seq_len=patches,
    )


_READERS: Final[dict[str, Callable[[Job, Mapping[str, Any]], tuple[Stack, ...]]]] = {
    "vit": _vit,
    "t5": _t5,
    "whisper": _whisper,
    **dict.fromkeys(("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3"), _images_and_text),
}
