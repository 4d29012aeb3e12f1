"""Small programs with ordinary habits, each dry-run and compared with the answer that its bytes give.

python -m benchmarks.habits [NAME ...]      # a table; exit code 1 if an answer is wrong without a word

Every program trains the same four matrices, W = 64 MiB in fp32, with AdamW unless it says otherwise.  Weights,
gradients and two states are 4 W; the foreach update has at most one more W of temporaries, and one row of activations
is 64 KiB.  So a step is between 4 W and 5.3 W, whatever the program decides, counts or does behind its loop.
"""

import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from benchmarks.trainer_examples import Habit, around_the_step, make_notebook, of_trainers, starting

from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, TonnageError
from tonnage.script import dry_run

PROLOGUE: Final = """\
import atexit, itertools, json, math, os, random, subprocess, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def network(depth=4):
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(depth)]).cuda()
    return model, torch.optim.AdamW(model.parameters())

def rows(count=8):
    return torch.randn(count, 2048, device="cuda")

def step(model, opt, batch=None):
    loss = model(rows() if batch is None else batch).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss

def loader(count=400, **options):
    return DataLoader(TensorDataset(torch.zeros(count, 2048)), batch_size=8, **options)

model, opt = network()
"""


_LOOP: Final = "for i in range(8):\n    loss = model(rows()).pow(2).mean()\n    loss.backward()\n"
_STEP: Final = "    opt.step()\n    opt.zero_grad()\n"
_NORM: Final = "    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"


def _deciding() -> Iterator[Habit]:
    """Yield programs that decide by, or compute with, numbers that hang on weights."""
    guarded = "        opt.step()\n    opt.zero_grad()\n"
    yield Habit(name="step if norm.item() > 0", code=f"{_LOOP}{_NORM}    if norm.item() > 0:\n{guarded}")
    yield Habit(name="step if norm > 0 on the card", code=f"{_LOOP}{_NORM}    if norm > 0:\n{guarded}")
    yield Habit(name="step if the norm is finite", code=f"{_LOOP}{_NORM}    if torch.isfinite(norm):\n{guarded}")
    yield Habit(name="step if math.isfinite(loss)", code=f"{_LOOP}    if math.isfinite(loss.item()):\n{guarded}")
    yield Habit(name="step unless the loss is NaN", code=f"{_LOOP}    if not torch.isnan(loss):\n{guarded}")
    yield Habit(
        name="step unless the loss is a spike",
        code=f"mean = None\n{_LOOP}    mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()\n"
        f"    if loss.item() < 3 * mean:\n{guarded}",
    )
    yield Habit(name="log10 of the loss", code=f"{_LOOP}{_STEP}    print(math.log10(loss.item()))\n")
    yield Habit(name="log of the tensor", code=f"{_LOOP}{_STEP}    print(math.log(loss), math.exp(loss))\n")
    yield Habit(
        name="loss over the first, on the card",
        code=f"first = None\n{_LOOP}{_STEP}    first = loss.detach() if first is None else first\n"
        "    assert 0 < (loss / first).item() <= 1\n",
    )
    yield Habit(
        name="loss over the first, on the host",
        code=f"first = None\n{_LOOP}{_STEP}    first = first or loss.item()\n    print(loss.item() / first)\n",
    )
    yield Habit(name="assert loss > 0", code=f"{_LOOP}    assert loss > 0\n{_STEP}")
    yield Habit(name="assert float(loss) > 0", code=f"{_LOOP}    assert float(loss) > 0\n{_STEP}")
    yield Habit(
        name="while the loss is large",
        code="loss, n = torch.ones(()), 0\nwhile loss.item() > 0.05 and n < 9:\n"
        "    loss = step(model, opt)\n    n += 1\n",
    )
    yield Habit(
        name="until the loss stays, on the host",
        code="last = math.inf\nfor i in range(9):\n    now = step(model, opt).item()\n"
        "    if abs(last - now) < 1e-4:\n        break\n    last = now\n",
    )
    yield Habit(
        name="until the loss stays, on the card",
        code='last = torch.tensor(math.inf, device="cuda")\nfor i in range(9):\n    now = step(model, opt).detach()\n'
        "    if (last - now).abs() < 1e-4:\n        break\n    last = now\n",
    )
    yield Habit(
        name="early stopping with patience",
        code="best, bad = math.inf, 0\nfor i in range(9):\n    now = step(model, opt).item()\n"
        "    best, bad = (now, 0) if now < best else (best, bad + 1)\n    if bad > 2:\n        break\n",
    )
    yield Habit(
        name="the best weights are saved",
        code="best = math.inf\nfor i in range(6):\n    now = step(model, opt).item()\n    if now < best:\n"
        '        best = now\n        torch.save({"best": best, "model": model.state_dict()}, "best.pt")\n'
        'assert torch.load("best.pt")["best"] > 0\n',
    )
    yield Habit(
        name="accuracy and precision",
        code="labels = torch.zeros(8, dtype=torch.long).cuda()\nfor i in range(6):\n    step(model, opt)\n"
        "    right = model(rows()).argmax(-1) == labels\n    assert 0 <= right.float().mean().item() <= 1\n"
        "    print(1 / right.sum().item())\n",
    )
    yield Habit(
        name="loss as a list and an array",
        code=f"{_LOOP}{_STEP}    assert loss.tolist() == loss.detach().cpu().numpy()\n",
    )
    yield Habit(
        name="a rate that follows the loss",
        code=f'{_LOOP}    opt.param_groups[0]["lr"] = 1e-3 / loss.item()\n{_STEP}',
    )
    yield Habit(
        name="ReduceLROnPlateau",
        code="plan = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)\nfor i in range(8):\n"
        "    plan.step(step(model, opt).item())\n",
    )
    yield Habit(
        name="gradients scaled by hand",
        code=f"{_LOOP}    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n    if norm > 1:\n"
        f"        for p in model.parameters():\n            p.grad.mul_(1 / norm.item())\n{_STEP}",
    )
    yield Habit(
        name="a token drawn on the host",
        code="for i in range(6):\n    step(model, opt)\n    chances = model(rows(2)).softmax(-1).cpu()\n"
        "    torch.multinomial(chances, 1)\n",
    )
    yield Habit(
        name="GradScaler",
        code='scaler = torch.amp.GradScaler()\nfor i in range(6):\n    with torch.autocast("cuda", torch.float16):\n'
        "        loss = model(rows()).float().pow(2).mean()\n    scaler.scale(loss).backward()\n"
        "    scaler.step(opt)\n"
        "    scaler.update()\n    opt.zero_grad()\n    assert scaler.get_scale() > 0\n",
        most=6.0,
    )
    yield Habit(
        name="losses written as JSON",
        code=f"log = []\n{_LOOP}{_STEP}    log.append(loss.item())\n"
        f"json.dumps(log); print(max(log), sorted(log), sum(log))\n",
    )
    yield Habit(
        name="a step that never comes", code=f"{_LOOP}    if loss.item() < 0:\n{guarded}", least=None, most=None
    )


def _counting() -> Iterator[Habit]:
    """Yield programs that keep numbers on the card."""
    yield Habit(
        name="accumulation by a counter on the card",
        code='n = torch.zeros((), dtype=torch.long, device="cuda")\nfor i in range(12):\n'
        "    model(rows()).pow(2).mean().backward()\n    n += 1\n    if n.item() % 4 == 0:\n"
        "        opt.step()\n        opt.zero_grad()\nassert n.item() == 12\n",
    )
    yield Habit(
        name="samples counted on the card",
        code='n = torch.zeros((), device="cuda")\nfor i in range(6):\n    step(model, opt)\n    n += 8\n'
        "    assert n.item() == 8 * (i + 1)\n",
    )
    yield Habit(
        name="a mean of losses",
        code='total = torch.zeros((), device="cuda")\nfor i in range(6):\n    total += step(model, opt).detach()\n'
        "    assert total > 0\n    print(math.log((total / (i + 1)).item()))\n",
    )
    yield Habit(
        name="a schedule on the card",
        code='t = torch.ones((), device="cuda")\nfor i in range(6):\n'
        "    rate = torch.minimum(t / 4, torch.rsqrt(t))\n"
        '    opt.param_groups[0]["lr"] = rate.item()\n    assert rate > 0\n    step(model, opt)\n    t.add_(1)\n',
    )
    yield Habit(
        name="a rate kept in a tensor",
        code='rate = torch.tensor(1e-3, device="cuda")\n'
        "opt = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)\n"
        "for i in range(6):\n    step(model, opt)\n    rate.mul_(0.5)\nassert abs(rate.item() - 1e-3 / 64) < 1e-8\n",
    )
    yield Habit(
        name="a mask that fills up",
        code='done = torch.zeros(6, dtype=torch.bool, device="cuda")\nn = 0\nwhile not done.all():\n'
        "    step(model, opt)\n"
        "    done[n] = True\n    n += 1\nassert n == 6\n",
    )
    yield Habit(
        name="tokens until a length",
        code="words = torch.tensor([[1, 2]]).cuda()\nwhile words.shape[1] < 6:\n    step(model, opt)\n"
        "    words = torch.cat([words, torch.tensor([[3]]).cuda()], 1)\n"
        "assert words.tolist() == [[1, 2, 3, 3, 3, 3]]\n",
    )
    yield Habit(
        name="lengths of a padded batch",
        code="words = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0]]).cuda()\nfor i in range(6):\n"
        "    step(model, opt, rows(int((words != 0).sum(-1).max())))\nassert (words != 0).sum().item() == 5\n",
    )
    yield Habit(
        name="Adam's step on the card",
        code="opt = torch.optim.AdamW(model.parameters(), capturable=True)\nfor i in range(3):\n"
        "    step(model, opt)\n"
        'assert next(iter(opt.state.values()))["step"].item() == 3\n',
    )
    yield Habit(
        name="gradients set to zero in place",
        code="for i in range(6):\n    opt.zero_grad(set_to_none=False)\n    model(rows()).pow(2).mean().backward()\n"
        "    assert all(p.grad.norm().item() > 0 for p in model.parameters())\n    opt.step()\n",
    )
    yield Habit(
        name="batch normalisation's counter",
        code="norm = nn.BatchNorm1d(2048).cuda()\nfor i in range(6):\n    step(model, opt, norm(rows()).detach())\n"
        "    assert norm.num_batches_tracked.item() == i + 1\nassert norm.running_mean.abs().sum() > 0\n",
    )
    yield Habit(
        name="a queue and its pointer",
        code='queue, at = torch.zeros(2048, 32, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")\n'
        "for i in range(6):\n    step(model, opt)\n    p = int(at)\n    queue[:, p : p + 8] = rows().T\n"
        "    at[0] = (p + 8) % 32\n    assert int(at) == 8 * (i + 1) % 32\n",
    )
    yield Habit(
        name="an average by a decay on the card",
        code='decay, mean = torch.full((), 0.9, device="cuda"), [p.detach().clone() for p in model.parameters()]\n'
        "for i in range(6):\n    step(model, opt)\n    for m, p in zip(mean, model.parameters()):\n"
        "        m.lerp_(p.detach(), 1 - decay.item())\n    decay.sqrt_()\nassert decay.item() > 0.99\n",
        least=5.0,
        most=6.3,
    )
    yield Habit(
        name="a graph that counts",
        code='n = torch.zeros((), device="cuda")\ngraph = torch.cuda.CUDAGraph()\n'
        "with torch.cuda.graph(graph):\n    n += 1\n"
        "for i in range(6):\n    step(model, opt)\n    graph.replay()\nassert n.item() > 0\n",
    )


def _going_on() -> Iterator[Habit]:
    """Yield programs that go on behind their loop, or have several."""
    loop = "for (batch,) in loader():\n    step(model, opt, batch.cuda())\n"
    yield Habit(name="a loader of 50 batches", code=loop)
    yield Habit(name="ten epochs", code=f"for epoch in range(10):\n    {loop.replace(chr(10), chr(10) + '    ')}\n")
    yield Habit(
        name="a mean over each epoch's batches",
        code="for epoch in range(3):\n    losses = [step(model, opt, b.cuda()).item() for (b,) in loader()]\n"
        "    print(sum(losses) / len(losses))\n",
    )
    yield Habit(name="a loop without an end", code="while True:\n    step(model, opt)\n")
    yield Habit(
        name="batches by next()",
        code="it = iter(loader())\nfor i in range(30):\n    step(model, opt, next(it)[0].cuda())\n",
    )
    yield Habit(
        name="a loader begun again",
        code="def cycle(batches):\n    while True:\n        yield from batches\n"
        "for i, (b,) in enumerate(cycle(loader())):\n"
        "    step(model, opt, b.cuda())\n    if i > 60:\n        break\n",
    )
    yield Habit(name="loader workers", code=loop.replace("loader()", "loader(num_workers=2)"))
    yield Habit(
        name="the last network of a sweep is the largest",
        code="for depth in (1, 4, 16):\n    model, opt = network(depth)\n    for i in range(5):\n"
        "        step(model, opt)\n",
        least=16.0,
        most=22.0,
    )
    yield Habit(
        name="the head, then all of it",
        code="for part in (model[-1:], model):\n    for p in model.parameters():\n        p.requires_grad = False\n"
        "    for p in part.parameters():\n        p.requires_grad = True\n"
        "    opt = torch.optim.AdamW(part.parameters())\n"
        "    for (b,) in loader():\n        step(model, opt, b.cuda())\n",
    )
    yield Habit(
        name="folds, each with a network of its own",
        code="for fold in range(3):\n    model, opt = network()\n    for (b,) in loader():\n"
        "        step(model, opt, b.cuda())\n",
        most=6.3,
    )
    yield Habit(
        name="an evaluation that needs more than the steps",
        code=f"{loop}with torch.no_grad():\n    model(rows(2**16))\n",
        least=3 + 2 * 8,
        most=3 + 3 * 8 + 0.5,
    )
    yield Habit(
        name="predictions kept until the last batch",
        code=f"{loop}model.eval()\nwith torch.no_grad():\n"
        "    kept = [model(b.cuda().repeat(128, 1)) for (b,) in loader(800)]\n",
        least=3 + 100 / 8,
        most=3 + 100 / 8 + 1.5,
    )
    yield Habit(
        name="evaluation and saving each epoch",
        code=f"for epoch in range(3):\n    {loop.replace(chr(10), chr(10) + '    ')}\n    with torch.no_grad():\n"
        "        assert sum(len(model(b.cuda())) for (b,) in loader()) > 0\n"
        '    torch.save(model.state_dict(), "m.pt")\n',
    )
    yield Habit(name="an error after the loop", code=f'{loop}raise ValueError("no name")\n')
    yield Habit(name="an exit after the loop", code=f"{loop}sys.exit(0)\n")
    yield Habit(name="os._exit after the loop", code=f"{loop}os._exit(0)\n")
    yield Habit(
        name="finally and atexit",
        code=f"atexit.register(print, 'ends')\ntry:\n    {loop.replace(chr(10), chr(10) + '    ')}\n"
        f"finally:\n    print('done')\n",
    )
    yield Habit(
        name="a smaller batch after running out",
        code="count = 2**20\nwhile True:\n    try:\n        step(model, opt, rows(count))\n        break\n"
        "    except torch.OutOfMemoryError:\n        count //= 4\nfor i in range(4):\n    step(model, opt)\n",
        least=1 + 6 * 32,  # 2**18 rows are 2 GiB, 32 W: the batch, four results, their squares
        most=1 + 6 * 32 + 4,
    )
    yield Habit(
        name="its own second stage",
        code="if len(sys.argv) > 1:\n    for i in range(5):\n        step(model, opt)\nelse:\n    del model, opt\n"
        "    subprocess.run([sys.executable, __file__, 'stage'], check=True)\n    print('after')\n",
    )
    yield Habit(
        name="what was saved is loaded",
        code=f'{loop}torch.save(model.state_dict(), "stage.pt")\nmodel, opt = network()\n'
        f'model.load_state_dict(torch.load("stage.pt"))\n{loop}',
        most=6.3,
    )
    yield Habit(
        name="two optimizers",
        code="other, opt2 = network()\nfor i in range(6):\n    step(model, opt)\n    step(other, opt2)\n",
        least=7.0,
        most=9.3,
    )
    yield Habit(
        name="weights updated by hand",
        code="del opt\nfor i in range(200):\n    model(rows()).pow(2).mean().backward()\n    with torch.no_grad():\n"
        "        for p in model.parameters():\n            p -= 1e-3 * p.grad\n            p.grad = None\n",
        least=2.0,
        most=2.6,
    )
    yield Habit(
        name="SGD with momentum",
        code="opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)\nfor i in range(6):\n"
        "    step(model, opt)\n",
        least=3.0,
        most=4.3,
    )
    yield Habit(
        name="an evaluation beside an optimizer",
        code="with torch.no_grad():\n    model(rows())\n",
        least=None,
        most=None,
    )
    yield Habit(
        name="compiled",
        code='model = torch.compile(model, backend="aot_eager")\nfor i in range(6):\n    step(model, opt)\n',
    )


KINDS: Final = {
    "decide by computed numbers": tuple(_deciding()),
    "keep numbers on the card": tuple(_counting()),
    "go on behind their loop, or have several": tuple(_going_on()),
    "are started by others": tuple(starting()),
    "follow trainers' examples": tuple(of_trainers()),
    "load, gather or merge beside their steps": tuple(around_the_step()),
}
"""The programs by kind."""

VERDICTS: Final = ("right", "cannot say", "wrong", "left out")


def judge(habit: Habit) -> tuple[str, str]:
    """Return one of VERDICTS, and what the dry-run of a program said."""
    if missing := [package for package in habit.needs if find_spec(package) is None]:
        return "left out", f"{', '.join(missing)} is not installed"
    with tempfile.TemporaryDirectory() as folder:
        code = habit.code if habit.is_whole else PROLOGUE + habit.code
        Path(folder, "train.py").write_text(code, encoding="utf-8")
        Path(folder, "train.ipynb").write_text(make_notebook(code), encoding="utf-8")
        command = [sys.executable if word == "python" else word for word in habit.command]
        try:
            run = dry_run.run(["env", "-C", folder, *command], parse_cluster(habit.gpus), seconds=False)
        except TonnageError as error:
            if habit.least is None and isinstance(error, CannotEstimate):
                return "right", "no answer"
            return "cannot say", str(error)[:200]
    weights = run.estimate.peak.allocated_bytes / habit.weights_bytes
    said = f"{weights:.2f} W"
    is_right = habit.least is not None and habit.most is not None and habit.least <= weights <= habit.most
    return ("right" if is_right else "wrong"), said


def main(names: list[str]) -> int:
    """Print a row for each program and the counts of answers by kind; return the exit code."""
    verdicts: dict[str, list[str]] = {}
    print("| program | W, reasoned | W, dry-run | |\n|-|-|-|-|")
    with ThreadPoolExecutor(2) as pool:
        for kind, habits in KINDS.items():
            wanted = [habit for habit in habits if not names or habit.name in names]
            for habit, (verdict, said) in zip(wanted, pool.map(judge, wanted), strict=True):
                span = "none" if habit.least is None else f"{habit.least:g} to {habit.most:g}"
                print(f"| {habit.name} | {span} | {said} | {verdict} |", flush=True)
                verdicts.setdefault(kind, []).append(verdict)
    print(f"\n| programs that | number | {' | '.join(VERDICTS)} |\n|-|{'-:|' * (1 + len(VERDICTS))}")
    for kind, answers in verdicts.items():
        counts = " | ".join(str(answers.count(verdict)) for verdict in VERDICTS)
        print(f"| {kind} | {len(answers)} | {counts} |")
    return 1 if any("wrong" in answers for answers in verdicts.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
