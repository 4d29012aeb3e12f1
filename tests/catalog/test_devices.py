"""Figures of a card agree with each other; names are exact; the notations of clusters are parsed."""

import contextlib
import re
import tomllib
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.catalog.devices import device_names, find_device, generic_device, parse_cluster, spell_options
from tonnage.catalog.spelling import closest, distance, normalise
from tonnage.cluster import Cluster
from tonnage.errors import UnknownDevice, UsageError
from tonnage.units import GIB, MIB, parse_bytes

REQUIRED = [
    *("t4", "v100-16gb", "v100-32gb", "rtx-2080-ti", "rtx-3080", "rtx-3090", "rtx-4080", "rtx-4090", "rtx-5080"),
    *("rtx-5090", "rtx-a4000", "rtx-a5000", "rtx-a6000", "rtx-6000-ada", "rtx-pro-6000", "a10", "a10g", "a30"),
    *("l4", "l40", "l40s", "a100-40gb", "a100-80gb", "a100-pcie-40gb", "a100-pcie-80gb", "h100-80gb", "h100-pcie"),
    *("h100-nvl", "h200", "h20", "b200", "b300", "gb200"),
]
DEVICES = [find_device(name) for name in device_names()]


@pytest.mark.parametrize("name", REQUIRED)
def test_required_cards_are_in_the_catalog(name):
    assert find_device(name).id == name


@pytest.mark.parametrize("name", device_names())
def test_figures_of_a_card_agree(name):
    device = find_device(name)
    assert device.context_low_bytes <= device.context_bytes <= device.context_high_bytes < device.capacity_bytes
    assert 100 * MIB < device.context_bytes < GIB
    assert device.shared_per_block_bytes <= device.shared_per_sm_bytes
    assert device.source
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", device.date)
    peaks = device.peak_flops
    assert peaks.fp32 is not None
    if peaks.bf16 is not None:
        assert device.capability >= (8, 0)
        assert peaks.bf16 == peaks.fp16
    if peaks.fp8 is not None:
        assert device.capability >= (8, 9)
        assert peaks.fp8 == pytest.approx(2 * peaks.bf16, rel=0.02)
    if peaks.fp4 is not None:
        assert device.capability >= (10, 0)


def test_host_memory_is_the_median_of_the_machines_with_the_card():
    """A p5.48xlarge has 2 TiB for eight, a workstation 64 GiB for one; of some cards no machine is known."""
    h100 = find_device("h100-80gb")
    assert h100.host_bytes == 235 * GIB
    assert "AWS p5.48xlarge 2,048 GiB for 8" in h100.host_source
    assert parse_cluster("4x8xh100-80gb").host_limit_bytes == 8 * 235 * GIB
    assert parse_cluster("2xrtx-4090").host_limit_bytes == 128 * GIB
    assert parse_cluster("2xrtx-4090", host_memory_bytes=96 * GIB).host_limit_bytes == 96 * GIB
    for cluster in (parse_cluster("a800-80gb"), parse_cluster(gpu_memory_bytes=24 * GIB)):
        assert cluster.host_limit_bytes is None


@pytest.mark.parametrize("device", [d for d in DEVICES if d.host_bytes is not None], ids=lambda d: d.id)
def test_host_memory_is_plausible(device):
    """From a small cloud machine with one T4 to an eighth of a large server."""
    assert 16 * GIB <= device.host_bytes <= 512 * GIB
    assert device.host_source.startswith("median of ")


@pytest.mark.parametrize("device", [d for d in DEVICES if d.bus_bits and d.memory_khz], ids=lambda d: d.id)
def test_bandwidth_follows_from_clock_and_bus(device):
    """Two transfers a clock: bus bits / 8 * 2 * memory clock, within a datasheet's rounding (H200: 4.8 of 4.92)."""
    derived = device.bus_bits / 8 * 2 * device.memory_khz * 1000
    assert device.bandwidth_bytes_per_second == pytest.approx(derived, rel=0.03)


@pytest.mark.parametrize("device", [d for d in DEVICES if d.id.endswith("gb")], ids=lambda d: d.id)
def test_memory_in_a_name_is_that_of_the_board(device):
    """`80gb`: at most 80 GiB, and at least 90 % of 80 GB."""
    stated = int(device.id.removesuffix("gb").rsplit("-", 1)[1])
    assert 0.9 * stated * 10**9 < device.capacity_bytes < stated * GIB


def test_capacities_equal_those_of_public_logs():
    """Figures that several public logs print, in GiB with two decimals."""
    printed = {"h100-80gb": "79.19", "h200": "139.80", "t4": "14.56", "b200": "178.35", "rtx-5090": "31.36"}
    assert {name: f"{find_device(name).capacity_bytes / GIB:.2f}" for name in printed} == printed


def test_aliases_are_exact_and_unique():
    seen: dict[str, str] = {}
    for name in device_names():
        device = find_device(name)
        for alias in (device.id, normalise(device.name), *device.aliases):
            assert alias == normalise(alias)
            assert seen.setdefault(alias, device.id) == device.id
            assert find_device(alias) is device
    with pytest.raises(UnknownDevice):
        find_device("l4 s")
    with pytest.raises(UnknownDevice):
        find_device("nvidia-l")


@pytest.mark.parametrize(
    ("short", "device_id"),
    [
        ("h100", "h100-80gb"),
        ("a100", "a100-80gb"),
        ("v100", "v100-16gb"),
        ("rtx 4090", "rtx-4090"),
        ("RTX_A6000", "rtx-a6000"),
    ],
)
def test_short_names_have_a_documented_meaning(short, device_id):
    assert find_device(short).id == device_id


@pytest.mark.parametrize(
    ("spec", "nodes", "gpus_per_node", "device"),
    [
        ("t4", 1, 1, "t4"),
        ("8xA100-80GB", 1, 8, "a100-80gb"),
        ("4x8xH100", 4, 8, "h100-80gb"),
        (" 2 x NVIDIA L40S ", 1, 2, "l40s"),
        ("2×rtx 4090", 1, 2, "rtx-4090"),
        ("4x1xt4", 4, 1, "t4"),
        ("2080ti", 1, 1, "rtx-2080-ti"),
    ],
)
def test_notations_of_clusters_are_parsed(spec, nodes, gpus_per_node, device):
    cluster = parse_cluster(spec)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.device.id) == (nodes, gpus_per_node, device)
    assert cluster.gpus == nodes * gpus_per_node
    assert parse_cluster(str(cluster)) == cluster


def test_total_number_of_gpus():
    assert parse_cluster("h100", gpus=4) == Cluster(device=find_device("h100"), gpus_per_node=4)
    assert parse_cluster("h100", gpus=64) == Cluster(device=find_device("h100"), gpus_per_node=8, nodes=8)
    assert parse_cluster("4x8xh100", gpus=32).gpus == 32
    with pytest.raises(UsageError, match="has 32 GPUs, but --gpus is 16"):
        parse_cluster("4x8xh100", gpus=16)
    with pytest.raises(UsageError, match="12 GPUs are not whole machines of 8"):
        parse_cluster("h100", gpus=12)


def test_memory_alone_makes_a_generic_gpu_that_states_its_assumptions():
    device = parse_cluster(gpu_memory_bytes=24 * GIB).device
    assert device.capacity_bytes == 24 * GIB
    assert device.bandwidth_bytes_per_second is None
    assert device.peak_flops.bf16 is None
    assert "assumed: capability 8.0" in device.source[0]
    assert device == generic_device(24 * GIB)
    assert "108 multiprocessors" in device.assumed[0]
    assert find_device("t4").assumed == ()


def test_memory_with_a_card_replaces_only_the_memory():
    card = find_device("a100-80gb")
    device = parse_cluster("2xa100-80gb", gpu_memory_bytes=40 * GIB).device
    assert device.capacity_bytes == 40 * GIB
    assert device.sms == card.sms
    assert "instead of 79.26 GiB" in device.source[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"spec": "h10"}, "Close: h100-80gb"),
        ({"spec": "8xrtx-4099"}, "rtx-4090"),
        ({"spec": "4x8x2xh100"}, "2xh100"),
        ({"spec": "0xt4"}, "0 is not a number of GPUs"),
        ({"spec": "12345678901xt4"}, "12345678901 is not a number of GPUs"),
        ({"spec": "t4", "gpus": 0}, "at least 1"),
        ({"spec": "t4", "gpu_memory_bytes": 0}, "above zero"),
        ({"spec": "8x"}, "No GPU named"),
        ({}, "No GPU named"),
        ({"spec": "a\nb"}, "Unknown GPU"),
        ({"spec": "h100x8"}, "--gpu 8xh100"),
        ({"spec": "H100:8"}, "--gpu 8xH100"),
        ({"spec": "8*h100"}, "--gpu 8xh100"),
        ({"spec": "8xh100,4xt4"}, "2 kinds of GPUs"),
        ({"spec": "zork:8"}, "Unknown GPU"),
        ({"spec": "t4", "gpu_memory_bytes": 24}, "give its unit too"),
    ],
)
def test_invalid_clusters_are_refused_in_one_line(arguments, words):
    with pytest.raises(UsageError) as caught:
        parse_cluster(**arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@given(st.text(max_size=40))
def test_any_text_is_a_cluster_or_a_usage_error(text):
    with contextlib.suppress(UsageError):
        assert parse_cluster(text).gpus >= 1


def test_ghost_settings_describe_the_card():
    settings = find_device("h100").ghost_settings()
    assert settings["GHOST_TOTAL_BYTES"] == "85028896768"
    assert settings["GHOST_CAPABILITY"] == "9.0"
    assert settings["GHOST_NAME"] == "NVIDIA H100 80GB HBM3"
    assert settings["GHOST_SHARED_PER_BLOCK_BYTES"] == "232448"
    assert "GHOST_L2_BYTES" not in find_device("h100-nvl").ghost_settings()


def test_context_is_observed_or_derived():
    """T4: NVML reported 140.9 MiB in 111 runs.  The L40S has its chip's context, the A40's is derived."""
    assert find_device("t4").context_bytes == 141 * MIB
    assert find_device("l40s").context_source == "observations on rtx-6000-ada: 2"
    assert find_device("a40").context_source.startswith("derived from")


def test_observed_contexts_stay_within_the_stated_range_per_multiprocessor():
    tables = tomllib.loads((files("tonnage") / "catalog" / "devices.toml").read_text(encoding="utf-8"))
    observed = [e for e in tables["device"] if "context_observed_mib" in e]
    assert len(observed) >= 9
    assert all(2.5 <= mib / e["sms"] <= 5.9 for e in observed for mib in e["context_observed_mib"])


@given(st.text("abc-1", max_size=8), st.text("abc-1", max_size=8), st.text("abc-1", max_size=8))
def test_distance_is_a_metric(left, right, third):
    assert distance(left, right) == distance(right, left)
    assert (distance(left, right) == 0) == (left == right)
    assert distance(left, third) <= distance(left, right) + distance(right, third)


def test_closest_names():
    assert distance("kitten", "sitting") == 3
    assert closest("lama-3", ["llama-3", "gpt2", "llama-2"]) == ["llama-3", "llama-2"]
    assert closest("completely-else", ["t4"]) == []


def test_memory_that_the_driver_reserves_on_an_h200() -> None:
    """nvmlDeviceGetMemoryInfo_v2 on the card (measurements/h200-2026-11-20.jsonl): reserved, and total."""
    device = find_device("h200")
    assert device.nvml_total_bytes == 150_754_820_096
    assert device.ghost_settings()["GHOST_RESERVED_BYTES"] == "644939776"
    assert "GHOST_RESERVED_BYTES" not in device.with_capacity(2**36).ghost_settings()
    assert "GHOST_RESERVED_BYTES" not in find_device("t4").ghost_settings(), "the ghost's own rule holds"


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ("--gpu 4x8xh100-80gb", {"spec": "4x8xh100-80gb"}),
        ("--gpu-memory 6.5GiB --gpus 2", {"spec": None, "gpus": 2, "gpu_memory_bytes": 13 * 2**29}),
        ("--gpu 2xt4 --gpu-memory 12GiB", {"spec": "2xt4", "gpu_memory_bytes": 12 * 2**30}),
        ("--gpu-memory 80GB --gpus 16", {"spec": "2x8x", "gpu_memory_bytes": 80 * 10**9}),
        ("--gpu 2x4x --gpu-memory 24GiB", {"spec": "2x4x", "gpu_memory_bytes": 24 * 2**30}),
        ("--gpu 2xt4 --host-memory 96GiB", {"spec": "2xt4", "host_memory_bytes": 96 * 2**30}),
        ("--gpu 1x12x --gpu-memory 25436943811", {"spec": "12x", "gpu_memory_bytes": 25_436_943_811}),
    ],
)
def test_cluster_is_spelled_as_options(options, arguments):
    assert spell_options(parse_cluster(**arguments)) == options


@given(
    st.sampled_from(["", "t4", "h100-80gb"]),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(MIB, 2**40) | st.integers(1, 300).map(lambda size: size * GIB),
    st.none() | st.integers(MIB, 2**43),
)
def test_spelled_options_parse_to_the_same_cluster(name, nodes, gpus_per_node, memory_bytes, host_bytes):
    cluster = parse_cluster(
        f"{nodes}x{gpus_per_node}x{name}", gpu_memory_bytes=memory_bytes, host_memory_bytes=host_bytes
    )
    words = spell_options(cluster).split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    parsed = parse_cluster(
        options.get("--gpu"),
        gpus=int(options["--gpus"]) if "--gpus" in options else None,
        gpu_memory_bytes=parse_bytes(options["--gpu-memory"]) if "--gpu-memory" in options else None,
        host_memory_bytes=parse_bytes(options["--host-memory"]) if "--host-memory" in options else None,
    )
    assert parsed == cluster


def test_cards_before_ampere_have_no_bf16() -> None:
    for name in ("t4", "v100-16gb", "rtx-2080-ti"):
        assert f"{name} does not compute in bf16: its compute capability is 7." in find_device(name).without_bf16
    assert not find_device("a100-40gb").without_bf16
    assert not find_device("rtx-3090").without_bf16
