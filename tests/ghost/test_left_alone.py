"""Which code Dynamo is told to run as it is, by the words that each torch has for that."""

import subprocess
import sys

import pytest

from tonnage.ghost.environment import PATH

OLDER = "frames = SimpleNamespace(skip_code=lambda code: marked.append(code.co_name))\n"
NEWER = (
    "frames = SimpleNamespace(\n"
    "    _FrameAction=SimpleNamespace(SKIP='skip', DEFAULT='default'),\n"
    "    _FrameExecStrategy=lambda *actions: actions,\n"
    "    set_code_exec_strategy=lambda code, how: marked.append(code.co_name if 'skip' in how else how),\n"
    ")\n"
)


@pytest.mark.parametrize("frames", [OLDER, NEWER], ids=["torch 2.4 and 2.5", "torch of today"])
def test_functions_methods_and_what_they_define_are_left_alone(frames: str) -> None:
    """Published figures of 2024 are run with the torch of then."""
    program = (
        "import json, types\n"
        "from types import SimpleNamespace\n"
        "from tonnage_inside.values import compiled\n"
        f"marked = []\n{frames}"
        "torch = SimpleNamespace(_C=SimpleNamespace(_dynamo=SimpleNamespace(eval_frame=frames)))\n"
        "module = types.ModuleType('some')\n"
        "exec('def one():\\n    def inner(): pass\\nclass Kind:\\n    def method(self): pass', vars(module))\n"
        "module.dumps = json.dumps\n"
        "compiled.leave_alone(torch, [module])\n"
        "assert marked == ['one', 'inner', 'method'], marked\n"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": PATH}, check=True, timeout=300)


def test_modes_that_follow_numbers_are_set_aside_and_others_stay() -> None:
    """A program's own mode may begin meanwhile."""
    program = (
        "import torch\n"
        "from types import SimpleNamespace\n"
        "from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack as stack\n"
        "from tonnage_inside.values import integers\n"
        "first, second = TorchFunctionMode(), TorchFunctionMode()\n"
        "ours = integers.known_integers(SimpleNamespace(torch=torch))()\n"
        "ours.__enter__()\n"
        "first.__enter__()\n"
        "with integers.without_following(torch):\n"
        "    assert stack() == [first]\n"
        "    second.__enter__()\n"
        "assert stack() == [ours, first, second]\n"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": PATH}, check=True, timeout=300)
