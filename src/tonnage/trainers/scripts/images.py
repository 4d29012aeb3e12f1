"""The rows that are trained on: conversations about images.  Used by train.py.

Each line of the file of --data is a conversation as JSON; paths of images are relative to the file's folder:

    {"images": ["cat.jpg"],
     "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]}

All words are learned, also those of the user.  Needs pillow, and most processors torchvision.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from job import Job
from torch.utils.data import Dataset

HERE = Path(__file__).parent
Batch = dict[str, torch.Tensor]


class Conversations(Dataset):  # type: ignore[type-arg, misc]
    """Lines of the file with their images."""

    def __init__(self, job: Job, path: Path) -> None:
        from transformers import AutoProcessor

        self.job = job
        self.folder = path.parent
        self.lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not all(line.get("images") for line in self.lines):  # under FSDP other ranks would wait for it
            raise ValueError(f"{path} has rows without images.")
        self.processor = AutoProcessor.from_pretrained(job.model)
        if self.processor.tokenizer.pad_token is None:
            self.processor.tokenizer.pad_token = self.processor.tokenizer.eos_token
        size = getattr(self.processor.image_processor, "size", None)
        if job.image_size is not None and size is not None and set(dict(size)) == {"longest_edge"}:
            size["longest_edge"] = max(job.image_size)  # some processors enlarge smaller images to it (SmolVLM)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        line = self.lines[index]
        return {**line, "images": [opened(self.folder / name, self.job.image_size) for name in line["images"]]}

    def batch(self, rows: list[dict[str, Any]]) -> Batch:
        """Return the tensors that the processor makes of several rows, each padded or cut to the job's length.

        Padding comes after the words, and no word attends to what comes after it.  So no mask is passed on, and
        attention takes its fastest kernels.
        """
        made = self.processed(
            [row["messages"] for row in rows],
            images=[row["images"] for row in rows],
            padding="max_length",
            padding_side="right",
            truncation=True,
            max_length=self.job.seq_len,
            return_tensors="pt",
        )
        if "labels" not in made:
            made["labels"] = made["input_ids"].clone()
        made["labels"][made.pop("attention_mask") == 0] = -100
        made["labels"][made["input_ids"] == self.job.image_token] = -100
        dtype = getattr(torch, self.job.images_dtype or "float32")
        return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in made.items()}

    def processed(self, conversations: list[Any], **options: Any) -> Any:
        """Return the processor's tensors, by the network's own template.

        Without a template (PaliGemma) a row is a question and the answer to be learned.
        """
        if self.processor.chat_template is not None:
            texts = [self.processor.apply_chat_template(messages, tokenize=False) for messages in conversations]
            return self.processor(text=texts, add_special_tokens=False, **options)
        asked = [
            "<image>" * len(images) + words(messages[0])
            for messages, images in zip(conversations, options["images"], strict=True)
        ]
        made = self.processor(text=asked, suffix=[words(messages[-1]) for messages in conversations], **options)
        made["token_type_ids"][made["attention_mask"] == 0] = 1  # as for the answer, to which no question attends
        return made


def opened(path: Path, size: list[int] | None) -> Any:
    """Return the image, shrunk to as many pixels as the job counts on."""
    from PIL import Image

    image = Image.open(path).convert("RGB")
    scale = 1.0 if size is None else math.sqrt(size[0] * size[1] / (image.width * image.height))
    if scale >= 1:
        return image
    return image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))


def words(message: dict[str, Any]) -> str:
    """Return the text of a message."""
    return " ".join(part["text"] for part in message["content"] if part["type"] == "text")


class MadeUp(Dataset):  # type: ignore[type-arg, misc]
    """Rows of random tokens and pixels, in the shapes that the processor gives: made_up.json has them."""

    def __init__(self, job: Job, count: int) -> None:
        self.job = job
        self.count = count
        self.row: dict[str, Any] = json.loads((HERE / "made_up.json").read_text(encoding="utf-8"))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        tokens = torch.randint(0, self.row["vocabulary"], (1, self.job.seq_len))
        images = torch.zeros_like(tokens, dtype=torch.bool)
        for start, end in self.row["images"]:
            images[:, start:end] = True
        if self.job.image_token is not None:
            tokens[tokens == self.job.image_token] = 0
            tokens[images] = self.job.image_token
        dtype = getattr(torch, self.job.images_dtype or "float32")
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(images, -100),
            **{name: images.long() for name in self.row["marks"]},
            **{name: torch.rand(shape).to(dtype) for name, shape in self.row["pixels"].items()},
            **{name: torch.tensor(values) for name, values in self.row["values"].items()},
            **{name: torch.ones(shape, dtype=torch.long) for name, shape in self.row["ones"].items()},
        }

    def batch(self, rows: list[Batch]) -> Batch:
        """Return several rows as one batch; a row may have many rows of patches, or of tiles."""
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def dataset(job: Job, data: str | None, made_up: int) -> Any:
    """Return the conversations of a file, or `made_up` rows."""
    return MadeUp(job, made_up) if data is None else Conversations(job, Path(data))
