"""What is done right after an import, in a process of its own."""

import subprocess
import sys

from tonnage.ghost.process import INSIDE


def test_several_actions_after_one_import_all_happen_in_order() -> None:
    program = (
        "from tonnage_inside.imports import after_import\n"
        "done = []\n"
        "after_import('colorsys', lambda module: done.append(('first', module.__name__)))\n"
        "after_import('colorsys', lambda module: done.append(('second', hasattr(module, 'rgb_to_hsv'))))\n"
        "import colorsys\n"
        "after_import('colorsys', lambda module: done.append('already there'))\n"
        "assert done == [('first', 'colorsys'), ('second', True), 'already there'], done\n"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(INSIDE)}, check=True, timeout=60)
