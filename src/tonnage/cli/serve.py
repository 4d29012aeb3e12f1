"""`tonnage estimate MODEL --task serve`: will an inference engine start, and how much does it hold."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.serving.settings import ServeSettings


def estimate_serve(
    model: str, settings: "ServeSettings", cluster: "Cluster", *, advice: bool, json: bool, offline: bool
) -> int:
    """Print the answer and return the exit code: 0 starts, 1 does not."""
    from tonnage.cli import answer
    from tonnage.serving.advice import advise
    from tonnage.serving.closed_form import estimate_serving
    from tonnage.serving.document import to_json
    from tonnage.serving.network import read_network

    estimate = estimate_serving(read_network(model, offline=offline), settings, cluster)
    changes = advise(estimate) if advice and not estimate.starts else ()
    if json:
        answer.print_json(to_json(estimate, changes))
    else:
        from tonnage.report.serving import render

        view = render(estimate, changes, width=answer.width(), colour=answer.colour(), unicode=answer.unicode())
        answer.emit(view)
    return 0 if estimate.starts else 1
