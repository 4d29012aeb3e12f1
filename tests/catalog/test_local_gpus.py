"""The GPUs of this machine: what NVML tells, read on a ghost's NVML; what CUDA_VISIBLE_DEVICES leaves."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tonnage.catalog import local_gpus as here
from tonnage.catalog.devices import find_device, parse_cluster, spell_cluster
from tonnage.catalog.local_gpus import Found
from tonnage.errors import CannotEstimate, UsageError
from tonnage.ghost.process import environment
from tonnage.units import GIB


def card(place: int = 0, name: str = "NVIDIA GeForce RTX 3090", **changes) -> Found:
    found = Found(
        name=name,
        uuid=f"GPU-{place}f",
        total_bytes=24 * GIB,
        capacity_bytes=23 * GIB,
        used_bytes=0,
        capability=(8, 6),
    )
    return replace(found, **changes)


def put(patch: pytest.MonkeyPatch, *cards: Found) -> None:
    patch.setattr(here, "visible", lambda: list(cards))


def test_a_card_of_the_catalog_has_the_memory_that_is_here(monkeypatch):
    put(monkeypatch, card(0), card(1, capacity_bytes=22 * GIB))
    found = parse_cluster("here")
    assert (found.device.id, found.gpus, found.device.capacity_bytes) == ("rtx-3090", 2, 22 * GIB)
    assert found.device.bandwidth_bytes_per_second == find_device("rtx-3090").bandwidth_bytes_per_second
    assert parse_cluster("here", gpus=1).device.capacity_bytes == 23 * GIB
    assert (parse_cluster("4x2xhere").nodes, parse_cluster("4x2xhere").gpus) == (4, 8)
    assert parse_cluster("here", gpu_memory_bytes=GIB).device.capacity_bytes == GIB
    assert (
        parse_cluster(*spell_cluster(found)[:1], gpu_memory_bytes=spell_cluster(found)[1]).device.capacity_bytes
        == 22 * GIB
    )


def test_a_card_that_is_not_in_the_catalog_is_known_by_its_memory(monkeypatch):
    put(monkeypatch, card(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", capacity_bytes=5 * GIB))
    device = parse_cluster("here").device
    assert (device.capacity_bytes, device.capability, device.peak_flops.bf16) == (5 * GIB, (8, 6), None)
    assert device.name == "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


def test_cards_that_differ_or_are_too_few_are_said(monkeypatch):
    put(monkeypatch, card(0), card(1, name="Tesla T4"))
    with pytest.raises(UsageError, match=r"1 x NVIDIA GeForce RTX 3090, 1 x Tesla T4.*CUDA_VISIBLE_DEVICES"):
        parse_cluster("here")
    put(monkeypatch, card(0))
    with pytest.raises(UsageError, match="This machine has 1 x NVIDIA GeForce RTX 3090, and 8 were asked for"):
        parse_cluster("8xhere")
    with pytest.raises(UsageError, match="'1xhere' says 1 GPU, --gpus 2"):
        parse_cluster("1xhere", gpus=2)


@pytest.mark.parametrize(
    ("said", "left"),
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
def test_the_variable_chooses(said, left):
    every = [card(place) for place in range(3)]
    assert [one.uuid[4] for one in here._chosen(every, said)] == list(left)


def test_memory_that_others_hold_is_said_only_when_it_matters():
    busy = card(1, used_bytes=3 * GIB)
    assert here.in_use([card(0, used_bytes=GIB // 4)]) == []
    [said] = here.in_use([card(0), busy])
    assert said.startswith("GPU 1 (NVIDIA GeForce RTX 3090): other processes hold 3.00 GiB of 23.00 GiB")


def test_a_machine_without_a_driver_says_so(monkeypatch):
    pynvml = pytest.importorskip("pynvml")

    def init():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    with pytest.raises(CannotEstimate, match=r"cannot be read.*Name a card with --gpu"):
        here.visible()


class NVMLError(Exception):
    pass


def divided_cards():
    """NVML of a machine with a whole card, and one of which two parts of seven are made."""

    def part(card, place):
        if place not in (0, 3):
            raise NVMLError
        return f"part {place} of {card}"

    def capability(handle):
        if handle.startswith("part"):
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
        nvmlDeviceGetMigDeviceHandleByIndex=part,
        nvmlDeviceGetName=lambda handle: f"name of {handle}",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetMemoryInfo=lambda handle, version: SimpleNamespace(total=5 * GIB, reserved=GIB, used=0),
        nvmlDeviceGetCudaComputeCapability=capability,
    )


def test_a_divided_card_is_its_parts(monkeypatch):
    monkeypatch.setattr(here, "_nvml", divided_cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = here.visible()
    assert [one.name for one in found] == ["name of card 0", "name of part 0 of card 1", "name of part 3 of card 1"]
    assert {(one.capacity_bytes, one.capability) for one in found} == {(4 * GIB, (8, 0))}


@pytest.mark.ghost
def test_what_nvml_tells_is_what_torch_sees():
    pytest.importorskip("pynvml")
    device = find_device("h200")
    settings = {name.removeprefix("GHOST_").lower(): value for name, value in device.ghost_settings().items()}
    program = (
        "from tonnage.catalog import local_gpus; c = local_gpus.cluster(); "
        "print(c, c.device.capacity_bytes, local_gpus.visible()[1].uuid)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(devices=2, **settings),
        capture_output=True,
        text=True,
        check=True,
    )
    name, capacity, uuid = told.stdout.split()
    assert (name, int(capacity)) == ("2xh200", device.capacity_bytes)
    assert uuid.startswith("GPU-")


@pytest.mark.parametrize(
    ("said", "order", "ambiguous"),
    [
        ("0", None, True),
        ("1,0", "FASTEST_FIRST", True),
        ("0", "PCI_BUS_ID", False),
        ("GPU-1f", None, False),
        (None, None, False),
        ("", None, False),
    ],
)
def test_numbers_of_cards_that_differ_are_cudas(monkeypatch, said, order, ambiguous):
    pytest.importorskip("pynvml")
    monkeypatch.setattr(here, "_nvml", divided_cards)
    for name, value in (("CUDA_VISIBLE_DEVICES", said), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    every = [card(0), card(1, name="Tesla T4")]
    monkeypatch.setattr(here, "_all", lambda nvml: iter(every))
    if ambiguous:
        with pytest.raises(UsageError, match=r"CUDA_DEVICE_ORDER.*UUIDs"):
            here.visible()
    elif said == "":
        with pytest.raises(UsageError, match="No GPU of this machine can be seen"):
            here.visible()
    else:
        assert here.visible() == here._chosen(every, said) != []
    monkeypatch.setattr(here, "_all", lambda nvml: iter([card(0), card(1)]))
    if said and order is None:
        assert here.visible()  # whichever they are, they are alike
