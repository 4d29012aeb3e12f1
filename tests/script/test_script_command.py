"""Tests of command lines with other values, by the options of the script's own parser."""

import pytest

from tonnage.script.command import can_set, find_flag, set_value


def store(dest, nargs=None):
    return {"dest": dest, "action": "store", "nargs": nargs}


OPTIONS = {
    "--batch": store("batch"),
    "-b": store("batch"),
    "--bf16": store("bf16", "?"),
    "--packing": store("packing", "?"),
    "--no_packing": {"dest": "packing", "action": "storefalse", "nargs": 0},
    "--fast": {"dest": "fast", "action": "storetrue", "nargs": 0},
    "--kwargs": store("kwargs"),
    "--learning_rate": store("learning_rate"),
    "--learning-rate": store("learning_rate"),
    "--bs": {**store("bs"), "default": 4},
    "--grad-accum": {**store("grad_accum"), "default": 2},
    "--batch-size": {**store("batch_size"), "default": 64},
}


def changed(command, name, value):
    words = command.split()
    return " ".join(set_value(words, find_flag(name, OPTIONS, words), value, OPTIONS))


@pytest.mark.parametrize(
    ("command", "name", "value", "after"),
    [
        ("python x.py --batch 4 --fast", "batch", 8, "python x.py --batch 8 --fast"),
        ("python x.py --batch=4 --fast", "batch", 8, "python x.py --batch 8 --fast"),
        ("python x.py", "batch", 8, "python x.py --batch 8"),
        ("python x.py --bf16 --fast", "bf16", False, "python x.py --bf16 False --fast"),
        ("python x.py --bf16 True", "bf16", None, "python x.py"),
        ("python x.py --bf16 False --fast", "bf16", True, "python x.py --fast --bf16"),
        ("python x.py --batch 1 --batch 2", "batch", 3, "python x.py --batch 3"),
        ("python x.py --fast", "fast", False, "python x.py"),
        ("python x.py", "fast", True, "python x.py --fast"),
        ("python x.py --learning-rate 1", "learning_rate", 2, "python x.py --learning-rate 2"),
        ("python x.py", "kwargs", {"a": 1}, 'python x.py --kwargs {"a": 1}'),
    ],
)
def test_a_value_is_changed_in_its_place(command, name, value, after):
    assert can_set(find_flag(name, OPTIONS, command.split()), value, OPTIONS, command.split())
    assert changed(command, name, value) == after


@pytest.mark.parametrize(("name", "value"), [("unknown", 1), ("fast", False), ("batch", None)])
def test_values_that_no_flag_can_set(name, value):
    assert not can_set(find_flag(name, OPTIONS), value, OPTIONS, ["python", "x.py"])


def test_the_flag_that_switches_off_is_not_found_first():
    assert find_flag("packing", OPTIONS) == "--packing"


@pytest.mark.parametrize(
    ("name", "present", "command", "flag"),
    [
        ("per_device_train_batch_size", 4, "python x.py", "--bs"),
        ("per_device_train_batch_size", 16, "python x.py --bs 16", "--bs"),
        ("per_device_train_batch_size", 16, "python x.py --bs=16", "--bs"),
        ("per_device_train_batch_size", 8, "python x.py --bs 16", None),
        ("per_device_train_batch_size", 64, "python x.py", "--batch-size"),
        ("gradient_accumulation_steps", 2, "python x.py", "--grad-accum"),
        ("gradient_accumulation_steps", 1, "python x.py", None),
        ("seed", 4, "python x.py", None),
    ],
)
def test_a_scripts_own_name_of_a_setting_is_known_by_its_value(name, present, command, flag):
    assert find_flag(name, OPTIONS, command.split(), present) == flag
