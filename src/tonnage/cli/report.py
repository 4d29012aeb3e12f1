"""`tonnage report FILE`: what `--save` kept, shown again; without torch, on any machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli.options import Force, Html, Json, Snapshot, in_panels

if TYPE_CHECKING:
    from tonnage.trace.trace import Trace


@in_panels
def report(
    file: Annotated[Path, typer.Argument(help="A file written by --save.", metavar="FILE")],
    json: Json = False,
    html: Html = None,
    snapshot: Snapshot = None,
    force: Force = False,
) -> int:
    """Show an estimate that was saved with --save; nothing is run, and nothing in the file is executed."""
    from tonnage.cli.answer import Wanted, deliver
    from tonnage.errors import UnreadableFile
    from tonnage.estimates import archive as saved

    wanted = Wanted(json=json, html=html, snapshot=snapshot)
    wanted.check(force=force)
    estimate = saved.load_estimate(file)
    wanted.check_card(str(estimate.cluster.get("gpu")))

    def traces() -> "list[Trace]":
        found = sorted(saved.load_traces(file), key=lambda trace: trace.rank != estimate.rank)
        if not found:
            raise UnreadableFile(f"{file} holds no trace to make a snapshot of; save it again with --save.")
        return found

    return deliver(estimate, traces, wanted)
