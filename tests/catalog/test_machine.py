"""Usable host memory is the machine's total, or the limit of control groups."""

from pathlib import Path

import psutil
import pytest

from tonnage.catalog import machine
from tonnage.catalog.devices import host_device
from tonnage.units import GIB

WHOLE = int(psutil.virtual_memory().total)


def limits(root: Path, groups: str, contents: dict[str, str]) -> list[int]:
    """Return the limits that files with these contents state for a process in these groups."""
    for name, text in {"proc/self/cgroup": groups, **contents}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return list(machine._cgroup_limits(root))


def test_limits_of_parent_groups_count(tmp_path):
    contents = {
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/other/memory.max": f"{GIB}\n",
    }
    assert limits(tmp_path, "0::/job/step\n", contents) == [8 * GIB]


def test_container_sees_its_own_group_at_the_root(tmp_path):
    assert limits(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": f"{4 * GIB}\n"}) == [4 * GIB]


def test_cgroup_v1_has_a_tree_for_memory(tmp_path):
    """In a container the path is the host's, which does not exist inside."""
    groups = "5:devices:/docker/ab\n4:memory:/docker/ab\n1:name=systemd:/a:b\n0::/\n"
    contents = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/devices/docker/ab/memory.limit_in_bytes": "1\n",
    }
    assert limits(tmp_path, groups, contents) == [2 * GIB]


@pytest.mark.parametrize("groups", ["", "\n", "0\n", "7:memory\n", "nothing that is known"])
def test_without_groups_there_are_no_limits(tmp_path, groups: str):
    assert list(machine._cgroup_limits(tmp_path)) == []
    assert limits(tmp_path, groups, {}) == []


def test_usable_memory_is_the_least_of_total_and_limits(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    assert machine.memory_bytes() == WHOLE
    limits(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "9223372036854771712\n"})
    assert machine.memory_bytes() == WHOLE
    limits(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "65536\n"})
    assert machine.memory_bytes() == 65536
    assert host_device().capacity_bytes == 65536
