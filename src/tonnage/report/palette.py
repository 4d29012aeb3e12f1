"""The colour, glyph and label of each category of memory, for all views.

The colours are those of Okabe and Ito ("Color Universal Design", https://jfly.uni-koeln.de/color/), which readers
with the usual kinds of colour blindness can tell apart, and a brown that keeps the same distance.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Look:
    """Name and appearance of one category."""

    label: str
    """Name in reports."""
    meaning: str
    """Description of its bytes for the legend."""
    colour: str
    """Colour as `#rrggbb`."""
    glyph: str
    """Character that fills the bar without colour."""
    letter: str
    """Character that fills the bar in ASCII."""


LOOKS: Final[dict[str, Look]] = {
    "parameter": Look(
        label="parameters", meaning="the model's weights and buffers", colour="#0072B2", glyph="█", letter="P"
    ),
    "gradient": Look(label="gradients", meaning="of the parameters", colour="#E69F00", glyph="▓", letter="G"),
    "optimizer_state": Look(
        label="optimizer states", meaning="moments and master weights", colour="#009E73", glyph="▒", letter="O"
    ),
    "kv_cache": Look(
        label="KV cache", meaning="keys and values of the tokens so far", colour="#F0E442", glyph="▤", letter="K"
    ),
    "activation": Look(label="activations", meaning="saved for backward", colour="#D55E00", glyph="░", letter="A"),
    "workspace": Look(
        label="workspace", meaning="temporaries, batches and library buffers", colour="#CC79A7", glyph="▚", letter="W"
    ),
    "communication": Look(
        label="communication", meaning="buffers of collectives", colour="#56B4E9", glyph="▞", letter="C"
    ),
    "cached": Look(
        label="cached", meaning="reserved by the allocator, unallocated", colour="#999999", glyph="╱", letter="-"
    ),
    "graphs": Look(
        label="CUDA graphs", meaning="captured graphs, outside the allocator", colour="#882255", glyph="▦", letter="E"
    ),
    "runtime": Look(
        label="runtime", meaning="CUDA context, loaded kernels, NCCL", colour="#8C6D46", glyph="▪", letter="R"
    ),
}
"""Categories in their order in a stacked bar."""

OTHERS: Final = Look(
    label="other processes", meaning="of the command, on the same card", colour="#4D4D4D", glyph="▧", letter="X"
)
"""Memory of other processes on the same card."""

FREE_GLYPH: Final = "·"
FREE_LETTER: Final = "."

PHASE_LETTERS: Final = {
    "load": "l",
    "forward": "f",
    "backward": "b",
    "recompute": "r",
    "optimizer": "o",
    "evaluate": "e",
    "generate": "g",
    "reference": "R",
    "save": "s",
    "merge": "m",
    "resume": "l",
    "other": " ",
}
"""Letter of each phase, for the strip under the timeline."""


def look(category: str) -> Look:
    """Return the look of a category; an unknown one (from a newer file) has its own name as label."""
    other = Look(label=category, meaning="", colour="#000000", glyph="?", letter="?")
    return LOOKS.get(category, other)
