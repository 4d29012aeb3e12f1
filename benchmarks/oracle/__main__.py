"""Ask a fixed set of questions of one version of the program, and compare the answers of two versions.

    python -m benchmarks.oracle list [--only PATTERN]
    python -m benchmarks.oracle record FOLDER [--source SRC] [--only PATTERN] [--jobs N]
    python -m benchmarks.oracle compare OLD NEW [--only PATTERN] [--most N]

`record` asks the package in SRC (default: this checkout's) and stores every answer in FOLDER, outside of the tree.
`compare` prints what differs, in two classes: VALUES (JSON values, numbers in texts, exit codes, files) and WORDING
(other words with the same numbers).  It ends with 1 where a value differs, else with 0.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.oracle.comparing import compare
from benchmarks.oracle.questions import chosen
from benchmarks.oracle.recording import record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing, recording, comparing = (verbs.add_parser(verb) for verb in ("list", "record", "compare"))
    for each in (listing, recording, comparing):
        each.add_argument("--only", metavar="PATTERN", help="questions with this in their name")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--source", type=Path, default=Path(__file__).parents[2] / "src")
    recording.add_argument("--jobs", type=int, default=1, help="questions that are asked at the same time")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--most", type=int, default=12, help="differing values to print for each question")
    options = parser.parse_args()
    try:
        if options.verb == "compare":
            return compare(options.old, options.new, options.only, most=options.most)
        questions = chosen(options.only)
        if options.verb == "record":
            record(questions, options.folder, options.source, options.jobs)
        else:
            print(*(f"{one.name:28} {'; '.join(one.commands)}" for one in questions), sep="\n")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
