"""What others measured on real GPUs, beside what the ghost says of the same step.

    python -m benchmarks.accuracy [--source NAME] [--json FILE [--resume]] > table.md

The rows are in measurements/published, each with its source; docs/reference/accuracy.md says what is in and what is
not.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.accuracy.rows import load
from benchmarks.accuracy.runner import Predicted, predict
from benchmarks.accuracy.table import markdown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="only sources whose name contains this")
    parser.add_argument("--json", type=Path, help="also write each row with its prediction, a JSON line a row")
    parser.add_argument("--resume", action="store_true", help="take the predictions that the file of --json has")
    parser.add_argument("--at-once", type=int, help="jobs at a time; default: one a core; 0: none, only --resume")
    parser.add_argument(
        "--torch",
        help="another torch than the installed one: its version, or a folder with it, of any age (./torch251)",
    )
    options = parser.parse_args()
    rows = load()
    chosen = [row for row in rows if (options.source or "").lower() in row.source.lower()]
    if not chosen:
        print(
            f"no source {options.source!r}; there are: {', '.join(sorted({r.source for r in rows}))}", file=sys.stderr
        )
        return 2
    known = _predictions(options.json) if options.resume and options.json and options.json.exists() else {}
    rest = [row for row in chosen if (row.source, row.name) not in known]
    if options.at_once != 0 and rest:
        made = predict(rest, lambda text: print(text, file=sys.stderr, flush=True), options.at_once, options.torch)
        known |= {(row.source, row.name): predicted for row, predicted in made}
    answers = [(row, known[row.source, row.name]) for row in chosen if (row.source, row.name) in known]
    print(markdown(answers))
    if options.json:
        lines = (json.dumps({**asdict(row), "predicted": predicted}) for row, predicted in answers)
        options.json.write_text("".join(f"{line}\n" for line in lines))
    return 0


def _predictions(path: Path) -> dict[tuple[str, str], Predicted]:
    """What an earlier run wrote, by source and name; errors are tried again."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return {(line["source"], line["name"]): line["predicted"] for line in lines if "error" not in line["predicted"]}


if __name__ == "__main__":
    sys.exit(main())
