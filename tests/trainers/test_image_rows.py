"""Rows of image-text networks: made up they are what an estimate runs on, read they are what the processor makes."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from networks import SEEING, TINY, tiny_job
from tonnage.errors import UsageError
from tonnage.job import Job
from tonnage.step import model
from tonnage.trainers import common, image_rows, job_file

META = torch.device("meta")
ASKED = [
    {"type": "image"},
    {"type": "text", "text": "what is this"},
]
ANSWERED = [{"type": "text", "text": "a cat"}]
MESSAGES = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]


def seen(job: Job) -> dict[str, Any]:
    """What `image_rows.describe_row` is told, without a process of its own."""
    said = {name: getattr(job, name) for name in ("seq_len", "images", "image_size")}
    return image_rows._row_fields(job.model.name, job.model.config, said)


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Job], tuple[Any, Any]]]:
    """The job of a folder into which its scripts were written, and their rows.py."""

    def write(job: Job) -> tuple[Any, Any]:
        found = seen(job)
        (tmp_path / "made_up.json").write_text(json.dumps(found["row"]))
        (tmp_path / "job.py").write_text(job_file.script("job").text)
        (tmp_path / "rows.py").write_text(job_file.script("images", "rows").text)
        monkeypatch.syspath_prepend(str(tmp_path))
        said = importlib.import_module("job").Job(
            model=str(tmp_path),
            seq_len=job.seq_len,
            weights_dtype="float32",
            auto_class=image_rows.AUTO_CLASS,
            image_token=found["image_token"],
            image_size=found["image_size"],
        )
        return said, importlib.import_module("rows")

    yield write
    for name in ("job", "rows"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", list(SEEING))
@pytest.mark.parametrize("images", [1, 2])
def test_made_up_rows_are_those_of_an_estimate(name: str, images: int, exported: Any) -> None:
    job = tiny_job(name, seq_len=48, images=images)
    said, rows = exported(job)
    made = rows.dataset(said, None, job.micro_batch)
    batch = made.batch([made[index] for index in range(len(made))])
    network = model.build(job.model, dtype=torch.float32, attention=None, device=META)
    expected = model.batch(job, network, torch.float32)
    assert {n: (t.shape, t.dtype) for n, t in batch.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    assert torch.equal(batch["labels"] == -100, expected["labels"] == -100)
    assert torch.equal(batch["input_ids"] == said.image_token, expected["input_ids"] == said.image_token)
    for name, tensor in expected.items():
        if name not in ("input_ids", "labels") and not tensor.is_floating_point():
            assert torch.equal(batch[name], tensor), name


def test_rows_are_of_the_dtype_that_the_network_takes(exported: Any) -> None:
    said, rows = exported(tiny_job("llava"))
    made = rows.dataset(dataclasses.replace(said, images_dtype="bfloat16"), None, 1)
    assert made[0]["pixel_values"].dtype is torch.bfloat16
    assert made[0]["input_ids"].dtype is torch.int64


def test_images_that_are_cut_to_one_size_anyway_are_left_as_they_are() -> None:
    assert seen(tiny_job("llava"))["image_size"] is None
    assert seen(tiny_job("mllama", image_size=None))["image_size"] is None
    assert seen(tiny_job("qwen2_5_vl"))["image_size"] == (32, 16)
    assert seen(tiny_job("qwen2_5_vl", images=0))["image_size"] is None


def test_layers_are_named_where_fsdp_would_look_for_some_that_are_not_there() -> None:
    """CLIP and SigLIP list what their towers for text have, which these networks have not."""
    assert seen(tiny_job("gemma3"))["layers"] == ("SiglipEncoderLayer", "Gemma3DecoderLayer")
    assert seen(tiny_job("llava"))["layers"] == ("CLIPEncoderLayer", "LlamaDecoderLayer")
    for name in ("qwen2_5_vl", "llama"):
        network = model.build(tiny_job(name).model, dtype=torch.float32, attention=None, device=META)
        assert common.layers_to_wrap(network) == ()


def test_stretches_of_a_mask() -> None:
    assert image_rows._runs([False, True, True, False, True]) == [(1, 3), (4, 5)]
    assert image_rows._runs([True]) == [(0, 1)]
    assert image_rows._runs([False]) == []


def test_networks_that_write_nothing_are_refused() -> None:
    towers = {
        "text_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61},
        "vision_config": {**TINY["llava"]["vision_config"]},
    }
    job = tiny_job("llava")
    clip = dataclasses.replace(job.model, name="clip", config={"model_type": "clip", **towers})
    with pytest.raises(UsageError, match="read words and images and write on, and clip is a CLIPModel"):
        seen(dataclasses.replace(job, model=clip))


def test_a_refusal_comes_back_from_the_process_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"^3 x an image of qwen2_5_vl takes 27 tokens; .*image_size\.$"):
        image_rows.describe_row(tiny_job("qwen2_5_vl", images=3))


class Letters:
    """A processor of words, which gives an image two tokens and says what it was asked."""

    pad_token = eos_token = "_"
    chat_template: str | None = "a template"
    image_processor = None

    def __init__(self) -> None:
        self.tokenizer = self

    def apply_chat_template(self, messages: list[Any], tokenize: bool) -> str:
        parts = [part for message in messages for part in message["content"]]
        return " ".join("60 60" if part["type"] == "image" else str(len(part["text"])) for part in parts)

    def __call__(self, text: list[str], images: list[Any], max_length: int, **options: Any) -> dict[str, Any]:
        self.options = options
        rows = [[int(word) for word in words.split()] for words in text]
        return {
            "input_ids": torch.tensor([row + [0] * (max_length - len(row)) for row in rows]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (max_length - len(row)) for row in rows]),
            "pixel_values": torch.zeros(len([image for row in images for image in row]), 3, 16, 16),
        }


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> Letters:
    import transformers

    made = Letters()
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda name: made)
    return made


def conversations(folder: Path, *images: str) -> str:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"images": images, "messages": MESSAGES}) + "\n\n")
    return str(file)


def test_words_are_learned_and_neither_images_nor_padding(exported: Any, letters: Letters, tmp_path: Path) -> None:
    said, rows = exported(tiny_job("llava"))
    said = dataclasses.replace(said, seq_len=6, images_dtype="bfloat16")
    rows.opened = lambda path, size: path.name
    made = rows.dataset(said, conversations(tmp_path, "cat.png"), 0)
    batch = made.batch([made[0], made[0]])
    assert batch["input_ids"].tolist() == [[60, 60, 12, 5, 0, 0]] * 2
    assert batch["labels"].tolist() == [[-100, -100, 12, 5, -100, -100]] * 2
    assert batch["pixel_values"].dtype is torch.bfloat16
    assert "attention_mask" not in batch
    assert letters.options["padding_side"] == "right"


def test_rows_without_images_are_an_error(exported: Any, letters: Letters, tmp_path: Path) -> None:
    said, rows = exported(tiny_job("llava"))
    with pytest.raises(ValueError, match="has rows without images"):
        rows.dataset(said, conversations(tmp_path), 0)


def test_larger_images_are_shrunk(exported: Any, tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    _, rows = exported(tiny_job("qwen2_5_vl"))
    images.new("L", (64, 128)).save(tmp_path / "tall.png")
    assert rows.opened(tmp_path / "tall.png", [32, 16]).size == (16, 32)
    assert rows.opened(tmp_path / "tall.png", [640, 480]).size == (64, 128)
    assert rows.opened(tmp_path / "tall.png", None).mode == "RGB"


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}<end> {% endfor %}"
)
WORDS = ("<pad>", "<unk>", "<end>", "<bos>", "user", "assistant", "a", "cat", "what", "is", "this", "\n")


def tokenizer() -> Any:
    """One of words, in which token 60 is an image's, as in the tiny networks."""
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: place for place, word in enumerate([*WORDS, *map(str, range(len(WORDS), 60)), "<image>"])}
    words = Tokenizer(model.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<pad>", "<end>", "<bos>", "<image>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<end>",
        bos_token="<bos>",
        extra_special_tokens={"image_token": "<image>"},
    )


def processor(name: str) -> Any:
    """transformers' own of a tiny network."""
    import transformers

    if name == "llava":
        size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
        return transformers.LlavaProcessor(
            transformers.CLIPImageProcessor(**size),
            tokenizer(),
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=TEMPLATE,
        )
    seer = transformers.SiglipImageProcessor(size={"height": 16, "width": 16})
    seer.image_seq_length = 4
    return transformers.PaliGemmaProcessor(seer, tokenizer())


@pytest.mark.parametrize(
    ("name", "learned"),
    [("llava", [4, 8, 9, 10, 2, 5, 6, 7, 2]), ("paligemma", [6, 7, 2])],
)
def test_transformers_own_processors_make_such_batches(
    name: str, learned: list[int], exported: Any, tmp_path: Path
) -> None:
    """By a template all words are learned; PaliGemma has none, and learns the answer."""
    images = pytest.importorskip("PIL.Image")
    pytest.importorskip("torchvision", exc_type=ImportError)
    processor(name).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY[name]))
    images.new("RGB", (40, 30)).save(tmp_path / "cat.png")
    said, rows = exported(tiny_job(name))
    made, made_up = rows.dataset(said, conversations(tmp_path, "cat.png"), 0), rows.dataset(said, None, 2)
    batch, expected = made.batch([made[0], made[0]]), made_up.batch([made_up[0], made_up[1]])
    assert {n: (t.shape, t.dtype) for n, t in batch.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    labels = batch["labels"][0]
    assert labels[labels != -100].tolist() == learned
    network = importlib.import_module("job").network(said, random_weights=True)
    masked = {**batch, "attention_mask": (batch["input_ids"] != 0).long()}
    assert torch.allclose(network(**batch)[0], network(**masked)[0])  # nobody looks at padding
