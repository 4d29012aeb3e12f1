"""Programs in the manner of trainers' own examples, and ways to start one, for `benchmarks.habits`.

Those of trainers have networks of their own: `LLAMA_BYTES` and the like are the bytes of their weights in fp32.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MATRICES_BYTES: Final = 4 * 2048 * 2048 * 4
LLAMA_BYTES: Final = 4 * (2 * (4 * 1024**2 + 3 * 1024 * 4096) + 2 * 1024 * 1024)
BERT_BYTES: Final = 4 * 109_482_240
VIT_BYTES: Final = 4 * 85_806_346
UNET_BYTES: Final = 4 * 113_673_219
DIT_BYTES: Final = 4 * 35_924_512


@dataclass(frozen=True, kw_only=True)
class Habit:
    """A program, and between which multiples of its weights the peak of allocated bytes lies.

    Both are None where no answer is right: the optimizer makes no step.
    """

    name: str
    code: str
    least: float | None = 4.0
    most: float | None = 5.3
    weights_bytes: int = MATRICES_BYTES
    needs: tuple[str, ...] = ()
    """Packages without which it is left out."""
    command: tuple[str, ...] = ("python", "train.py")
    """How it is started; `train.ipynb` is the same program in cells, which blank lines part."""
    gpus: str = "t4"
    is_whole: bool = False
    """True for a program without the network and functions of `benchmarks.habits`."""


def make_notebook(code: str) -> str:
    """Return a notebook with a program's parts between blank lines as cells."""
    cells: list[dict[str, object]] = [
        {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": part, "id": f"c{n}"}
        for n, part in enumerate(code.split("\n\n"))
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})


_LONG: Final = "for i in range(10**6):\n    step(model, opt)\n"
_ENDLESS: Final = "while True:\n    step(model, opt)\n"
_FIT: Final = """\
def fit(depth):
    model, opt = network(depth)
    for i in range(10**6):
        step(model, opt)
    return depth

"""
_MAIN: Final = 'if __name__ == "__main__":\n'


def starting() -> Iterator[Habit]:
    """Yield programs that others start and wait for."""
    last_is_largest = functools.partial(Habit, least=16.0, most=22.0)
    yield Habit(
        name="a long loop, then an evaluation that needs more",
        code=f"{_LONG}with torch.no_grad():\n    model(rows(2**16))\n",
        least=3 + 2 * 8,
        most=3 + 3 * 8 + 0.5,
    )
    yield last_is_largest(
        name="stages by subprocess, each checked",
        code="if len(sys.argv) > 1:\n    model, opt = network(int(sys.argv[1]))\n    for i in range(10**6):\n"
        '        step(model, opt)\n    torch.save(model.state_dict(), "stage.pt")\nelse:\n    del model, opt\n'
        '    for depth in ("1", "16"):\n        subprocess.run([sys.executable, __file__, depth], check=True)\n'
        '        assert len(torch.load("stage.pt")) == int(depth)\n',
    )
    yield last_is_largest(
        name="a pool of processes",
        code=f"del model, opt\n{_FIT}{_MAIN}    from concurrent.futures import ProcessPoolExecutor as Pool\n"
        '    import multiprocessing\n    with Pool(1, mp_context=multiprocessing.get_context("spawn")) as pool:\n'
        "        assert list(pool.map(fit, (1, 4, 16))) == [1, 4, 16]\n",
    )
    yield last_is_largest(
        name="a queue that the parent reads",
        code=f"del model, opt\n{_FIT}def work(depth, queue):\n    queue.put(fit(depth))\n\n{_MAIN}"
        '    import multiprocessing\n    context = multiprocessing.get_context("spawn")\n'
        "    queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(16, queue))\n    child.start()\n"
        "    assert queue.get() == 16\n    child.join()\n",
    )
    yield last_is_largest(
        name="joblib",
        code=f"del model, opt\n{_FIT}{_MAIN}    from joblib import Parallel, delayed\n"
        "    assert Parallel(n_jobs=1, backend='loky')(delayed(fit)(n) for n in (1, 4, 16)) == [1, 4, 16]\n"
        "    assert Parallel(n_jobs=2)(delayed(fit)(n) for n in (1, 16)) == [1, 16]\n",
        needs=("joblib",),
    )
    yield last_is_largest(
        name="hydra -m",
        code="import hydra\ndel model, opt\n\n@hydra.main(version_base=None, config_path=None)\ndef main(settings):\n"
        "    model, opt = network(settings.depth)\n    for i in range(10**6):\n        step(model, opt)\n\nmain()\n",
        needs=("hydra",),
        command=("python", "train.py", "-m", "+depth=1,4,16"),
    )
    notebook = f"{_ENDLESS}\n{_LONG}\nwith torch.no_grad():\n    model(rows(2**16))\n"
    for name, command in (
        (
            "nbconvert",
            ("jupyter", "nbconvert", "--to", "notebook", "--execute", "train.ipynb", "--output", "o.ipynb"),
        ),
        ("papermill", ("papermill", "train.ipynb", "o.ipynb")),
    ):
        yield Habit(
            name=f"a notebook by {name}",
            code=notebook,
            needs=(name, "ipykernel"),
            command=command,
            least=3 + 2 * 8,
            most=3 + 3 * 8 + 0.5,
        )


_TOKENS: Final = """\
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(("<pad>", "<eos>", "<unk>", "a", "b"))}, "<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "vocab_size": 1024}
network = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=8, **sizes))
how = {"output_dir": "out", "max_steps": 50, "per_device_train_batch_size": 1, "report_to": "none", "bf16": False}
how["gradient_checkpointing"] = False
"""
_PREFERENCES: Final = """\
rows = Dataset.from_list([{"prompt": "a a", "chosen": " b b", "rejected": " a b"}] * 64)
from trl import DPOConfig, DPOTrainer
"""
_LIGHTNING: Final = """\
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset

class Lit(lightning.LightningModule):
    def __init__(self, depth=4):
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(depth)])

    def training_step(self, batch, index):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

def rows():
    return DataLoader(TensorDataset(torch.zeros(800, 2048)), batch_size=8)

"""
_NANO: Final = """\
import math, torch, time
from torch import nn
net = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)]).cuda()
decay = [p for p in net.parameters() if p.dim() >= 2]
opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}], lr=6e-4, betas=(0.9, 0.95), fused=True)
data = torch.randn(4096, 2048)

def batch():
    at = torch.randint(len(data) - 8, (1,)).item()
    return data[at : at + 8].pin_memory().to("cuda", non_blocking=True)

@torch.no_grad()
def estimate():
    net.eval()
    losses = torch.zeros(20)
    for k in range(20):
        losses[k] = net(batch()).pow(2).mean().item()
    net.train()
    return losses.mean()

n, best, x = 0, 1e9, batch()
while True:
    for group in opt.param_groups:
        group["lr"] = 6e-4 * 0.5 * (1 + math.cos(math.pi * n / 600000))
    if n % 250 == 0 and (now := estimate()) < best:
        best = now
        torch.save({"model": net.state_dict(), "optimizer": opt.state_dict(), "best": best}, "ckpt.pt")
    for micro in range(4):
        loss = net(x).pow(2).mean() / 4
        x = batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    if n % 10 == 0:
        print(n, loss.item() * 4)
    n += 1
    if n > 600000:
        break
"""
_FABRIC: Final = """\
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset
fabric = lightning.Fabric(devices=1, precision="32-true")
fabric.launch()
with fabric.init_module():
    net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)])
net = fabric.setup(net)
opt = fabric.setup_optimizers(torch.optim.AdamW(net.parameters()))
rows = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.zeros(800, 2048)), batch_size=8))
count = 0
for epoch in range(1000):
    for (batch,) in rows:
        count += 1
        with fabric.no_backward_sync(net, enabled=count % 4 != 0):
            fabric.backward(net(batch).pow(2).mean() / 4)
        if count % 4 == 0:
            fabric.clip_gradients(net, opt, max_norm=1.0)
            opt.step()
            opt.zero_grad()
fabric.save("lit.ckpt", {"model": net})
"""
_ACCELERATE: Final = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
a = Accelerator(gradient_accumulation_steps=4)
net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)])
data = DataLoader(TensorDataset(torch.zeros(800, 2048)), batch_size=8)
net, opt, data = a.prepare(net, torch.optim.AdamW(net.parameters()), data)
for epoch in range(1000):
    for (batch,) in data:
        with a.accumulate(net):
            a.backward(net(batch).pow(2).mean())
            if a.sync_gradients:
                a.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    a.save_state("state")
"""
_TIMM: Final = """\
import timm, timm.optim, torch
from timm.utils import ModelEmaV3
net = timm.create_model("vit_base_patch16_224", pretrained=True, num_classes=10).cuda()
opt = timm.optim.create_optimizer_v2(net, opt="adamw", lr=1e-3)
"""
_DIFFUSERS: Final = """\
import torch
from diffusers import DDPMScheduler, UNet2DModel
net = UNet2DModel(sample_size=32, block_out_channels=(128, 128, 256, 256, 512, 512), down_block_types=("DownBlock2D",)
    * 4 + ("AttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4)
net = net.cuda()
noising, opt = DDPMScheduler(num_train_timesteps=1000), torch.optim.AdamW(net.parameters())
for i in range(10**6):
    clean, noise = torch.randn(1, 3, 32, 32, device="cuda"), torch.randn(1, 3, 32, 32, device="cuda")
    when = torch.randint(0, 1000, (1,), device="cuda")
    loss = torch.nn.functional.mse_loss(net(noising.add_noise(clean, noise, when), when).sample, noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
net.save_pretrained("ddpm")
"""
_DIT_LORA: Final = """\
import torch
from diffusers import PixArtTransformer2DModel
from peft import LoraConfig, get_peft_model
net = PixArtTransformer2DModel(num_attention_heads=8, attention_head_dim=64, num_layers=8, sample_size=16,
    cross_attention_dim=512, caption_channels=64, use_additional_conditions=False).cuda().requires_grad_(False)
net = get_peft_model(net, LoraConfig(r=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
for i in range(10**6):
    noisy, when = torch.randn(1, 4, 16, 16, device="cuda"), torch.randint(0, 1000, (1,), device="cuda")
    words = torch.randn(1, 8, 64, device="cuda")
    guess = net(noisy, words, when, added_cond_kwargs={"resolution": None, "aspect_ratio": None}).sample
    guess.float().pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
"""
_AFTER: Final = """\
import functools, os, torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
torch.distributed.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
with torch.device("cuda"):
    net = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(32)])

def train(net):
    opt = torch.optim.AdamW(net.parameters(), fused=True)
    for i in range(5):
        net(torch.randn(8, 2048, device="cuda")).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    return opt

"""
_GATHERED: Final = f"""{_AFTER}
net = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({{nn.Linear}}), use_orig_params=True)
opt = train(net)
whole = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
with FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT, whole):
    torch.save(net.state_dict(), "model.pt")
"""
_GATHERED_2: Final = f"""{_AFTER}
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
for part in (*net, net):
    fully_shard(part)
opt = train(net)
torch.save(get_model_state_dict(net, options=StateDictOptions(full_state_dict=True)), "model.pt")
"""
_ZERO3: Final = f"""{_TOKENS}
from transformers import Trainer, TrainingArguments
how |= {{"bf16": True, "gradient_checkpointing": False, "max_steps": 3, "save_strategy": "no"}}
stage = {{"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "reduce_bucket_size": 1_000_000}}
stage |= {{"stage3_prefetch_bucket_size": 0}}
how["deepspeed"] = {{"zero_optimization": stage, "bf16": {{"enabled": True}}, "train_micro_batch_size_per_gpu": 1}}
rows = [dict.fromkeys(("input_ids", "labels"), [3, 4] * 8)] * 64
trainer = Trainer(model=network, args=TrainingArguments(**how), train_dataset=rows)
trainer.train()
trainer.save_model("end")
"""
_MERGED: Final = f"""{_TOKENS}
from peft import LoraConfig, get_peft_model
net = get_peft_model(network, LoraConfig(r=8, target_modules="all-linear")).cuda()
opt = torch.optim.AdamW(each for each in net.parameters() if each.requires_grad)
for i in range(5):
    words = torch.randint(0, 1024, (1, 16), device="cuda")
    net(input_ids=words, labels=words).loss.backward()
    opt.step()
    opt.zero_grad()
net.merge_and_unload().save_pretrained("merged")
"""
_SENTENCES: Final = """\
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
net = SentenceTransformer("google-bert/bert-base-uncased")
rows = Dataset.from_dict({"anchor": ["a cat sat"] * 64, "positive": ["the cat was sitting"] * 64})
how = Arguments(output_dir="out", num_train_epochs=9, per_device_train_batch_size=4, report_to="none")
loss = losses.MultipleNegativesRankingLoss(net)
SentenceTransformerTrainer(model=net, args=how, train_dataset=rows, loss=loss).train()
net.save_pretrained("final")
"""


def around_the_step() -> Iterator[Habit]:
    """Yield programs that load, gather, merge or generate beside their steps, most of them as one rank of two."""
    ranks = ("python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    two = functools.partial(Habit, is_whole=True, command=ranks, gpus="2xt4")
    sharded = functools.partial(two, weights_bytes=32 * 2048 * 2048 * 4)
    yield sharded(name="FSDP1, all weights gathered on each card", code=_GATHERED, least=1.5 + 1.0, most=1.5 + 1.25)
    yield sharded(name="FSDP2, all weights gathered on each card", code=_GATHERED_2, least=1.5 + 1.0, most=1.5 + 1.25)
    yield sharded(
        name="each rank loads the whole network onto its card",
        code=f"{_AFTER}for part in (*net, net):\n    fully_shard(part)\nopt = torch.optim.SGD(net.parameters())\n"
        'net(torch.randn(8, 2048, device="cuda")).sum().backward()\nopt.step()\n',
        least=1.0,
        most=1.3,
    )
    yield two(
        name="ZeRO-3, 16-bit weights gathered for the file",
        code=_ZERO3,
        weights_bytes=LLAMA_BYTES,
        needs=("deepspeed", "datasets"),
        least=(1 + 1 + 2 + 4) / 4,
        most=(1 + 1 + 2 + 4) / 4 + 1.5,
    )
    yield Habit(
        name="adapters merged and saved",
        code=_MERGED,
        is_whole=True,
        weights_bytes=LLAMA_BYTES,
        needs=("peft", "datasets"),
        least=1.0,
        most=1.5,
    )


def of_trainers() -> Iterator[Habit]:
    """Yield programs in the manner of trainers' examples."""
    whole = functools.partial(Habit, is_whole=True)
    llama = functools.partial(whole, weights_bytes=LLAMA_BYTES, needs=("trl",))
    yield llama(
        name="TRL: supervised",
        code=f"{_TOKENS}from trl import SFTConfig, SFTTrainer\n"
        'rows = Dataset.from_dict({"text": ["a b " * 9] * 64})\n'
        "trainer = SFTTrainer(model=network, args=SFTConfig(**how), train_dataset=rows, processing_class=words)\n"
        'trainer.train()\ntrainer.save_model("end")\n',
    )
    yield llama(
        name="TRL: preferences with a copy as reference",
        code=f"{_TOKENS}{_PREFERENCES}import copy\n"
        "DPOTrainer(model=network, args=DPOConfig(**how), train_dataset=rows, "
        "ref_model=copy.deepcopy(network), processing_class=words).train()\n",
        least=5.0,
        most=6.3,
    )
    yield llama(
        name="TRL: preferences with LoRA, whose base is the reference",
        code=f"{_TOKENS}{_PREFERENCES}from peft import LoraConfig\nDPOTrainer(model=network, args=DPOConfig(**how), "
        "train_dataset=rows, processing_class=words, peft_config=LoraConfig(r=8)).train()\n",
        least=1.0,
        most=1.6,
    )
    for name, package in (("galore_adamw", "galore_torch"), ("apollo_adamw", "apollo_torch")):
        yield whole(
            name=f"Trainer: {name}, states of rank 128",
            code=f"{_TOKENS}from transformers import Trainer, TrainingArguments\nhow.pop('gradient_checkpointing')\n"
            "rows = [dict.fromkeys(('input_ids', 'labels'), [3, 4] * 8)] * 64\n"
            f"how |= {{'optim': '{name}', 'optim_target_modules': ['self_attn', 'mlp']}}\n"
            "Trainer(model=network, args=TrainingArguments(**how), train_dataset=rows).train()\n",
            weights_bytes=LLAMA_BYTES,
            needs=(package,),
            least=2.2,
            most=3.3,
        )
    yield whole(
        name="Trainer: lomo, one gradient at a time and no states",
        code=f"{_TOKENS}from transformers import Trainer, TrainingArguments\nhow.pop('gradient_checkpointing')\n"
        "rows = [dict.fromkeys(('input_ids', 'labels'), [3, 4] * 8)] * 64\n"
        "how |= {'optim': 'lomo', 'max_grad_norm': 0.0}\n"
        "Trainer(model=network, args=TrainingArguments(**how), train_dataset=rows).train()\n",
        weights_bytes=LLAMA_BYTES,
        needs=("lomo_optim", "datasets"),
        least=1.0,
        most=1.5,
    )
    yield whole(name="accelerate", code=_ACCELERATE, needs=("accelerate",))
    yield whole(
        name="Lightning: epochs, validation, test",
        code=f"{_LIGHTNING}trainer, net = lightning.Trainer(max_epochs=500, logger=False), Lit()\n"
        "trainer.fit(net, rows(), rows())\nassert trainer.global_step < 20\ntrainer.test(net, rows())\n",
        needs=("lightning",),
    )
    yield whole(
        name="Lightning: a sweep",
        code=f"{_LIGHTNING}for depth in (1, 4, 16):\n"
        "    lightning.Trainer(max_epochs=500, min_epochs=9, logger=False).fit(Lit(depth), rows())\n",
        needs=("lightning",),
        least=16.0,
        most=22.0,
    )
    yield whole(
        name="Lightning: a backbone that is trained from epoch 5 on",
        code=f"{_LIGHTNING}class Part(Lit):\n    def __init__(self):\n        super().__init__()\n"
        "        self.backbone = self.net[:3]\n\n    def configure_optimizers(self):\n"
        "        return torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)\n\n"
        "later = lightning.pytorch.callbacks.BackboneFinetuning(5, lambda epoch: 1.0)\n"
        "lightning.Trainer(max_epochs=500, logger=False, callbacks=[later]).fit(Part(), rows())\n",
        needs=("lightning",),
    )
    yield whole(name="Fabric, as litgpt does", code=_FABRIC, needs=("lightning",))
    yield whole(name="a loop like nanoGPT's", code=_NANO)
    images = 'for i in range(10**6):\n    net(torch.randn(1, 3, 224, 224, device="cuda")).sum().backward()\n'
    stepped = "    opt.step()\n    opt.zero_grad()\n"
    vit = functools.partial(whole, weights_bytes=VIT_BYTES, needs=("timm",))
    yield vit(
        name="timm",
        code=f"{_TIMM}{images}{stepped}",
    )
    yield vit(
        name="timm with a running mean of the weights",
        code=f"{_TIMM}mean = ModelEmaV3(net, decay=0.999)\n{images}{stepped}    mean.update(net, step=i)\n",
        least=5.0,
        most=6.3,
    )
    yield whole(name="diffusers: a U-Net", code=_DIFFUSERS, needs=("diffusers",), weights_bytes=UNET_BYTES)
    yield whole(
        name="diffusers: LoRA of a transformer",
        code=_DIT_LORA,
        needs=("diffusers", "peft"),
        weights_bytes=DIT_BYTES,
        least=1.0,
        most=1.9,
    )
    yield whole(
        name="sentence-transformers", code=_SENTENCES, needs=("sentence_transformers",), weights_bytes=BERT_BYTES
    )
