"""What is done right after an import, in a process of its own."""

import subprocess
import sys

from tonnage.ghost.environment import PATH


def test_several_actions_after_one_import_all_happen_in_order() -> None:
    program = (
        "from tonnage_recorder.imports import after_import\n"
        "done = []\n"
        "after_import('colorsys', lambda module: done.append(('first', module.__name__)))\n"
        "after_import('colorsys', lambda module: done.append(('second', hasattr(module, 'rgb_to_hsv'))))\n"
        "import colorsys\n"
        "after_import('colorsys', lambda module: done.append('already there'))\n"
        "assert done == [('first', 'colorsys'), ('second', True), 'already there'], done\n"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": PATH}, check=True, timeout=300)


def test_who_only_asks_for_a_module_does_not_use_the_actions_up() -> None:
    """`datasets` and transformers look for torch before they import it."""
    program = (
        "import importlib.util\n"
        "from tonnage_recorder.imports import after_import\n"
        "done = []\n"
        "after_import('colorsys', lambda module: done.append(hasattr(module, 'rgb_to_hsv')))\n"
        "assert importlib.util.find_spec('colorsys') is not None and done == []\n"
        "import colorsys\n"
        "assert done == [True], done\n"
        "assert importlib.util.find_spec('colorsys') is not None and done == [True]\n"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": PATH}, check=True, timeout=300)
