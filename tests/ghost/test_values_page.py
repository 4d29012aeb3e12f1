"""The page on values names every assumption in the words of the report."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
VALUES = ROOT / "src" / "tonnage" / "ghost" / "inside" / "tonnage_inside" / "values" / "policy.py"


def assumptions() -> dict[str, str]:
    """ASSUMED of policy.py, read without importing it: it belongs into a ghost's process."""
    for node in ast.parse(VALUES.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ASSUMED":
            found = ast.literal_eval(node.value)
            assert isinstance(found, dict)
            return found
    raise LookupError("policy.py has no ASSUMED")


def test_every_assumption_is_on_the_page() -> None:
    page = (ROOT / "docs" / "explanation" / "values.md").read_text()
    assert [name for name, text in assumptions().items() if f"| `{name}` | {text} |" not in page] == []


def test_every_assumption_is_made_somewhere() -> None:
    code = "".join(path.read_text() for path in VALUES.parents[1].rglob("*.py"))
    assert [name for name in assumptions() if f'use("{name}")' not in code] == []
