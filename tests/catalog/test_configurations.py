"""All forms of MODEL; any content of a config.json is a configuration or a one-line error."""

import contextlib
import json
import math
import os
import string
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.catalog.configurations import LARGEST_FILE_BYTES, read_config, resolve
from tonnage.catalog.models import find_model
from tonnage.errors import CannotEstimate, UnknownModel, UnreadableModel

TINY = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100},
}


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a value (a text unchanged) as a config.json and returns its path."""

    def write(value, name="config.json"):
        file = tmp_path / "tiny-llama" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        return str(file)

    return write


def refusal(model, **options):
    """Return the one-line message of the error that `resolve` raises."""
    with pytest.raises(CannotEstimate) as caught:
        resolve(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 3
    return message


def test_file_and_its_folder_are_the_same_model(written, tmp_path):
    file = written(TINY)
    ref = resolve(file)
    assert (ref.name, ref.kind, ref.config, ref.source) == ("tiny-llama", "config", TINY, file)
    assert resolve(str(tmp_path / "tiny-llama")) == ref


def test_objects_are_refused_with_the_possible_form(written):
    assert "not a dict" in refusal({"hidden_size": 64})
    assert "package.module:function" in refusal(object())
    assert resolve(Path(written(TINY))) == resolve(written(TINY))


def test_file_of_another_name_names_the_model(written):
    assert resolve(written(TINY, "mine.json")).name == "mine"


def test_file_with_a_byte_order_mark_is_read(written):
    assert resolve(written("\ufeff" + json.dumps(TINY))).config == TINY


def test_catalog_name_wins_over_a_folder_and_dot_slash_means_the_folder(written, tmp_path, monkeypatch):
    written(TINY)
    (tmp_path / "tiny-llama").rename(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert resolve("gpt2").config["n_embd"] == 768
    assert resolve("./gpt2").config == TINY


def test_factory_stays_a_reference():
    ref = resolve("no_such_package.nets:Net.tiny", offline=True)
    assert (ref.kind, ref.factory, ref.config) == ("factory", "no_such_package.nets:Net.tiny", {})


def test_code_of_a_repository_is_ignored(written):
    ref = resolve(written({**TINY, "auto_map": {"AutoModelForCausalLM": "evil.Model"}, "_name_or_path": "x"}))
    assert ref.config == TINY


def test_source_says_that_quantization_is_not_applied(written):
    ref = resolve(written({**TINY, "quantization_config": {"quant_method": "fp8"}}))
    assert ref.config == TINY
    assert ref.source.endswith("its fp8 quantization is not applied")


def test_sizes_may_be_in_nested_configurations(written):
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 64, "num_attention_heads": 4}}
    assert resolve(written(config)).config == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be a whole number from 1 to 1,000,000"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": "64"}, 'hidden_size is "64"'),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"hidden_size": True}, "hidden_size is true"),
        (
            {"num_hidden_layers": 10**12},
            "num_hidden_layers is 1000000000000; it must be a whole number from 1 to 10,000",
        ),
        ({"vocab_size": 10**40}, "vocab_size is a number of more than 30 digits"),
        ({"vocab_size": {"a": 1}}, 'vocab_size is {"a": 1}'),
        ({"hidden_size": 66}, "hidden_size 66 is not divisible by num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": 7}, "has no model_type"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is"),
        ({"architectures": [{}]}, "it must be a list of names"),
        ({"vision_config": {"hidden_size": -1}}, "hidden_size is -1"),
    ],
)
def test_impossible_values_are_refused_by_field(written, change, words):
    assert words in refusal(written({**TINY, **change}))


def test_unset_fields_and_lists_are_accepted(written):
    config = {
        "model_type": "swin",
        "embed_dim": 96,
        "depths": [2, 2, 6, 2],
        "num_heads": [3, 6, 12, 24],
        "head_dim": None,
    }
    assert resolve(written(config)).config == config
    assert "depths is 0" in refusal(written({**config, "depths": [2, 0]}))


def test_number_of_experts_may_be_zero(written):
    config = {**TINY, "num_local_experts": 0, "num_experts_per_tok": 0, "type_vocab_size": 0}
    assert resolve(written(config)).config == config
    assert "from 0 to" in refusal(written({**config, "num_local_experts": -1}))


def test_width_need_not_be_divisible_where_the_head_size_is_given(written):
    assert resolve(written({**TINY, "hidden_size": 66, "head_dim": 16})).config["hidden_size"] == 66


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON: Expecting value at line 1, column 1"),
        ("{", "is not JSON"),
        ("[1, 2]", "holds a list where"),
        ('"llama"', "holds a single value where"),
        ("null", "holds a single value where"),
        ("{}", "has no model_type"),
        ('{"model_type": "llama"}', "states neither the width nor the depth"),
        ('{"model_type": "llama", "hidden_size": NaN}', "a number that cannot be read: 'NaN is not JSON'"),
        ('{"model_type": "llama", "hidden_size": 1e999}', "hidden_size is not finite"),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "a number that cannot be read"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"a": ' * 60 + "1" + "}" * 60, "nested more than 32 levels"),
        ('{"model_type": "\ud800"}', "is not UTF-8 text"),
    ],
)
def test_invalid_files_are_refused(written, tmp_path, text, words):
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert words in refusal(str(file))


def test_huge_file_is_not_read_to_its_end(tmp_path):
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(LARGEST_FILE_BYTES * 1000)
    assert "larger than 16.0 MiB" in refusal(str(file))


def test_devices_and_pipes_are_not_opened(tmp_path):
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    assert "not a regular file" in refusal(str(pipe))
    assert "not a regular file" in refusal("/dev/zero")


def test_folder_without_configuration_is_refused(tmp_path):
    assert "is a folder without config.json" in refusal(str(tmp_path))


def test_file_without_read_permission_is_refused(written, monkeypatch):
    file = written(TINY)
    monkeypatch.setattr(
        "pathlib.Path.open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    assert "cannot be read: Permission denied" in refusal(file)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lama-3.1-8b", "Close: llama-3.1-8b"),
        ("qwen3-7b", "qwen3-"),
        ("no/such/folder", "Unknown model 'no/such/folder'"),
        ("missing/config.json", "Unknown model 'missing/config.json'. There is no such file"),
        ("missing.json", "There is no such file"),
        ("./missing.sh", "There is no such file"),
        ("", "Unknown model ''"),
        ("~nobody-of-that-name/model", "Unknown model"),
        ("a\0b", "Unknown model"),
        ("a\nb", "Unknown model"),
        ("x" * 5000, "..."),
        ("package.module:", "Unknown model"),
    ],
)
def test_unknown_models_are_refused_with_close_names_and_all_forms(name, words):
    message = refusal(name, offline=True)
    assert words in message
    assert "package.module:factory" in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train.py", "is a script, not a model; run it after two dashes"),
        ("plan.toml", "a plan file is given as --plan"),
    ],
)
def test_files_for_other_arguments_are_named(tmp_path, name, words):
    (tmp_path / name).write_text("x = 1")
    assert words in refusal(str(tmp_path / name))


def test_catalog_repository_needs_no_network():
    assert resolve("Qwen/Qwen3-8B", offline=True).name == "qwen3-8b"


@pytest.fixture
def hub(monkeypatch):
    """Return a function that installs a reachable Hub with an empty cache; `answer(repository, file)` downloads."""

    def install(answer):
        def download(repository, file, *, local_files_only=False, **_):
            if local_files_only:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
            return answer(repository, file)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=lambda *_, **__: None))

    return install


def test_only_the_configuration_is_downloaded(written, hub):
    downloads = []
    hub(lambda repository, file: downloads.append((repository, file)) or written(TINY))
    ref = resolve("someone/some-model")
    assert (ref.name, ref.config) == ("someone/some-model", TINY)
    assert ref.source == "https://huggingface.co/someone/some-model"
    assert downloads == [("someone/some-model", "config.json")]


def test_cache_is_used_without_network(written, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: written(TINY))
    assert resolve("someone/some-model", offline=True).config == TINY


def test_uncached_repository_is_refused_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert "Offline, and the Hub's cache has no such model" in refusal("someone/no-such-model", offline=True)


def test_missing_network_is_noticed_with_one_request(tmp_path, monkeypatch):
    def head(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    assert "The Hub was not reached (ConnectionError)" in refusal("someone/no-such-model")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("GatedRepoError", "is gated on the Hub: accept its licence"),
        ("RepositoryNotFoundError", "The Hub has no repository of that name"),
        ("RemoteEntryNotFoundError", "has no config.json"),
    ],
)
def test_errors_of_the_hub_become_one_line(hub, error, words):
    def fail(*_):
        kind = getattr(huggingface_hub.errors, error)
        raise kind.__new__(kind)

    hub(fail)
    assert words in refusal("someone/some-model")


FIELDS = st.sampled_from(
    [*TINY, "head_dim", "depths", "text_config", "rope_scaling", "architectures", "n_embd", "n_head"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(value=JSON | st.dictionaries(FIELDS, JSON).map(lambda change: {**TINY, **change}))
def test_any_json_is_a_configuration_or_one_line(tmp_path_factory, value):
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_text(json.dumps(value), encoding="utf-8")
    with contextlib.suppress(UnreadableModel):
        config = read_config(file)
        assert isinstance(config["model_type"], str)
        assert json.loads(json.dumps(config)) is not None


@settings(max_examples=200)
@given(content=st.binary(max_size=60))
def test_any_bytes_are_a_configuration_or_one_line(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "bytes.json"
    file.write_bytes(content)
    with pytest.raises(UnreadableModel) as caught:
        read_config(file)
    assert "\n" not in str(caught.value)


@settings(max_examples=300)
@given(name=st.text(string.printable, max_size=30) | st.text(max_size=30))
def test_any_text_is_a_model_or_one_line(tmp_path_factory, name):
    folder = os.getcwd()
    os.chdir(tmp_path_factory.getbasetemp())
    try:
        with contextlib.suppress(UnknownModel, UnreadableModel):
            assert resolve(name, offline=True).kind in ("factory", "config")
    finally:
        os.chdir(folder)


def test_full_published_configuration_has_the_catalogs_fields(written):
    """A published config.json has more fields (dtype, generation, cache) than the catalog's."""
    model = find_model("smollm2-135m")
    published = {
        **model.config(),
        **{"_name_or_path": "x", "initializer_range": 0.04, "is_llama_config": True, "pretraining_tp": 1},
        **{"rope_interleaved": False, "rope_scaling": None, "torch_dtype": "bfloat16", "use_cache": True},
        **{"transformers_version": "4.40.1"},
    }
    assert model.config().items() <= resolve(written(published)).config.items()


@pytest.mark.parametrize("written", ["Infinity", '{"__float__": "Infinity"}'])
def test_both_notations_of_infinity_are_read(tmp_path, written):
    file = tmp_path / "config.json"
    file.write_text(f'{{"model_type": "mamba2", "hidden_size": 64, "time_step_limit": [0.0, {written}]}}')
    assert read_config(file)["time_step_limit"] == [0.0, math.inf]
    file.write_text(f'{{"model_type": "mamba2", "hidden_size": {written}}}')
    with pytest.raises(UnreadableModel, match="hidden_size is not finite"):
        read_config(file)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.Q4_K_M.GGUF"])
def test_file_of_weights_is_refused_and_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x00\x80\x04{")
    with pytest.raises(UnreadableModel, match=r"is a file of weights, which are not read; give the config\.json"):
        resolve(str(tmp_path / name))
