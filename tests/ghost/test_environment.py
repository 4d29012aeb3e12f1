"""The environment of a ghost process, and which Python a command runs under."""

import sys
from pathlib import Path

import pytest

from tonnage.errors import GhostUnavailable, UsageError
from tonnage.ghost import environment as ghost_environment
from tonnage.ghost.wheel import Torch


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of libraries, as if built."""
    for name in ("libghost.so", "libcudart.so.13"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr(ghost_environment, "libraries", lambda cuda_major: tmp_path)
    return tmp_path


def test_the_environment_names_our_libraries_the_card_and_the_torch(built: Path, tmp_path: Path) -> None:
    torch = Torch(version="2.13.0", cuda_major=13, path=tmp_path / "torch", python=sys.executable)
    inherited = {"PYTHONPATH": "/own/code", "CUDA_VISIBLE_DEVICES": "3", "HOME": "/home/me"}
    variables = ghost_environment.environment(
        torch=torch, inherit=inherited, watch_into=tmp_path, steps=2, devices=8, total_bytes=1 << 34, capability="8.0"
    )
    assert variables["LD_PRELOAD"].split(":") == [str(built / "libcudart.so.13"), str(built / "libghost.so")]
    assert variables["PYTHONPATH"].split(":") == [
        *ghost_environment.PATH.split(":"),
        str(tmp_path / "torch"),
        "/own/code",
    ]
    assert (variables["GHOST_TOTAL_BYTES"], variables["GHOST_CAPABILITY"]) == (str(1 << 34), "8.0")
    assert (variables["GHOST_DEVICES"], variables["TONNAGE_STEPS"]) == ("8", "2")
    assert variables["CUDNN_HOME"] == variables["NVRTC_HOME"] == str(built), "where Transformer Engine looks"
    caches = {variables[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")}
    assert len(caches) == 3
    assert len({Path(cache).parent for cache in caches}) == 1, "a real run finds no kernel chosen on a ghost"
    assert "CUDA_VISIBLE_DEVICES" not in variables
    assert variables["HOME"] == "/home/me"
    assert inherited["CUDA_VISIBLE_DEVICES"] == "3", "the caller's own environment stays as it is"


def test_a_worker_is_not_watched_by_sitecustomize(built: Path) -> None:
    torch = Torch(version="2.13.0", cuda_major=13, path=None, python=sys.executable)
    assert "TONNAGE_OUT" not in ghost_environment.environment(torch=torch, inherit={})


def test_another_platform_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghost_environment.sys, "platform", "darwin")
    with pytest.raises(GhostUnavailable, match="needs Linux on x86-64"):
        ghost_environment.libraries(13)


def test_missing_libraries_name_the_command_that_builds_them() -> None:
    with pytest.raises(GhostUnavailable, match=r"CUDA 99 are not built.*native\.build"):
        ghost_environment.libraries(99)


def test_nothing_is_fetched_where_no_library_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghost_environment, "_BUILT", tmp_path)
    with pytest.raises(GhostUnavailable, match="not built"):
        ghost_environment.any_libraries()
    (tmp_path / "cuda12").mkdir()
    (tmp_path / "cuda12" / "libghost.so").write_bytes(b"")
    ghost_environment.any_libraries()


def script(path: Path, head: str) -> str:
    path.write_text(f"{head}\nprint()\n")
    path.chmod(0o755)
    return str(path)


def test_the_interpreter_of_a_command(tmp_path: Path) -> None:
    python = script(tmp_path / "python3.11", "#!/bin/sh")
    assert ghost_environment.interpreter([python, "train.py"]) == python
    assert ghost_environment.interpreter([script(tmp_path / "torchrun", f"#!{python}"), "train.py"]) == python
    long = script(tmp_path / "accelerate", f"#!/bin/sh\n'''exec' '{python}' \"$0\" \"$@\"\n' '''")
    assert ghost_environment.interpreter([long, "launch"]) == python


def test_the_interpreter_named_within_a_command(tmp_path: Path) -> None:
    python = script(tmp_path / "python3.11", "#!/bin/sh")
    tool = script(tmp_path / "run", "")
    assert ghost_environment.interpreter([tool, "A=1", python, "train.py"]) == python


def test_an_interpreter_named_from_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    for command in ([".venv/bin/python", "train.py"], ["env", "A=1", ".venv/bin/python", "train.py"]):
        assert ghost_environment.interpreter(command) == str(python)


def test_a_script_without_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()")
    with pytest.raises(UsageError, match=r"interpreter too: python .*train\.py"):
        ghost_environment.interpreter([str(tmp_path / "train.py")])


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="'no-such-program' is not found"):
        ghost_environment.interpreter(["no-such-program"])


def test_what_was_meant_by_a_command_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"Give its words without quotes around them: python train\.py$"):
        ghost_environment.interpreter(["python train.py"])
    with pytest.raises(UsageError, match=r"Variables are set by env: env WANDB_MODE=off python train\.py$"):
        ghost_environment.interpreter(["WANDB_MODE=off", "python", "train.py"])
    for nothing in ("", "=", "no-such program"):
        with pytest.raises(UsageError, match=r"is not found on PATH\.$"):
            ghost_environment.interpreter([nothing])


def test_compiled_kernels_of_somebody_else_are_not_loaded(tmp_path: Path) -> None:
    mine, shared, link = tmp_path / "mine", tmp_path / "shared", tmp_path / "link"
    shared.mkdir()
    shared.chmod(0o777)
    link.symlink_to(shared)
    (tmp_path / "file").touch()
    assert ghost_environment._is_own(mine)
    assert ghost_environment._is_own(mine), "and it stays so"
    assert mine.stat().st_mode & 0o077 == 0
    assert not any(
        ghost_environment._is_own(place) for place in (shared, link, tmp_path / "file", tmp_path / "no" / "folder")
    )
