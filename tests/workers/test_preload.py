"""Imports in the process that forks: none may touch the card."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tonnage.ghost import environment as ghost_environment
from tonnage.ghost.wheel import Torch
from tonnage.units import GIB
from tonnage.workers import preload

ASKS = """
import torch
CAPABILITY = torch.cuda.get_device_capability()
KEPT = torch.cuda.get_device_properties
MAJOR = torch.cuda.get_device_properties(torch.cuda.current_device()).major
"""
COMPILES = """
import torch
@torch.compile(backend="eager")
def double(x):
    return 2 * x
"""
TOUCHES = """
import preload_asks
try:
    import torch; torch.cuda._lazy_init()
except Exception:
    pass
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in {
        "asks": ASKS,
        "compiles": COMPILES,
        "touches": TOUCHES,
        "breaks": "import preload_asks\n1 / 0",
    }.items():
        (tmp_path / f"preload_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("preload_")]:
        del sys.modules[name]


def test_an_import_that_queries_the_card_gets_an_ordinary_one() -> None:
    assert preload.try_import("preload_asks")
    assert sys.modules["preload_asks"].CAPABILITY == preload.CAPABILITY
    assert sys.modules["preload_asks"].MAJOR == preload.CAPABILITY[0]
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("name", ["preload_asks", "preload_breaks"])
def test_a_kept_reference_to_a_query_function_is_the_real_one_afterwards(name: str) -> None:
    function = torch.cuda.get_device_properties
    code = function.__code__, torch.cuda.current_device.__code__, torch.cuda._lazy_init.__code__
    if preload.try_import(name):
        assert sys.modules[name].KEPT is function
    assert (function.__code__, torch.cuda.current_device.__code__, torch.cuda._lazy_init.__code__) == code


def test_a_function_is_compiled_when_it_is_called_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, object]] = []
    real = torch.compile

    def ours(model: Callable[..., object], **options: Any) -> Any:
        compiled.append(options)
        return real(model, **options)

    monkeypatch.setattr(torch, "compile", ours)
    assert preload.try_import("preload_compiles")
    assert torch.compile is ours
    module = sys.modules["preload_compiles"]
    assert (compiled, module.double.__name__) == ([], "double")
    assert [module.double(3), module.double(4)] == [6, 8]
    assert compiled == [{"backend": "eager"}]


def test_torch_compile_learns_of_the_forks_own_card(torch_build: Torch) -> None:
    """Its interface keeps torch.cuda's functions from the moment it is imported."""
    print_card = (
        "from tonnage.workers import preload\n"
        "assert preload.try_import('torch._dynamo.device_interface')\n"
        "from torch._dynamo.device_interface import get_interface_for_device\n"
        "card = get_interface_for_device('cuda').get_device_properties(0)\n"
        "print(card.multi_processor_count, card.total_memory)"
    )
    environment = ghost_environment.environment(torch=torch_build, sms=132, total_bytes=80 * GIB)
    answer = subprocess.run([sys.executable, "-c", print_card], env=environment, capture_output=True, text=True)
    assert answer.stdout.split() == ["132", str(80 * GIB)], answer.stderr


@pytest.mark.parametrize("name", ["preload_touches", "preload_breaks"])
def test_an_import_that_needs_cuda_is_undone(name: str) -> None:
    assert not preload.try_import(name)
    assert not any(name.startswith("preload_") for name in sys.modules)
    assert not torch.cuda.is_initialized()


def test_a_broken_module_raises_its_error_where_it_is_imported_again(torch_build: Torch, tmp_path: Path) -> None:
    """Torch's symmetric memory registers operators, and cannot be imported twice."""
    (tmp_path / "preload_lacks.py").write_text("import torch.distributed._symmetric_memory\nimport preload_missing")
    again = (
        "from tonnage.workers import preload\n"
        "assert not preload.try_import('preload_lacks')\n"
        "try: import preload_lacks\n"
        "except Exception as error: print(type(error).__name__, error.name)"
    )
    environment = ghost_environment.environment(torch=torch_build, sms=132, total_bytes=80 * GIB)
    environment["PYTHONPATH"] = f"{environment['PYTHONPATH']}{os.pathsep}{tmp_path}"
    answer = subprocess.run([sys.executable, "-c", again], env=environment, capture_output=True, text=True)
    assert answer.stdout.split() == ["ModuleNotFoundError", "preload_missing"], answer.stderr


def test_parent_packages_of_a_module_get_an_ordinary_card_too(tmp_path: Path) -> None:
    package = tmp_path / "preload_package"
    package.mkdir()
    (package / "__init__.py").write_text(ASKS)
    (package / "part.py").write_text("")
    assert preload.try_import("preload_package.part")
    assert sys.modules["preload_package"].CAPABILITY == preload.CAPABILITY


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.inside"])
def test_a_missing_module_is_not_imported(name: str) -> None:
    assert not preload.try_import(name)
