"""Every model's configuration has exactly the published number of weights; overheads are intervals with sources."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from commands import TONNAGE
from tonnage.catalog.configurations import read_config, resolve
from tonnage.catalog.devices import device_names, find_device
from tonnage.catalog.models import find_model, known_model_names, model_names
from tonnage.catalog.overheads import Overhead, overheads
from tonnage.catalog.spelling import normalise
from tonnage.model import ModelRef
from tonnage.units import MIB

MODELS = [model for model in map(find_model, model_names()) if model is not None]

FAMILIES = [
    *("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3.1-8b", "llama-3.1-70b"),
    *("llama-3.1-405b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.3-70b", "qwen2.5-0.5b", "qwen2.5-72b", "qwen3-0.6b"),
    *("qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "mistral-7b-v0.1", "mistral-7b-v0.3", "mixtral-8x7b"),
    *("mixtral-8x22b", "gemma-2-2b", "gemma-2-9b", "gemma-2-27b", "gemma-3-1b", "gemma-3-4b-text", "gemma-3-27b"),
    *("phi-2", "phi-3-mini-4k", "phi-4", "deepseek-v2-lite", "deepseek-v3", "gpt2", "gpt2-xl", "pythia-160m"),
    *("opt-125m", "bert-base", "bert-large", "t5-small", "t5-large", "vit-base", "vit-large", "tinyllama-1.1b"),
    *("smollm2-135m", "granite-3.3-8b", "olmo-2-7b", "qwen2.5-vl-3b", "gpt-oss-20b"),
]


def test_catalog_has_the_families():
    assert set(FAMILIES) <= set(model_names())
    assert len(model_names()) >= 40


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
def test_configuration_has_exactly_the_published_number_of_weights(model):
    """The function that builds a step's network builds it on the meta device; tied weights count once."""
    torch = pytest.importorskip("torch")
    from tonnage.step.model import build

    ref = ModelRef(name=model.id, kind="config", config=model.config())
    network = build(ref, dtype=torch.bfloat16, attention=None, device=torch.device("meta"))
    assert sum(parameter.numel() for parameter in network.parameters()) == model.parameters
    assert type(network).__name__ in ref.config["architectures"]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
def test_catalog_model_passes_the_check_of_configurations(model):
    file = files("tonnage") / "catalog" / "configs" / f"{model.id}.json"
    assert read_config(file) == model.config()
    assert model.config_url.startswith("https://huggingface.co/" + model.hub)
    assert model.parameters_source


def test_each_file_is_listed_and_names_are_unique():
    stored = {file.name.removesuffix(".json") for file in (files("tonnage") / "catalog" / "configs").iterdir()}
    assert stored == set(model_names())
    names = [normalise(name) for model in MODELS for name in (model.id, *model.aliases)]
    assert len(names) == len(set(names))
    assert set(names) <= set(known_model_names())


def test_names_are_compared_exactly():
    assert find_model("Meta-Llama/Llama-3.1-8B-Instruct") is find_model("llama-3.1-8b")
    assert find_model("LLaMA 3.1 8b") is find_model("llama-3.1-8b")
    assert find_model("llama-3.1") is None


def test_repository_of_two_entries_is_the_whole_network():
    assert find_model("google/gemma-3-4b-pt").id == "gemma-3-4b"


def test_catalog_model_resolves_offline_with_its_source():
    ref = resolve("qwen3-8b", offline=True)
    assert ref.kind == "config"
    assert ref.config["hidden_size"] == 4096
    assert "https://huggingface.co/Qwen/Qwen3-8B" in ref.source
    ref.config["hidden_size"] = 1
    assert resolve("qwen3-8b").config["hidden_size"] == 4096


def test_overhead_of_one_gpu_is_its_context():
    device = find_device("t4")
    assert overheads(device) == Overhead(
        low_bytes=device.context_low_bytes,
        bytes=device.context_bytes,
        high_bytes=device.context_high_bytes,
        context_bytes=device.context_bytes,
        nccl_bytes=0,
        source=("CUDA context: observations on t4: 3",),
    )


def test_nccl_overhead_adds_up():
    """Two communicators of 8 on one machine and one of 2: 2 x 540 MiB + 443 MiB of NCCL buffers."""
    device = find_device("h100")
    overhead = overheads(device, (8, 8, 2))
    assert overhead.nccl_bytes == 2 * 540 * MIB + 443 * MIB
    assert overhead.bytes == device.context_bytes + overhead.nccl_bytes
    assert overhead.low_bytes < overhead.bytes < overhead.high_bytes
    assert any("nccl/issues/964" in line for line in overhead.source)


def test_communicator_across_machines_needs_more():
    device = find_device("h100")
    assert overheads(device, (64,)).bytes > overheads(device, (8,)).bytes
    assert overheads(device, (64,)).bytes == overheads(device, (1024,)).bytes
    assert overheads(device, (16,), gpus_per_node=72) == overheads(device, (8,))


def test_direct_peers_need_what_the_first_all_to_all_of_eight_h100_needed():
    """NVIDIA/nccl#1685: 1.06 GB before, 4.34 GB after, with 7 peers."""
    device = find_device("h100")
    added = overheads(device, (8,), send_recv_peers=7)
    base = overheads(device, (8,))
    assert added.low_bytes - base.low_bytes <= 3.28e9 <= added.high_bytes - base.high_bytes
    assert added.bytes - base.bytes == 7 * 32 * 12 * MIB


@pytest.mark.parametrize("ranks", [1, 2, 8, 9])
def test_each_interval_is_ordered(ranks):
    overhead = overheads(find_device("b200"), (ranks,), send_recv_peers=1)
    assert overhead.low_bytes <= overhead.bytes <= overhead.high_bytes


def _run(command):
    arguments = [*TONNAGE, command]
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"}
    )


def test_listings_have_all_models_and_devices():
    models = _run("models").stdout
    assert all(model.id in models for model in MODELS)
    devices = _run("devices").stdout
    assert all(name in devices for name in device_names())


def test_unknown_command_is_refused():
    result = _run("modles")
    assert result.returncode == 2
    assert "modles" in result.stderr


def test_catalog_imports_no_torch():
    program = (
        "import sys; from tonnage.catalog.configurations import resolve; "
        "resolve('gpt2'); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.stdout == "False\n", result.stderr


def test_configurations_are_plain_json():
    for model in MODELS:
        assert json.loads(json.dumps(model.config())) == model.config()


def test_readme_states_the_size_of_the_catalog():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"{len(device_names())} GPUs and {len(model_names())} model configurations" in readme
