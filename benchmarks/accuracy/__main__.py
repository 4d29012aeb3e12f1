"""What others measured on real GPUs, beside what the ghost says of the same step.

    python -m benchmarks.accuracy [--source NAME] [--json FILE] > table.md

The rows are in measurements/published, each with its source; docs/accuracy.md says what is in and what is not.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.accuracy.rows import load
from benchmarks.accuracy.runner import predict
from benchmarks.accuracy.table import markdown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="only sources whose name contains this")
    parser.add_argument("--json", type=Path, help="also write each row with its prediction, a JSON line a row")
    options = parser.parse_args()
    rows = load()
    chosen = [row for row in rows if (options.source or "").lower() in row.source.lower()]
    if not chosen:
        print(
            f"no source {options.source!r}; there are: {', '.join(sorted({r.source for r in rows}))}", file=sys.stderr
        )
        return 2
    answers = predict(chosen, lambda text: print(text, file=sys.stderr, flush=True))
    print(markdown(answers))
    if options.json:
        lines = (json.dumps({**asdict(row), "predicted": predicted}) for row, predicted in answers)
        options.json.write_text("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
