"""Ranks of jobs that divide the network itself, alone on the ghost."""

from dataclasses import replace
from typing import Any

import pytest

from networks import tiny, tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates import predict
from tonnage.estimates.from_traces import Run
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.techniques.expert_parallel import transformers_has_it
from tonnage.workers.worker import Worker

WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
"""Wide enough for every parameter to be a whole number of the allocator's 512-byte blocks on each of 8 ranks."""

LAYERS, WIDTH, MLP, VOCABULARY = 8, 512, 1024, 2048
MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * MLP
"""Elements of the matrices of one layer."""

BY_ROWS, BY_COLUMNS = 3 * [(WIDTH, WIDTH)] + 2 * [(MLP, WIDTH)], [(WIDTH, WIDTH), (WIDTH, MLP)]
"""Shapes of the matrices of one layer, by what tensor parallelism divides."""

LORA: dict[str, Any] = {"method": "lora", "lora_rank": 32}
ADAPTERS = LAYERS * 32 * sum(rows + columns for rows, columns in BY_ROWS + BY_COLUMNS)
"""Elements of an adapter beside each of them."""


needs_exchange = pytest.mark.skipif(
    not transformers_has_it(), reason="this version of transformers has no exchange of tokens between experts"
)


def job(**fields: Any) -> Job:
    model = tiny("llama", num_hidden_layers=LAYERS, vocab_size=VOCABULARY, max_position_embeddings=4096, **WIDE)
    return tiny_job("llama", **{"model": model, "seq_len": 512, "micro_batch": 1, **fields})


def run(
    worker: Worker, plan: dict[str, Any], gpu: str, rank: int | None = None, steps: int = 2, **fields: Any
) -> Run:
    """Two steps: in the first there are no optimizer states yet."""
    found = predict.estimate(
        Case(job(**fields), Plan(**{"precision": "fp32", **plan}), parse_cluster(gpu)),
        rank=rank,
        worker=worker,
        steps=steps,
    )
    adapters = ADAPTERS if fields.get("method") == "lora" else 0
    for trace in found.traces:
        assert trace.outcome["kind"] == "completed"
        whole = LAYERS * (MATRICES + 2 * WIDTH) + 2 * VOCABULARY * WIDTH + WIDTH + adapters
        assert trace.model["parameters"] == whole
        assert trace.model["trainable_parameters"] == (adapters or whole)
    return found


@pytest.mark.parametrize("source", ["ghost", "meta"])
def test_a_stage_that_runs_out_of_memory_does_not_fit(worker: Worker, source: str) -> None:
    """torch's pipeline raises an error of its own, from PyTorch's."""
    cluster, options = parse_cluster("2xh100-80gb"), {"rank": 0, "steps": 2, "worker": worker, "source": source}
    asked = job(grad_accum=2), Plan(precision="fp32", pp=2)
    need = predict.estimate(Case(*asked, cluster), **options).estimate.peak
    small = replace(cluster, device=cluster.device.with_capacity(need.process_bytes - need.allocated_bytes // 3))
    found = predict.estimate(Case(*asked, small), **options).estimate
    assert found.oom is not None
    assert found.oom.message.startswith("CUDA out of memory. Tried to allocate ")
    assert any("pipelining" in frame for frame in found.oom.stack)


def held(found: Run, category: str) -> int:
    return int(found.estimate.peak.by_category[category])


def part_bytes(rows: int, columns: int, ranks: int, place: int) -> int:
    """What FSDP2 leaves of an fp32 matrix on one of `ranks`: rows as torch.chunk deals them out, in blocks."""
    each = -(-rows // ranks)
    return -(-4 * columns * max(0, min(each, rows - place * each)) // 512) * 512


@pytest.mark.parametrize(
    ("gpu", "shard", "tp", "rank"),
    [
        ("2xh100-80gb", "none", 2, 1),
        ("8xh100-80gb", "none", 8, 5),
        ("8x8xh100-80gb", "zero3", 8, 63),
        ("128x8xh100-80gb", "zero3", 8, 1000),
    ],
)
def test_states_of_tensor_parallelism(gpu: str, shard: str, tp: int, rank: int, worker: Worker) -> None:
    """AdamW keeps two fp32 numbers for each element that a rank holds; norms are whole on every rank of tp."""
    ranks = parse_cluster(gpu).gpus // tp
    matrices = [(rows // tp, columns) for rows, columns in LAYERS * BY_ROWS + 2 * [(VOCABULARY, WIDTH)]]
    matrices += [(rows, columns // tp) for rows, columns in LAYERS * BY_COLUMNS]
    matrices += (2 * LAYERS + 1) * [(WIDTH, 1)]
    expected = 2 * sum(part_bytes(rows, columns, ranks, rank // tp) for rows, columns in matrices)
    assert held(run(worker, {"tp": tp, "shard": shard}, gpu, rank), "optimizer_state") == expected


@pytest.mark.parametrize(
    ("gpu", "shard", "tp", "rank"),
    [("8xh100-80gb", "none", 8, 5), ("2x4xh100-80gb", "zero3", 4, 6)],
)
def test_states_of_adapters_beside_divided_matrices(gpu: str, shard: str, tp: int, rank: int, worker: Worker) -> None:
    """Of a matrix cut by its rows A is whole and B is cut, of one cut by its columns the other way round."""
    ranks, narrow = parse_cluster(gpu).gpus // tp, LORA["lora_rank"]
    parts = [part for rows, columns in BY_ROWS for part in ((narrow, columns), (rows // tp, narrow))]
    parts += [part for rows, columns in BY_COLUMNS for part in ((narrow, columns // tp), (rows, narrow))]
    expected = 2 * LAYERS * sum(part_bytes(rows, columns, ranks, rank // tp) for rows, columns in parts)
    found = run(worker, {"tp": tp, "shard": shard, "checkpointing": "full"}, gpu, rank, **LORA)
    assert held(found, "optimizer_state") == expected


def test_adapters_of_a_stage_are_those_of_its_layers(worker: Worker) -> None:
    """Of 4 stages each has two of eight layers, and AdamW's two fp32 numbers for each element of their adapters."""
    found = run(worker, {"pp": 4}, "4xh100-80gb", 0, grad_accum=4, **LORA)
    assert held(found, "optimizer_state") == 2 * 4 * ADAPTERS // 4


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_what_adapters_send_is_not_kept(checkpointing: str, worker: Worker) -> None:
    """In a layer that runs again nobody asks for the last sums; what was sent for them must not wait for each other.

    Between 4 and 8 layers a rank's memory grows by what each layer keeps, at the same moments.
    """
    peaks = []
    for layers in (4, 6, 8):
        asked = job(**LORA, seq_len=2048)
        few = replace(asked, model=replace(asked.model, config={**asked.model.config, "num_hidden_layers": layers}))
        plan = Plan(precision="bf16-mixed", tp=4, checkpointing=checkpointing)
        options = {"rank": 0, "worker": worker, "steps": 1}
        peaks.append(
            predict.estimate(Case(few, plan, parse_cluster("4xh100-80gb")), **options).estimate.peak.allocated_bytes
        )
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0]


def test_sequence_parallelism_keeps_less(worker: Worker) -> None:
    whole, divided = (run(worker, {"tp": 4, "sequence_parallel": word}, "4xh100-80gb", 0) for word in ("off", "on"))
    assert held(divided, "activation") < 0.8 * held(whole, "activation")


def test_the_first_stage_keeps_the_most_micro_batches(worker: Worker) -> None:
    """Of 4 stages the first holds the activations of 4 micro-batches, the next of 3, the last of one."""
    found = run(worker, {"pp": 4}, "4xh100-80gb", grad_accum=8)
    listed = found.estimate.ranks
    assert [rank["rank"] for rank in listed] == [0, 1, 3]
    assert found.estimate.peak.process_bytes == max(rank["process_bytes"] for rank in listed)
    first, second = (held(run(worker, {"pp": 4}, "4xh100-80gb", rank, grad_accum=8), "activation") for rank in (0, 1))
    assert first > 1.2 * second


def test_main_weights_of_divided_networks(worker: Worker) -> None:
    """Megatron's distributed optimizer: of a rank's elements it keeps 12 bytes for each that lies in its piece."""
    plan = {"tp": 4, "pp": 2, "shard": "zero1", "precision": "megatron-bf16", "clip_grad_norm": 1}
    found = run(worker, plan, "2x8xh100-80gb", 15, grad_accum=2)
    elements = LAYERS // 2 * (MATRICES // 4 + 2 * WIDTH) + VOCABULARY * WIDTH // 4 + WIDTH
    piece = -(-elements // 2)
    assert 12 * piece <= held(found, "optimizer_state") <= 12 * piece + 512 * 3 * (LAYERS // 2 * 9 + 3)
    assert 0 <= held(found, "gradient") - 4 * 2 * piece < 2**20  # slack behind a large block


def test_a_shared_sequence_is_a_part_of_the_activations(worker: Worker) -> None:
    """Ranks that share a sequence of 512 keep what a sequence of half as long does, and exchange keys and values."""
    plan = {"shard": "zero3", "precision": "bf16-true"}
    shared = run(worker, {**plan, "cp": 2}, "4xh100-80gb", 1)
    half = run(worker, plan, "4xh100-80gb", 1, seq_len=256)
    assert held(shared, "activation") == pytest.approx(held(half, "activation"), rel=0.1)
    assert held(shared, "optimizer_state") == held(half, "optimizer_state")
    gathered = [activity for activity in shared.traces[0].activities("collective") if activity.grid[0] == 2]
    assert len(gathered) >= 2 * LAYERS


EXPERTS, EXPERT_MLP = 8, 256


def expert_job() -> Job:
    changes = {
        "num_local_experts": EXPERTS,
        "intermediate_size": EXPERT_MLP,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    }
    return tiny_job("mixtral", model=tiny("mixtral", **{**WIDE, **changes}), seq_len=64, micro_batch=1)


@needs_exchange
@pytest.mark.parametrize(("ep", "sharing"), [(8, 1), (2, 4), (4, 2)])
def test_experts_are_dealt_out(ep: int, sharing: int, worker: Worker) -> None:
    """A rank has EXPERTS / ep experts, which it shares with the ranks that have the same: an eighth in any case."""
    plan = Plan(precision="fp32", shard="zero3", ep=ep)
    found = predict.estimate(Case(expert_job(), plan, parse_cluster("8xh100-80gb")), rank=3, worker=worker, steps=2)
    dense = 4 * [(WIDTH, WIDTH)] + [(EXPERTS, WIDTH)] + 2 * [(WIDTH, 1)]
    matrices = 2 * dense + 2 * [(512, WIDTH)] + [(WIDTH, 1)]
    experts = 2 * [(EXPERTS // ep, 2 * EXPERT_MLP * WIDTH), (EXPERTS // ep, WIDTH * EXPERT_MLP)]
    expected = sum(part_bytes(rows, columns, 8, 3) for rows, columns in matrices)
    expected += sum(part_bytes(rows, columns, sharing, 3 // ep) for rows, columns in experts)
    assert held(found, "optimizer_state") == 2 * expected
    assert any("balanced" in said for said in found.estimate.coverage.assumed)


@needs_exchange
def test_selective_checkpointing_around_experts_of_their_own_mesh(worker: Worker) -> None:
    """Behind the experts comes a shared one: the layer runs again past what FSDP2 notes for the profiler there."""
    plan = Plan(shard="zero3", ep=2, checkpointing="selective")
    found = predict.estimate(Case(tiny_job("deepseek_v3"), plan, parse_cluster("4xh100-80gb")), rank=3, worker=worker)
    assert found.estimate.fits
    assert found.traces[0].outcome["kind"] == "completed"


@needs_exchange
def test_ranks_that_share_one_expert_cut_its_rows(worker: Worker) -> None:
    plan = Plan(precision="fp32", shard="zero3", ep=8)
    peaks = [
        held(
            predict.estimate(Case(expert_job(), plan, parse_cluster(gpu)), rank=3, worker=worker, steps=2),
            "optimizer_state",
        )
        for gpu in ("8xh100-80gb", "2x8xh100-80gb")
    ]
    assert peaks[1] == pytest.approx(peaks[0] / 2, rel=0.01)


@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 4, "pp_schedule": "interleaved", "shard": "zero1"},
        {"pp": 2, "pp_schedule": "gpipe", "shard": "hsdp", "tp": 2, "clip_grad_norm": 1},
        {"pp": 2, "tp": 2, "cp": 2, "shard": "ddp", "precision": "bf16-mixed", "checkpointing": "full"},
    ],
)
def test_combinations_run(plan: dict[str, Any], worker: Worker) -> None:
    found = run(worker, plan, "8x8xh100-80gb", 63, steps=1, grad_accum=4)
    assert found.estimate.fits
