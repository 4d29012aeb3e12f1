"""LoRA on CogVideoX's transformer, 49 frames of 480 x 720 pixels that are latents already: fp16, adapters in fp32.

What training/cogvideox_text_to_video_lora.py of a-r-r-o-w/cogvideox-factory (d81209b, October 2024) does until its
first validation, called as its author's metrics.sh (512a8a6) calls it: `--load_tensors --mixed_precision fp16
--max_train_steps 2`.  By accelerate, PEFT and diffusers (which `PYTHONPATH` must have).
"""

from __future__ import annotations

import functools
import gc

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

IMPORTS = (
    "accelerate",
    "bitsandbytes",
    "diffusers.models.autoencoders.autoencoder_kl_cogvideox",
    "diffusers.models.transformers.cogvideox_transformer_3d",
    "diffusers.schedulers.scheduling_dpm_cogvideox",
    "diffusers.training_utils",
    "peft.tuners.lora",
    "transformers.models.t5.modeling_t5",
)

FRAMES, CHANNELS, ROWS, COLUMNS, WORDS = 13, 16, 60, 90, 226  # of the latents, and of the prompt
HEAD = 64
STEPS = 2


def measure(size: str, rank: int, checkpointing: bool, micro_batch: int, optimizer: str) -> dict[str, int]:
    """Bytes allocated and reserved at the most in two steps; `size` is 2b or 5b, `optimizer` adamw or adamw-8bit."""
    from accelerate import Accelerator
    from diffusers import CogVideoXDPMScheduler
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    trainer = Accelerator(mixed_precision="fp16")
    encoder, model, decoder = (_on_card(network) for network in _networks(size))
    if checkpointing:
        model.enable_gradient_checkpointing()
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    cast_training_params([model], dtype=torch.float32)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    videos = DataLoader(_Videos(micro_batch), batch_size=1, collate_fn=_drawn)
    model, stepper, batches = trainer.prepare(model, _optimizer(optimizer, adapters), videos)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    del encoder, decoder
    gc.collect()
    torch.cuda.empty_cache()
    noise_of = CogVideoXDPMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type="v_prediction"
    )
    kept = noise_of.alphas_cumprod.to("cuda")
    model.train()
    for step, (words, latents) in enumerate(batches, start=1):
        with trainer.accumulate(model):
            noise = torch.randn_like(latents)
            times = torch.randint(0, 1000, (micro_batch,), dtype=torch.int64, device="cuda")
            turns = _turns() if size == "5b" else None
            noisy = noise_of.add_noise(latents, noise, times)
            said = model(
                hidden_states=noisy,
                encoder_hidden_states=words,
                timestep=times,
                image_rotary_emb=turns,
                return_dict=False,
            )[0]
            guess = noise_of.get_velocity(said, noisy, times)
            weights = 1 / (1 - kept[times])
            while weights.dim() < guess.dim():
                weights = weights.unsqueeze(-1)
            loss = torch.mean((weights * (guess - latents) ** 2).reshape(micro_batch, -1), dim=1).mean()
            trainer.backward(loss)
            _norm(adapters)
            trainer.clip_grad_norm_(model.parameters(), 1.0)
            _norm(adapters)
            stepper.step()
            stepper.zero_grad()
        if step == STEPS:
            break
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def rehearse() -> None:
    """Compute the positions' waves, seconds of NumPy's in each job otherwise, for the two sizes."""
    from diffusers.models import embeddings

    embeddings.get_3d_sincos_pos_embed = functools.cache(embeddings.get_3d_sincos_pos_embed)
    for size in ("2b", "5b"):
        _networks(size)


def _networks(size: str) -> tuple[nn.Module, nn.Module, nn.Module]:
    """T5's encoder, the transformer and the autoencoder, without memory, in the order in which they go to the card.

    The first and the last are given up before the first step; the transformer lies between what they leave.
    """
    from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
    from transformers import T5Config, T5EncoderModel

    large = size == "5b"
    with torch.device("meta"):
        return (
            T5EncoderModel(
                T5Config(
                    d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu"
                )
            ),
            CogVideoXTransformer3DModel(
                num_attention_heads=48 if large else 30,
                num_layers=42 if large else 30,
                use_rotary_positional_embeddings=large,
            ),
            AutoencoderKLCogVideoX(
                latent_channels=CHANNELS, block_out_channels=(128, 256, 256, 512), layers_per_block=3
            ),
        )


def _on_card(network: nn.Module) -> nn.Module:
    """In fp16, frozen."""
    return network.requires_grad_(False).to(torch.float16).to_empty(device="cuda")


def _optimizer(name: str, adapters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(adapters, lr=1e-4, betas=(0.9, 0.95), weight_decay=1e-3)
    import bitsandbytes

    eight_bit: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        adapters, lr=1e-4, betas=(0.9, 0.95), weight_decay=1e-3
    )
    return eight_bit


class _Videos(Dataset[list[tuple[Tensor, Tensor]]]):
    """Micro-batches on the host: of each row the words, encoded, and what the autoencoder said of the video."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return STEPS + 1

    def __getitem__(self, index: int) -> list[tuple[Tensor, Tensor]]:
        words, said = torch.zeros(WORDS, 4096), torch.zeros(2 * CHANNELS, FRAMES, ROWS, COLUMNS)
        return [(words, said)] * self.rows


def _drawn(micro_batches: list[list[tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
    """Words, and latents drawn from what was said of them, on the card: accelerate asks for them a batch ahead."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    words = torch.stack([words for words, _ in micro_batches[0]]).to("cuda", dtype=torch.float16)
    videos = torch.stack([said for _, said in micro_batches[0]]).to("cuda", dtype=torch.float16)
    videos = DiagonalGaussianDistribution(videos).sample() * 0.7
    videos = videos.permute(0, 2, 1, 3, 4)
    return words, videos.to(memory_format=torch.contiguous_format).float()


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
