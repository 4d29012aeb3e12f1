"""The shortcuts give what torch gives: foreach operations on divided tensors, with and without them."""

import json
import subprocess
import sys
from typing import Any

import pytest

from networks import tiny_job
from tonnage.device import parse_cluster
from tonnage.ghost import pool
from tonnage.ghost.process import INSIDE
from tonnage.plans import Plan

PROGRAM = """
import json, sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
asked = {}
from torch.distributed.tensor._sharding_prop import ShardingPropagator as Propagator
original = Propagator.propagate_op_sharding_non_cached
def counted(self, operation):
    tensors = operation.args_schema[0]
    asked.setdefault(operation.op.name(), []).append(len(tensors) if isinstance(tensors, list | tuple) else 1)
    return original(self, operation)
Propagator.propagate_op_sharding_non_cached = counted
if sys.argv[1] == "short":
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
}))
"""


def ran(mode: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, mode]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(INSIDE), "PATH": ""})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_one_of_each_kind_is_asked_for_and_the_results_are_torchs() -> None:
    plain, short = ran("plain"), ran("short")
    assert short["results"] == plain["results"]
    asked = short["asked"]
    assert asked["aten::_foreach_sqrt"] == asked["aten::_foreach_lerp_.Scalar"] == [3]  # rows, columns, whole
    assert plain["asked"]["aten::_foreach_sqrt"] == [6]
    assert asked["aten::_fused_adamw_"] == [3]
    assert plain["asked"]["aten::_fused_adamw_"] == [6]
    assert asked["aten::_foreach_add.List"] == [3, 6]  # tensors that must be moved: torch decides about all


WITHOUT = """
from tonnage_inside import shortcuts
shortcuts.install = lambda: None
from tonnage.ghost import worker
worker.serve()
"""


@pytest.mark.ghost
def test_every_event_is_the_same_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    job, cluster = tiny_job("llama", micro_batch=2, grad_accum=2), parse_cluster("4xa100-40gb")
    plan = Plan(shard="zero3", tp=2, checkpointing="full", optimizer="adamw-fused", loss="chunked")
    traces = []
    for program in (("-m", "tonnage.ghost.worker"), ("-c", WITHOUT)):
        monkeypatch.setattr(pool, "_PROGRAM", program)
        with pool.Worker() as worker:
            traces.append(worker.run(job, plan, cluster, steps=2))
    short, plain = traces
    assert short.event_count > 1000
    for column in ("action", "size", "mark"):
        assert short.event_columns[column] == plain.event_columns[column]
    assert short.peaks == plain.peaks
    launched = [[(one.kind, one.name, one.grid, one.bytes) for one in trace.activities()] for trace in traces]
    assert launched[0] == launched[1]
