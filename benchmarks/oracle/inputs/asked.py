"""Answers Python expressions such as `estimate("gpt2", gpu="t4", seq_len=512)`, all in one process.

    python asked.py CASES.json

The file maps the name of each case to its expression.  Prints one JSON document with the answer of each case, or with
the class and the message of the error.  All estimates run on one warm worker.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import tonnage


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with tonnage.Worker(wait=False) as worker:
        names = {
            "estimate": functools.partial(tonnage.estimate, offline=True, worker=worker),
            "plan": functools.partial(tonnage.plan, offline=True),
            **{name: getattr(tonnage, name) for name in ("Job", "Plan")},
        }
        print(json.dumps({name: answered(expression, names) for name, expression in cases.items()}))


def answered(expression: str, names: dict[str, Any]) -> Any:
    """Return the answer as its JSON document, or the error."""
    try:
        return eval(expression, dict(names)).to_json()
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    main()
