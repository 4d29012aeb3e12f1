"""Stacks of layers of a network: images, sounds, encoders with decoders, images beside text.

Each stack is a Shape that sees sequences of its own length; a step runs them one after the other.  For example, the
stacks of Whisper are its encoder, the decoder's attention to the encoder, and the decoder.  Letters: timing/shape.py.
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
    """One stack, and the tokens that it sees of each sequence of the batch."""

    name: str
    """Name in sentences, e.g. `images`."""
    shape: Shape
    seq_len: int
    """Tokens (patches, frames) that see each other."""
    sequences: int = 1
    """Sequences of this stack for each one of the batch: the images of a text."""


def read_stacks(job: Job) -> tuple[Stack, ...]:
    """Return the stacks of a job's network.  Raise UnknownNetwork, with one line, for a kind that is not known."""
    config = job.model.config
    kind = str(config.get("model_type"))
    reader = _READERS.get(kind)
    if reader is None:
        return (Stack(name="layers", shape=read_shape(config), seq_len=job.seq_len),)
    try:
        return reader(job, config)
    except KeyError as missing:
        raise UnknownNetwork(f"The configuration of this {kind} network does not say {missing}.") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UnknownNetwork(f"The dimensions of this {kind} network cannot be read ({error}).") from None


def _plain_shape(**stated: Any) -> Shape:
    """Return layers that see tokens in both directions, without words: layer norms, biases, no gate."""
    heads, h = stated["heads"], stated["hidden"]
    values: dict[str, Any] = {
        **{"kv_heads": heads, "head_dim": h // heads, "value_dim": h // heads, "gated": False},
        **{"vocab": 0, "tied": True, "causal": False, "rms_norm": False, "rotary": 0.0, "biases": "all", "parts": 3},
    }
    return Shape(**values | stated)


# -- images


def _vit(job: Job, config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """Return the stack of an image classifier; its tokens are patches and one for the class."""
    patches = (_side(config.get("image_size", 224)) // _side(config.get("patch_size", 16))) ** 2
    return (Stack(name="images", shape=_patched(config, patches + 1), seq_len=patches + 1),)


def _patched(config: Mapping[str, Any], positions: int) -> Shape:
    """Return layers over the patches of an image; the patches' own product counts with the weights beside layers."""
    h, side = config["hidden_size"], _side(config.get("patch_size", 16))
    return _plain_shape(
        layers=config["num_hidden_layers"],
        hidden=h,
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        positions=positions,
        dropout=bool(config.get("hidden_dropout_prob")),
        extra_parameters=(config.get("num_channels", 3) * side**2 + 1) * h + config.get("num_labels", 0) * (h + 1),
    )


def _side(size: Any) -> int:
    """Return the side of a square, or the first side of a rectangle."""
    return int(size[0] if isinstance(size, (list, tuple)) else size)


# -- an encoder and a decoder


def _t5(job: Job, config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """Return the stacks of T5: as many tokens in as out; scores have a bias of their distance."""
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    layers = config.get("num_layers", 6)
    common = {
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
        Stack(name="encoder", shape=_plain_shape(**common, layers=layers), seq_len=job.seq_len),
        *_decoder(job, {**common, **decoder, "causal": True, "tied": tied}),
    )


def _whisper(job: Job, config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """Return the stacks of Whisper: an encoder over half as many positions as frames, made by two convolutions."""
    h, frames = config["d_model"], config["max_source_positions"]
    dropout = bool(config.get("dropout"))
    encoder = _plain_shape(
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


def _decoder(job: Job, stated: Mapping[str, Any]) -> tuple[Stack, ...]:
    """Return a decoder, and its attention to the encoder: layers without a feed-forward network, one norm each.

    That attention is assumed to have as many keys and values as queries.
    """
    decoder = _plain_shape(**stated)
    across = replace(
        decoder, intermediate=0, gated=False, vocab=0, positions=0, causal=False, norms=1, biased_scores=False
    )
    return (
        Stack(name="attention to the encoder", shape=across, seq_len=job.seq_len),
        Stack(name="decoder", shape=decoder, seq_len=job.seq_len),
    )


# -- images beside text


def _images_and_text(job: Job, config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """Return a tower over each image, and a decoder over text in which images have their places."""
    text = text_part(config)
    kind = str(text.get("model_type") or config["model_type"]).removesuffix("_text")
    kind = _TEXT_KINDS.get(kind, kind)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    shape = read_shape({**text, "model_type": kind, **({} if tied is None else {"tie_word_embeddings": tied})})
    text_stack = Stack(name="text", shape=shape, seq_len=job.seq_len)
    if not job.images:
        return (text_stack,)
    vision = config["vision_config"]
    tower = _tower_of_any_size(job, vision) if "depth" in vision else _tower_of_one_size(vision)
    return (replace(tower, sequences=job.images), text_stack)


_TEXT_KINDS: Final = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "gemma3": "gemma3_text",
    "llava": "llama",
}
"""Kinds of the layers for text, where a configuration does not state it: transformers' own defaults."""


def _tower_of_one_size(vision: Mapping[str, Any]) -> Stack:
    """Return a tower for images of one size (CLIP, SigLIP)."""
    patches = (_side(vision["image_size"]) // _side(vision["patch_size"])) ** 2
    return Stack(name="images", shape=_patched(vision, patches), seq_len=patches)


def _tower_of_any_size(job: Job, vision: Mapping[str, Any]) -> Stack:
    """Return Qwen's tower: patches of images of any size, most layers within windows, a head that merges patches."""
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
        shape=_plain_shape(
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
