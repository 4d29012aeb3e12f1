"""The catalog answers for its models where the Hub cannot be reached or withholds them."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tonnage
from tonnage.catalog.models import find_model, hub_repositories, model_names
from tonnage.ghost.environment import PATH

sys.path.extend(PATH.split(":"))

from tonnage_inside import made_up_tokens
from tonnage_inside.hub import Hub

NAME = "HuggingFaceTB/SmolLM2-135M"

SCRIPT = f"""
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

name = "{NAME}"
assert AutoConfig.from_pretrained(name).hidden_size == 576
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name).cuda()
assert len(tokenizer) == model.config.vocab_size == 49152
assert model.dtype == torch.bfloat16
rows = tokenizer(["The quick brown fox", "jumps"], padding=True, return_tensors="pt").to("cuda")
optimizer = torch.optim.SGD(model.parameters())
model(**rows, labels=rows["input_ids"]).loss.backward()
optimizer.step()
"""


class GatedRepoError(Exception):
    """Named as the Hub's error."""


class LocalEntryNotFoundError(Exception):
    """Named as the Hub's error."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    catalog = tmp_path / "catalog.json"
    catalog.write_text(json.dumps(hub_repositories()))
    monkeypatch.setattr(made_up_tokens, "_MERGES", 300)  # learning more takes a second
    return Hub(str(catalog), tmp_path / "hub")


def patched(hub: Hub, monkeypatch: pytest.MonkeyPatch, *, reach: bool, error: Exception | None) -> SimpleNamespace:
    """Return the functions of the Hub's library, patched: its cache is empty, and the Hub raises `error`."""

    def fetch(repo_id: str, filename: str = "", *, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError
        if error is not None:
            raise error
        return f"/hub/{repo_id}/{filename}"

    monkeypatch.setattr(hub, "_can_reach", lambda: reach)
    library = SimpleNamespace(
        hf_hub_download=fetch, snapshot_download=fetch, try_to_load_from_cache=lambda *_, **__: None
    )
    hub._patch(library)  # type: ignore[arg-type]
    return library


def test_an_engine_gets_the_format_of_the_published_weights_and_a_trainer_does_not(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stated(repository: str) -> object:
        library = patched(hub, monkeypatch, reach=False, error=None)
        return json.loads(Path(library.hf_hub_download(repository, "config.json")).read_text()).get(
            "quantization_config"
        )

    assert stated("openai/gpt-oss-20b") is None
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    assert stated("openai/gpt-oss-120b")["quant_method"] == "mxfp4"  # type: ignore[index]
    assert stated("Qwen/Qwen3-8B") is None


@pytest.mark.parametrize(
    ("reach", "error"), [(False, None), (True, GatedRepoError()), (True, LocalEntryNotFoundError())]
)
def test_the_catalog_answers_where_the_hub_does_not(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, reach: bool, error: Exception | None
) -> None:
    library = patched(hub, monkeypatch, reach=reach, error=error)
    config = json.loads(Path(library.hf_hub_download("meta-llama/Llama-3.2-1B", "config.json")).read_text())
    assert (config["hidden_size"], config["torch_dtype"]) == (2048, "bfloat16")
    tokenizer = library.try_to_load_from_cache("meta-llama/Llama-3.2-1B", "tokenizer.json")
    assert len(json.loads(Path(tokenizer).read_text())["model"]["vocab"]) == 128_256
    [sentence] = hub.assumed()
    assert "the Hub did not give meta-llama/Llama-3.2-1B" in sentence
    assert "bfloat16" in sentence
    assert "makes up tokens" in sentence
    for missing in ("adapter_config.json", "model.safetensors"):
        with pytest.raises((GatedRepoError, LocalEntryNotFoundError)):
            library.hf_hub_download("meta-llama/Llama-3.2-1B", missing)


@pytest.mark.parametrize(
    ("repository", "files"),
    [
        ("meta-llama/Llama-3.2-1B", 3),
        ("google/vit-base-patch16-224", 1),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 4),
        ("Qwen/Qwen3-VL-8B-Instruct", 5),
    ],
)
def test_a_repository_as_a_whole_is_a_folder_of_what_is_made(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, repository: str, files: int
) -> None:
    library = patched(hub, monkeypatch, reach=False, error=LocalEntryNotFoundError())
    folder = Path(library.snapshot_download(repository, ignore_patterns="*"))
    assert json.loads((folder / "config.json").read_text())["torch_dtype"]
    assert len(list(folder.iterdir())) == files
    assert ("sizes published" in hub.assumed()[0]) == (files > 3)
    with pytest.raises(LocalEntryNotFoundError):  # the caller looks for the files that it named
        library.snapshot_download(repository, allow_patterns=["config.json"])


def test_what_the_hub_gives_is_taken(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    library = patched(hub, monkeypatch, reach=True, error=None)
    assert (
        library.hf_hub_download("meta-llama/Llama-3.2-1B", "config.json")
        == "/hub/meta-llama/Llama-3.2-1B/config.json"
    )
    assert library.try_to_load_from_cache("meta-llama/Llama-3.2-1B", "config.json") is None
    assert hub.assumed() == []


@pytest.mark.parametrize(
    ("repository", "options"),
    [("someone/other", {}), ("meta-llama/Llama-3.2-1B", {"repo_type": "dataset"}), (NAME, {"subfolder": "onnx"})],
)
def test_other_repositories_keep_their_errors(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, repository: str, options: dict[str, Any]
) -> None:
    library = patched(hub, monkeypatch, reach=False, error=GatedRepoError())
    with pytest.raises(GatedRepoError):
        library.hf_hub_download(repository, "config.json", **options)
    assert hub.assumed() == []


def test_an_error_that_withholds_nothing_is_raised(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    library = patched(hub, monkeypatch, reach=True, error=PermissionError("the cache"))
    with pytest.raises(PermissionError):
        library.hf_hub_download(NAME, "config.json")


ONE_OF_EACH_TYPE = {str(model.config()["model_type"]): model.id for model in map(find_model, model_names()) if model}


@pytest.mark.parametrize("name", ONE_OF_EACH_TYPE.values())
def test_every_vocabulary_is_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number from 0 has one token, and special ones have the configuration's numbers."""
    monkeypatch.setattr(made_up_tokens, "_MERGES", 300)
    model = find_model(name)
    assert model is not None
    config = model.config()
    files = made_up_tokens.files(config, model.hub)
    text = config.get("text_config") or config
    if "vocab_size" not in text:
        assert files == {}
        return
    document, settings = files["tokenizer.json"](), files["tokenizer_config.json"]()
    vocabulary = document["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(text["vocab_size"]))
    for role in ("bos", "eos", "pad"):
        number = text.get(f"{role}_token_id", config.get(f"{role}_token_id"))
        if isinstance(number, int):
            assert vocabulary[settings[f"{role}_token"]] == number
    for added in document["added_tokens"]:
        assert vocabulary[added["content"]] == added["id"]


def test_tokens_say_the_text_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer

    model = find_model("llama-3.2-1b")
    assert model is not None
    files = made_up_tokens.files(model.config(), model.hub)
    tokenizer = Tokenizer.from_str(json.dumps(files["tokenizer.json"]()))
    text = "Memory of a training step, in bytes: naïve 数 <|im_end|>"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 128_000
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False).removeprefix("<s>").strip() == text
    english = "The process of training a large network needs more memory than the weights alone would suggest."
    assert len(tokenizer.encode(english).ids) < len(english) / 2


@pytest.mark.ghost
def test_a_script_without_a_network_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    run = tonnage.dry_run([sys.executable, str(script)], gpu="t4", steps=1, seconds=False, variables=variables)
    assert run.estimate.fits
    assert any(f"the Hub did not give {NAME}" in sentence for sentence in run.estimate.coverage.assumed)
