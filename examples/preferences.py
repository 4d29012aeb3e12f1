"""Preference training (DPO) of a small Llama, with what happens before and after its step.

    tonnage dry-run --gpu t4 -- python examples/preferences.py --reference copy
    tonnage dry-run --gpu 2xt4 -- torchrun --nproc-per-node 2 examples/preferences.py --shard fsdp2 --save full

A loop of plain PyTorch, transformers and PEFT, to ask what each way of doing it needs.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.functional import log_softmax, logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

BETA = 0.1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One step of DPO, and what is around it.")
    parser.add_argument("--reference", choices=("copy", "adapters", "precomputed"), default="copy")
    parser.add_argument("--shard", choices=("none", "fsdp1", "fsdp2"), default="none")
    parser.add_argument(
        "--load", choices=("on-card", "on-host"), default="on-card", help="where weights are before sharding"
    )
    parser.add_argument("--save", choices=("none", "full"), default="none")
    parser.add_argument("--merge", action="store_true", help="merge the adapters at the end")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    return parser.parse_args()


def log_probabilities(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)


def load(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32_000,
        max_position_embeddings=options.length,
    )
    with torch.device(device if options.load == "on-card" else "cpu"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def shard(model: torch.nn.Module, kind: str, device: torch.device) -> torch.nn.Module:
    layers = [child for child in model.modules() if type(child).__name__ == "LlamaDecoderLayer"]
    if kind == "fsdp1":
        from functools import partial

        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers[0])})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    from torch.distributed.fsdp import fully_shard

    for part in (*layers, model):
        fully_shard(part)
    return model


def save(model: torch.nn.Module) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    weights = get_model_state_dict(model, options=options)  # whole on each rank's card, as without cpu_offload
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({name: weight.cpu() for name, weight in weights.items()}, "weights.pt")


def main() -> None:
    options = parse()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if options.shard != "none":
        dist.init_process_group("nccl")
    model = load(options, device)
    reference = copy.deepcopy(model).eval().requires_grad_(False) if options.reference == "copy" else None
    if options.reference == "adapters" or options.merge:
        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    if options.shard == "none":
        model = model.to(device)
        reference = None if reference is None else reference.to(device)
    else:
        model = shard(model, options.shard, device)
        reference = None if reference is None else shard(reference, options.shard, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    for _ in range(3):
        tokens = torch.randint(0, 32_000, (2 * options.pairs, options.length), device=device)
        with torch.no_grad():
            if reference is not None:
                expected = log_probabilities(reference, tokens)
            elif options.reference == "adapters":
                with model.disable_adapter():
                    expected = log_probabilities(model, tokens)
            else:
                expected = torch.zeros(2 * options.pairs, device=device)
        chosen, rejected = (log_probabilities(model, tokens) - expected).chunk(2)
        (-logsigmoid(BETA * (chosen - rejected))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if options.merge:
        model = model.merge_and_unload()
    if options.save == "full":
        save(model)


if __name__ == "__main__":
    main()
