"""The command of a change can be pasted: it asks for the changed case."""

import shlex

from tonnage.advice.changes import Change
from tonnage.advice.command import spell_command
from tonnage.catalog.devices import parse_cluster


def spell(options: dict[str, object], change: Change, gpu: str = "t4", others: tuple[str, ...] = ()) -> str:
    return spell_command("gpt2", parse_cluster(gpu), options, change, others)


def test_options_are_kept_and_changed():
    change = Change(options={"checkpointing": "full", "optimizer_in_backward": True})
    spelled = spell({"seq_len": 512, "checkpointing": "none"}, change)
    assert spelled == ("tonnage estimate gpt2 --gpu t4 --seq-len 512 --checkpointing full --optimizer-in-backward")


def test_lists_names_and_other_words():
    spelled = spell(
        {"lora_targets": ("q_proj", "v_proj"), "accum_sync": False},
        Change(options={}),
        others=("--rank", "1"),
    )
    assert spelled == "tonnage estimate gpt2 --gpu t4 --lora-targets q_proj,v_proj --rank 1"


def test_other_cards_replace_those_of_the_question():
    change = Change(options={}, cluster=parse_cluster("2x8xa100-80gb"))
    assert shlex.split(spell({}, change))[3:5] == ["--gpu", "2x8xa100-80gb"]
