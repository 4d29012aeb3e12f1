"""The GPUs of this machine as NVML reports them (a ghost's NVML) and as CUDA_VISIBLE_DEVICES selects them."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tonnage.catalog import local_gpus
from tonnage.catalog.devices import find_device, parse_cluster, spell_cluster
from tonnage.catalog.local_gpus import Found
from tonnage.errors import CannotEstimate, UsageError
from tonnage.ghost.environment import environment
from tonnage.units import GIB


def card(index: int = 0, name: str = "NVIDIA GeForce RTX 3090", **changes) -> Found:
    gpu = Found(
        name=name,
        uuid=f"GPU-{index}f",
        total_bytes=24 * GIB,
        capacity_bytes=23 * GIB,
        used_bytes=0,
        capability=(8, 6),
    )
    return replace(gpu, **changes)


def install(patch: pytest.MonkeyPatch, *cards: Found) -> None:
    patch.setattr(local_gpus, "visible", lambda: list(cards))


def test_catalog_card_has_the_memory_of_this_machine(monkeypatch):
    install(monkeypatch, card(0), card(1, capacity_bytes=22 * GIB))
    cluster = parse_cluster("here")
    assert (cluster.device.id, cluster.gpus, cluster.device.capacity_bytes) == ("rtx-3090", 2, 22 * GIB)
    assert cluster.device.bandwidth_bytes_per_second == find_device("rtx-3090").bandwidth_bytes_per_second
    assert parse_cluster("here", gpus=1).device.capacity_bytes == 23 * GIB
    assert (parse_cluster("4x2xhere").nodes, parse_cluster("4x2xhere").gpus) == (4, 8)
    assert parse_cluster("here", gpu_memory_bytes=GIB).device.capacity_bytes == GIB
    spec, memory_bytes = spell_cluster(cluster)
    assert parse_cluster(spec, gpu_memory_bytes=memory_bytes).device.capacity_bytes == 22 * GIB


def test_card_outside_the_catalog_is_known_by_its_memory(monkeypatch):
    install(monkeypatch, card(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", capacity_bytes=5 * GIB))
    device = parse_cluster("here").device
    assert (device.capacity_bytes, device.capability, device.peak_flops.bf16) == (5 * GIB, (8, 6), None)
    assert device.name == "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


def test_different_or_too_few_cards_are_refused(monkeypatch):
    install(monkeypatch, card(0), card(1, name="Tesla T4"))
    with pytest.raises(UsageError, match=r"1 x NVIDIA GeForce RTX 3090, 1 x Tesla T4.*CUDA_VISIBLE_DEVICES"):
        parse_cluster("here")
    install(monkeypatch, card(0))
    with pytest.raises(UsageError, match="This machine has 1 x NVIDIA GeForce RTX 3090, but 8 were requested"):
        parse_cluster("8xhere")
    with pytest.raises(UsageError, match="'1xhere' has 1 GPU, but --gpus is 2"):
        parse_cluster("1xhere", gpus=2)


@pytest.mark.parametrize(
    ("variable", "selected"),
    [
        (None, "012"),
        ("", ""),
        ("-1", ""),
        ("2,0", "20"),
        ("1,7,0", "1"),
        ("GPU-2", "2"),
        ("GPU-", ""),
        ("0,GPU-1f", "01"),
        ("0,1,0", ""),
        ("0,GPU-0", ""),
        ("²", ""),
    ],
)
def test_variable_selects_cards(variable, selected):
    gpus = [card(index) for index in range(3)]
    assert [gpu.uuid[4] for gpu in local_gpus._select_visible(gpus, variable)] == list(selected)


def test_memory_of_other_processes_is_reported_only_when_it_matters():
    busy = card(1, used_bytes=3 * GIB)
    assert local_gpus.in_use([card(0, used_bytes=GIB // 4)]) == []
    [sentence] = local_gpus.in_use([card(0), busy])
    assert sentence.startswith("GPU 1 (NVIDIA GeForce RTX 3090): other processes hold 3.00 GiB of 23.00 GiB")


def test_machine_without_a_driver_is_refused(monkeypatch):
    pynvml = pytest.importorskip("pynvml")

    def init():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    with pytest.raises(CannotEstimate, match=r"cannot be read.*Name a card with --gpu"):
        local_gpus.visible()


class NVMLError(Exception):
    pass


def divided_cards():
    """Return a fake NVML of a machine with a whole card, and one with MIG instances in two of seven slots."""

    def instance(card, slot):
        if slot not in (0, 3):
            raise NVMLError
        return f"instance {slot} of {card}"

    def capability(handle):
        if handle.startswith("instance"):
            raise NVMLError
        return 8, 0

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: f"card {index}",
        nvmlDeviceGetMigMode=lambda card: (card == "card 1", False),
        nvmlDeviceGetMaxMigDeviceCount=lambda card: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetName=lambda handle: f"name of {handle}",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetMemoryInfo=lambda handle, version: SimpleNamespace(total=5 * GIB, reserved=GIB, used=0),
        nvmlDeviceGetCudaComputeCapability=capability,
    )


def test_divided_card_is_listed_as_its_instances(monkeypatch):
    monkeypatch.setattr(local_gpus, "_import_nvml", divided_cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = local_gpus.visible()
    names = ["name of card 0", "name of instance 0 of card 1", "name of instance 3 of card 1"]
    assert [gpu.name for gpu in gpus] == names
    assert {(gpu.capacity_bytes, gpu.capability) for gpu in gpus} == {(4 * GIB, (8, 0))}


@pytest.mark.ghost
def test_nvml_reports_the_card_of_the_ghost():
    pytest.importorskip("pynvml")
    device = find_device("h200")
    settings = {name.removeprefix("GHOST_").lower(): value for name, value in device.ghost_settings().items()}
    program = (
        "from tonnage.catalog import local_gpus; c = local_gpus.cluster(); "
        "print(c, c.device.capacity_bytes, local_gpus.visible()[1].uuid)"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(devices=2, **settings),
        capture_output=True,
        text=True,
        check=True,
    )
    name, capacity, uuid = process.stdout.split()
    assert (name, int(capacity)) == ("2xh200", device.capacity_bytes)
    assert uuid.startswith("GPU-")


@pytest.mark.parametrize(
    ("variable", "order", "is_ambiguous"),
    [
        ("0", None, True),
        ("1,0", "FASTEST_FIRST", True),
        ("0", "PCI_BUS_ID", False),
        ("GPU-1f", None, False),
        (None, None, False),
        ("", None, False),
    ],
)
def test_indices_of_different_cards_are_ambiguous(monkeypatch, variable, order, is_ambiguous):
    pytest.importorskip("pynvml")
    monkeypatch.setattr(local_gpus, "_import_nvml", divided_cards)
    for name, value in (("CUDA_VISIBLE_DEVICES", variable), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    gpus = [card(0), card(1, name="Tesla T4")]
    monkeypatch.setattr(local_gpus, "_iterate_gpus", lambda nvml: iter(gpus))
    if is_ambiguous:
        with pytest.raises(UsageError, match=r"CUDA_DEVICE_ORDER.*UUIDs"):
            local_gpus.visible()
    elif variable == "":
        with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES hides all GPUs of this machine"):
            local_gpus.visible()
    else:
        assert local_gpus.visible() == local_gpus._select_visible(gpus, variable) != []
    monkeypatch.setattr(local_gpus, "_iterate_gpus", lambda nvml: iter([card(0), card(1)]))
    if variable and order is None:
        assert local_gpus.visible()  # equal cards: their order does not matter
