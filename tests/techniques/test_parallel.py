"""Networks divided among two and four real processes (gloo), against one process with the whole network."""

import re
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from networks import one_thread, tiny, tiny_job  # noqa: F401
from real_ranks import drop_like_others, run_ranks
from ring_on_cpu import ring_on_cpu
from tonnage.case import Case as TrainingCase
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate
from tonnage.job import Job
from tonnage.mesh import make_mesh
from tonnage.plans import Plan
from tonnage.step import model as models
from tonnage.step.main_weights import MainOptimizer
from tonnage.step.step import ReadyStep
from tonnage.techniques import build, tensor_parallel
from tonnage.techniques.expert_parallel import experts_of, transformers_has_it

STEPS, MICRO_BATCHES = 2, 2
Weights = dict[str, torch.Tensor]


LORA: dict[str, Any] = {"method": "lora", "lora_rank": 4}
SHARED: dict[str, Any] = {"precision": "fp32", "optimizer": "sgd", "clip_grad_norm": 1}
"""SGD shows the size of a gradient, which AdamW hides; its norm is about 3, so clipping halves it and more."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train one network."""

    plan: dict[str, Any]
    network: str = "llama"
    changes: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    """Fields of the job."""
    tolerance: float = 1e-3
    """Of the distance that training moves the weights."""

    def job(self, micro_batches: int) -> Job:
        model = tiny(self.network, **{"num_hidden_layers": 2, **self.changes})
        return replace(tiny_job(self.network, grad_accum=micro_batches, **self.method), model=model)

    @property
    def parallel(self) -> Plan:
        return Plan(**{**SHARED, **self.plan})

    @property
    def alone(self) -> Plan:
        """The same mathematics in one process."""
        return Plan(**{**SHARED, **{name: self.plan[name] for name in SHARED if name in self.plan}})


ALL_CASES: dict[int, dict[str, Case]] = {
    2: {
        "tp": Case(plan={"tp": 2}),
        "tp whole sequences": Case(plan={"tp": 2, "sequence_parallel": "off"}),
        "tp tied": Case(plan={"tp": 2}, network="qwen3"),
        "tp chunked": Case(plan={"tp": 2, "loss": "chunked", "checkpointing": "full"}),
        "tp chunked of capped logits": Case(
            plan={"tp": 2, "loss": "chunked"}, network="gemma2", changes={"final_logit_softcapping": 2.0}
        ),
        "tp chunked tied": Case(plan={"tp": 2, "loss": "chunked", "sequence_parallel": "off"}, network="qwen3"),
        "tp chunked of uneven words": Case(plan={"tp": 2, "loss": "chunked"}, changes={"vocab_size": 63}),
        "tp budget": Case(plan={"tp": 2, "checkpointing": "budget=100KiB"}),
        "pp": Case(plan={"pp": 2}, changes={"num_hidden_layers": 3}),
        "pp interleaved": Case(plan={"pp": 2, "pp_schedule": "interleaved"}, changes={"num_hidden_layers": 4}),
        "pp tied": Case(plan={"pp": 2}, network="qwen3"),
        "pp gpipe": Case(plan={"pp": 2, "pp_schedule": "gpipe", "loss": "chunked", "checkpointing": "full"}),
        "cp": Case(plan={"cp": 2, "shard": "ddp"}, changes={"num_key_value_heads": 4}),
        "cp chunked": Case(
            plan={"cp": 2, "shard": "zero3", "loss": "chunked", "checkpointing": "full"},
            changes={"num_key_value_heads": 4},
        ),
        "cp offloaded": Case(
            plan={"cp": 2, "shard": "zero3", "activation_offload": "cpu", "checkpointing": "full"},
            changes={"num_key_value_heads": 4},
        ),
        "ep": Case(plan={"ep": 2, "shard": "zero3"}, network="qwen3_moe"),
        "tp lora": Case(plan={"tp": 2}, method=LORA),
        "tp lora whole sequences": Case(plan={"tp": 2, "sequence_parallel": "off", "loss": "chunked"}, method=LORA),
        "tp lora of some": Case(plan={"tp": 2}, method={**LORA, "lora_targets": ("q_proj", "down_proj")}),
        "pp lora": Case(plan={"pp": 2, "loss": "chunked", "checkpointing": "full"}, method=LORA),
        "pp lora tied": Case(plan={"pp": 2}, network="qwen3", method=LORA),
        "tp experts": Case(plan={"tp": 2}, network="mixtral"),
        "tp lora beside experts": Case(
            plan={"tp": 2}, network="mixtral", method={**LORA, "lora_targets": ("q_proj", "o_proj")}
        ),
        "tp experts whole sequences": Case(plan={"tp": 2, "sequence_parallel": "off"}, network="qwen3_moe"),
    },
    4: {
        "ep zero2": Case(plan={"ep": 2, "shard": "zero2"}, network="mixtral"),
        "ep of one expert": Case(
            plan={"ep": 2, "shard": "zero3"}, network="mixtral", changes={"num_local_experts": 2}
        ),
        "ep tp": Case(plan={"ep": 4, "tp": 2, "shard": "zero3"}, network="qwen3_moe"),
        "ep pp": Case(plan={"ep": 2, "pp": 2, "shard": "zero3"}, network="mixtral"),
        "tp lora ddp": Case(plan={"tp": 2, "shard": "ddp"}, method=LORA),
        "tp lora zero3": Case(plan={"tp": 2, "shard": "zero3", "checkpointing": "full"}, method=LORA),
        "pp tp lora": Case(plan={"pp": 2, "tp": 2}, method=LORA),
        "pp lora zero2": Case(plan={"pp": 2, "shard": "zero2"}, method=LORA),
        "tp ddp": Case(plan={"tp": 2, "shard": "ddp"}),
        "tp ddp of a network with buffers": Case(plan={"tp": 2, "shard": "ddp"}, network="gemma2"),
        "tp zero1": Case(plan={"tp": 2, "shard": "zero1", "sequence_parallel": "off", "optimizer": "adamw"}),
        "tp zero3": Case(plan={"tp": 2, "shard": "zero3", "checkpointing": "full"}),
        "tp zero3 whole sequences": Case(plan={"tp": 2, "shard": "zero3", "sequence_parallel": "off"}),
        "megatron tp zero1": Case(
            plan={"tp": 2, "shard": "zero1", "precision": "megatron-bf16", "optimizer": "adamw"}, tolerance=0.1
        ),
        "megatron pp zero1": Case(
            plan={"pp": 2, "shard": "zero1", "precision": "megatron-bf16", "optimizer": "adamw"}, tolerance=0.1
        ),
        "cp pp": Case(plan={"cp": 2, "pp": 2, "shard": "zero1"}, changes={"num_key_value_heads": 4}),
        "cp tp": Case(plan={"cp": 2, "tp": 2, "shard": "zero2"}, changes={"num_key_value_heads": 4}),
        "cp tp chunked": Case(
            plan={"cp": 2, "tp": 2, "shard": "zero3", "loss": "chunked", "checkpointing": "full"},
            changes={"num_key_value_heads": 4},
        ),
        "tp ddp chunked": Case(plan={"tp": 2, "shard": "ddp", "loss": "chunked"}),
        "tp zero2 chunked": Case(plan={"tp": 2, "shard": "zero2", "loss": "chunked"}, network="qwen3"),
        "pp tp": Case(plan={"pp": 2, "tp": 2}),
        "pp tp chunked": Case(plan={"pp": 2, "tp": 2, "loss": "chunked"}),
        "pp zero1": Case(plan={"pp": 2, "shard": "zero1"}),
        "pp tied zero2": Case(plan={"pp": 2, "shard": "zero2"}, network="qwen3"),
        "pp zero2": Case(plan={"pp": 2, "shard": "zero2"}),
        "pp zero3 interleaved": Case(
            plan={"pp": 2, "shard": "zero3", "pp_schedule": "interleaved"}, changes={"num_hidden_layers": 4}
        ),
    },
}


LIKE_OTHERS = (
    *("tp whole sequences", "tp chunked", "tp chunked tied", "pp", "pp lora", "cp", "tp lora whole sequences"),
    *("tp lora of some", "tp experts", "pp tied"),
    *("ep zero2", "ep tp", "tp lora ddp", "pp lora zero2", "tp ddp", "tp zero3 whole sequences", "cp tp", "pp tp"),
    *("tp ddp chunked", "pp zero1", "pp zero2", "tp zero1"),
)
CASES = {world: drop_like_others(cases, LIKE_OTHERS) for world, cases in ALL_CASES.items()}


def batches(data_ranks: int) -> list[models.Batch]:
    """Return every micro-batch of the run: step by step, and within a step one data-parallel rank after another."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 61, (2, 24), generator=generator) for _ in range(STEPS * data_ranks * MICRO_BATCHES)]
    return [{"input_ids": one, "labels": one} for one in ids]


def trained(ready: ReadyStep, mine: list[models.Batch], start: Weights) -> None:
    """Return the network after two steps from the same weights on this rank's batches."""
    with torch.no_grad():
        for name, parameter in ready.model.named_parameters():
            _part(_whole(start, name), parameter, ready).copy_to(parameter)
    for optimizer in ready.optimizers:
        if isinstance(optimizer, MainOptimizer):
            optimizer.reload()
    handed = iter(mine)
    original, models.batch = models.batch, lambda *arguments: next(handed)  # type: ignore[assignment]
    try:
        ready.run(STEPS)
    finally:
        models.batch = original


def _whole(all_of: Weights, name: str) -> torch.Tensor:
    """The weight of that name; a head that is the embedding too has the embedding's."""
    plain = _plain(name)
    return all_of.get(plain, all_of["model.embed_tokens.weight"]) if plain == "lm_head.weight" else all_of[plain]


def _plain(name: str) -> str:
    return re.sub(r"^(part\d\.)?(module\.)?(network\.)?(base_model\.model\.)?", "", name)


@dataclass(frozen=True)
class _part:  # noqa: N801
    """What a rank holds of a whole tensor."""

    whole: torch.Tensor
    like: nn.Parameter
    ready: ReadyStep

    def copy_to(self, parameter: nn.Parameter) -> None:
        parameter.copy_(self.value())

    def value(self) -> torch.Tensor:
        if isinstance(self.like, DTensor):
            return distribute_tensor(self.whole, self.like.device_mesh, self.like.placements, src_data_rank=None)
        world = self.ready.step.world
        found = self.whole
        for dim, (size, wanted) in enumerate(zip(self.whole.shape, self.like.shape, strict=True)):
            if size != wanted:
                halves = found.chunk(2, dim) if (dim, found.ndim) == (1, 3) else (found,)  # experts: gate and up
                parts = [half.chunk(world.axes.tp, dim)[world.axes.place(world.rank, "tp")] for half in halves]
                found = torch.cat(parts, dim)
        return found


def alone(case: Case, data_ranks: int) -> tuple[Weights, Weights]:
    """Weights before and after training in one process on everybody's batches."""
    everything = batches(data_ranks)
    ready = build(case.job(len(everything) // STEPS), case.alone, device="cpu", initialise=True)
    generator = torch.Generator().manual_seed(1)
    start = {_plain(n): torch.randn(p.shape, generator=generator) / 2 for n, p in ready.model.named_parameters()}
    trained(ready, everything, start)
    return start, {_plain(name): parameter.detach().clone() for name, parameter in ready.model.named_parameters()}


def possible(world: int) -> dict[str, Case]:
    """Return the cases of a world size that the installed transformers can divide."""
    cases = CASES[world].items()
    return {name: case for name, case in cases if transformers_has_it() or experts_of(case.job(1)) is None}


def rank_main(rank: int, world: int, folder: str) -> None:
    found = {name: worst_difference(case, rank, world, Path(folder) / name) for name, case in possible(world).items()}
    torch.save(found, Path(folder) / f"worst-{rank}")


def worst_difference(case: Case, rank: int, world: int, reference: Path) -> float:
    """Between what this rank holds after training and the same part of what one process has."""
    ready = build(
        case.job(MICRO_BATCHES),
        case.parallel,
        device="cpu",
        initialise=True,
        world_size=world,
        rank=rank,
        gpus_per_node=_node(case),
    )
    laid = ready.step.world.axes
    data, mine = laid.data_parallel, laid.place(rank, "dp_replicate") * laid.dp_shard + laid.place(rank, "dp_shard")
    everything = batches(data)
    own = [
        everything[(step * data + mine) * MICRO_BATCHES + index]
        for step in range(STEPS)
        for index in range(MICRO_BATCHES)
    ]
    start, expected = torch.load(reference)
    with ring_on_cpu() if laid.cp > 1 else nullcontext():
        trained(ready, own, start)
    return _difference(ready, start, expected)


def _node(case: Case) -> int:
    """Ranks of a machine: HSDP needs two of them."""
    return 2 if case.plan.get("shard") == "hsdp" else 4


def _difference(ready: ReadyStep, start: Weights, expected: Weights) -> float:
    """How far this rank's weights are away from those expected, as a part of how far these moved from `start`."""
    away = moved = 0.0
    for name, parameter in ready.model.named_parameters():
        before, wanted = (
            _local(_part(_whole(all_of, name), parameter, ready).value()) for all_of in (start, expected)
        )
        away += float((_local(parameter.detach()) - wanted).square().sum())
        moved += float((wanted - before).square().sum())
    return float((away / moved) ** 0.5)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).float()


_RUNS: dict[int, list[dict[str, float]]] = {}


def in_processes(world: int) -> list[dict[str, float]]:
    """Return the difference of every case, for each rank."""
    if world not in _RUNS:
        with tempfile.TemporaryDirectory() as folder:
            for name, case in possible(world).items():
                data = make_mesh(case.parallel, world, _node(case)).data_parallel
                torch.save(alone(case, data), Path(folder) / name)
            run_ranks(rank_main, world, folder)
            _RUNS[world] = [torch.load(Path(folder) / f"worst-{rank}") for rank in range(world)]
    return _RUNS[world]


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in CASES.items() for name in cases])
def test_agrees_with_one_process(world: int, name: str) -> None:
    if name not in possible(world):
        pytest.skip("this version of transformers does not divide experts")
    assert max(found[name] for found in in_processes(world)) < CASES[world][name].tolerance


def test_adapters_of_embeddings_are_not_divided() -> None:
    whole = models.build(tiny("llama"), dtype=torch.float32, attention=None, device=torch.device("meta"))
    inject_adapter_in_model(LoraConfig(target_modules=["embed_tokens"]), whole)
    nowhere: Any = None  # the mesh is not asked
    with pytest.raises(CannotEstimate, match="adapters on its embedding or head are not divided; choose tp 1"):
        tensor_parallel.divided(whole, mesh=nowhere, sequence=True, local_parameters=True)


def test_adapters_of_experts_are_refused_before_anything_runs() -> None:
    job, cluster = tiny_job("mixtral", method="lora"), parse_cluster("2xh100-80gb")
    told = tensor_parallel.accepts(TrainingCase(job, Plan(tp=2), cluster))
    assert told is not None
    assert "adapters on experts are not divided; choose lora-targets" in str(told)
    some = replace(job, lora_targets=("q_proj", "v_proj"))
    assert tensor_parallel.accepts(TrainingCase(some, Plan(tp=2), cluster)) is None


@pytest.mark.parametrize(("network", "reason"), [("gpt2", "no tp_plan"), ("bert", "not masked-lm")])
def test_networks_without_a_plan_are_not_divided(network: str, reason: str) -> None:
    whole = models.build(tiny(network), dtype=torch.float32, attention=None, device=torch.device("meta"))
    nowhere: Any = None  # the mesh is not asked
    with pytest.raises(CannotEstimate, match=f"{reason}.*choose tp 1"):
        tensor_parallel.divided(whole, mesh=nowhere, sequence=True, local_parameters=True)
