"""What was decided in one process about divided tensors is what torch decides in another."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from networks import tiny_job
from tonnage.device import parse_cluster
from tonnage.ghost import pool
from tonnage.ghost.process import INSIDE
from tonnage.plans import Plan

sys.path.append(str(INSIDE))
from tonnage_inside import decided

HERE = Path(__file__).parent

PROGRAM = """
import json, os, sys
import torch
from forks import one_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch._library.simple_registry import singleton
from torch.distributed.tensor._sharding_prop import ShardingPropagator as Propagator
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from tonnage_inside import decided

path = sys.argv[1]
rank, mode = one_of([(0, "first"), (3, "second"), (3, "plain")])  # a process each, which has decided nothing yet
there = len(os.listdir(path))
torch.distributed.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
asked = []
original = Propagator.propagate_op_sharding_non_cached
def counted(self, operation):
    asked.append(str(operation.op))
    return original(self, operation)
Propagator.propagate_op_sharding_non_cached = counted
known = set(singleton._data)
if mode != "plain":
    decided.learn(path)
    decided.install()
learned = len(set(singleton._data) - known)

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
found = []

def divided(*shape, placed, dtype=torch.float32):
    value = torch.rand(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    return distribute_tensor(value, mesh, placed, src_data_rank=None).requires_grad_(dtype.is_floating_point)

def note(name, *tensors):
    found.extend([name, str(t.placements), list(t.shape), list(t.to_local().shape), str(t.dtype)] for t in tensors)

tokens = divided(2, 8, placed=[Shard(0), Replicate()], dtype=torch.long)
table = divided(32, 16, placed=[Replicate(), Shard(0)])
hidden = functional.embedding(tokens, table).detach()  # whose result remembers which of its tokens another rank has
note("embedding", hidden)
hidden = hidden.redistribute(mesh, [Shard(0), Replicate()])
up, down = divided(64, 16, placed=[Shard(0), Shard(0)]), divided(16, 64, placed=[Shard(0), Shard(1)])
out = functional.linear(functional.silu(functional.linear(hidden, up)), down)
note("linear", out)
parts = out.redistribute(mesh, [Shard(0), Replicate()]).view(2, 8, 4, 4).transpose(1, 2).chunk(2, dim=1)
note("parts", *parts)
(torch.cat(parts).float().mean() + out.sum()).backward()
note("gradients", up.grad, down.grad)
note("foreach", *torch._foreach_mul([up, down, up], 2.0))
if mode != "plain":
    decided.leave(path)
print(json.dumps({"found": found, "asked": asked, "there": there, "learned": learned}), flush=True)
os._exit(0)
"""


def test_a_second_process_decides_only_about_what_cannot_be_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": f"{INSIDE}:{HERE}", "PATH": ""})
    assert done.returncode == 0, done.stderr
    first, second, plain = map(json.loads, done.stdout.splitlines())
    assert (first["there"], second["there"]) == (0, 1)
    assert plain["there"] == 1  # nothing was added
    assert second["found"] == plain["found"]
    assert len(first["asked"]) > 20
    assert (first["learned"], plain["learned"]) == (0, 0)
    assert second["learned"] > 0
    assert set(second["asked"]) == {"aten.detach.default"}  # of what has a mask, which is of its process alone


@pytest.mark.ghost
def test_a_worker_that_knows_gives_the_same_trace(worker: pool.Worker) -> None:
    job, cluster = tiny_job("llama", micro_batch=2, grad_accum=2), parse_cluster("8xa100-40gb")
    plan = Plan(shard="zero2", tp=2, pp=2, checkpointing="full", optimizer="adamw-fused", loss="chunked")
    worker.run(job, plan, cluster, rank=0, steps=1)
    knowing = worker.run(job, plan, cluster, rank=4, steps=2)
    with pool.Worker() as other:
        fresh = other.run(job, plan, cluster, rank=4, steps=2)
    assert fresh.event_count > 1000
    for column in ("action", "size", "mark"):
        assert knowing.event_columns[column] == fresh.event_columns[column]
    assert knowing.peaks == fresh.peaks
    launched = [
        [(one.kind, one.name, one.grid, one.bytes) for one in trace.activities()] for trace in (knowing, fresh)
    ]
    assert launched[0] == launched[1]


def test_what_only_another_run_had_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_known", "_ready"):
        monkeypatch.setattr(decided, name, {})
    monkeypatch.setattr(decided, "_learned", set())
    monkeypatch.setitem(sys.modules, decided._DECIDES, decided)
    gone = b"cos\nan_operation_that_is_not_here\n."
    (tmp_path / "one").write_bytes(pickle.dumps(({"gone": gone, "there": pickle.dumps(7)}, [])))
    decided.learn(str(tmp_path))
    assert decided._ready == {"there": (7, [])}


def test_a_file_is_read_once_and_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decided, "_known", known := {})
    monkeypatch.setattr(decided, "_learned", set())
    (tmp_path / "other.draft").write_bytes(b"half of")
    monkeypatch.setattr(decided, "_new", {"asked": pickle.dumps("told")})
    decided.leave(str(tmp_path))
    decided.learn(str(tmp_path))
    assert {asked: pickle.loads(told) for asked, told in known.items()} == {"asked": "told"}
    known.clear()
    decided.learn(str(tmp_path))
    assert not known


@pytest.mark.ghost
def test_workers_of_one_folder_know_of_each_other(tmp_path: Path) -> None:
    job, plan = tiny_job("llama", micro_batch=1), Plan(shard="zero3", tp=2)
    left = []
    for _ in range(2):
        with pool.Worker(decided=tmp_path) as worker:
            worker.run(job, plan, parse_cluster("8xa100-40gb"), steps=1)
        left.append(len(list(tmp_path.iterdir())))
    assert left == [1, 1]  # the second had nothing to decide
