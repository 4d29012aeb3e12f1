"""The questions, by name: command lines with their input files, and calls of the Python API."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

INPUTS: Final = Path(__file__).parent / "inputs"
"""Files that questions are about: programs, plans, settings of trainers."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Command lines that run one after the other in one folder."""

    name: str
    """Its folder in a record."""
    commands: tuple[str, ...]
    """Each begins with `tonnage` or `python`."""
    inputs: tuple[str, ...] = ()
    """Files of INPUTS that are in the folder."""
    cases: Mapping[str, str] = field(default_factory=dict)
    """Python expressions for asked.py."""


SMALL: Final = 'estimate("smollm2-135m", gpu="{gpu}", seq_len=512'
PAIR: Final = "2xa100-40gb"


def questions() -> tuple[Question, ...]:
    """Return all questions."""
    return (*_estimates(), *_calls(), *_plans(), *_dry_runs(), *_exports(), *_lists(), *_errors())


def _commands(group: str, lines: Mapping[str, str | Sequence[str]], *inputs: str) -> Iterator[Question]:
    """Make a question of each line; `tonnage` stands before all that do not name their program."""
    for name, several in lines.items():
        commands = (several,) if isinstance(several, str) else tuple(several)
        yield Question(name=f"{group}-{name}", commands=tuple(f"tonnage {line}" for line in commands), inputs=inputs)


def _asked(name: str, cases: Mapping[str, str], *inputs: str) -> Question:
    return Question(name=f"api-{name}", commands=("python asked.py cases.json",), inputs=inputs, cases=cases)


def _varied(gpu: str = "a100-40gb", /, **options: Sequence[Any]) -> dict[str, str]:
    """Make one case for each value of each option."""
    asked = SMALL.format(gpu=gpu)
    return {f"{name}={value}": f"{asked}, {name}={value!r})" for name, values in options.items() for value in values}


def _each(asked: str, **cases: str) -> dict[str, str]:
    """Make one case for each set of options, in addition to what is always asked."""
    return {name: f"{asked}, {options})" for name, options in cases.items()}


# ---- estimate ------------------------------------------------------------------------------------------------------


def _estimates() -> Iterator[Question]:
    saved = "--save run.tonnage --html page.html --snapshot z.pickle"
    yield from _commands(
        "estimate",
        {
            "text": "estimate llama-3.2-1b --gpu a100-40gb",
            "saved": (
                f"estimate smollm2-135m --gpu t4 --precision fp16-mixed --seq-len 256 --json {saved}",
                "report run.tonnage",
                "report run.tonnage --json --html again.html --snapshot again.pickle",
                "report run.tonnage --html run.tonnage",
            ),
            "again": (
                "estimate gpt2 --gpu t4 --seq-len 128 --json",
                "estimate gpt2 --gpu t4 --seq-len 128 --json",
                "estimate gpt2 --gpu t4 --seq-len 128 --json --fresh --steps 2",
            ),
            "saved-ranks": (
                "estimate smollm2-135m --gpu 2xa100-40gb --pp 2 --grad-accum 4 --seq-len 512 --save ranks.tonnage",
                "report ranks.tonnage --json",
            ),
            "too-large": (
                "estimate llama-3.1-8b --gpu t4 --precision fp16-true --save oom.tonnage --html oom.html",
                "report oom.tonnage --json --snapshot oom.pickle",
            ),
            "too-large-ranks": "estimate llama-3.2-3b --gpu 2xt4 --shard zero3 --precision fp16-mixed",
            "lora": "estimate llama-3.2-1b --gpu rtx-4090 --method lora --lora-targets q_proj,v_proj",
            "meta": (
                "estimate llama-3.2-1b --gpu h100-80gb --source meta --json",
                "estimate smollm2-135m --gpu t4 --source meta --precision fp16-mixed --checkpointing full",
            ),
            "cpu": "estimate smollm2-135m --gpu cpu --seq-len 64",
            "own-card": "estimate smollm2-135m --gpu-memory 24GiB --gpus 2 --shard zero2 --seq-len 512",
        },
    )
    yield from _commands(
        "estimate",
        {
            "config": "estimate experts.json --gpu a100-40gb --seq-len 256 --json",
            "factory": "estimate network:small --gpu a100-40gb --seq-len 256 --json",
            "plan-file": (
                "estimate --plan divided.toml --json",
                "estimate --plan divided.toml --gpu 4xa100-40gb --shard zero2 --seq-len 1024",
            ),
        },
        *("experts.json", "network.py", "divided.toml"),
    )


# ---- the Python API ------------------------------------------------------------------------------------------------


def _calls() -> Iterator[Question]:
    single, pair, four = (SMALL.format(gpu=gpu) for gpu in ("a100-40gb", PAIR, "4xa100-40gb"))
    kinds = ("full", "full-reentrant", "every-2", "selective", "attention-module", "attention", "sqrt")
    yield _asked("checkpointing", _varied(checkpointing=(*kinds, "budget=256MiB")))
    yield _asked(
        "offload",
        _each(
            single,
            activations='activation_offload="cpu"',
            streamed='activation_offload="cpu-streamed"',
            files='activation_offload="nvme"',
            optimizer='optimizer_offload="cpu"',
            part='optimizer_offload="cpu=0.5"',
            in_backward="optimizer_in_backward=True",
            parameters='shard="zero3", param_offload="cpu"',
        ),
    )
    precisions = ("bf16-mixed", "bf16-true", "fp16-mixed", "fp16-true", "fp32", "fp8", "megatron-bf16")
    newer = {"fp8 of Hopper": f'{SMALL.format(gpu="h100-80gb")}, precision="fp8")'}
    yield _asked("precision", {**_varied(precision=precisions, weights_dtype=("bf16",)), **newer})
    losses = {"loss": ("plain", "chunked", "fused", "torch", "liger"), "outputs": ("step", "loop")}
    attention = ("eager", "math", "efficient", "flash", "cudnn", "flex")
    yield _asked("loss-attention", _varied(**losses, attention=attention, allocator=("expandable",)))
    optimizers = ("adamw-loop", "adamw-foreach", "adamw-fused", "sgd", "sgd-plain", "adafactor", "muon", "lion")
    absent = ("adamw-8bit", "paged-adamw", "adamw-4bit")
    yield _asked("optimizer", _varied(optimizer=(*optimizers, *absent), clip_grad_norm=(1.0,)))
    yield _asked(
        "shard",
        {
            **_varied(PAIR, shard=("ddp", "zero1", "zero2", "zero3")),
            **_each(
                pair,
                accumulated='shard="zero3", grad_accum=3',
                each_time='shard="zero3", grad_accum=2, accum_sync=True',
                second='shard="zero1", rank=1',
                saved='shard="zero3", save_checkpoint="sharded"',
            ),
            "hsdp": SMALL.format(gpu="2x2xa100-40gb") + ', shard="hsdp")',
            "global": SMALL.format(gpu="2x8xh100-80gb") + ', shard="zero3", global_batch_tokens=131072)',
        },
    )
    yield _asked(
        "parallel",
        {
            **_each(
                pair.replace("smollm2-135m", "llama-3.2-1b"),
                tp="tp=2",
                tp_whole_sequence='tp=2, sequence_parallel="off"',
                cp='cp=2, shard="zero3"',
                pp="pp=2, grad_accum=4",
                gpipe='pp=2, grad_accum=4, pp_schedule="gpipe"',
                interleaved='pp=2, grad_accum=4, pp_schedule="interleaved"',
            ),
            **_each(
                four.replace("smollm2-135m", "llama-3.2-1b"),
                tp_shard='tp=2, shard="zero3"',
                pp_shard='pp=2, shard="zero2", grad_accum=4',
            ),
            "ep": 'estimate("experts.json", gpu="4xa100-40gb", seq_len=256, shard="zero3", ep=2)',
            "experts": 'estimate("experts.json", gpu="2xa100-40gb", seq_len=256, shard="ddp")',
        },
        "experts.json",
    )
    yield _asked(
        "phases",
        _each(
            single,
            evaluation="eval_batch=4",
            logits="eval_batch=4, eval_logits=2",
            generation="generate=4",
            saving='save_checkpoint="full"',
            saving_parts='save_checkpoint="sharded"',
            resuming='resume="gpu"',
            resuming_by_host='resume="cpu"',
            packing="packing=4",
            lengths='lengths=("512", "300", "77")',
            accumulation="grad_accum=3, micro_batch=2",
            steps="steps=2",
        ),
    )
    yield _asked(
        "method",
        _each(
            single,
            lora='method="lora"',
            small='method="lora", lora_rank=4, lora_targets=("q_proj", "v_proj"), lora_dropout=0.1',
            base='method="lora", base_dtype="fp32"',
            sharded='method="lora", precision="bf16-true", checkpointing="full"',
            qlora='method="qlora"',
        ),
    )
    families = ("gpt2", "pythia-160m", "opt-125m", "bert-base", "t5-small", "vit-base", "whisper-small", "gemma-3-1b")
    cases = {name: f'estimate("{name}", gpu="a100-40gb", precision="bf16-true")' for name in families}
    yield _asked("families", cases)
    for engine in ("hf-trainer", "accelerate", "deepspeed"):
        yield _asked(engine, dict(_of_engine(engine)))
    yield _asked(
        "source",
        {
            **_varied(source=("meta", "spirit")),
            "meta fused": f'{single}, loss="fused", source="meta")',
            "meta ranks": f'{pair}, shard="zero3", source="meta")',
            "cpu": 'estimate("gpt2", gpu="cpu", seq_len=32)',
        },
    )
    yield _asked("too-large", {name: f'estimate("{name}", gpu="t4")' for name in ("llama-3.2-3b", "gpt2-xl")})
    yield _asked("mistakes", dict(_mistakes()))


def _of_engine(engine: str) -> Iterator[tuple[str, str]]:
    single, pair = (f'{SMALL.format(gpu=gpu)}, engine="{engine}"' for gpu in ("a100-40gb", PAIR))
    one_card = {
        "plain": "micro_batch=2",
        "accumulated": "grad_accum=2",
        "checkpointed": 'checkpointing="full"',
        "lora": 'method="lora"',
        "fused": 'optimizer="adamw-fused"',
        "evaluated": "eval_batch=4",
    }
    two_cards = {
        "ddp": 'shard="ddp"',
        "zero2": 'shard="zero2"',
        "zero3": 'shard="zero3"',
        "offloaded": 'shard="zero3", param_offload="cpu"',
        "refused": "tp=2",
    }
    for name, options in one_card.items():
        yield name, f"{single}, {options})"
    for name, options in two_cards.items():
        yield name, f"{pair}, {options})"


def _mistakes() -> Iterator[tuple[str, str]]:
    """Make what neither estimate nor plan can answer, for both where both have the option."""
    both = {
        "unknown model": '"no-such-model", gpu="t4"',
        "unknown card": '"gpt2", gpu="h1000"',
        "no card": '"gpt2"',
        "unknown option": '"gpt2", gpu="t4", seqlen=512',
        "unknown word": '"gpt2", gpu="t4", shard="zero9"',
        "wrong type": '"gpt2", gpu="t4", seq_len="many"',
        "below one": '"gpt2", gpu="t4", micro_batch=0',
        "card of a number": '"gpt2", gpu=8',
        "adapters of none": '"llama-3.2-1b", gpu="t4", pp_schedule="gpipe", lora_rank=8',
        "schedule of none": '"llama-3.2-1b", gpu="t4", pp_schedule="gpipe"',
        "quantized none": '"gpt2", gpu="t4", quant="nf4"',
        "images of none": '"gpt2", gpu="t4", images=2',
        "average of one": '"gpt2", gpu="t4", accum_sync=True',
        "positions": '"gpt2", gpu="t4", seq_len=4096',
        "batch": '"gpt2", gpu="t4", global_batch_tokens=1001, seq_len=512',
        "batch twice": '"gpt2", gpu="t4", global_batch_tokens=4096, grad_accum=2',
        "flash before Ampere": '"gpt2", gpu="t4", attention="flash"',
        "bf16 before Ampere": '"gpt2", gpu="t4", precision="bf16-true"',
        "fp8 before Ada": '"gpt2", gpu="a100-40gb", precision="fp8"',
        "tp of one": '"gpt2", gpu="t4", tp=2',
        "tp of heads": '"smollm2-135m", gpu="8xa100-40gb", tp=8',
        "pp too deep": '"gpt2", gpu="64xa100-40gb", pp=64, grad_accum=64',
        "pp too few": '"gpt2", gpu="2xa100-40gb", pp=2, grad_accum=1',
        "ep of none": '"gpt2", gpu="2xa100-40gb", ep=2, shard="zero3"',
        "shard of one": '"gpt2", gpu="t4", shard="zero2"',
        "not divided": '"gpt2", gpu="3xa100-40gb", tp=2',
        "prompt": '"gpt2", gpu="t4", generate=512, seq_len=512',
        "logits": '"gpt2", gpu="t4", eval_logits=2',
        "sharded save": '"gpt2", gpu="t4", save_checkpoint="sharded"',
        "engine": '"gpt2", gpu="t4", engine="megatron"',
        "engine's words": '"gpt2", gpu="a100-40gb", engine="hf-trainer", optimizer="muon"',
        "memory": '"gpt2", gpu="t4", gpu_memory="24"',
        "several cards": '"gpt2", gpu="2xa100-40gb"',
    }
    for name, given in both.items():
        yield f"estimate: {name}", f"estimate({given})"
        if name not in ("several cards", "shard of one", "tp of heads"):  # which plan can answer, in a while
            yield f"plan: {name}", f"plan({given})"
    yield "estimate: rank", 'estimate("gpt2", gpu="t4", rank=1)'
    yield "estimate: steps", 'estimate("gpt2", gpu="t4", steps=0)'
    yield "estimate: job", 'estimate("gpt2", gpu="t4", job={"seq_len": 64})'
    yield "estimate: plan", 'estimate("gpt2", gpu="t4", plan=Job())'
    yield "estimate: two clusters", 'estimate("gpt2", cluster="t4", gpu="t4")'
    yield "plan: only", 'plan("gpt2", gpu="t4", only=("shard",), without=("shard",))'
    yield "plan: technique", 'plan("gpt2", gpu="t4", without=("sharding",))'
    yield "plan: allow", 'plan("gpt2", gpu="t4", allow=("shard",))'
    yield "plan: headroom", 'plan("gpt2", gpu="t4", headroom=1.5)'
    yield "plan: find", 'plan("gpt2", gpu="t4", find="min-seconds")'
    yield "plan: found card", 'plan("gpt2", gpu="t4", find="min-gpu")'
    yield "plan: method", 'plan("gpt2", gpu="t4", method="full,dora")'
    yield "plan: said and left out", 'plan("gpt2", gpu="4xa100-40gb", tp=2, without=("tp=2",))'


# ---- plan ----------------------------------------------------------------------------------------------------------


def _plans() -> Iterator[Question]:
    two_cards = "plan smollm2-135m --gpu 2xrtx-3090"
    yield from _commands(
        "plan",
        {
            "8b-on-8": (
                "plan llama-3.1-8b --gpu 8xh100-80gb --seq-len 8192 --json --save plan.toml --html plan.html",
                "export plan.toml --to torchrun --json",
            ),
            "70b-on-64": "plan llama-3.1-70b --gpu 8x8xh100-80gb --seq-len 8192 --global-batch-tokens 4M --json",
            "experts-on-64": "plan mixtral-8x7b --gpu 8x8xh100-80gb --seq-len 4096 --global-batch-tokens 4M",
            "small": "plan smollm2-135m --gpu t4 --seq-len 1024 --save small.toml",
            "methods": "plan llama-3.2-1b --gpu rtx-3060 --method full,lora --json",
            "pareto": "plan smollm2-360m --gpu 4xt4 --pareto --json",
            "too-large": (
                "plan llama-3.1-8b --gpu t4 --only checkpointing --json",
                "plan llama-3.2-3b --gpu t4 --only checkpointing",
            ),
            "host-memory": "plan llama-3.2-1b --gpu rtx-3060 --host-memory 16GiB --json",
            "allow": "plan llama-3.2-1b --gpu rtx-3060 --allow optimizer,precision --without loss=chunked --json",
            "headroom": "plan smollm2-360m --gpu a10 --headroom 50 --top 2 --micro-batch 8",
            "own-card": "plan smollm2-135m --gpu-memory 4GiB --seq-len 1024 --json",
            "engine": "plan smollm2-360m --gpu 2xa100-40gb --engine hf-trainer --only shard,checkpointing --json",
            "max-seq-len": "plan smollm2-135m --gpu t4 --find max-seq-len --json",
            "max-micro-batch": "plan smollm2-135m --gpu t4 --find max-micro-batch --only checkpointing",
            "min-gpus": "plan llama-3.1-8b --gpu a100-40gb --find min-gpus --json",
            "min-gpu": "plan llama-3.2-1b --find min-gpu",
        },
    )
    yield from _commands(
        "plan",
        {
            "from-deepspeed": f"{two_cards} --from ds_config.json --only shard,param-offload --json",
            "from-trainer": "plan smollm2-360m --gpu rtx-3090 --from training_args.json --only checkpointing",
            "from-accelerate": f"{two_cards} --from accelerate.yaml --only checkpointing --json",
            "experts": "plan experts.json --gpu 8xa100-40gb --seq-len 512 --json",
        },
        *("ds_config.json", "training_args.json", "accelerate.yaml", "experts.json"),
    )
    program = "python trainer.py --output_dir out --bf16 --per_device_train_batch_size 32 --report_to none"
    yield from _commands(
        "plan",
        {
            "script": f"plan --gpu rtx-3060 -- {program}",
            "script-json": f"plan --gpu rtx-3060 --only checkpointing --json -- {program} --rank 8",
            "script-unknown": "plan --gpu t4 --json -- python loop.py too-large",
        },
        *("trainer.py", "loop.py"),
    )


# ---- dry-run -------------------------------------------------------------------------------------------------------


def _dry_runs() -> Iterator[Question]:
    arguments = "--output_dir out --bf16 --per_device_train_batch_size 4 --report_to none"
    launched = f"torchrun --nproc-per-node 2 trainer.py {arguments}"
    yield from _commands(
        "dry-run",
        {
            "loop": "dry-run --gpu a100-40gb --json --save run.tonnage --snapshot z.pickle -- python loop.py fits",
            "too-large": "dry-run --gpu t4 -- python loop.py too-large",
            "fails": "dry-run --gpu t4 -- python loop.py fails",
            "trainer": f"dry-run --gpu a100-40gb --json -- python trainer.py {arguments}",
            "adapters": f"dry-run --gpu a100-40gb --steps 2 -- python trainer.py {arguments} --rank 8",
            "accelerated": "dry-run --gpu a100-40gb --json -- python accelerated.py",
            "torchrun": f"dry-run --gpu {PAIR} -- {launched}",
            "rank": f"dry-run --gpu {PAIR} --rank 1 --json -- {launched}",
            "short": "dry-run --gpu a100-40gb --steps 1 python loop.py fits",
        },
        *("loop.py", "trainer.py", "accelerated.py"),
    )


# ---- export --------------------------------------------------------------------------------------------------------

TARGETS: Final = (
    *("hf-trainer", "trl", "accelerate", "deepspeed", "torchrun", "torchtitan", "axolotl", "llama-factory"),
    "megatron-bridge",
)


def _exports() -> Iterator[Question]:
    plans = ("divided", "adapters", "stage2", "pipeline")
    for target in TARGETS:
        written = "stage2" if target == "deepspeed" else "adapters"
        lines = [f"export {plan}.toml --to {target} --out {plan}" for plan in (written, "pipeline")]
        lines += [f"export divided.toml --to {target} --json", f"export divided.toml --to {target}"]
        lines += [f"export divided.toml --to {target} --out strict --strict"] if target == "hf-trainer" else []
        yield from _commands("export", {target: lines}, *(f"{plan}.toml" for plan in plans))


# ---- lists and errors ----------------------------------------------------------------------------------------------


def _lists() -> Iterator[Question]:
    yield from _commands(
        "list",
        {
            "devices": ("devices", "devices --json", "devices t4", "devices h100-80gb --json"),
            "models": ("models", "models llama --json", "models gpt2 --config", "models nothing-of-the-kind"),
            "formats": ("formats", "formats --json", "formats nf4", "formats bf16 --json", "formats --markdown"),
            "help": (
                *("--version", "--help", "estimate --help", "plan --help", "dry-run --help", "export --help"),
                *("report --help", "devices --help", "models --help", "formats --help"),
            ),
        },
    )


ERRORS: Final[Mapping[str, str | Sequence[str]]] = {
    "adapters-of-none": "estimate llama-3.2-1b --gpu t4 --pp-schedule gpipe --lora-rank 8",
    "option": "estimate gpt2 --gpu t4 --shrad zero3",
    "word": "estimate gpt2 --gpu t4 --shard zero9",
    "number": ("estimate gpt2 --gpu t4 --seq-len many", "estimate gpt2 --gpu t4 --micro-batch 0"),
    "model": ("estimate no-such-model --gpu t4 --offline", "plan no-such-model --gpu t4 --offline"),
    "no-model": ("estimate --gpu t4", "plan --gpu t4"),
    "gpu": ("estimate gpt2 --gpu h1000", "plan gpt2 --gpu h1000", "dry-run --gpu h1000 -- python loop.py fits"),
    "no-gpu": ("estimate gpt2", "plan gpt2", "dry-run -- python loop.py fits", "dry-run python loop.py --gpu t4"),
    "here": ("estimate gpt2 --here", "plan gpt2 --here --gpu t4"),
    "file": (
        *("report none.tonnage", "report notes.txt", "export none.toml --to trl", "estimate --plan none.toml"),
        *("plan gpt2 --gpu t4 --from none.json", "estimate none.json --gpu t4", "estimate broken.json --gpu t4"),
    ),
    "plan-file": ("estimate --plan bad.toml", "export bad.toml --to hf-trainer", "export notes.txt --to trl"),
    "from": ("plan gpt2 --gpu t4 --from broken.json", "plan gpt2 --gpu t4 --from notes.txt"),
    "place": (
        "estimate gpt2 --gpu t4 --save notes.txt",
        "estimate gpt2 --gpu t4 --html none/page.html",
        "estimate gpt2 --gpu t4 --html one --save one",
        "plan gpt2 --gpu t4 --save notes.txt",
        "estimate gpt2 --gpu cpu --snapshot z.pickle",
    ),
    "idle": (
        "estimate gpt2 --gpu t4 --accum-sync",
        "estimate gpt2 --gpu t4 --sequence-parallel on",
        "estimate gpt2 --gpu t4 --pp-stages 3",
        "estimate gpt2 --gpu t4 --save-checkpoint sharded",
        "estimate gpt2 --gpu t4 --images 2",
        "plan gpt2 --gpu t4 --accum-sync",
    ),
    "divided": (
        "estimate gpt2 --gpu 3xa100-40gb --tp 2",
        "estimate smollm2-135m --gpu 8xa100-40gb --tp 8",
        "estimate gpt2 --gpu 2xa100-40gb --ep 2 --shard zero3",
        "estimate gpt2 --gpu 2xa100-40gb --pp 2",
        "estimate gpt2 --gpu 2xa100-40gb",
        "estimate gpt2 --gpu 2xa100-40gb --shard hsdp",
    ),
    "batch": (
        "estimate gpt2 --gpu t4 --seq-len 512 --global-batch-tokens 1001",
        "estimate gpt2 --gpu t4 --global-batch-tokens 4k --grad-accum 2",
        "estimate gpt2 --gpu t4 --seq-len 4096",
    ),
    "card": (
        "estimate gpt2 --gpu t4 --attention flash --precision fp16-mixed",
        "plan gpt2 --gpu t4 --attention flash",
        "estimate gpt2 --gpu a100-40gb --precision fp8",
        "estimate gpt2 --gpu t4 --precision bf16-true",
        "estimate gpt2 --gpu-memory 24",
        "estimate gpt2 --gpu cpu --shard zero3",
        "estimate gpt2 --gpu a100-40gb --rank 3",
    ),
    "package": (
        "estimate smollm2-135m --gpu a100-40gb --method qlora",
        "estimate smollm2-135m --gpu a100-40gb --optimizer adamw-8bit",
        "estimate smollm2-135m --gpu a100-40gb --engine trl",
        "estimate smollm2-135m --gpu a100-40gb --engine torchtitan",
        "estimate smollm2-135m --gpu 2xa100-40gb --engine megatron --tp 2",
        "estimate smollm2-135m --gpu a100-40gb --engine axolotl",
        "plan smollm2-135m --gpu a100-40gb --engine trl",
    ),
    "engine": (
        "estimate smollm2-135m --gpu a100-40gb --engine hf-trainer --optimizer muon",
        "estimate smollm2-135m --gpu 2xa100-40gb --engine deepspeed --shard hsdp",
        "estimate smollm2-135m --gpu 2xa100-40gb --engine accelerate --tp 2",
        "estimate smollm2-135m --gpu a100-40gb --source meta --engine hf-trainer",
    ),
    "backwards": (
        "plan gpt2 --gpu t4 --find min-gpu",
        "plan gpt2 --gpu 4xt4 --find min-gpus",
        "plan gpt2 --gpu t4 --find max-seq-len --seq-len 512",
        "plan gpt2 --gpu t4 --find shortest",
    ),
    "choices": (
        "plan gpt2 --gpu t4 --only shard --without shard",
        "plan gpt2 --gpu t4 --without sharding",
        "plan gpt2 --gpu t4 --allow shard",
        "plan gpt2 --gpu t4 --headroom 150",
        "plan gpt2 --gpu t4 --method full,dora",
        "plan gpt2 --gpu t4 --timeout 5",
        "plan gpt2 --gpu cpu",
        "plan gpt2 llama-3.1-8b --gpu t4",
        "plan gpt2 --gpu t4 --top 0",
    ),
    "script": (
        "dry-run --gpu t4 -- no-such-program",
        "dry-run --gpu t4",
        "plan --gpu t4 --find min-gpu -- python loop.py fits",
        "plan --gpu t4 --seq-len 512 -- python loop.py fits",
        "dry-run --gpu t4 --rank 3 -- python loop.py fits",
    ),
    "torch": ("estimate gpt2 --gpu t4 --torch 1.0.0", "estimate gpt2 --gpu t4 --torch newest"),
    "target": ("export divided.toml --to jax", "export divided.toml"),
    "list": ("formats fp3", "devices h1000", "models --config"),
}


def _errors() -> Iterator[Question]:
    inputs = ("bad.toml", "broken.json", "notes.txt", "loop.py", "divided.toml")
    yield from _commands("error", ERRORS, *inputs)


def chosen(pattern: str | None) -> tuple[Question, ...]:
    """Return the questions whose name contains the pattern; all of them without one."""
    return tuple(one for one in questions() if pattern is None or pattern in one.name)
