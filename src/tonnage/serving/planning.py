"""The fastest way to serve a model on some GPUs that holds so many requests at once.

    solution = plan_serving(Question(network=..., cluster=..., lengths=..., concurrency=64))
    solution.plans[0].settings   # ServeSettings(tp=2, dp=2, ...)

Degrees, format of the weights and dtype of the KV cache are open unless they are stated.  All combinations are
computed in closed form.  Plans that keep the numbers (weights and KV cache as published) come first, then those
with fewer bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil
from typing import Any, Final, Literal, get_args

from tonnage.catalog.devices import device_names, find_device
from tonnage.cluster import GPUS_PER_NODE, Cluster
from tonnage.errors import CannotEstimate, UsageError
from tonnage.estimates.viewed import Viewed
from tonnage.options import unknown_word
from tonnage.serving.advice import LARGER_CARDS
from tonnage.serving.blocks import PagedEngine, Simulation, simulate
from tonnage.serving.cache_layers import read_layers
from tonnage.serving.closed_form import ServingEstimate, estimate_serving
from tonnage.serving.extras import has_adapters
from tonnage.serving.lengths import Lengths
from tonnage.serving.network import ServedNetwork
from tonnage.serving.quantization import describe_format
from tonnage.serving.settings import ServeSettings
from tonnage.serving.speed import ServingSpeed, held_requests, serving_speed
from tonnage.units import format_gib

ServeFind = Literal["max-len", "max-concurrency", "min-gpu", "min-gpus", "quantization"]
FINDS: Final[tuple[str, ...]] = get_args(ServeFind)
"""Words of `--find`."""

MOST_GPUS: Final = 64
"""Most GPUs that a search for their number tries."""

_MOST_TOGETHER: Final = 4096
"""Most requests that a search for their number lets an engine run together."""

_ROUNDING: Final = 1024
"""Multiple of tokens of a maximal length that nobody stated."""

_TAIL: Final = 6
"""Mean answers that a maximal length leaves room for: one of 400 geometric answers is longer."""

_SIMULATED: Final = 2000
"""Requests that the best plan is simulated with, at least."""

_FP8: Final = (8, 9)
"""Capability from which on tensor cores multiply fp8."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A network to serve, the GPUs, and how many requests at once."""

    network: ServedNetwork
    cluster: Cluster
    lengths: Lengths
    concurrency: int
    stated: ServeSettings = field(default_factory=ServeSettings)
    """Settings that are kept."""
    fixed: frozenset[str] = frozenset()
    """Names of the settings that were stated, also with their default values."""
    price: float | None = None
    """Price of an hour of one GPU."""
    remedied: bool = True
    """True to look for other GPUs where no plan holds the requests."""

    @property
    def max_len(self) -> int:
        """Return the maximal length: stated, or what the lengths need within what the model allows."""
        if self.stated.max_len is not None:
            return self.stated.max_len
        longest = max((sum(pair) for pair in self.lengths.stated), default=0)
        drawn = round(self.lengths.p95 * self.lengths.p95 / self.lengths.p50)  # about the 99.9th percentile
        needed = longest or min(max(drawn, self.lengths.p95), 4 * self.lengths.p95) + _TAIL * self.lengths.output
        rounded = ceil(needed / _ROUNDING) * _ROUNDING
        return min(rounded, self.network.max_positions or rounded)

    @property
    def refused(self) -> float:
        """Return the part of the prompts that an engine refuses: they leave no room for an answer."""
        return self.lengths.share_from(self.max_len)


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A choice of a plan, and what would be without it."""

    technique: str
    why: str
    saves_bytes: int | None
    costs_seconds: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the reason as the contract spells it."""
        return {
            "technique": self.technique,
            "why": self.why,
            "saves_bytes": self.saves_bytes,
            "costs_seconds": self.costs_seconds,
        }


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """One way to serve."""

    settings: ServeSettings
    estimate: ServingEstimate
    speed: ServingSpeed | None
    """None for a card or a network whose rates are not known."""
    held: int
    """Requests of these lengths that run together, over all replicas."""
    reasons: tuple[Reason, ...] = ()
    simulation: Simulation | None = None

    @property
    def name(self) -> str:
        """Return the plan in a few words."""
        words = [f"{name} {getattr(self.settings, name)}" for name in ("tp", "pp", "dp", "ep")]
        chosen = [word for word in words if not word.endswith(" 1")]
        weights = self.estimate.settings.quantization
        chosen.append(f"{describe_format(weights)} weights")
        chosen.append("fp8 KV cache" if self.estimate.settings.has_fp8_cache else "16-bit KV cache")
        if has_adapters(self.settings):
            chosen.append("adapters")
        if self.settings.draft is not None:
            chosen.append(f"{self.settings.draft_tokens} tokens drafted by {self.settings.draft}")
        return ", ".join(chosen)

    @property
    def loss(self) -> int:
        """Return how far the numbers are from the published ones: 0 as published, 1 with an fp8 KV cache, 2 with
        8-bit weights, 4 with 4-bit weights, and their sums."""
        weights = self.estimate.settings.quantization
        is_published = weights.name == self.estimate.network.published.name or weights.bits == 16
        return (0 if is_published else 2 if weights.bits == 8 else 4) + self.settings.kv_dtype.startswith("fp8")

    @property
    def keeps_numbers(self) -> bool:
        """Return True if weights, keys and values are as published."""
        return self.loss == 0

    def cost_per_million(self, price: float | None) -> float | None:
        """Return what a million tokens of answers cost at a price of a GPU's hour."""
        if price is None or self.speed is None or not self.speed.output_tokens_per_second:
            return None
        return price * self.estimate.cluster.gpus * 1e6 / (3600 * self.speed.output_tokens_per_second)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of the question that has a plan."""

    change: dict[str, Any]
    """`gpu` or `concurrency`, with the new value."""
    plan: ServePlan
    price: float | None
    """Price of an hour of all its GPUs; None if none was stated, or the card is another."""

    def to_json(self) -> dict[str, Any]:
        """Return the remedy as a document."""
        return {"change": self.change, "plan": self.plan.name, "concurrency": self.plan.held, "price": self.price}


@dataclass(frozen=True, kw_only=True, repr=False)
class ServeSolution(Viewed):
    """Plans, best first, and what was refused."""

    question: Question
    status: str
    """`found`, or `too_large` where none holds the requests."""
    plans: tuple[ServePlan, ...]
    refused: tuple[dict[str, str], ...]
    nearest: ServePlan | None = None
    """Where none holds the requests: the plan that holds most of them, or the one closest to a start."""
    remedies: tuple[Remedy, ...] = ()
    """Other GPUs, or fewer requests, with which it would serve."""
    found: str | None = None
    """The limit that `--find` found, such as `max-len 65536`."""

    def summary(self) -> str:
        """Return the answer in one line."""
        best = f"; the best: {self.plans[0].name}" if self.plans else ""
        return f"{self.question.network.name} on {self.question.cluster}: {self.status}{best}"

    def to_json(self) -> dict[str, Any]:
        """Return the document that `--json` prints, best plan first."""
        from tonnage.serving.document import solution_to_json

        return solution_to_json(self)


def plan_serving(question: Question, *, top: int = 4) -> ServeSolution:
    """Return the plans that hold the requests, fastest first among those that keep the numbers."""
    tried, refused = _try_all(question)
    holding = [plan for plan in tried if plan.estimate.starts and plan.held >= question.concurrency]
    if not holding:
        return _too_large(question, tried, refused)
    ordered = sorted(holding, key=_rank)
    shown = _distinct(ordered, top)
    best = _explained(question, shown[0])
    return ServeSolution(question=question, status="found", plans=(best, *shown[1:]), refused=refused)


def _too_large(question: Question, tried: list[ServePlan], refused: tuple[dict[str, str], ...]) -> ServeSolution:
    """Return the answer where no plan holds the requests, with what would."""
    starting = [plan for plan in tried if plan.estimate.starts]
    best = max(starting, key=lambda plan: plan.held) if starting else min(tried, key=_distance, default=None)
    remedies = tuple(_remedies(question, best)) if question.remedied else ()
    return ServeSolution(
        question=question, status="too_large", plans=(), refused=refused, nearest=best, remedies=remedies
    )


def _remedies(question: Question, nearest: ServePlan | None) -> Iterator[Remedy]:
    """Yield fewer requests, more of the same GPUs, and larger ones, each the first that has a plan."""
    alone = replace(question, remedied=False)
    if nearest is not None and nearest.held:
        yield Remedy(change={"concurrency": nearest.held}, plan=nearest, price=_price(question, question.cluster))
    for variants in (_more, _larger):
        for cluster in variants(question.cluster):
            answer = plan_serving(replace(alone, cluster=cluster), top=1)
            if answer.plans:
                price = _price(question, cluster)
                yield Remedy(change={"gpu": f"{cluster}"}, plan=answer.plans[0], price=price)
                break


def _price(question: Question, cluster: Cluster) -> float | None:
    """Return the price of an hour of a cluster of the same cards."""
    if question.price is None or cluster.device.id != question.cluster.device.id:
        return None
    return question.price * cluster.gpus


def _more(cluster: Cluster) -> Iterator[Cluster]:
    gpus = 2 * cluster.gpus
    while gpus <= MOST_GPUS:
        per_node = min(gpus, GPUS_PER_NODE)
        yield replace(cluster, gpus_per_node=per_node, nodes=gpus // per_node)
        gpus *= 2


def _larger(cluster: Cluster) -> Iterator[Cluster]:
    for name in LARGER_CARDS:
        device = find_device(name)
        if device.capacity_bytes > cluster.device.capacity_bytes:
            yield replace(cluster, device=device, network_bytes_per_second=None)


def find_limit(find: str, question: Question, *, top: int = 4) -> ServeSolution:
    """Return the plans at a limit: the longest request, the most requests, the smallest or fewest GPUs, the format.

    Raises UsageError for an unknown word of `--find`.
    """
    if find not in FINDS:
        raise unknown_word("find", find, FINDS)
    if find == "max-len":
        return _longest(question, top)
    if find == "max-concurrency":
        return _most_together(question, top)
    variants = {"min-gpu": _cards, "min-gpus": _counts, "quantization": _formats}[find](question)
    last = None
    for words, variant in variants:
        last = plan_serving(replace(variant, remedied=False), top=top)
        if last.status == "found":
            return replace(last, found=words)
    assert last is not None
    return last


def _rank(plan: ServePlan) -> tuple[int, float]:
    speed = plan.speed.output_tokens_per_second if plan.speed is not None else float(plan.held)
    return plan.loss, -speed


def _distance(plan: ServePlan) -> int:
    return plan.estimate.request_bytes - plan.estimate.worst.pool_bytes


def _distinct(ordered: list[ServePlan], top: int) -> list[ServePlan]:
    """Return the best plan, the fastest of each further loss, and then the next best ones."""
    firsts = [next(plan for plan in ordered if plan.loss == loss) for loss in sorted({p.loss for p in ordered})]
    rest = [plan for plan in ordered if plan not in firsts]
    return [firsts[0], *sorted([*firsts[1:top], *rest[: max(0, top - len(firsts))]], key=_rank)]


def _try_all(question: Question) -> tuple[list[ServePlan], tuple[dict[str, str], ...]]:
    """Return all combinations that can be computed, and why others cannot."""
    tried, refused = [], {}
    for settings in candidates(question):
        try:
            tried.append(evaluate(question, settings))
        except UsageError as error:
            refused[str(error)] = {"candidate": _short(settings), "why": str(error)}
    if not tried and refused:
        raise UsageError(next(iter(refused)))
    return tried, tuple(refused.values())


def _short(settings: ServeSettings) -> str:
    return f"tp {settings.tp}, dp {settings.dp}, {settings.quantization or 'as published'}"


def candidates(question: Question) -> Iterator[ServeSettings]:
    """Yield the settings to compute: every degree, format and dtype that is open."""
    stated, gpus, device = question.stated, question.cluster.gpus, question.cluster.device
    has_fp8 = device.capability >= _FP8
    formats: list[str | None] = [stated.quantization]
    if "quantization" not in question.fixed and question.network.published.bits == 16:
        formats += [*(["fp8"] if has_fp8 else []), "awq-int4"]
    dtypes = [stated.kv_dtype]
    keeps_tokens = any(layer.token_bytes for layer in read_layers(question.network.config, element_bytes=2))
    if "kv_dtype" not in question.fixed and has_fp8 and keeps_tokens and not question.network.has_fp8_cache:
        dtypes.append("fp8")
    for (tp, pp, dp), quantization, kv_dtype in product(_degrees(question, gpus), formats, dtypes):
        together = ceil(question.concurrency / dp)
        changes: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "quantization": quantization, "kv_dtype": kv_dtype}
        if stated.max_seqs is None:
            changes["max_seqs"] = min(together, _MOST_TOGETHER)
        yield stated.changed(**changes, max_len=question.max_len)


def _degrees(question: Question, gpus: int) -> Iterator[tuple[int, int, int]]:
    stated, per_node = question.stated, question.cluster.gpus_per_node
    tps = [stated.tp] if "tp" in question.fixed else [tp for tp in (1, 2, 4, 8) if tp <= per_node]
    pps = [stated.pp] if "pp" in question.fixed else sorted({1, question.cluster.nodes})
    for tp, pp in product(tps, pps):
        if pp > 1 and tp < per_node and "pp" not in question.fixed:
            continue  # stages pay where a machine is full
        if gpus % (tp * pp):
            continue
        dp = stated.dp if "dp" in question.fixed else gpus // (tp * pp)
        yield tp, pp, dp


def evaluate(question: Question, settings: ServeSettings) -> ServePlan:
    """Return the plan of these settings.  Raises UsageError for settings that cannot be."""
    estimate = estimate_serving(question.network, settings, question.cluster)
    if not estimate.starts or estimate.longest < estimate.settings.max_len:
        return ServePlan(settings=settings, estimate=estimate, speed=None, held=0)
    per_replica = min(float(estimate.settings.max_seqs), held_requests(estimate, question.lengths))
    try:
        speed = serving_speed(estimate, question.lengths, question.concurrency)
    except CannotEstimate:
        speed = None
    return ServePlan(settings=settings, estimate=estimate, speed=speed, held=int(settings.dp * per_replica))


def _explained(question: Question, plan: ServePlan) -> ServePlan:
    """Return the best plan with the reasons for its choices, and simulated with requests of these lengths."""
    reasons = list(_reasons(question, plan))
    return replace(plan, reasons=tuple(reasons), simulation=simulated(question, plan))


def _reasons(question: Question, plan: ServePlan) -> Iterator[Reason]:
    alternatives: list[tuple[str, dict[str, Any]]] = []
    if plan.settings.tp > 1:
        half = plan.settings.tp // 2
        change = {"tp": half, "dp": question.cluster.gpus // (half * plan.settings.pp)}
        alternatives.append((f"tp {plan.settings.tp}", change))
    if plan.settings.dp > 1 and 2 * plan.settings.tp <= question.cluster.gpus_per_node:
        change = {"tp": 2 * plan.settings.tp, "dp": plan.settings.dp // 2}
        alternatives.append((f"dp {plan.settings.dp}", change))
    if plan.settings.quantization not in (None, "none"):
        alternatives.append((f"{plan.settings.quantization} weights", {"quantization": None}))
    if plan.settings.kv_dtype.startswith("fp8"):
        alternatives.append(("fp8 KV cache", {"kv_dtype": "auto"}))
    for technique, change in alternatives:
        if "dp" in change and plan.settings.max_seqs is not None:
            change["max_seqs"] = ceil(question.concurrency / change["dp"])
        try:
            other = evaluate(question, plan.settings.changed(**change))
        except (UsageError, CannotEstimate):
            continue
        words = ", ".join(_spell(name, value) for name, value in change.items() if name != "max_seqs")
        saved = other.estimate.worst.weights_bytes - plan.estimate.worst.weights_bytes
        if not other.estimate.starts:
            yield Reason(
                technique=technique,
                why=f"with {words} it does not start: {other.estimate.serving.error}",
                saves_bytes=max(0, saved),
                costs_seconds=None,
            )
        elif other.held < question.concurrency:
            yield Reason(
                technique=technique,
                why=f"with {words} only {other.held} of {question.concurrency} requests run together",
                saves_bytes=max(0, saved),
                costs_seconds=None,
            )
        elif plan.speed is not None and other.speed is not None:
            yield Reason(
                technique=technique,
                why=f"with {words} {other.speed.output_tokens_per_second:,.0f} tokens/s",
                saves_bytes=max(0, saved),
                costs_seconds=plan.speed.token_seconds - other.speed.token_seconds,
            )


def _spell(name: str, value: Any) -> str:
    """Return a changed setting in words."""
    known = {"quantization": "weights as published", "kv_dtype": "a 16-bit KV cache"}
    return known.get(name, f"{name} {value}")


def simulated(question: Question, plan: ServePlan) -> Simulation | None:
    """Return the course of one replica's scheduler under requests of these lengths that are always there."""
    estimate = plan.estimate
    layout = estimate.worst.layout
    if len(layout.groups) != 1 or layout.groups[0].kind != "full":
        return None  # layers that keep a window or a state hold fewer blocks than the simulator counts
    count = max(_SIMULATED, 20 * estimate.settings.max_seqs)
    lengths = replace(question.lengths, rate=None)
    if plan.settings.no_prefix_caching:
        lengths = replace(lengths, prefix=0)
    requests = lengths.draw(count, most=estimate.settings.max_len)
    step = plan.speed.step_seconds / plan.speed.tokens_per_step if plan.speed is not None else 0.02
    engine = PagedEngine(
        blocks=estimate.pool.blocks,
        block_tokens=layout.block_tokens,
        max_seqs=min(estimate.settings.max_seqs, ceil(question.concurrency / plan.settings.dp)),
        batched_tokens=estimate.settings.max_batched_tokens,
        caches=estimate.settings.engine.name == "vllm" and not plan.settings.no_prefix_caching,
        step_seconds=step,
    )
    return simulate(requests, engine)


def _longest(question: Question, top: int) -> ServeSolution:
    """Return the plan with the longest request that one replica holds."""
    most = question.network.max_positions
    if most is None:
        raise UsageError("The configuration states no longest request; give --max-len instead of --find max-len.")
    wide = replace(question, stated=question.stated.changed(max_len=most), concurrency=1)
    tried, refused = _try_all(wide)
    best = max(tried, key=lambda plan: (plan.estimate.longest, plan.keeps_numbers, -plan.settings.tp))
    kept = max((plan for plan in tried if plan.keeps_numbers), key=lambda plan: plan.estimate.longest, default=best)
    chosen = [plan.estimate.longest for plan in (kept, best)]
    if not max(chosen):
        return _too_large(wide, tried, refused)
    length = chosen[0] or chosen[1]
    answer = plan_serving(replace(wide, stated=wide.stated.changed(max_len=length)), top=top)
    return replace(answer, found=f"max-len {length}")


def _most_together(question: Question, top: int) -> ServeSolution:
    """Return the plan that holds most requests of these lengths, among those that keep the numbers if any starts."""
    one = replace(question, concurrency=1)
    tried, _ = _try_all(one)
    starting = [plan for plan in tried if plan.estimate.starts]
    if not starting:
        return plan_serving(one, top=top)
    least = min(plan.loss for plan in starting)
    most = max(_count_held(question, plan) for plan in starting if plan.loss == least)
    answer = plan_serving(replace(question, concurrency=most), top=top)
    return replace(answer, found=f"max-concurrency {most}")


def _count_held(question: Question, plan: ServePlan) -> int:
    """Return the most requests that settings hold where the engine may run as many; its sampler needs more then."""
    low, high = 0, _MOST_TOGETHER * plan.settings.dp
    while low < high:
        middle = (low + high + 1) // 2
        settings = plan.settings
        if question.stated.max_seqs is None:
            settings = settings.changed(max_seqs=ceil(middle / settings.dp))
        holds = evaluate(replace(question, concurrency=middle), settings).held >= middle
        low, high = (middle, high) if holds else (low, middle - 1)
    return low


Variant = tuple[str, Question]


def _cards(question: Question) -> Iterator[Variant]:
    cards = sorted(map(find_device, device_names()), key=lambda device: device.capacity_bytes)
    for device in cards:
        cluster = replace(question.cluster, device=device, network_bytes_per_second=None)
        yield f"min-gpu {device.id} ({format_gib(device.capacity_bytes)})", replace(question, cluster=cluster)


def _counts(question: Question) -> Iterator[Variant]:
    gpus = 1
    while gpus <= MOST_GPUS:
        per_node = min(gpus, GPUS_PER_NODE)
        cluster = replace(question.cluster, gpus_per_node=per_node, nodes=gpus // per_node)
        yield f"min-gpus {gpus}", replace(question, cluster=cluster)
        gpus *= 2


def _formats(question: Question) -> Iterator[Variant]:
    has_fp8 = question.cluster.device.capability >= _FP8
    others = ["fp8" if has_fp8 else "int8", "awq-int4"] if question.network.published.bits == 16 else []
    for name in (None, *others):
        stated = question.stated.changed(quantization=name)
        words = question.network.published.name if name is None else name
        yield (
            f"quantization {words}",
            replace(question, stated=stated, fixed=question.fixed | {"quantization", "kv_dtype"}),
        )
