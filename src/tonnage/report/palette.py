"""How each category of memory looks, the same in every view.

The colours are those of Okabe and Ito ("Color Universal Design", https://jfly.uni-koeln.de/color/), which readers
with the usual kinds of colour blindness can tell apart, and a brown that keeps the same distance.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Look:
    """One category: its name for people, and how it is drawn."""

    label: str
    """What the reader calls it."""
    meaning: str
    """What is counted here, for a legend that explains itself."""
    colour: str
    """`#rrggbb`."""
    glyph: str
    """Fills the bar where there is no colour."""
    letter: str
    """Fills the bar where there is only ASCII."""


LOOKS: Final[dict[str, Look]] = {
    "parameter": Look(
        label="parameters", meaning="the model's weights and buffers", colour="#0072B2", glyph="█", letter="P"
    ),
    "gradient": Look(label="gradients", meaning="of the parameters", colour="#E69F00", glyph="▓", letter="G"),
    "optimizer_state": Look(
        label="optimizer states", meaning="moments and master weights", colour="#009E73", glyph="▒", letter="O"
    ),
    "activation": Look(label="activations", meaning="saved for backward", colour="#D55E00", glyph="░", letter="A"),
    "workspace": Look(
        label="workspace", meaning="temporaries, batches and library buffers", colour="#CC79A7", glyph="▚", letter="W"
    ),
    "communication": Look(
        label="communication", meaning="buffers of collectives", colour="#56B4E9", glyph="▞", letter="C"
    ),
    "cached": Look(
        label="cached", meaning="reserved by the allocator, not handed out", colour="#999999", glyph="╱", letter="-"
    ),
    "runtime": Look(
        label="runtime", meaning="CUDA context, loaded kernels, NCCL", colour="#8C6D46", glyph="▪", letter="R"
    ),
}
"""In the order in which they are stacked."""

OTHERS: Final = Look(
    label="other processes", meaning="of the command, on the same card", colour="#4D4D4D", glyph="▧", letter="X"
)
"""What is no category of the process's own."""

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
    "save": "s",
    "resume": "l",
    "other": " ",
}
"""One letter a phase, for the strip under the timeline."""


def look(category: str) -> Look:
    """The look of a category; one that is not known (from a newer file) shows under its own name."""
    other = Look(label=category, meaning="", colour="#000000", glyph="?", letter="?")
    return LOOKS.get(category, other)
