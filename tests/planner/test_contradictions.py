"""Options that contradict each other whatever is chosen for the others, and those that do not."""

from dataclasses import replace
from typing import Any

import pytest

from solutions import question
from tonnage.errors import UsageError
from tonnage.planner.candidates import list_candidates
from tonnage.planner.contradictions import check_possible, find_ways_out
from tonnage.planner.question import Question
from tonnage.trainers import engine


def asked(gpu: str, model: str = "smollm2-135m", **said: Any) -> Question:
    return question(model, gpu, stated=tuple(said), seq_len=1024, **said)


@pytest.mark.parametrize(
    ("gpu", "said", "reason"),
    [
        ("t4", {"attention": "flash"}, "attention=flash: it needs compute capability 8.0, and t4 has 7.5"),
        (
            "a100-40gb",
            {"optimizer_in_backward": True, "precision": "fp16-mixed"},
            "loss scaling checks all gradients",
        ),
        ("a100-40gb", {"weights_dtype": "fp32", "precision": "bf16-true"}, "weights compute in their own dtype"),
        ("a100-40gb", {"shard": "hsdp"}, "shard=hsdp: it needs several nodes .* choose shard zero3.$"),
        ("8xa100-40gb", {"shard": "hsdp"}, r"shard zero3, or say its halves as machines \(2x4xa100-40gb\)"),
        ("2xa100-40gb", {"tp": 2, "loss": "fused"}, "tp=2: loss fused takes a whole head"),
        ("2xa100-40gb", {"pp": 2}, "pp=2: a step has 1 micro-batch, fewer than stages"),
        ("cpu", {"allocator": "expandable"}, "allocator=expandable: .*the CPU has none"),
    ],
)
def test_option_refused_in_every_combination_raises(gpu: str, said: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_possible(asked(gpu, **said))


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ("t4", {}),
        ("2xa100-40gb", {"loss": "fused"}),
        ("a100-40gb", {"optimizer_in_backward": True, "clip_grad_norm": 1.0}),
        ("a100-40gb", {"param_offload": "cpu"}),  # needs a sharding, which is open
        ("2xt4", {"tp": 2}),  # fp16 refuses it, which nobody stated
        ("2xa100-40gb", {"pp": 2, "global_batch_tokens": 4096}),
    ],
)
def test_option_that_depends_on_open_options_is_left_to_the_search(gpu: str, said: dict[str, Any]) -> None:
    check_possible(asked(gpu, **said))


def test_default_that_the_search_may_change_is_no_contradiction() -> None:
    """Expert parallelism needs a sharding, which is open and not the default."""
    check_possible(asked("8xh100-80gb", "mixtral-8x7b", ep=8))


def test_missing_trainer_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_version", lambda package: None)
    check_possible(asked("a100-40gb", engine="torchtitan"))


def test_option_that_is_not_stated_is_no_contradiction() -> None:
    one = asked("t4", attention="flash")
    check_possible(replace(one, stated=()))


@pytest.mark.parametrize(
    ("limits", "said", "ways"),
    [
        ({"only": ("checkpointing",)}, {"shard": "none"}, ("--only", "--shard none")),
        ({"only": ("checkpointing",)}, {"shard": "none", "tp": 1}, ("--only", "--shard none")),
        ({"without": ("tp", "pp")}, {"shard": "none", "cp": 1}, ("--without pp", "--shard none")),
        (
            {"without": ("cp", "pp"), "only_micro_batch": 1},
            {"shard": "none", "tp": 1},
            ("--without pp", "--shard none"),
        ),
    ],
)
def test_constraints_without_any_combination_are_named(
    limits: dict[str, Any], said: dict[str, Any], ways: Any
) -> None:
    """Two does not divide three heads, and a sequence of 1,024 tokens is too short for cp."""
    found = replace(asked("2xa100-40gb", **said), **limits)
    assert not list(list_candidates(found))
    assert find_ways_out(found) == ways
