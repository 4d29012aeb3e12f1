"""torch's own tracker on fake CPU tensors: two steps, so that optimizer states are there.

As it comes it fails on every frozen parameter ("cannot register a hook on a tensor that doesn't require gradient"),
so hooks on such tensors are left out here.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from answering import answer, meta_model, weights
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from tonnage.step import model as models

SCRIPT = Path(__file__).parents[3] / "examples" / "lora.py"


class NoHook:
    """What stands for the hook of a frozen parameter."""

    def remove(self) -> None:
        """Nothing was registered."""


def leave_out_frozen() -> None:
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        original = getattr(torch.Tensor, name)

        def register(tensor: torch.Tensor, hook: Any, original: Any = original) -> Any:
            return original(tensor, hook) if tensor.requires_grad else NoHook()

        setattr(torch.Tensor, name, register)


def network_of(row: dict[str, Any]) -> Any:
    network = adapted(row) if row["method"] == "lora" else meta_model(row["model"], weights(row))
    if row["checkpointing"] == "full":
        network.train()
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return network


def adapted(row: dict[str, Any]) -> Any:
    """With adapters as the published script makes them, or on every linear layer as PEFT does."""
    whole = meta_model(row["model"], weights(row), row["attention"])
    if "script" not in row:
        with torch.device("meta"):
            config = LoraConfig(r=row["lora_rank"], target_modules="all-linear")
            network = get_peft_model(whole, config)
        return network.bfloat16() if row["precision"] == "bf16-true" else network
    spec = importlib.util.spec_from_file_location("lora", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with torch.device("meta"):
        return script.adapt(whole, row["lora_rank"])


def ask(row: dict[str, Any]) -> tuple[float, str]:
    leave_out_frozen()
    network = network_of(row)
    with FakeTensorMode(allow_non_fake_inputs=True):
        models.materialise(network, torch.device("cpu"))
        optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], foreach=True)
        ids = torch.zeros(row["micro_batch"], row["seq_len"], dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(network, optimizer)
        with tracker:
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=row["precision"] == "bf16-mixed"):
                    loss = network(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
    snapshot = tracker.get_tracker_snapshot("peak")
    return max(device["Total"] for device in snapshot.values()), "peak of live tensors (CPU kernels' choices)"


answer(ask)
