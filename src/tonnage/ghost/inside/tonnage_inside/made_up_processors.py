"""The files of a processor of images: what a repository states beyond the defaults of transformers' classes.

An engine sizes its largest image by them, so that they decide the peak of its profile run.
"""

from collections.abc import Callable, Mapping
from typing import Any

_IMAGES: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12_845_056,
    },
    "qwen3_vl": {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    },
}
"""By model type, what `preprocessor_config.json` of Qwen/Qwen2.5-VL-7B-Instruct and Qwen3-VL-8B-Instruct states."""

_VIDEOS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_vl": {
        "processor_class": "Qwen3VLProcessor",
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 25_165_824},
    },
}
"""The same of `video_preprocessor_config.json`; without one, the images' file has both."""


def files(config: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return the makers of a processor's files, by name; none for a network whose processor is not known here."""
    model_type, tower = str(config.get("model_type")), config.get("vision_config")
    if model_type not in _IMAGES or not isinstance(tower, Mapping):
        return {}
    patches = {
        "patch_size": tower.get("patch_size"),
        "temporal_patch_size": tower.get("temporal_patch_size"),
        "merge_size": tower.get("spatial_merge_size"),
    }
    made: dict[str, Callable[[], Any]] = {"preprocessor_config.json": lambda: {**_IMAGES[model_type], **patches}}
    if model_type in _VIDEOS:
        made["video_preprocessor_config.json"] = lambda: {**_VIDEOS[model_type], **patches}
    return made
