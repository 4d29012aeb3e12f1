"""How a name that a person typed is compared with the names that exist: exactly, or as a suggestion."""

from collections.abc import Iterable


def normalise(name: str) -> str:
    """Lower case, with dashes for spaces and underscores; nothing else is forgiven."""
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def distance(left: str, right: str) -> int:
    """Levenshtein's distance: insertions, deletions and substitutions that turn one into the other."""
    previous = list(range(len(right) + 1))
    for row, letter in enumerate(left, start=1):
        current = [row]
        for column, other in enumerate(right, start=1):
            substituted = previous[column - 1] + (letter != other)
            current.append(min(previous[column] + 1, current[-1] + 1, substituted))
        previous = current
    return previous[-1]


def closest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """At most `limit` known names within half the length of `name`, nearest first.

    Names that begin alike come first among equals, because people misremember endings (`h100` for
    `h100-80gb`); a name of which the typed one is the beginning is always near.
    """
    typed = normalise(name)[:80]
    ranked = []
    for candidate in known:
        apart = 0 if typed and candidate.startswith(typed) else distance(typed, candidate)
        if apart <= max(1, len(typed) // 2):
            ranked.append((apart, candidate[:1] != typed[:1], candidate))
    return [candidate for _, _, candidate in sorted(ranked)[:limit]]
