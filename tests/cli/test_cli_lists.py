"""`tonnage devices`, `tonnage models` and `tonnage formats`."""

import json

import pytest

from tonnage.catalog.devices import device_names
from tonnage.catalog.models import model_names


def test_each_device_has_a_line(tonnage):
    ended = tonnage("devices")
    assert ended.code == 0
    assert [line.split()[0] for line in ended.out.splitlines()[1:]] == device_names()


def test_one_device_with_its_sources(tonnage):
    out = tonnage("devices", "Tesla T4").out
    assert "14.56 GiB" in out
    assert "source" in out


def test_devices_as_json(tonnage):
    assert [entry["id"] for entry in json.loads(tonnage("devices", "--json").out)] == device_names()
    assert json.loads(tonnage("devices", "t4", "--json").out)["capacity_bytes"] > 14 * 2**30


def test_each_model_has_a_line(tonnage):
    ended = tonnage("models")
    assert ended.code == 0
    assert [line.split()[0] for line in ended.out.splitlines()[1:]] == model_names()


def test_models_can_be_searched(tonnage):
    names = [line.split()[0] for line in tonnage("models", "LLAMA-3.1").out.splitlines()[1:]]
    assert "llama-3.1-8b" in names
    assert "gpt2" not in names


def test_search_without_a_match_exits_with_1(tonnage):
    ended = tonnage("models", "zzz")
    assert (ended.code, ended.out) == (1, "")
    assert "zzz" in ended.err
    assert (tonnage("models", "zzz", "--json").out, ended.code) == ("[]\n", 1)


@pytest.mark.parametrize(
    ("model", "dtype", "method"),
    [("gpt2", "float32", None), ("llama-3.1-8b", "bfloat16", None), ("gpt-oss-20b", "bfloat16", "mxfp4")],
)
def test_configuration_is_printed_with_the_format_of_the_published_weights(model, dtype, method, tonnage):
    written = json.loads(tonnage("models", model, "--config").out)
    assert written["torch_dtype"] == dtype
    assert written.get("quantization_config", {}).get("quant_method") == method


def test_configuration_needs_an_exact_name(tonnage):
    ended = tonnage("models", "gpt", "--config")
    assert (ended.code, ended.out) == (2, "")
    assert "'gpt'" in ended.err


def test_page_of_formats_excludes_other_outputs(tonnage):
    assert tonnage("formats", "--markdown").out.startswith("# Number formats")
    for other in ("nf4", "--json"):
        ended = tonnage("formats", other, "--markdown")
        assert (ended.code, ended.out) == (2, "")
        assert f"--markdown prints the page of all formats, and {other} another output" in ended.err
