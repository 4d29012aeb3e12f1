"""The memory that is here: the machine's, or what control groups leave of it."""

from pathlib import Path

import psutil
import pytest

from tonnage.catalog import machine
from tonnage.catalog.devices import host_device
from tonnage.units import GIB

WHOLE = int(psutil.virtual_memory().total)


def limits(root: Path, groups: str, said: dict[str, str]) -> list[int]:
    """What is said in files of these names, for a process in these groups."""
    for name, text in {"proc/self/cgroup": groups, **said}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return list(machine._limits(root))


def test_the_groups_above_count_too(tmp_path):
    said = {
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/other/memory.max": f"{GIB}\n",
    }
    assert limits(tmp_path, "0::/job/step\n", said) == [8 * GIB]


def test_a_container_sees_its_own_group_at_the_top(tmp_path):
    assert limits(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": f"{4 * GIB}\n"}) == [4 * GIB]


def test_the_first_version_has_a_tree_for_memory(tmp_path):
    """In a container the path is the machine's, which is not there."""
    groups = "5:devices:/docker/ab\n4:memory:/docker/ab\n1:name=systemd:/a:b\n0::/\n"
    said = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/devices/docker/ab/memory.limit_in_bytes": "1\n",
    }
    assert limits(tmp_path, groups, said) == [2 * GIB]


@pytest.mark.parametrize("groups", ["", "\n", "0\n", "7:memory\n", "nothing that is known"])
def test_without_groups_there_are_no_limits(tmp_path, groups: str):
    assert list(machine._limits(tmp_path)) == []
    assert limits(tmp_path, groups, {}) == []


def test_the_least_of_the_machine_and_its_limits_is_there(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    assert machine.memory_bytes() == WHOLE
    limits(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "9223372036854771712\n"})
    assert machine.memory_bytes() == WHOLE
    limits(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "65536\n"})
    assert machine.memory_bytes() == 65536
    assert host_device().capacity_bytes == 65536
