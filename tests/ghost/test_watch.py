"""The watch only looks: a watched program asks the allocator for exactly what it asks for alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from real_ranks import drop_like_others
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.timeline import timeline
from tonnage.ghost.environment import environment
from tonnage.ghost.wheel import Torch
from tonnage.script import dry_run as dry_run_module
from tonnage.script import launchers
from tonnage.trace.trace import Trace

pytestmark = pytest.mark.ghost

ALONE = Path(__file__).parent / "alone.py"
PROGRAMS = Path(__file__).parents[1] / "programs"


def run_alone(torch_build: Torch, programs: dict[Path, list[str]], gpu: str, rank: int | None) -> None:
    """Write the allocator's events of programs that are not watched, each into its file."""
    cluster = parse_cluster(gpu)
    inherit = {**os.environ, "OMP_NUM_THREADS": "1"}
    if rank is not None:
        inherit |= launchers.rank_variables(rank, cluster)
    settings = {name.removeprefix("GHOST_").lower(): value for name, value in cluster.device.ghost_settings().items()}
    variables = environment(torch=torch_build, inherit=inherit, devices=cluster.gpus_per_node, **settings)
    assert "TONNAGE_OUT" not in variables
    runs = [["--", str(target), str(PROGRAMS / program), *rest] for target, (program, *rest) in programs.items()]
    words = [sys.executable, str(ALONE), *(word for run in runs for word in run)]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


ALL_PROGRAMS = {
    "checkpointing and accumulation": (
        ["families.py", "t5", "--checkpointing", "--accumulate", "2"],
        "a100-40gb",
        None,
    ),
    "experts, checkpointed": (["families.py", "mixtral", "--checkpointing"], "a100-40gb", None),
    "bf16": (["families.py", "llama", "--precision", "bf16-true"], "a100-40gb", None),
    "loss scaling": (["families.py", "llama", "--precision", "fp16-mixed"], "a100-40gb", None),
    "images": (["families.py", "vit", "--precision", "bf16-true"], "a100-40gb", None),
    "graphs": (["graphs.py"], "a100-40gb", None),
    "out of memory": (["too_big.py", "backward"], "a100-40gb", None),
    "out of memory, again and again": (["too_big.py", "adapting"], "a100-40gb", None),
    "fsdp": (["parallel.py", "fsdp"], "8xa100-40gb", 3),
    "ddp": (["parallel.py", "ddp"], "2xa100-40gb", 1),
    "tensor and fsdp": (["parallel.py", "both"], "8xa100-40gb", 5),
}

LIKE_OTHERS = ("bf16", "loss scaling", "images", "experts, checkpointed", "out of memory", "tensor and fsdp")
PROGRAMS_TO_WATCH = drop_like_others(ALL_PROGRAMS, LIKE_OTHERS)

ADAPTERS = ("--lora", "--checkpointing", "--accumulate", "2")
"""Arguments of the Trainer; the same as in test_programs, so that it runs once."""

THREADED = ("ddp", "graphs")
"""Programs with other threads that free blocks at any time: NCCL's watchdog, backward on several streams."""


@pytest.fixture(scope="module")
def alone(torch_build: Torch, tmp_path_factory: Any) -> Path:
    """Return a folder with the allocator's events of each program; those on one card share a process for imports."""
    folder: Path = tmp_path_factory.mktemp("alone")
    places: dict[tuple[str, int | None], dict[Path, list[str]]] = {}
    for name, (command, gpu, rank) in PROGRAMS_TO_WATCH.items():
        places.setdefault((gpu, rank), {})[folder / name] = command
    places["a100-40gb", None][folder / "trainer"] = ["trainer.py", str(folder / "output"), *ADAPTERS]
    for (gpu, rank), programs in places.items():
        run_alone(torch_build, programs, gpu, rank)
    return folder


@pytest.mark.parametrize("name", PROGRAMS_TO_WATCH)
def test_a_watched_program_allocates_what_it_does_alone(dry_run: Any, alone: Path, name: str) -> None:
    command, gpu, rank = PROGRAMS_TO_WATCH[name]
    options = {"steps": 10} if command[0] == "graphs.py" else {"steps": 50} if "adapting" in command else {}
    options |= {"gpu": gpu, "rank": rank} if rank is not None else {}
    answer = dry_run(*command, **options)
    assert answer.error is None, answer.error
    watched = [tuple(event[:4]) for event in answer.run.traces[0].events()]
    said = json.loads((alone / name).read_text())
    assert said["ended"] == answer.run.traces[0].outcome["kind"]
    unwatched = [tuple(event) for event in said["events"]]
    if name in THREADED:
        watched, unwatched = ([event for event in events if event[0] == "alloc"] for events in (watched, unwatched))
    if said["ended"] == "oom":  # what is freed on the way out depends on who holds the exception
        watched, unwatched = (events[: 1 + last(events, "oom")] for events in (watched, unwatched))
    assert comparable(watched) == comparable(unwatched)
    assert len(watched) > 20


def last(events: list[tuple[Any, ...]], action: str) -> int:
    """Return the index of the last event of this kind."""
    return max(place for place, event in enumerate(events) if event[0] == action)


def comparable(events: list[tuple[Any, ...]]) -> list[tuple[str, int, int]]:
    """Return actions, sizes and streams, numbered by first use, with the frees between two allocations sorted.

    A watched module call goes another way through torch's Python, and what it gives back at its end may come in
    another order.  Free blocks are kept by size and place, so only the order of allocations against frees matters.
    """
    streams: dict[int, int] = {}
    plain = [(action, size, streams.setdefault(stream, len(streams))) for action, _, size, stream in events]
    found: list[tuple[str, int, int]] = []
    given_back: list[tuple[str, int, int]] = []
    for event in plain:
        if event[0].startswith("free"):
            given_back.append(event)
        else:
            found += [*sorted(given_back), event]
            given_back = []
    return found + sorted(given_back)


def test_adapters_in_the_trainer_allocate_what_they_do_alone(dry_run: Any, alone: Path, whole_session: Path) -> None:
    answer = dry_run("trainer.py", str(whole_session / "trainer"), *ADAPTERS, steps=None)
    assert answer.error is None, answer.error
    unwatched = json.loads((alone / "trainer").read_text())["events"]
    watched = [tuple(event[:4]) for event in answer.run.traces[0].events()]
    assert comparable(watched) == comparable([tuple(event) for event in unwatched])


SCRIPT = """
import torch

class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(1000, 3000, bias=False)
        self.down = torch.nn.Linear(3000, 1000, bias=False)
    def forward(self, x):
        kept = self.up(x)
        extra = torch.empty(7_000_000, dtype=torch.uint8, device="cuda")
        return self.down(kept.relu())

class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Inner(), Inner()])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model = Outer().cuda()
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for step in range(2):
    before = torch.empty(5_000_000, dtype=torch.uint8, device="cuda")
    del before
    loss = model(torch.randn(512, 1000, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def small(torch_build: Torch, tmp_path_factory: Any) -> Trace:
    """Return the Trace of a script whose every allocation is known by its size."""
    script = tmp_path_factory.mktemp("script") / "small.py"
    script.write_text(SCRIPT)
    return dry_run_module.run([sys.executable, str(script)], parse_cluster("a100-40gb")).traces[0]


def marks_of(trace: Trace, size_bytes: int) -> list[tuple[int, str, str]]:
    """Return step, phase and module of every allocation of this requested size."""
    found = [
        trace.marks[event.mark] for event in trace.events() if event[:1] == ("alloc",) and event[2] == size_bytes
    ]
    return [(mark.step, mark.phase, mark.module) for mark in found]


def test_marks_name_the_phase_and_module_of_known_events(small: Trace) -> None:
    assert marks_of(small, 7_000_000) == [
        (step, "forward", f"layers.{layer}") for step in (0, 1) for layer in (0, 1)
    ], "inside a module's own forward"
    assert marks_of(small, 5_000_000) == [(0, "load", ""), (0, "other", "")], "between steps"
    ups = marks_of(small, 512 * 3000 * 4)
    assert ups[:2] == [(0, "forward", "layers.0.up"), (0, "forward", "layers.0")], "the product, then relu's"
    weights = marks_of(small, 1000 * 3000 * 4)
    assert weights[:4] == [(0, "load", "")] * 4
    gradients = [mark for mark in weights if mark[1] == "backward"]
    assert gradients[:4] == [
        (0, "backward", name) for name in ("layers.1.down", "layers.1.up", "layers.0.down", "layers.0.up")
    ]
    states = [mark for mark in weights if mark == (0, "optimizer", "")]
    assert len(states) >= 2 * 4, "two moments for each of four weights"


def test_categories_of_known_blocks(small: Trace) -> None:
    weight = 1000 * 3000 * 4
    born = {}
    walked = timeline(small)
    for life in walked.lives:
        if weight <= life.size_bytes <= weight + 2**20:
            born.setdefault((walked.marks[life.mark].phase, life.category), []).append(life)
    assert len(born["load", "parameter"]) == 4
    assert len(born["backward", "gradient"]) == 2 * 4
    assert len(born["optimizer", "optimizer_state"]) == 2 * 4
    kept = [life for life in walked.lives if life.category == "activation" and life.size_bytes >= 512 * 3000 * 4]
    # Autograd keeps relu's result of each layer for both of its neighbours; up's own product is not needed again.
    assert len([life for life in kept if walked.marks[life.mark].phase == "forward"]) >= 2 * 2


TEACHER = """
import torch

torch.ones(2, device="cuda", requires_grad=True).sum().backward()  # as libraries try it while they are imported
teacher = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)).cuda()
student = torch.nn.Linear(64, 64).cuda().requires_grad_(False)
reward = torch.nn.Bilinear(64, 64, 64).cuda()
judge = torch.nn.Linear(64, 8192).cuda()  # the largest, and first called when training has begun
student(torch.randn(8, 64, device="cuda"))  # before it is said that it is trained
student.requires_grad_(True)
norm = torch.nn.LayerNorm(64).cuda()
optimizer = torch.optim.SGD([*student.parameters(), *norm.parameters()])
for step in range(2):
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        expected = teacher(x)
        reward(x, expected)
        if step:
            judge(x)
    (norm(student(x)) - expected).square().mean().backward()
    optimizer.step()
"""


def test_of_several_networks_those_that_are_trained_are_reported(tmp_path: Path) -> None:
    script = tmp_path / "teacher.py"
    script.write_text(TEACHER)
    [trace] = dry_run_module.run([sys.executable, str(script)], parse_cluster("a100-40gb"), steps=2).traces
    trained = 64 * 65 + 2 * 64
    classes = {
        "class": "Linear + LayerNorm",
        "module": "torch.nn.modules.linear + torch.nn.modules.normalization",
    }
    assert trace.model == {**classes, "parameters": trained, "trainable_parameters": trained}
    assert marks_of(trace, 64 * 64 * 64 * 4) == [(0, "load", "")], "the reward's weights"


AN_OPTIMIZER_EACH = """
import torch

class Counting(torch.nn.Sequential):
    asked = 0

    def parameters(self, recurse=True):
        Counting.asked += 1
        return super().parameters(recurse)

network = Counting(*(torch.nn.Linear(8, 8) for _ in range(100))).cuda()
optimizers = {each: torch.optim.SGD([each]) for each in network.parameters()}

def update(parameter):
    optimizers[parameter].step()
    parameter.grad = None

for each in optimizers:
    each.register_post_accumulate_grad_hook(update)
for _ in range(2):
    network(torch.randn(8, 8, device="cuda")).sum().backward()
assert Counting.asked < 50, Counting.asked
"""


def test_a_network_with_an_optimizer_for_each_parameter_is_counted_seldom(tmp_path: Path) -> None:
    script = tmp_path / "each.py"
    script.write_text(AN_OPTIMIZER_EACH)
    [trace] = dry_run_module.run([sys.executable, str(script)], parse_cluster("a100-40gb"), steps=2).traces
    trained = 100 * 8 * 9
    assert trace.model == {
        "class": "Counting",
        "module": "__main__",
        "parameters": trained,
        "trainable_parameters": trained,
    }
