"""The table of docs/reference/export.md: the values that each target has settings for.

    python -m tonnage.trainers.table [FILE]

prints it, or writes it into FILE between its two marks.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tonnage.job import Job
from tonnage.options import options, spell_option
from tonnage.plans import Plan
from tonnage.trainers.engine import ANY
from tonnage.trainers.targets import DECIDED, TARGETS, Target

BEGIN: Final = "<!-- python -m tonnage.trainers.table docs/reference/export.md -->"
END: Final = "<!-- end -->"

AT_MOST: Final = 4
"""The number of values up to which a cell lists them; of more it may list those that are missing."""


def table() -> str:
    """Return one line for each option that some target has a setting for, with one column for each target."""
    lines = [
        f"| option | {' | '.join(f'`{target.name}`' for target in TARGETS)} |",
        f"|---|{'---|' * len(TARGETS)}",
        *_rows(),
    ]
    return "\n".join(lines) + "\n"


def _rows() -> Iterator[str]:
    for kind in (Job, Plan):
        for item, option in options(kind):
            if item.name in DECIDED or not any(item.name in target.expresses for target in TARGETS):
                continue
            cells = [_cell(target, item.name, option.possible) for target in TARGETS]
            yield f"| `{spell_option(item.name)}` | {' | '.join(cells)} |"


def _cell(target: Target, name: str, possible: tuple[str, ...]) -> str:
    known = target.expresses.get(name)
    if known is None:
        return ""
    if known == ANY:
        return "any"
    missing = [value for value in possible if value not in known]
    if len(known) <= AT_MOST or len(missing) > len(known):
        return ", ".join(known)
    return "any" if not missing else f"any but {', '.join(missing)}"


def write(path: Path) -> None:
    """Replace the text between the marks of a page."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]))
    else:
        print(table(), end="")
