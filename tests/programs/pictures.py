"""A small image-text model under torch.compile: sizes of images are integers on the card, asked for between graphs.

python pictures.py gemma3|qwen2_5_vl whole|in-place

By Dynamo and autograd alone: what graphs compute is no more known without Inductor, which takes minutes.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROTARY = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
IMAGE, BATCH, LENGTH = 990, 2, 40


def qwen() -> Any:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    return AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={**TEXT, "rope_parameters": ROTARY, "rope_scaling": {**ROTARY, "type": "mrope"}},
        vision_config={**vision, "fullatt_block_indexes": [1], "window_size": 56},
        image_token_id=IMAGE,
        vision_start_token_id=991,
        vision_end_token_id=992,
        video_token_id=993,
    )


def gemma() -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return AutoConfig.for_model(
        "gemma3",
        text_config={**TEXT, "head_dim": 16, "sliding_window": 32},
        vision_config={**vision, "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=991,
        eoi_token_index=992,
    )


def batch(kind: str) -> dict[str, torch.Tensor]:
    """Two sequences with an image each: 8 x 8 patches of which 16 tokens are made, or 4 tokens."""
    tokens = torch.randint(10, 900, (BATCH, LENGTH))
    tokens[:, 3 : 3 + (16 if kind == "qwen2_5_vl" else 4)] = IMAGE
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
    of_images = (tokens == IMAGE).long()
    if kind == "qwen2_5_vl":
        grid = torch.tensor([[1, 8, 8]] * BATCH)
        pixels = torch.randn(64 * BATCH, 3 * 2 * 14 * 14)
        return {**given, "mm_token_type_ids": of_images, "pixel_values": pixels, "image_grid_thw": grid}
    return {**given, "token_type_ids": of_images, "pixel_values": torch.randn(BATCH, 3, 56, 56)}


def main(kind: str, how: str) -> None:
    model = AutoModelForImageTextToText.from_config(qwen() if kind == "qwen2_5_vl" else gemma())
    model.cuda()
    run = torch.compile(model, backend="aot_eager") if how == "whole" else model
    if how == "in-place":
        model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = run(**{name: tensor.cuda() for name, tensor in batch(kind).items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps({"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
