"""The rules of thumb that people learn, beside the ghost's numbers: writes docs/reference/rules-of-thumb.md.

    python benchmarks/rules.py > docs/reference/rules-of-thumb.md

Bytes are the ghost's, on a card on which everything fits.  FLOPs are those of matrix products and attention, counted
by torch's FlopCounterMode over the same step on fake tensors (`tonnage.meta.recording`); time itself is not measured.
"""

from pathlib import Path

from asking import STATES, most, run, table

from tonnage.units import GIB
from tonnage.workers.worker import Worker

TEXT = Path(__file__).parent / "rules.md"
MODELS = ("smollm2-135m", "llama-3.2-1b")
RANKS = 8


def gib(count_bytes: float) -> str:
    return f"{count_bytes / GIB:.2f}"


def per_parameter(worker: Worker) -> str:
    """16 bytes a parameter."""
    recipes = (
        ("bf16-mixed", "adamw"),
        ("bf16-true", "adamw"),
        ("bf16-true", "adamw-fused"),
        ("bf16-true", "adafactor"),
    )
    rows = []
    for model in MODELS:
        for precision, optimizer in recipes:
            found = run(worker, model, seq_len=2048, precision=precision, optimizer=optimizer)
            count = found.estimate.model["parameters"]
            peak = found.estimate.peak
            rows.append(
                (
                    f"{model}, {precision}, {optimizer}",
                    gib(16 * count),
                    f"{most(found, *STATES) / count:.2f}",
                    f"{peak.allocated_bytes / count:.2f}",
                    gib(peak.allocated_bytes),
                    peak.phase,
                )
            )
    headings = ("1 x 2,048 tokens", "16 P, GiB", "states, B/P", "peak, B/P", "peak, GiB", "in phase")
    return table(headings, rows)


def sharded(worker: Worker) -> str:
    """4P + 12P/N, 2P + 14P/N, 16P/N."""
    rules = {"ddp": 16.0, "zero1": 4 + 12 / RANKS, "zero2": 2 + 14 / RANKS, "zero3": 16 / RANKS}
    rows = []
    for shard, rule in rules.items():
        found = run(
            worker,
            "llama-3.2-1b",
            gpu=f"{RANKS}xa100-80gb",
            seq_len=2048,
            shard=shard,
            checkpointing="full",
        )
        count = found.estimate.model["parameters"]
        rows.append(
            (
                shard,
                f"{rule:.2f}",
                f"{most(found, 'parameter') / count:.2f}",
                f"{most(found, 'gradient') / count:.2f}",
                f"{most(found, 'optimizer_state') / count:.2f}",
                f"{most(found, 'communication') / count:.2f}",
                f"{most(found, *STATES, 'communication') / count:.2f}",
            )
        )
    headings = (
        f"llama-3.2-1b on {RANKS} ranks",
        "rule",
        "parameters",
        "gradients",
        "states",
        "communication",
        "together at most",
    )
    return table(headings, rows)


def activations(worker: Worker) -> str:
    """s b h (34 + 5 a s / h) a layer, from two depths."""
    cases = (
        ("gpt2-medium", "n_layer", "eager", 1024),
        ("gpt2-medium", "n_layer", "auto", 1024),
        ("llama-3.2-1b", "num_hidden_layers", "eager", 2048),
        ("llama-3.2-1b", "num_hidden_layers", "auto", 2048),
    )
    rows = []
    for model, depth, attention, tokens in cases:
        deep, shallow = (
            run(worker, model, changes={depth: layers}, seq_len=tokens, precision="bf16-true", attention=attention)
            for layers in (8, 4)
        )
        layer = (most(deep, "activation") - most(shallow, "activation")) / 4
        job = request_config(model)
        h, a = job["hidden"], job["heads"]
        rule = tokens * h * (34 + 5 * a * tokens / h)
        rows.append(
            (
                f"{model}, {attention}, {tokens:,} tokens",
                f"{rule / 2**20:,.0f}",
                f"{34 * tokens * h / 2**20:,.0f}",
                f"{layer / 2**20:,.0f}",
                f"{layer / (tokens * h):.1f}",
            )
        )
    headings = ("one layer, bf16", "the rule, MiB", "34sbh alone, MiB", "ghost, MiB", "ghost, bytes / sbh")
    return table(headings, rows)


def request_config(model: str) -> dict[str, int]:
    """Width and attention heads."""
    from tonnage.catalog.models import find_model

    known = find_model(model)
    assert known is not None
    config = known.config()
    return {
        "hidden": config.get("hidden_size") or config["n_embd"],
        "heads": config.get("num_attention_heads") or config["n_head"],
    }


def checkpointed(worker: Worker) -> str:
    """sqrt(L), and `checkpointing saves 60-70 %`."""
    rows = []
    for model, tokens in (("llama-3.2-1b", 512), ("llama-3.2-1b", 8192)):
        plain = None
        for checkpointing in ("none", "full", "sqrt", "selective"):
            found = run(
                worker,
                model,
                seq_len=tokens,
                precision="bf16-true",
                optimizer="adamw-fused",
                checkpointing=checkpointing,
            )
            kept, peak = most(found, "activation"), found.estimate.peak.allocated_bytes
            plain = plain or (kept, peak)
            rows.append(
                (
                    f"{model}, {tokens:,} tokens, {checkpointing}",
                    gib(kept),
                    f"{100 * (1 - kept / plain[0]):.0f} %",
                    gib(peak),
                    f"{100 * (1 - peak / plain[1]):.0f} %",
                )
            )
    return table(("bf16-true, fused AdamW", "activations, GiB", "saved", "peak, GiB", "saved"), rows)


def flops() -> str:
    """+33 % time."""
    rows = []
    for model, tokens in (("smollm2-135m", 2048), ("llama-3.2-1b", 2048)):
        plain = counted(model, tokens, "none")
        full = counted(model, tokens, "full")
        rows.append((f"{model}, {tokens:,} tokens", f"{plain / 1e12:.2f}", f"+{100 * (full / plain - 1):.1f} %"))
    return table(("forward and backward", "FLOPs x 1e12", "with checkpointing full"), rows)


def counted(model: str, tokens: int, checkpointing: str) -> int:
    """FLOPs of one micro-batch's forward and backward."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from tonnage.meta import recording
    from tonnage.techniques import build
    from tonnage.trainers.cases import request

    job, plan = request(
        model,
        offline=True,
        seq_len=tokens,
        precision="bf16-true",
        optimizer="sgd",
        attention="eager",  # whose products torch's counter knows; those of the CPU's fused attention it does not
        checkpointing=checkpointing,
    )
    with recording.recording(torch.device("cpu"), 2**50):
        ready = build(job, plan, device="cpu")
        with FlopCounterMode(display=False) as counter:
            ready.micro_batch(ready.next_batch())
        return int(counter.get_total_flops())


def main() -> None:
    with Worker() as worker:
        parts = {
            "per_parameter": per_parameter(worker),
            "sharded": sharded(worker),
            "activations": activations(worker),
            "checkpointed": checkpointed(worker),
        }
    parts["flops"] = flops()
    text = TEXT.read_text()
    for name, part in parts.items():
        text = text.replace(f"{{{name}}}\n", part)
    print(text, end="")


if __name__ == "__main__":
    main()
