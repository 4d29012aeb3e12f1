"""`tonnage report FILE`: shows a file of `--save` again, without torch and on any machine."""

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
    """Show an estimate that was saved with --save; nothing is run, and no code in the file is executed.

    Example: tonnage report step.tonnage --html step.html
    """
    from tonnage.cli.answer import Output, deliver
    from tonnage.errors import UnreadableFile
    from tonnage.estimates import archive

    wanted = Output(json=json, html=html, snapshot=snapshot)
    wanted.check(force=force)
    estimate = archive.load_estimate(file)
    wanted.check_card(str(estimate.cluster.get("gpu")))

    def traces() -> "list[Trace]":
        own_first = sorted(archive.load_traces(file), key=lambda trace: trace.rank != estimate.rank)
        if not own_first:
            raise UnreadableFile(f"{file} has no trace for a snapshot; make the file again with --save.")
        return own_first

    return deliver(estimate, traces, wanted)
