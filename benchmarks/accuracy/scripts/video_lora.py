"""LoRA on CogVideoX's transformer, 49 frames of 480 x 720 pixels that are latents already, in bf16.

What training/cogvideox_text_to_video_lora.py of a-r-r-o-w/cogvideox-factory (d81209b, October 2024) trains, by
accelerate, PEFT and diffusers (which `PYTHONPATH` must have).  Text encoder and autoencoder are gone by then.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMPORTS = ("accelerate", "peft.tuners.lora")

FRAMES, CHANNELS, ROWS, COLUMNS, WORDS = 13, 16, 60, 90, 226  # of the latents, and of the prompt
HEAD = 64


def measure(size: str, rank: int, checkpointing: bool, micro_batch: int, optimizer: str) -> dict[str, int]:
    """Bytes reserved at the most in three steps; `size` is 2b or 5b, `optimizer` adamw or adamw-8bit."""
    from accelerate import Accelerator
    from diffusers import CogVideoXDPMScheduler
    from peft import LoraConfig

    trainer = Accelerator(mixed_precision="bf16")
    model = _transformer(size)
    if checkpointing:
        model.enable_gradient_checkpointing()
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, stepper = trainer.prepare(model, _optimizer(optimizer, adapters))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    noise_of = CogVideoXDPMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type="v_prediction"
    )
    model.train()
    for _ in range(3):
        words, latents = _batch(micro_batch)
        with trainer.accumulate(model):
            noise = torch.randn_like(latents)
            times = torch.randint(0, 1000, (micro_batch,), dtype=torch.int64, device="cuda")
            noisy = noise_of.add_noise(latents, noise, times)
            said = model(
                hidden_states=noisy,
                encoder_hidden_states=words,
                timestep=times,
                image_rotary_emb=_turns() if size == "5b" else None,
                return_dict=False,
            )[0]
            guess = noise_of.get_velocity(said, noisy, times)
            weights = 1 / (1 - noise_of.alphas_cumprod.to("cuda")[times])
            while weights.dim() < guess.dim():
                weights = weights.unsqueeze(-1)
            loss = torch.mean((weights * (guess - latents) ** 2).reshape(micro_batch, -1), dim=1).mean()
            trainer.backward(loss)
            _norm(adapters)
            trainer.clip_grad_norm_(model.parameters(), 1.0)
            _norm(adapters)
            stepper.step()
            stepper.zero_grad()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _transformer(size: str) -> nn.Module:
    """In bf16 on the card, frozen."""
    from diffusers import CogVideoXTransformer3DModel

    large = size == "5b"
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(
            num_attention_heads=48 if large else 30,
            num_layers=42 if large else 30,
            use_rotary_positional_embeddings=large,
        )
    frozen: nn.Module = model.requires_grad_(False).to(torch.bfloat16).to_empty(device="cuda")
    return frozen


def _optimizer(name: str, adapters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(adapters, lr=1e-4, betas=(0.9, 0.95), weight_decay=1e-3)
    import bitsandbytes

    eight_bit: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        adapters, lr=1e-4, betas=(0.9, 0.95), weight_decay=1e-3
    )
    return eight_bit


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    """Of words, encoded, and of latents drawn from what the autoencoder said of them."""
    words = torch.zeros(rows, WORDS, 4096).to("cuda", dtype=torch.bfloat16)
    said = torch.zeros(rows, 2 * CHANNELS, FRAMES, ROWS, COLUMNS).to("cuda", dtype=torch.bfloat16)
    mean, spread = said.chunk(2, dim=1)
    latents = (mean + torch.exp(0.5 * spread.clamp(-30, 20)) * torch.randn_like(mean)) * 0.7
    return words, latents.permute(0, 2, 1, 3, 4).to(memory_format=torch.contiguous_format).float()


def _turns() -> tuple[Tensor, Tensor]:
    """Cosines and sines of each token of a video."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    cosines, sines = get_3d_rotary_pos_embed(
        embed_dim=HEAD,
        crops_coords=((0, 0), (ROWS // 2, COLUMNS // 2)),
        grid_size=(ROWS // 2, COLUMNS // 2),
        temporal_size=FRAMES,
    )
    return cosines.to("cuda"), sines.to("cuda")


def _norm(parameters: list[nn.Parameter]) -> float:
    """Of all gradients together, one at a time."""
    return sum(one.grad.detach().norm(2).item() ** 2 for one in parameters if one.grad is not None) ** 0.5
