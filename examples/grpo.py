"""GRPO of a network with vLLM in the trainer's process: `pip install trl vllm`.

    tonnage dry-run --gpu a100-80gb -- python examples/grpo.py

With --sleep vLLM gives its memory back while the trainer computes.
"""

import argparse
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

PROMPTS = ["Tell me about the weather today."] * 64


def reward_length(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion: its length."""
    return [float(len(text)) for text in completions]


def main() -> None:
    """Make three steps with eight completions of one prompt each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--utilization", type=float, default=0.3, help="the part of the card that is vLLM's")
    parser.add_argument("--sleep", action="store_true")
    given = parser.parse_args()
    config = GRPOConfig(
        output_dir="out",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=given.utilization,
        vllm_max_model_length=768,
        vllm_enable_sleep_mode=given.sleep,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=256,
        bf16=True,
        max_steps=3,
        report_to="none",
    )
    prompts = Dataset.from_dict({"prompt": PROMPTS})
    GRPOTrainer(model=given.model, reward_funcs=reward_length, args=config, train_dataset=prompts).train()


if __name__ == "__main__":
    main()
