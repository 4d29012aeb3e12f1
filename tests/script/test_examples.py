"""The examples of questions that no option asks: what they hold, reasoned from bytes."""

from pathlib import Path

import pytest

import tonnage
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.estimate import Estimate
from tonnage.ghost.wheel import Torch
from tonnage.script import dry_run

EXAMPLES = Path(tonnage.__file__).parents[2] / "examples"
LLAMA = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
"intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
"num_key_value_heads": 4, "vocab_size": 1024}"""
ZERO3 = '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": "auto"}'


def run(cluster: str, *command: str) -> Estimate:
    return dry_run.run(command, parse_cluster(cluster), steps=3).estimate


def test_a_frozen_tower_has_neither_gradients_nor_states(torch_build: Torch) -> None:
    command = ("python", str(EXAMPLES / "images.py"), "--side", "112", "--steps", "2", "--freeze")
    estimate = run("a100-40gb", *command)
    trained = estimate.model["trainable_parameters"]
    assert estimate.model["parameters"] - trained > 40e6
    assert estimate.peak.by_category["optimizer_state"] == pytest.approx(2 * 4 * trained, rel=0.01)
    assert estimate.peak.by_category["gradient"] == pytest.approx(4 * trained, rel=0.01)


def test_fewer_pixels_and_more_frames_change_the_rows_of_the_tower(torch_build: Torch) -> None:
    command = ("python", str(EXAMPLES / "images.py"), "--freeze")
    few = run("a100-40gb", *command, "--side", "448")
    many = run("a100-40gb", *command, "--side", "896")
    bounded = run("a100-40gb", *command, "--side", "896", "--max-pixels", str(448**2))
    video = run("a100-40gb", *command, "--side", "448", "--images", "0", "--frames", "2")
    assert few.peak.allocated_bytes == bounded.peak.allocated_bytes < many.peak.allocated_bytes
    assert video.peak.allocated_bytes == pytest.approx(few.peak.allocated_bytes, rel=0.01), "two frames are one row"


def test_ulysses_halves_what_each_rank_keeps_of_a_row(torch_build: Torch, tmp_path: Path) -> None:
    """Each run starts a launcher and two ranks with DeepSpeed."""
    pytest.importorskip("deepspeed")
    (tmp_path / "config.json").write_text(LLAMA)
    (tmp_path / "zero3.json").write_text(ZERO3)
    script = ("torchrun", "--nproc-per-node", "2", str(EXAMPLES / "finetune.py"), "--model", str(tmp_path))
    options = (
        "--output_dir",
        str(tmp_path / "out"),
        "--per_device_train_batch_size",
        "1",
        "--tokens",
        "4096",
        "--bf16",
    )
    deepspeed = ("--deepspeed", str(tmp_path / "zero3.json"), "--report_to", "none")
    whole, shared = (
        run("2xa100-40gb", *script, *options, *deepspeed, "--ulysses", ranks).peak.by_category["activation"]
        for ranks in ("1", "2")
    )
    assert shared == pytest.approx(whole / 2, rel=0.1)
