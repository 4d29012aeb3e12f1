"""Random jobs under random plans, asked in several ways that must give the same answer.

    python -m benchmarks.sweep [--seed N] [--first N] [--cases N] [--only WAY ...] [--network NAME ...]
                               [--layers N ...] [--engine NAME]

Each case is three optimizer steps, made one by one on a ghost, beside the ways of `ways.py`.  Prints what differs,
with the case's number, which makes it again (`--seed 4 --first 13 --cases 1` for 4-13, with the same networks, layers
and installed packages), and how many cases were asked in each way.  What trainers, PEFT or torch do not take fails
with their words; those are to be read.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # their tiny networks

from benchmarks.sweep.cases import LAYERS, case
from benchmarks.sweep.ways import WAYS, Asking, of_engine, tell


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS))
    parser.add_argument("--network", nargs="+", default=())
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--engine")
    said = parser.parse_args()
    asking, differed = Asking(), Counter[str]()
    for number in range(said.first, said.first + said.cases):
        one = case(f"{said.seed}-{number}", said.network, said.layers, said.engine)
        for way, problems in tell(asking, one, tuple(said.only or of_engine(one.plan))):
            asking.asked[way] += 1
            if problems:
                differed[way] += 1
                print(f"{way}: {one}", *(f"    {line}" for line in problems[:8]), sep="\n", flush=True)
    asking.worker.close()
    print(f"asked {dict(asking.asked)}", f"differed {dict(differed)}", sep="\n")


if __name__ == "__main__":
    main()
