"""`tonnage cache`: show, limit and clear what tonnage keeps on disk."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from tonnage.cli.options import Json

if TYPE_CHECKING:
    from tonnage.estimates.disk import Part

_ACTIONS: Final = ("show", "clear", "limit")
_USUALLY_CLEARED: Final = ("traces", "compiled")
"""Parts that `clear` removes without a name: those that need no download to come back."""


def cache(
    action: Annotated[
        str,
        typer.Argument(
            help="show: the sizes. clear: remove a part (WHAT: traces, compiled, torch or all; without it traces and "
            "compiled, which need no download to come back). limit: most bytes of traces (WHAT: 5GiB).",
            metavar="ACTION",
        ),
    ] = "show",
    what: Annotated[
        str | None, typer.Argument(help="The part to clear, or the limit to set.", metavar="WHAT")
    ] = None,
    json: Json = False,
) -> int:
    """Show, limit or clear what tonnage keeps on disk: builds of torch, traces, compiled kernels.

    Example: tonnage cache clear traces
    """
    from tonnage.cli.answer import emit, print_json
    from tonnage.errors import UsageError
    from tonnage.estimates import cache as traces
    from tonnage.estimates import disk
    from tonnage.ghost.cache_folder import cache_folder
    from tonnage.units import format_size, parse_bytes

    if action not in _ACTIONS:
        raise UsageError(f"Unknown action {action!r}; possible: {', '.join(_ACTIONS)}.")
    if action == "show" and what is not None:
        raise UsageError(f"show has no {what!r}; leave it out.")
    cleared = 0
    if action == "clear":
        cleared = disk.clear(_parts_to_clear(what))
    elif action == "limit" and what is not None:
        traces.set_limit(parse_bytes(what))
    parts = disk.list_parts()
    if json:
        print_json(
            {
                "schema_version": 1,
                "folder": str(cache_folder()),
                "bytes": sum(part.bytes for part in parts),
                "cleared_bytes": cleared,
                "parts": [vars(part) for part in parts],
            }
        )
    elif action == "clear":
        emit(f"cleared {format_size(cleared)}; {format_size(sum(part.bytes for part in parts))} are kept\n")
    else:
        emit(_table(parts, str(cache_folder())))
    return 0


def _parts_to_clear(what: str | None) -> tuple[str, ...]:
    """Return the parts that a word means.  Raises UsageError."""
    from tonnage.errors import UsageError
    from tonnage.estimates.disk import PARTS

    if what is None:
        return _USUALLY_CLEARED
    if what == "all":
        return tuple(PARTS)
    if what not in PARTS:
        raise UsageError(f"Unknown part {what!r}; possible: {', '.join(PARTS)}, all.")
    return (what,)


def _table(parts: "tuple[Part, ...]", folder: str) -> str:
    from tonnage.cli.table import table
    from tonnage.estimates.disk import PARTS
    from tonnage.units import format_size

    rows = [
        (
            part.name,
            format_size(part.bytes),
            "-" if part.limit_bytes is None else format_size(part.limit_bytes),
            f"{part.entries:,}",
            PARTS[part.name],
        )
        for part in parts
    ]
    rows.append(("", format_size(sum(part.bytes for part in parts)), "", "", f"in {folder}"))
    return table(("part", "size", "limit", "entries", "what"), rows, numbers=(1, 2, 3))
