"""Estimates with round numbers, for tests of everything that shows or saves one.  None of them was computed."""

from dataclasses import replace

from tonnage.estimates.estimate import Coverage, Estimate, Host, Moment, OutOfMemory, Peak, PhasePeak
from tonnage.units import GIB, MIB

CAPACITY = 80 * GIB

FRAMES = (
    "/home/ada/train.py:88 <module>",
    "/home/ada/train.py:61 main",
    "/env/lib/python3.11/site-packages/torch/nn/modules/module.py:1775 _wrapped_call_impl",
    "/env/lib/python3.11/site-packages/torch/nn/modules/module.py:1786 _call_impl",
    "/env/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py:450 forward",
    "/env/lib/python3.11/site-packages/torch/nn/modules/module.py:1775 _wrapped_call_impl",
    "/env/lib/python3.11/site-packages/torch/nn/modules/module.py:1786 _call_impl",
    "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py:134 forward",
    "/env/lib/python3.11/site-packages/torch/nn/functional.py:3500 linear",
)

MESSAGE = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 80.00 GiB of which 256.00 MiB "
    "is free. Including non-PyTorch memory, this process has 79.75 GiB memory in use. Of the allocated memory "
    "70.00 GiB is allocated by PyTorch, and 9.00 GiB is reserved by PyTorch but unallocated."
)


def peak(process_bytes: int = 60 * GIB, phase: str = "optimizer", layer: str = "") -> Peak:
    """Return a peak whose categories sum to the process; 14 GiB of parameters, 1 GiB outside the allocator."""
    held = {
        "parameter": 14 * GIB,
        "gradient": 14 * GIB,
        "optimizer_state": 28 * GIB,
        "activation": process_bytes - 58 * GIB - 256 * MIB,
        "workspace": 256 * MIB,
        "communication": 0,
        "kv_cache": 0,
        "cached": GIB,
        "runtime": GIB,
    }
    return Peak(
        allocated_bytes=process_bytes - 2 * GIB,
        reserved_bytes=process_bytes - GIB,
        process_bytes=process_bytes,
        low_bytes=process_bytes - 128 * MIB,
        high_bytes=process_bytes + 128 * MIB,
        phase=phase,
        layer=layer,
        step=1,
        by_category=held,
    )


def curve() -> tuple[Moment, ...]:
    """Return the curve of loading and two steps: forward rises, backward falls, the optimizer is flat."""
    points: list[tuple[str, int, int]] = [("load", 0, level) for level in range(2, 15, 4)]
    for step, base in enumerate((14, 42)):
        points += [("forward", step, base + rise) for rise in range(0, 13, 2)]
        points += [("backward", step, base + 12 - fall // 2) for fall in range(0, 13, 2)]
        points += [("optimizer", step, 42 if step else 28), ("optimizer", step, 56), ("other", step + 1, 42)]
    held, moments = 0, []
    for mark, (phase, step, level) in enumerate(points):
        held = max(held, level + 1)
        moments.append(
            Moment(mark=mark, step=step, phase=phase, allocated_bytes=level * GIB, reserved_bytes=held * GIB)
        )
    return tuple(moments)


def fitting() -> Estimate:
    """Return the estimate of a 7-billion-parameter model that fits one GPU."""
    return Estimate(
        source="ghost",
        versions={"torch": "2.13.0", "cuda": "13.0", "transformers": "5.23.0"},
        model={"name": "llama-7b", "parameters": 6_738_415_616, "trainable_parameters": 6_738_415_616},
        job={"method": "full", "seq_len": 4096, "micro_batch": 1, "grad_accum": 1},
        plan={
            "precision": "bf16-true",
            "optimizer": "adamw",
            "checkpointing": "full",
            "shard": "none",
            "allocator": "default",
        },
        cluster={"gpu": "H100-80GB", "gpus": 1, "gpus_per_node": 1, "nodes": 1, "capacity_bytes": CAPACITY},
        fits=True,
        rank=0,
        peak=peak(),
        phases=(
            PhasePeak(name="load", allocated_bytes=14 * GIB, reserved_bytes=15 * GIB),
            PhasePeak(name="forward", allocated_bytes=54 * GIB, reserved_bytes=55 * GIB),
            PhasePeak(name="backward", allocated_bytes=54 * GIB, reserved_bytes=56 * GIB),
            PhasePeak(name="optimizer", allocated_bytes=58 * GIB, reserved_bytes=59 * GIB),
        ),
        host=Host(peak_bytes=3 * GIB, pinned_bytes=0),
        time={"step_seconds": None, "tokens_per_second_per_gpu": None, "mfu": None, "bound_by": None},
        coverage=Coverage(
            run=("3 optimizer steps of the real PyTorch",),
            modelled=("CUDA context 512 MiB (table of contexts, H100)",),
            assumed=("loss values read as zero",),
        ),
        curve=curve(),
        ranks=(rank_entry(0, True, peak()),),
    )


def full_card() -> Estimate:
    """Return the same in larger batches on four GPUs: out of memory in the second step, with enough bytes cached."""
    high = peak(79 * GIB + 768 * MIB, "backward", "model.layers.31.mlp")
    return replace(
        fitting(),
        fits=False,
        job={"method": "full", "seq_len": 4096, "micro_batch": 4, "grad_accum": 1},
        plan={**fitting().plan, "checkpointing": "none", "shard": "ddp"},
        cluster={"gpu": "H100-80GB", "gpus": 4, "gpus_per_node": 4, "nodes": 1, "capacity_bytes": CAPACITY},
        peak=high,
        oom=OutOfMemory(message=MESSAGE, phase="backward", layer="model.layers.3.mlp", step=2, stack=FRAMES),
        ranks=tuple(rank_entry(rank, rank > 0, high if rank == 0 else peak()) for rank in range(4)),
        notes=("Rank 0 ran out of memory; the others were stopped.",),
    )


def scripted() -> Estimate:
    """Return a dry-run of a script: no plan, because the script decides."""
    return replace(
        fitting(),
        model={"name": "LlamaForCausalLM", "parameters": 6_738_415_616, "trainable_parameters": 20_000_000},
        job={"command": ["python", "train.py", "--epochs", "3"]},
        plan={},
    )


def rank_entry(rank: int, fits: bool, high: Peak) -> dict[str, object]:
    """Return one of `Estimate.ranks`."""
    return {
        "rank": rank,
        "fits": fits,
        "allocated_bytes": high.allocated_bytes,
        "reserved_bytes": high.reserved_bytes,
        "process_bytes": high.process_bytes,
    }
