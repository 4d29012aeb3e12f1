"""What users get wrong with `tonnage train`: one line, the exit code of the contract, and nothing half-written."""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from real_ranks import run_ranks
from tonnage.cli.main import run
from tonnage.errors import TrialFailed, UnwritableFile
from tonnage.train import checkpoints
from tonnage.train.guard import Guard
from tonnage.train.run import _Run, _State
from tonnage.train.trainable import Trainable

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, **SIZES}
GPT = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 256, "n_positions": 8}
PLAN = 'schema_version = 1\nmodel = "{model}"\ngpu = "cpu"\n[job]\nseq_len = {length}\n[plan]\nprecision = "fp32"\n'
STEPS = ["--max-steps", "4", "--save-every", "2", "--keep", "3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a plan, a network with weights, data, and a run of four steps."""
    folder = tmp_path_factory.mktemp("trained")
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    network.save_pretrained(folder / "model")
    (folder / "plan.toml").write_text(PLAN.format(model="elsewhere", length=16))
    (folder / "docs.txt").write_text("The import statement combines two operations. " * 20)
    assert run(words(folder)) == 0
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "folder"))


def words(folder: Path, *others: str, out: str = "run", data: str = "docs.txt") -> list[str]:
    places = {"--model": "model", "--data": data, "--out": out}
    named = [word for option, name in places.items() for word in (option, str(folder / name))]
    return ["train", str(folder / "plan.toml"), *named, *STEPS, *others]


def change(folder: Path, **fields: Any) -> None:
    file = folder / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def replace_network(folder: Path, config: dict[str, Any]) -> None:
    shutil.rmtree(folder / "model")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))


def shorten_plan(folder: Path) -> None:
    (folder / "plan.toml").write_text(PLAN.format(model="elsewhere", length=1))


NEVER_BEGUN: dict[str, tuple[Callable[[Path], object], list[str], int, str]] = {
    "endless": (lambda _: None, ["--epochs", "inf"], 2, "--epochs is inf; it must be a number above zero"),
    "seed": (lambda _: None, ["--seed", str(2**64)], 2, "less than 2^63"),
    "words of the Trainer": (lambda _: None, ["--learning_rate", "1"], 2, "Here it is --lr."),
    "words of the plan": (
        lambda _: None,
        ["--per-device-train-batch-size", "1"],
        2,
        "The plan file says it: micro_batch",
    ),
    "other layers": (lambda f: change(f, num_hidden_layers=3), [], 3, "has no weights for model.layers.2"),
    "other sizes": (lambda f: change(f, intermediate_size=48), [], 3, "(16, 32) and not (16, 48) and 5 more"),
    "weights cut": (lambda f: os.truncate(f / "model" / "model.safetensors", 5000), [], 3, "incomplete metadata"),
    "an encoder": (
        lambda f: replace_network(f, {**CONFIG, "model_type": "bert"}),
        [],
        2,
        "bert is trained as masked-lm",
    ),
    "positions": (lambda f: replace_network(f, GPT), [], 2, "learned positions for 8 tokens, and seq_len is 16"),
    "one token": (shorten_plan, [], 2, "seq_len is 1, and a token is predicted from the one before"),
}


@pytest.mark.parametrize("name", NEVER_BEGUN)
def test_what_cannot_begin_leaves_the_folder_free(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare, options, code, message = NEVER_BEGUN[name]
    prepare(folder)
    assert run(words(folder, *options, out="new")) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert {path.name for path in (folder / "new").glob("*")} <= {"run.json"}


def break_all(folder: Path) -> None:
    for file in (folder / "run" / "checkpoints").glob("*/*.distcp"):
        file.unlink()


def rename_state(folder: Path) -> None:
    for file in (folder / "run" / "checkpoints").glob("*/checkpoint.json"):
        file.write_text(file.read_text().replace('{"state"', '{"stat"'))


NEVER_RESUMED: dict[str, tuple[Callable[[Path], object], list[str], int, str]] = {
    "fewer steps": (lambda _: None, ["--max-steps", "3"], 2, "has done 4 steps, more than 3; raise --max-steps"),
    "run.json": (lambda f: (f / "run" / "run.json").write_text("[]"), [], 3, "is not what tonnage train wrote"),
    "all damaged": (break_all, [], 3, "has no whole checkpoint (2 damaged ones)"),
    "another's state": (rename_state, [], 3, "step-4 was not saved by tonnage train"),
    "another seed": (lambda _: None, ["--seed", "1"], 2, "seed was 0 and is 1"),
}


@pytest.mark.parametrize("name", NEVER_RESUMED)
def test_what_cannot_be_resumed_is_left_as_it_is(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare, options, code, message = NEVER_RESUMED[name]
    prepare(folder)
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*") if path.is_file()}
    assert run(words(folder, "--resume", *options)) == code
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*") if path.is_file()}


def test_lines_that_cannot_be_used_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a folder in which a run never began is not in use."""
    (folder / "new").mkdir()
    (folder / "new" / "run.json").write_text("{}")
    lines = ['\ufeff{"text": "a text behind the mark of its bytes"}', '{"text": "half \\ud83d"}', "", "[1]"]
    lines += ['{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": null}]}']
    (folder / "data.jsonl").write_text("\n".join(lines))
    assert run(words(folder, out="new", data="data.jsonl")) == 0
    said = capsys.readouterr().err
    assert "left out 4 lines" in said
    for place, reason in ((2, "half of a character"), (3, "empty"), (5, "a message without content")):
        assert f"data.jsonl:{place} ({reason})" in said


BAD_STEPS: dict[str, tuple[set[int], int, int, str]] = {
    "one": ({3}, 0, 1, "step 3 was left out: its loss is no number"),
    "three in a row": ({3, 4, 5}, 0, 3, "went back to the weights of"),
    "with good ones between": ({3, 4, 5, 6, 7, 8, *range(11, 17)}, 0, 12, "step-10 after step 16; the data goes on"),
    "for ever": (set(range(3, 40)), 5, 12, "step-2 3 times and its steps are bad again at step 14; choose a lower"),
    "from the start": (set(range(1, 40)), 5, 3, "3 steps in a row, up to step 3, were left out, and there is no"),
}
"""Steps whose loss is no number; exit code, number of steps that are left out, and what is said."""


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_steps_change_nothing_and_end_a_run_that_does_not_recover(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, code, left_out, message = BAD_STEPS[name]
    own, numbers = Trainable.step, iter(range(1, 100))

    def step(self: Trainable, given: Any, accepts: Any = None) -> Any:
        is_bad = next(numbers) in bad
        result = own(self, given, lambda loss, norm: accepts(math.nan if is_bad else loss, norm))
        return replace(result, loss=math.nan) if is_bad else result

    monkeypatch.setattr(Trainable, "step", step)
    assert run(words(folder, "--max-steps", "20", out="new")) == code
    assert message in capsys.readouterr().err
    lines = [json.loads(line) for line in (folder / "new" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["skipped"] for line in lines) == left_out


def test_a_run_that_diverged_is_not_passed_off_as_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words(folder, "--max-steps", "3", "--lr", "1e30", out="new")) == 5
    said = capsys.readouterr().err
    assert "the run ends with 1 step left out" in said
    assert "The run diverged: under the weights after step 3 the loss of the first step's batch is no number" in said
    assert not (folder / "new" / "final").exists()
    assert not (folder / "new" / "checkpoints" / "step-3").exists()
    monkeypatch.setattr(Guard, "accepts", lambda guard, loss, norm: not setattr(guard, "bad_in_a_row", 1))
    assert run(words(folder, "--max-steps", "3", out="data_at_fault")) == 0
    assert "the run ends with 1 step left out" in capsys.readouterr().err
    assert (folder / "data_at_fault" / "final" / "config.json").exists()


def test_a_disk_that_is_full_at_the_end_leaves_the_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(self: Trainable, draft: Path) -> None:
        draft.mkdir()
        raise UnwritableFile(f"{draft} cannot be written: No space left on device.")

    with monkeypatch.context() as patch:
        patch.setattr(Trainable, "save_pretrained", save)
        assert run(words(folder, out="new")) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device. Make room, and continue with --resume." in said
    assert sorted(path.name for path in (folder / "new").iterdir()) == ["checkpoints", "metrics.jsonl", "run.json"]
    assert run(words(folder, "--resume", out="new")) == 0
    assert (folder / "new" / "final" / "model.safetensors").is_file()


def test_an_environment_that_is_not_whole(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for variables, message in (({"WORLD_SIZE": "1"}, "no MASTER_ADDR"), ({"WORLD_SIZE": "two"}, "WORLD_SIZE two")):
        with monkeypatch.context() as patch:
            patch.setenv("RANK", "0")
            for name, value in {
                **variables,
                **({} if "no" in message else {"MASTER_ADDR": "a", "MASTER_PORT": "1"}),
            }.items():
                patch.setenv(name, value)
            assert run(words(folder, out="new")) == 2
        assert f"The environment has RANK 0 and {message}; start with torchrun" in capsys.readouterr().err


def test_a_rank_that_dies_is_said_by_the_others(tmp_path: Path) -> None:
    run_ranks(lose_a_rank, 2, tmp_path / "said")
    assert "Another rank has ended" in (tmp_path / "said").read_text()


def lose_a_rank(rank: int, world: int, said: Path) -> None:
    if rank == 1:
        os._exit(0)
    lonely = object.__new__(_Run)
    lonely._rank, lonely._state = rank, _State()
    assert checkpoints.count_ranks() == 2
    with pytest.raises(TrialFailed) as failure, lonely.names_lost_ranks():
        dist.all_reduce(torch.zeros(1))
    said.write_text(str(failure.value))
    os._exit(0)  # without its peer it cannot leave the group
