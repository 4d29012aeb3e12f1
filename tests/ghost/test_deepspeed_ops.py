"""What DeepSpeed asks of a host is answered as the host would."""

import sys
from types import ModuleType
from typing import Any

import pytest

from tonnage.ghost.environment import PATH

sys.path.extend(PATH.split(":"))
from tonnage_inside.values import deepspeed_ops


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """What py-cpuinfo finds out in a second."""
    cpuinfo = pytest.importorskip("cpuinfo", reason="py-cpuinfo is not installed")
    found: dict[str, Any] = cpuinfo.get_cpu_info()
    return found


@pytest.mark.parametrize("taken_by_name", [False, True], ids=["0.19.8", "0.19.2"])
def test_the_processors_maker_is_who_py_cpuinfo_says(taken_by_name: bool, known: dict[str, Any]) -> None:
    asked: Any = ModuleType("cpuinfo")
    asked.get_cpu_info = lambda: known
    asking: Any = ModuleType(deepspeed_ops.HOST_OPTIMIZERS[0])
    asking.cpuinfo = asked
    policy: Any = None
    if taken_by_name:
        asking.get_cpu_info = asked.get_cpu_info
        deepspeed_ops.answer_at_once(policy, asking)
        exec("answer = get_cpu_info()", vars(asking))
    else:
        deepspeed_ops.answer_at_once(policy, asking)
        deepspeed_ops.answer_some_at_once(policy, asked)
        exec("answer = cpuinfo.get_cpu_info()", vars(asking))
        assert asked.get_cpu_info() == known
    assert asking.answer == {name: known[name] for name in ("vendor_id_raw",) if name in known}
    assert len(known) > len(asking.answer)
