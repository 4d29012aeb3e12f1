"""Questions about serving, as the command line and Python ask them: the same checks, the same answers.

    ask_serving("llama-3.1-8b", {"max_len": 8192}, cluster).estimate.starts
    ask_plans("llama-3.1-70b", {"quantization": "fp8"}, cluster, concurrency=64).plans[0].settings

Options are given by name; None and False stand for one that was not given.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from tonnage.catalog.spelling import closest
from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.viewed import Viewed
from tonnage.options import check_number, is_amount, spell_option
from tonnage.serving.advice import ServingAdvice, advise
from tonnage.serving.answer import Serving
from tonnage.serving.built_weights import complete_weights
from tonnage.serving.closed_form import ServingEstimate, estimate_serving
from tonnage.serving.document import to_json
from tonnage.serving.extras import as_draft, with_draft
from tonnage.serving.lengths import parse_lengths
from tonnage.serving.load import Load, serve_load
from tonnage.serving.network import ServedNetwork, read_network
from tonnage.serving.option_names import find_serve_option
from tonnage.serving.planning import Question, ServeSolution, find_limit, plan_serving
from tonnage.serving.settings import ServeSettings
from tonnage.serving.tasks import is_given

SETTINGS: Final = tuple(item.name for item in fields(ServeSettings))
"""Names of the settings of an engine."""

USUAL_LENGTHS: Final = "p50=1000,p95=4000"
"""Lengths of requests for `plan` where none are stated."""

USUAL_CONCURRENCY: Final = 64
"""Requests at once for `plan` where none are stated."""

_SOUGHT: Final[Mapping[str, Mapping[str, str]]] = {
    "max-len": {"max_len": "what --max-len says", "concurrency": "the length of one request"},
    "max-concurrency": {"concurrency": "what --concurrency says"},
    "quantization": {"quantization": "what --quantization says"},
}
"""Options that cannot be stated beside a word of `--find`, and why."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingAnswer(Viewed):
    """The start of an engine, what would make it start, and what it makes of requests."""

    estimate: ServingEstimate
    advice: tuple[ServingAdvice, ...] = ()
    """Changes of settings, each computed; empty where the engine starts."""
    load: Load | None = None
    """Course of serving requests; None where no lengths were stated."""
    ran: Estimate | None = None
    """The answer of the engine itself, which was run; None: the closed form is the answer."""
    lacks: str | None = None
    """Why the closed form is the answer; None where the engine was not wanted, or was run."""

    @property
    def starts(self) -> bool:
        """Return True if the engine gets ready."""
        return self.serving.starts

    @property
    def serving(self) -> Serving:
        """Return the memory that the engine holds."""
        if self.ran is None or self.ran.serving is None:
            return self.estimate.serving
        return Serving(**{name: value for name, value in self.ran.serving.items() if name != "load"})

    def summary(self) -> str:
        """Return the answer in one line."""
        told = f"starts: {self.serving.kv_cache_tokens or 0:,} tokens" if self.starts else "does not start"
        return f"{self.estimate.network.name} on {self.estimate.cluster}: {told}"

    def to_json(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        load = None if self.load is None else self.load.to_json()
        if self.ran is not None:
            return {**self.ran.to_json(), "load": load}
        document = to_json(self.estimate, self.advice)
        if self.lacks is not None:
            document["coverage"]["assumed"].append(self.lacks)
        return {**document, "load": load}


def ask_serving(
    model: str,
    options: Mapping[str, Any],
    cluster: Cluster,
    *,
    lengths: str | None = None,
    concurrency: int | None = None,
    advice: bool = True,
    offline: bool = False,
) -> ServingAnswer:
    """Return whether an engine starts, and what it makes of requests of these `lengths`.

    Raises UsageError, CannotEstimate and their subclasses.
    """
    _check_requests(lengths, concurrency)
    if concurrency is not None and lengths is None:
        raise UsageError("--concurrency needs --lengths, such as p50=800,p95=6000.")
    requests = None if lengths is None else parse_lengths(lengths)
    settings = _settings(options)
    estimate = estimate_serving(read_served(model, settings, offline=offline), settings, cluster)
    load = serve_load(estimate, requests, concurrency) if requests is not None and estimate.starts else None
    changes = advise(estimate) if advice and not estimate.starts else ()
    return ServingAnswer(estimate=estimate, advice=changes, load=load)


def ask_plans(
    model: str,
    options: Mapping[str, Any],
    cluster: Cluster,
    *,
    lengths: str | None = None,
    concurrency: int | None = None,
    find: str | None = None,
    top: int = 4,
    price: float | None = None,
    offline: bool = False,
) -> ServeSolution:
    """Return the fastest ways to serve so many requests at once; options that are given are kept.

    Raises UsageError, CannotEstimate and their subclasses.
    """
    _check_requests(lengths, concurrency)
    check_number("top", top)
    if price is not None and not is_amount(price):
        raise UsageError(f"--price is {price!r}; it must be a number above 0.")
    settings = _settings(options)
    for name, sought in _SOUGHT.get(find or "", {}).items():
        if is_given({**options, "concurrency": concurrency}.get(name)):
            raise UsageError(f"--find {find} looks for {sought}; leave --{spell_option(name)} out.")
    question = Question(
        network=read_served(model, settings, offline=offline),
        cluster=cluster,
        lengths=parse_lengths(USUAL_LENGTHS if lengths is None else lengths),
        concurrency=USUAL_CONCURRENCY if concurrency is None else concurrency,
        stated=settings,
        fixed=frozenset(name for name, value in options.items() if is_given(value)),
        price=price,
    )
    return plan_serving(question, top=top) if find is None else find_limit(find, question, top=top)


def read_served(model: str, settings: ServeSettings, *, offline: bool = False) -> ServedNetwork:
    """Return the network that MODEL names, with the one that drafts for it, and all their weights."""
    draft = as_draft(settings.draft)
    network = complete_weights(read_network(model, offline=offline))
    return network if draft is None else with_draft(network, complete_weights(read_network(draft, offline=offline)))


def _check_requests(lengths: object, concurrency: object) -> None:
    if lengths is not None and not isinstance(lengths, str):
        raise UsageError(f"lengths are {lengths!r}; give a text such as 'p50=800,p95=6000', or a file's name.")
    if concurrency is not None:
        check_number("concurrency", concurrency)


def _settings(options: Mapping[str, Any]) -> ServeSettings:
    """Return the settings of options by name.  Raises UsageError for one that no engine has."""
    unknown = next((name for name in options if name not in SETTINGS), None)
    if unknown is not None:
        known, near = find_serve_option(unknown), closest(unknown, SETTINGS, limit=1)
        hint = f"; close: {near[0]}" if near else ""
        hint = f"; here it is {known.in_python}" if known is not None else hint
        raise UsageError(
            f"Unknown option {unknown!r} of --task serve{hint}; possible: {', '.join(sorted(SETTINGS))}."
        )
    return ServeSettings(**{name: value for name, value in options.items() if is_given(value)})
