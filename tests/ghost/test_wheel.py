"""Finding and fetching the CUDA build of torch, without the network: a stand-in pip and stand-in wheels."""

import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tonnage.errors import GhostUnavailable
from tonnage.ghost import wheel


def make_torch(folder: Path, version: str, cuda: str | None) -> Path:
    """A folder that looks like site-packages with a torch in it."""
    package = folder / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = '{version}'\n")
    (package / "version.py").write_text(f"cuda: Optional[str] = {cuda!r}\n")
    if cuda is not None:
        (package / "lib" / "libtorch_cuda.so").write_bytes(b"")
    info = folder / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return folder


def interpreter_with(
    folder: Path, site: Path | None, pip: str = "import sys; sys.exit('ERROR: no network here')"
) -> str:
    """A Python that sees only `site` and whose pip is the given program."""
    (folder / "pip").mkdir(parents=True, exist_ok=True)
    (folder / "pip" / "__init__.py").write_text("")
    (folder / "pip" / "__main__.py").write_text(pip)
    script = folder / "python3"
    paths = ":".join(str(path) for path in (folder, site) if path is not None)
    script.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "cache"))


def test_an_installed_cuda_build_is_used_where_it_is(tmp_path: Path) -> None:
    site = make_torch(tmp_path / "site", "2.9.1", "12.8")
    found = wheel.find(interpreter_with(tmp_path / "bin", site))
    assert (found.version, found.cuda_major, found.path) == ("2.9.1", 12, None)


def test_a_cached_build_stands_in_for_a_cpu_build(tmp_path: Path) -> None:
    site = make_torch(tmp_path / "site", "2.13.0+cpu", None)
    python = interpreter_with(tmp_path / "bin", site)
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    make_torch(tmp_path / "cache" / f"torch-2.13.0-{tag}", "2.13.0", "13.0")
    found = wheel.find(python)
    assert (found.version, found.cuda_major) == ("2.13.0", 13)
    assert found.path == tmp_path / "cache" / f"torch-2.13.0-{tag}"


FETCH = """
import os, pathlib, shutil, sys, tempfile, time
if "torch===" in sys.argv[-1]:
    with tempfile.NamedTemporaryFile() as part:
        print("Downloading torch-2.13.0-py3-none-any.whl (4.0 MB)", flush=True)
        for _ in range(4):
            part.write(bytes(10**6)), part.flush(), time.sleep(0.3)
folder = pathlib.Path(sys.argv[sys.argv.index("-d") + 1]); folder.mkdir(parents=True)
name = "triton" if "triton" in sys.argv[-1] else "torch"
shutil.copy(pathlib.Path({source!r}) / f"{{name}}.whl", folder / f"{{name}}-1-py3-none-any.whl")
"""


def index_of(tmp_path: Path, fetch: str = FETCH) -> str:
    """A Python with a CPU build of torch, whose pip finds the CUDA build and its triton."""
    unpacked = make_torch(tmp_path / "unpacked", "2.13.0", "13.0")
    with (unpacked / "torch-2.13.0.dist-info" / "METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: triton==3.7.0 ; platform_system == 'Linux'\n")
    with zipfile.ZipFile(tmp_path / "torch.whl", "w") as archive:
        for path in unpacked.rglob("*"):
            archive.write(path, path.relative_to(unpacked))
    with zipfile.ZipFile(tmp_path / "triton.whl", "w") as archive:
        archive.writestr("triton/__init__.py", "")
    site = make_torch(tmp_path / "site", "2.13.0+cpu", None)
    return interpreter_with(tmp_path / "bin", site, fetch.format(source=str(tmp_path)))


def test_a_wheel_is_fetched_once_with_its_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, said = index_of(tmp_path), list[str]()
    (tmp_path / "shutil.py").write_text("raise SystemExit('a file of the user stood in for a library')")
    monkeypatch.chdir(tmp_path)
    found = wheel.find(python, progress=said.append)
    assert found.path is not None
    assert (found.path / "triton" / "__init__.py").exists()
    assert list((found.path / "triton" / "__pycache__").glob("__init__.*.pyc"))
    assert any("triton==3.7.0" in text for text in said)
    far = [text for text in said if text.endswith("of 4 MB")]
    assert far[0].startswith("fetching torch===2.13.0  ")
    full = [text.count("█") for text in far]
    assert full == sorted(set(full))
    assert 0 < full[-1] <= 20
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [found.path.name]
    said.clear()
    assert wheel.find(python, progress=said.append) == found
    assert said == []


def test_two_that_ask_at_once_fetch_one_wheel(tmp_path: Path) -> None:
    noted = FETCH + "\nwith open({source!r} + '/asked', 'a') as file: file.write(sys.argv[-1] + ' ')\n"
    python, said = index_of(tmp_path, noted), list[str]()
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(lambda _: wheel.find(python, progress=said.append), range(2)))
    assert found[0] == found[1]
    assert (tmp_path / "asked").read_text().split() == ["torch===2.13.0", "triton==3.7.0"]
    assert said.count("waiting for the CUDA build of torch, which another process is fetching") == 1


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("triton==3.4.0; platform_system == 'Linux'", "triton==3.4.0"),
        ("triton~=3.9.0; platform_system == 'Linux' and python_version < '3.16'", "triton~=3.9.0"),  # since 2.14
        ("triton (==3.1.0) ; platform_system == 'Linux'", "triton==3.1.0"),
        ("tritonclient==2.0.0", None),
    ],
)
def test_the_triton_that_a_torch_asks_for(tmp_path: Path, line: str, wanted: str | None) -> None:
    unpacked = make_torch(tmp_path / "unpacked", "2.15.0", "13.2")
    with (unpacked / "torch-2.15.0.dist-info" / "METADATA").open("a") as metadata:
        metadata.write(f"Requires-Dist: filelock\nRequires-Dist: {line}\n")
    assert wheel._required_triton(unpacked) == wanted


def test_offline_and_not_cached_is_one_line_with_a_way_out(tmp_path: Path) -> None:
    python = interpreter_with(tmp_path / "bin", make_torch(tmp_path / "site", "2.13.0+cpu", None))
    with pytest.raises(GhostUnavailable, match=r"no network here.*TONNAGE_CACHE") as caught:
        wheel.find(python)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_is_not_called_a_missing_network(tmp_path: Path) -> None:
    site = make_torch(tmp_path / "site", "2.13.0+cpu", None)
    full = "import sys; sys.exit('ERROR: Could not install: [Errno 28] No space left on device')"
    with pytest.raises(GhostUnavailable, match="No space is left to fetch torch===2") as caught:
        wheel.find(interpreter_with(tmp_path / "bin", site, full))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "file"))
    site = make_torch(tmp_path / "site", "2.13.0+cpu", None)
    with pytest.raises(GhostUnavailable, match="set TONNAGE_CACHE"):
        wheel.find(interpreter_with(tmp_path / "bin", site))


@pytest.mark.parametrize("version", ["latest", "2", "2.13; rm -rf /", "../2.13"])
def test_an_absurd_version_is_refused(tmp_path: Path, version: str) -> None:
    python = interpreter_with(tmp_path / "bin", make_torch(tmp_path / "site", "2.13.0+cpu", None))
    with pytest.raises(GhostUnavailable, match="is not a version"):
        wheel.find(python, version)


@pytest.mark.parametrize("version", ["2.7.1", "1.13.0"])
def test_a_torch_that_is_too_old_is_refused_before_it_is_fetched(tmp_path: Path, version: str) -> None:
    python = interpreter_with(tmp_path / "bin", make_torch(tmp_path / "site", f"{version}+cpu", None))
    with pytest.raises(GhostUnavailable, match=rf"torch {version} is too old .* needs 2\.8 or newer"):
        wheel.find(python)
    with pytest.raises(GhostUnavailable, match="too old"):
        wheel.find(interpreter_with(tmp_path / "other", make_torch(tmp_path / "cpu", "2.13.0+cpu", None)), version)


def test_a_folder_may_hold_an_older_torch(tmp_path: Path) -> None:
    folder = make_torch(tmp_path / "older", "2.5.1", "12.4")
    (folder / "torch" / "version.py").write_text("__version__ = '2.5.1+cu124'\ncuda: Optional[str] = '12.4'\n")
    found = wheel.find_in_folder(folder, sys.executable)
    assert (found.version, found.cuda_major, found.path) == ("2.5.1", 12, folder)
    with pytest.raises(GhostUnavailable, match="cpu holds no CUDA build"):
        wheel.find_in_folder(make_torch(tmp_path / "cpu", "2.5.1+cpu", None), sys.executable)


def test_a_python_without_torch_is_named(tmp_path: Path) -> None:
    with pytest.raises(GhostUnavailable, match="has no torch"):
        wheel.find(interpreter_with(tmp_path / "bin", None))


def test_what_is_no_python_is_named() -> None:
    with pytest.raises(GhostUnavailable, match="does not run as a Python"):
        wheel.find("/bin/true")


def test_what_a_broken_python_says_is_told(tmp_path: Path) -> None:
    shim = tmp_path / "python"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    with pytest.raises(GhostUnavailable, match=r"interpreter \(pyenv: python3\.12: command not found\)\.$"):
        wheel.find(str(shim))
    with pytest.raises(GhostUnavailable, match=r"interpreter \(exit code 0\)\.$"):
        wheel.find("/bin/true")


def test_a_version_that_does_not_exist_names_those_that_do(tmp_path: Path) -> None:
    site = make_torch(tmp_path / "site", "2.13.0+cpu", None)
    said = (
        "ERROR: Could not find a version that satisfies the requirement torch===9.9.9 (from versions: 2.8.0, 2.9.1)"
    )
    python = interpreter_with(tmp_path / "bin", site, f"import sys; sys.exit({said!r})")
    with pytest.raises(GhostUnavailable, match=r"has no torch===9\.9\.9 .*newest are 2\.8\.0, 2\.9\.1\."):
        wheel.find(python, "9.9.9")
    silent = interpreter_with(
        tmp_path / "offline", site, f"import sys; sys.exit({said[:-23]!r} + '(from versions: none)')"
    )
    with pytest.raises(GhostUnavailable, match="Connect once"):
        wheel.find(silent, "9.9.9")
