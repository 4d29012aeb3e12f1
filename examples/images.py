"""A step of a network that sees or makes images: Qwen2.5-VL with a frozen vision tower, or LoRA of Flux.

    tonnage dry-run --gpu t4 -- python examples/images.py --images 4 --side 896 --freeze
    tonnage dry-run --gpu t4 -- python examples/images.py --images 0 --frames 16 --side 448 --freeze
    tonnage dry-run --gpu t4 -- python examples/images.py --network flux --side 1024

Small networks of random weights: change their sizes, or load your own.  Flux wants diffusers.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

PATCH, MERGED = 14, 2
"""Pixels of a patch's side, and patches of the side of a square that becomes one token."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One step of a network that sees or makes images.")
    parser.add_argument("--network", choices=("qwen2.5-vl", "flux"), default="qwen2.5-vl")
    parser.add_argument("--images", type=int, default=1, help="in the sequence")
    parser.add_argument(
        "--frames", type=int, default=0, help="of a video in the sequence; two make one row of patches"
    )
    parser.add_argument("--side", type=int, default=448, help="pixels of an image's side, after the processor")
    parser.add_argument("--max-pixels", type=int, help="what the processor leaves of an image at most")
    parser.add_argument("--freeze", action="store_true", help="train no weight of the vision tower")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def make_seeing(options: argparse.Namespace) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Qwen2.5-VL of 12 and 8 layers, and a sequence with all images and 256 words behind them."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 32_000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    sections = {"rope_type": "default", "mrope_section": [8, 12, 12]}
    tower = {"hidden_size": 640, "intermediate_size": 1712, "depth": 8, "num_heads": 8, "out_hidden_size": 1024}
    tokens = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
    config = Qwen2_5_VLConfig(
        text_config={**text, **heads, "rope_scaling": sections},
        vision_config={**tower, "fullatt_block_indexes": [7]},
        **tokens,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    if options.freeze:
        model.model.visual.requires_grad_(False)

    pixels = min(options.side**2, options.max_pixels or options.side**2)
    side = max(1, int(pixels**0.5) // (PATCH * MERGED)) * MERGED
    grids = {
        "image": [[1, side, side]] * options.images,
        "video": [[-(-options.frames // 2), side, side]] * (options.frames > 0),
    }
    batch: dict[str, torch.Tensor] = {}
    words = [torch.randint(5, 32_000, (256,))]
    for kind, grid in grids.items():
        rows = sum(time * height * width for time, height, width in grid)
        if rows:
            batch["pixel_values" if kind == "image" else "pixel_values_videos"] = torch.randn(rows, 3 * 2 * PATCH**2)
            batch[f"{kind}_grid_thw"] = torch.tensor(grid)
            words.insert(0, torch.full((rows // MERGED**2,), tokens[f"{kind}_token_id"]))
    batch["input_ids"] = torch.cat(words)[None]
    return model, {**batch, "labels": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}


def make_painting(options: argparse.Namespace) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A Flux transformer of 4 and 8 layers with LoRA in its attention, and the latents of one image."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(num_layers=4, num_single_layers=8, num_attention_heads=12, guidance_embeds=False)
    model = get_peft_model(model, LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    tokens, words = (options.side // 16) ** 2, 512
    return model, {
        "hidden_states": torch.randn(1, tokens, 64),
        "encoder_hidden_states": torch.randn(1, words, 4096),
        "pooled_projections": torch.randn(1, 768),
        "timestep": torch.rand(1),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(words, 3),
    }


def main() -> None:
    options = parse()
    model, batch = make_painting(options) if options.network == "flux" else make_seeing(options)
    model.cuda().train()
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4)
    for _ in range(options.steps):
        with torch.autocast("cuda", torch.bfloat16):
            out = model(**batch)
        loss = out.loss if options.network != "flux" else out.sample.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
