"""Programs that do something beside their steps, or keep a second network beside the first.

python phases.py generates|prefers|averages|downloads|autotunes|gathers [WIDTH]|merges
"""

import copy
import sys
from collections.abc import Callable

import torch
from torch import nn

WIDTH = 256


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def generates() -> None:
    """Texts are generated, and trained on."""
    import transformers

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 1000}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **sizes)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        with torch.no_grad():
            words = model.generate(torch.randint(0, 1000, (2, 16)).cuda(), max_new_tokens=8, do_sample=True)
        step(model, optimizer, model(words, labels=words).loss)


def prefers() -> None:
    """A frozen reference is asked in each step, then the network is evaluated."""
    model = nn.Linear(WIDTH, WIDTH).cuda()
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        rows = torch.randn(64, WIDTH, device="cuda")
        with torch.no_grad():
            usual = reference(rows)
        step(model, optimizer, (model(rows) - usual).pow(2).mean())
    model.eval()
    with torch.no_grad():
        model(torch.randn(64, WIDTH, device="cuda"))


class Task(nn.Module):
    """A network and a running mean of it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.mean = copy.deepcopy(self.model).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.model(rows)
        return made


def averages() -> None:
    task = Task().cuda()
    optimizer = torch.optim.AdamW(task.model.parameters())
    for _ in range(3):
        step(task, optimizer, task(torch.randn(64, WIDTH, device="cuda")).pow(2).mean())


def downloads() -> None:
    """Weights that are nowhere."""
    model = nn.Linear(WIDTH, WIDTH)
    model.load_state_dict(torch.hub.load_state_dict_from_url("https://weights.invalid/linear-0123abcd.pth"))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        step(model, optimizer, model(torch.randn(64, WIDTH, device="cuda")).pow(2).mean())


def autotunes() -> None:
    """Each kernel has many forms, and each form would be compiled and timed."""
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, WIDTH)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, mode="max-autotune")
    for _ in range(3):
        step(model, optimizer, compiled(torch.randn(64, WIDTH, device="cuda")).pow(2).mean())


def gathers(width: str = "1024") -> None:
    """A file is saved, FSDP1 trains, and all weights are gathered on the card for another file."""
    from torch import distributed
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    distributed.init_process_group("nccl")
    torch.save({"seed": 1}, "seed.pt")
    with torch.device("cuda"):
        layers = nn.Sequential(*[nn.Linear(int(width), int(width), bias=False) for _ in range(16)])
    model = FullyShardedDataParallel(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        step(model, optimizer, model(torch.randn(1, int(width), device="cuda")).pow(2).mean())
    whole = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        kept = model.state_dict()
    torch.save(kept, "model.pt")


def merges() -> None:
    """Adapters are trained and merged into the weights, of which each is made once more, one after the other."""
    import peft

    layers = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
    model = peft.get_peft_model(layers, peft.LoraConfig(r=4, target_modules=["0", "1", "2", "3"])).cuda()
    optimizer = torch.optim.AdamW(each for each in model.parameters() if each.requires_grad)
    for _ in range(3):
        step(model, optimizer, model(torch.randn(1, 1024, device="cuda")).pow(2).mean())
    model.merge_and_unload()


WAYS: dict[str, Callable[..., None]] = {
    way.__name__: way for way in (generates, prefers, averages, downloads, autotunes, gathers, merges)
}

if __name__ == "__main__":
    WAYS[sys.argv[1]](*sys.argv[2:])
