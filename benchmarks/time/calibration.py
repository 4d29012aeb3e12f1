"""Which numbers of each Software are calibrated, on which rows, from which first guesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import sqrt

from benchmarks.time.fit import PRIOR, errors, fit, quantile
from benchmarks.time.rows import Row

from tonnage.timing.software import Software

MOST_ROWS = 240
"""Rows of one calibration: of more, every second, third, ... is taken."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How one Software is calibrated."""

    start: Software
    """The first guess, which also says what is not calibrated."""
    names: tuple[str, ...]
    """The fields that are."""
    takes: Callable[[Row], bool] = lambda row: True
    """Which rows of its own it is calibrated on."""
    weight: Callable[[Row], float] = lambda row: 1.0
    """How much a row counts."""
    prior: float = PRIOR
    """What a field's doubling must be worth: the more, the less the networks tell of the fields."""
    of_experts: tuple[str, ...] = ()
    """The fields that are calibrated afterwards on networks with experts, which count by the root of their rows: rows
    of one network repeat each other, but two are not worth as much as thirty.  gpt-oss is only judged: what its
    experts' biases take in one kernel is not known."""
    experts_prior: float = PRIOR
    """The prior of these."""
    rows: str
    """In words."""


def _fast(row: Row) -> float:
    """Layouts that somebody might want count more: in proportion to the utilisation, up to 15 %."""
    return min(max(row.raw.get("mfu") or _utilisation(row), 0.5), 15.0) / 15.0


def _utilisation(row: Row) -> float:
    """Percent of the card's bf16 peak by the usual count."""
    from tonnage.timing.timing import model_flops

    peak = row.cluster.device.peak_flops.bf16 or 1.0
    return 100 * model_flops(row.shape, row.work) / row.seconds / row.cluster.gpus / peak


CALIBRATIONS = {
    "eager": Calibration(
        start=Software(
            name="eager", capabilities=("9.0",), stops_early=True, kernel_seconds=2.5e-5,
            near_part=0.83, far_part=0.8, data_far_hop_seconds=5.24e-5, data_overlap=0.7,
            matmul_factor=1.05, attention_factor=1.07,  # of kernels (kinds.py), and 3 to 5 % of a step between them
            memory_factor=1.7, again_seconds=1.5e-3,
            compiled_call_seconds=6.6e-4,  # SmolLM2 360M, compiled (measurements/h200-2026-11-26b.jsonl)
        ),
        names=("kernel_seconds", "memory_factor", "again_seconds"),
        takes=lambda row: row.source == "own H200" and not row.shape.experts,
        of_experts=("expert_factor",),
        rows=(
            "steps of our own H200 (measurements/h200-2026-11-20.jsonl), products and attention its kernels'; "
            "exchanges as the other codes'"
        ),
    ),
    "megatron-deepspeed": Calibration(
        start=Software(
            name="megatron-deepspeed", capabilities=("8.0",), most_gpus=512, fused=True, kernel_seconds=5e-5,
            data_overlap=0.05,
        ),
        names=("kernel_seconds", "matmul_factor", "memory_factor", "call_seconds", "near_part", "far_part"),
        takes=lambda row: row.source.startswith("vTrain"),
        rows="vTrain's steps of GPTs on 1 to 64 machines with 8 A100",
    ),
    "llm-foundry": Calibration(
        start=Software(
            name="llm-foundry", capabilities=("8.0",), most_gpus=128, stops_early=True, kernel_seconds=5e-5,
            memory_factor=1.3, data_far_hop_seconds=5e-5,
        ),
        names=(
            *("kernel_seconds", "matmul_factor", "attention_factor", "memory_factor", "far_part"),
            "data_far_hop_seconds",
        ),
        rows="llm-foundry's steps of MPT under FSDP on 8 to 128 A100",
    ),
    "nanotron": Calibration(
        start=Software(
            name="nanotron", capabilities=("9.0",), most_gpus=512, balanced=True,
            kernel_seconds=3e-5, matmul_factor=1.1, memory_factor=1.1,
            call_seconds=1e-4, hop_seconds=1e-6, far_hop_seconds=5e-5, piped_rank_seconds=2e-4,
            piped_far_rank_seconds=3e-4, tensor_exposed=0.7, bucket_seconds=1e-4,
            update_seconds=1e-3, far_part=0.5, crowded_ranks=512, crowded_tensor_ranks=32, handing_seconds=0.3,
            crowded_seconds=0.45, data_overlap=0.05, sends_exposed=0.5, micro_batch_seconds=1e-3,
        ),
        names=(
            *("kernel_seconds", "matmul_factor", "memory_factor", "call_seconds", "hop_seconds", "far_hop_seconds"),
            *("piped_rank_seconds", "piped_far_rank_seconds", "tensor_exposed", "sends_exposed"),
            *("bucket_seconds", "update_seconds", "far_part", "handing_seconds", "crowded_seconds"),
            "micro_batch_seconds",
        ),
        weight=_fast,
        prior=10 * PRIOR,  # two networks for sixteen fields
        rows="the ultrascale playbook's grid of nanotron on 8 to 512 H100",
    ),
    "megatron": Calibration(
        start=Software(
            name="megatron", capabilities=("9.0", "10.0", "10.3"), most_gpus=2048, fused=True,
            kernel_seconds=5e-5, memory_factor=1.3, tensor_exposed=0.6, data_overlap=0.9,
            sends_exposed=0.3, call_seconds=9.1e-5,  # of the host, as in nanotron's code
            expert_factor=1.2, fused_expert_factor=1.0, looped_kernel_seconds=1e-5,
        ),
        names=("matmul_factor", "memory_factor", "tensor_exposed", "near_part", "far_part", "sends_exposed"),
        takes=lambda row: not row.shape.experts and row.cluster_name == "H100",
        of_experts=(
            *("expert_factor", "fused_expert_factor", "expert_overlap", "kernel_seconds", "looped_kernel_seconds"),
        ),
        experts_prior=10 * PRIOR,  # four networks for five fields
        rows="NeMo's, Megatron-Bridge's and dgxc-benchmarking's networks on 8 to 2,048 H100; experts also Blackwell",
    ),
    "internevo": Calibration(
        start=Software(
            name="internevo", capabilities=("8.0",), most_gpus=1024, fused=True, kernel_seconds=1e-5,
            matmul_factor=1.15, memory_factor=1.3,
        ),
        names=("matmul_factor", "memory_factor", "far_part", "data_overlap"),
        rows="InternEvo's InternLM 7B on 8 to 1,024 A100",
    ),
}  # fmt: skip


def calibrated(name: str, rows: Iterable[Row]) -> Software:
    """The Software calibrated on those of the rows that are its own and ran."""
    how = CALIBRATIONS[name]
    ran = [row for row in rows if row.software == name and row.ran]
    own = [row for row in ran if how.takes(row)]
    if not own:
        return how.start
    every = -(-len(own) // MOST_ROWS)
    taken = own[::every]
    weights = {id(row): how.weight(row) for row in taken}
    found = fit(taken, how.start, how.names, lambda row: weights[id(row)], how.prior)
    experts = [row for row in ran if row.shape.experts and not row.shape.keeps_scores]
    if not (how.of_experts and experts):
        return found
    count = Counter(row.model for row in experts)
    return fit(experts, found, how.of_experts, lambda row: 1 / sqrt(count[row.model]), how.experts_prior)


def with_interval(software: Software, left_out: Sequence[float]) -> Software:
    """The software with the interval in which 8 of 10 rows left out were measured, as factors of the prediction."""
    measured = [1 / (1 + error) for error in left_out]
    low, high = min(quantile(measured, 0.1), 0.95), max(quantile(measured, 0.9), 1.05)
    return replace(
        software, low_factor=round(low, 2), high_factor=round(high, 2), rows=CALIBRATIONS[software.name].rows
    )


def leaving_out(name: str, rows: Sequence[Row], group: Callable[[Row], str]) -> list[tuple[Row, float]]:
    """Each row of a Software with its error, calibrated without the group it belongs to."""
    own = [row for row in rows if row.software == name and row.ran]
    found: list[tuple[Row, float]] = []
    for left in sorted({group(row) for row in own}):
        without = calibrated(name, [row for row in own if group(row) != left])
        tested = [row for row in own if group(row) == left]
        found += zip(tested, errors(tested, without), strict=True)
    return found


def toml(software: Software) -> str:
    """The `[[software]]` table of catalog/times.toml."""
    plain = Software(name=software.name)
    lines = ["[[software]]", f'name = "{software.name}"']
    for item in fields(Software):
        value = getattr(software, item.name)
        if item.name != "name" and value != getattr(plain, item.name):
            lines.append(f"{item.name} = {_literal(value)}")
    return "\n".join(lines)


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(_literal(each) for each in value)}]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@cache
def known(name: str) -> Software:
    """The Software of the catalog."""
    from tonnage.timing.software import software

    return software(name)
