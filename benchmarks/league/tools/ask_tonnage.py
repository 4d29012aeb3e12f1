"""tonnage: full fine-tuning and recorded steps by estimate, published scripts by a dry-run of examples/lora.py."""

import shutil
import sys
import tempfile
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from answering import answer

from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster

ROOT = Path(__file__).parents[3]
ENOUGH_BYTES = 2**43


def ask(row: dict[str, Any]) -> tuple[float, str]:
    how = _recorded if "record" in row else _lora if row["method"] == "lora" else _full
    peak = how(row).estimate.peak
    return peak.allocated_bytes, f"peak allocated; reserved {peak.reserved_bytes / 2**30:.4f}, start included"


def _full(row: dict[str, Any]) -> Any:
    from tonnage.estimates.predict import estimate
    from tonnage.trainers.cases import request

    card = parse_cluster("h100-80gb")
    job, plan = request(
        row["model"], offline=True, seq_len=row["seq_len"], micro_batch=row["micro_batch"], precision="bf16-true"
    )
    return estimate(Case(job, plan, replace(card, device=card.device.with_capacity(ENOUGH_BYTES))))


def _recorded(row: dict[str, Any]) -> Any:
    sys.path.append(str(ROOT / "benchmarks" / "gpu"))
    import recorded

    from tonnage.estimates.predict import estimate, usual_steps

    cluster = recorded.card(row["record"])
    job, plan = recorded.asked(row["record"])
    steps, repeated = usual_steps(Case(job, plan, cluster))
    measured = row["record"]["versions"]["torch"].partition("+")[0]
    return estimate(Case(job, plan, cluster), steps=steps, repeated=repeated, torch_version=measured)


def _lora(row: dict[str, Any]) -> Any:
    from tonnage.script.dry_run import run

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(str(files("tonnage") / "catalog" / "configs" / f"{row['model']}.json"), f"{folder}/config.json")
        command = [sys.executable, str(ROOT / "examples" / "lora.py"), folder]
        command += ["--attention", row["attention"], "--rank", str(row["lora_rank"])]
        command += ["--seq-len", str(row["seq_len"]), "--micro-batch", str(row["micro_batch"])]
        return run(command, parse_cluster(row["gpu"]), steps=4)


answer(ask)
