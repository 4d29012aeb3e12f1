"""The shortcuts give what torch gives: foreach operations on divided tensors, with and without them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from networks import tiny_job
from tonnage.catalog.devices import parse_cluster
from tonnage.ghost.environment import PATH
from tonnage.plans import Plan
from tonnage.workers import worker as worker_module

HERE = Path(__file__).parent

PROGRAM = """
import json, os, sys
import torch
from forks import one_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

mode = one_of(["plain", "short"])
torch.distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
asked = {}
from torch.distributed.tensor._sharding_prop import ShardingPropagator as Propagator
original = Propagator.propagate_op_sharding_non_cached
def counted(self, operation):
    tensors = operation.args_schema[0]
    asked.setdefault(operation.op.name(), []).append(len(tensors) if isinstance(tensors, list | tuple) else 1)
    return original(self, operation)
Propagator.propagate_op_sharding_non_cached = counted
if mode == "short":
    from tonnage_inside import shortcuts
    shortcuts.install()

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
PLACED = {"rows": (Replicate(), Shard(0)), "columns": (Shard(1), Shard(0)), "whole": (Replicate(), Replicate())}

def tensors(*kinds):
    torch.manual_seed(0)
    shapes = {"rows": (5, 4), "columns": (6, 4), "whole": (3,)}
    local = {"rows": (3 if mesh.get_local_rank("shard") == 0 else 2, 4), "columns": (3, 2), "whole": (3,)}
    return [
        DTensor.from_local(torch.rand(local[k]), mesh, PLACED[k], run_check=False, shape=torch.Size(shapes[k]),
                           stride=(shapes[k][1], 1) if len(shapes[k]) > 1 else (1,))
        for k in kinds
    ]

kinds = ("rows", "columns", "rows", "whole", "rows", "columns")
numbers = [float(i) for i in range(6)]
a, b, c = tensors(*kinds), tensors(*kinds), tensors(*kinds)
results = {
    "mul": torch._foreach_mul(a, b),
    "mul_numbers": torch._foreach_mul(a, numbers),
    "sqrt": torch._foreach_sqrt(b),
    "norm": torch._foreach_norm(a),
    "moved": torch._foreach_add(a, tensors("whole") * 0 + [t.redistribute(mesh, (Replicate(),) * 2) for t in b]),
}
torch._foreach_lerp_(a, b, 0.1)
torch._foreach_addcdiv_(b, a, c, numbers)
results |= {"lerp_": a, "addcdiv_": b}
weights, gradients, first, second = (tensors(*kinds) for _ in range(4))
torch._fused_adamw_(
    weights, gradients, first, second, [], [torch.tensor(3.0) for _ in kinds],
    lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
)
results |= {"fused_weights": weights, "fused_first": first, "fused_second": second}
print(json.dumps({
    "asked": asked,
    "results": {
        name: [[str(t.placements), list(t.shape), t.to_local().tolist()] for t in found]
        for name, found in results.items()
    },
}), flush=True)
os._exit(0)
"""


def test_one_of_each_kind_is_asked_for_and_the_results_are_torchs() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": f"{PATH}:{HERE}", "PATH": ""})
    assert done.returncode == 0, done.stderr
    plain, short = map(json.loads, done.stdout.splitlines())
    assert short["results"] == plain["results"]
    asked = short["asked"]
    assert asked["aten::_foreach_sqrt"] == asked["aten::_foreach_lerp_.Scalar"] == [3]  # rows, columns, whole
    assert plain["asked"]["aten::_foreach_sqrt"] == [6]
    assert asked["aten::_fused_adamw_"] == [3]
    assert plain["asked"]["aten::_fused_adamw_"] == [6]
    assert asked["aten::_foreach_add.List"] == [3, 6]  # tensors that must be moved: torch decides about all


OLDER = """
from dataclasses import dataclass
from types import SimpleNamespace
from tonnage_inside import shortcuts

@dataclass(frozen=True)
class Spec:
    tensor_meta: str
    def shallow_copy_with_tensor_meta(self, meta):
        return Spec(meta)

@dataclass
class Operation:
    op: object
    args_schema: tuple

@dataclass
class Answer:
    output_spec: tuple
    needs_redistribute: bool = False

asked = []
class Propagator:
    def propagate_op_sharding_non_cached(self, operation):
        asked.append(len(operation.args_schema[0]))
        return Answer(tuple(operation.args_schema[0]))

shortcuts._sharding(SimpleNamespace(ShardingPropagator=Propagator, DTensorSpec=Spec))
specs = [Spec("rows"), Spec("whole"), Spec("rows")]
sqrt = SimpleNamespace(name=lambda: "aten::_foreach_sqrt")
answer = Propagator().propagate_op_sharding_non_cached(Operation(sqrt, (specs,)))
assert answer.output_spec == tuple(specs), answer
assert asked == [2], asked
"""


def test_operations_of_torch_2_8_have_nothing_that_they_are_compared_by() -> None:
    """An optimizer's step on weights that DTensor divides ended there."""
    subprocess.run([sys.executable, "-c", OLDER], env={"PYTHONPATH": PATH}, check=True, timeout=300)


WITHOUT = """
from tonnage_inside import shortcuts
shortcuts.install = lambda: None
from tonnage.workers import server
server.serve()
"""


@pytest.mark.ghost
def test_every_event_is_the_same_without_them(worker: worker_module.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    job, cluster = tiny_job("llama", micro_batch=2, grad_accum=2), parse_cluster("4xa100-40gb")
    plan = Plan(shard="zero3", tp=2, checkpointing="full", optimizer="adamw-fused", loss="chunked")
    monkeypatch.setattr(worker_module, "_PROGRAM", ("-c", WITHOUT))
    with worker_module.Worker() as without:
        plain = without.run(job, plan, cluster, steps=2)
    short = worker.run(job, plan, cluster, steps=2)
    assert short.event_count > 1000
    for column in ("action", "size", "mark"):
        assert short.event_columns[column] == plain.event_columns[column]
    assert short.peaks == plain.peaks
    launched = [[(one.kind, one.name, one.grid, one.bytes) for one in trace.activities()] for trace in (short, plain)]
    assert launched[0] == launched[1]


SHAPES = """
import json
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, empty
from torch.distributed.tensor._sharding_prop import ShardingPropagator as Propagator
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from tonnage_inside import shortcuts

torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
name = "_propagate_tensor_meta_non_cached"
fake = getattr(Propagator, name)
shortcuts.install()
meta = getattr(Propagator, name)
asked, different = [], []

def both(self, operation):
    found, expected = meta(self, operation), fake(self, operation)
    asked.append(str(operation.op))
    if found != expected:
        different.append([str(operation.op), str(found), str(expected)])
    return expected

setattr(Propagator, name, both)
mesh = init_device_mesh("cpu", (2,))

def divided(*shape, over=None, dtype=torch.float32):
    value = torch.rand(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    tensor = distribute_tensor(value, mesh, [Replicate() if over is None else Shard(over)], src_data_rank=None)
    return tensor.requires_grad_(dtype.is_floating_point)

tokens, table = divided(2, 8, dtype=torch.long), divided(32, 16, over=1)
hidden = functional.embedding(tokens, table).redistribute(mesh, [Replicate()])
hidden = functional.layer_norm(hidden, (16,), divided(16), divided(16))
hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
q, k, v = (functional.linear(hidden, divided(16, 16, over=0)).view(2, 8, 4, 4).transpose(1, 2) for _ in range(3))
scores = functional.softmax(q @ k.transpose(-2, -1), dim=-1, dtype=torch.float32)
mixed = functional.dropout(scores, 0.1) @ v
out = functional.linear(mixed.transpose(1, 2).reshape(2, 8, 16), divided(16, 16, over=1))
gate, up = (functional.linear(out.redistribute(mesh, [Replicate()]), divided(32, 16, over=0)) for _ in range(2))
out = functional.silu(gate) * up.to(torch.bfloat16).float()
logits = functional.linear(out.redistribute(mesh, [Replicate()]), divided(32, 32))
loss = functional.cross_entropy(logits.flatten(0, 1), divided(16, dtype=torch.long))
loss.backward()
torch.cat([table.detach(), table.detach()]).clone().zero_()
empty(4, 4, device_mesh=mesh, placements=[Shard(0)]).fill_(1)
table.detach().new_zeros((3, 3), device="cpu")
print(json.dumps({"asked": sorted(set(asked)), "different": different}))
"""


def test_shapes_of_results_are_those_of_fake_tensors() -> None:
    command = [sys.executable, "-c", SHAPES]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": PATH, "PATH": ""})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["different"] == []
    assert {"aten.mm.default", "aten.native_layer_norm.default", "aten.embedding.default"} <= set(found["asked"])
    assert len(found["asked"]) > 30
