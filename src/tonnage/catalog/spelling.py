"""Comparison of a name that a person typed with the names that exist: exactly, or to suggest close ones."""

from collections.abc import Iterable


def normalise(name: str) -> str:
    """Return the name in lower case, with dashes for spaces and underscores; nothing else is changed."""
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def squeeze(name: str) -> str:
    """Return the letters and digits of a name in lower case: `Llama-3.1-8B` and `llama3.1_8b` are equal."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def distance(left: str, right: str) -> int:
    """Return Levenshtein's distance: the insertions, deletions and substitutions that turn one into the other."""
    previous = list(range(len(right) + 1))
    for row, letter in enumerate(left, start=1):
        current = [row]
        for column, other in enumerate(right, start=1):
            substituted = previous[column - 1] + (letter != other)
            current.append(min(previous[column] + 1, current[-1] + 1, substituted))
        previous = current
    return previous[-1]


def closest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return at most `limit` known names whose distance is within half the length of `name`, nearest first.

    Among equally near names, those with the same first letter come first, because people misremember endings
    (`h100` for `h100-80gb`).  A name that starts with the typed one has distance 0.
    """
    typed = normalise(name)[:80]
    ranked = []
    for candidate in known:
        edits = 0 if typed and candidate.startswith(typed) else distance(typed, candidate)
        if edits <= max(1, len(typed) // 2):
            ranked.append((edits, candidate[:1] != typed[:1], candidate))
    return [candidate for _, _, candidate in sorted(ranked)[:limit]]
