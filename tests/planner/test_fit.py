"""Host memory: its bound, its limit, and files where it is not enough."""

from dataclasses import replace

import pytest

from solutions import FormulaRunner, question
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.estimates.estimate import Estimate, Host
from tonnage.estimates.predict import estimate
from tonnage.planner.fit import fits_host
from tonnage.planner.pricing import bound_candidate
from tonnage.planner.solution import Candidate
from tonnage.planner.solve import search
from tonnage.plans import Plan
from tonnage.report.wording import host_verdict
from tonnage.units import GIB

ON_HOST = {
    "states": ("a100-40gb", Plan(optimizer_offload="cpu")),
    "streamed activations": ("a100-40gb", Plan(activation_offload="cpu-streamed", precision="bf16-true")),
    "torch's activations": ("a100-40gb", Plan(activation_offload="cpu", precision="bf16-true")),
    "weights": ("4xa100-40gb", Plan(shard="zero3", param_offload="cpu")),
}


class WithHost(FormulaRunner):
    """Runs need 1.5 times the host bound, and a process's own memory."""

    def _answer(self, candidate: Candidate, cluster: Cluster) -> Estimate:  # type: ignore[override]
        each = bound_candidate(candidate, cluster).host_bytes // cluster.gpus_per_node
        made = super()._answer(candidate, cluster)
        peak, ranks = GIB // 4 + each * 3 // 2, cluster.gpus_per_node
        host = Host(peak_bytes=peak, pinned_bytes=0).with_machine(peak * ranks, {}, cluster.host_limit_bytes)
        stated = {"gpus_per_node": ranks, "host_memory_bytes": cluster.host_memory_bytes}
        return replace(made, cluster={**made.cluster, **stated}).with_host(host)


def planned(memory_bytes: int | None, **asked):
    return search(question("llama-3.2-1b", host_memory_bytes=memory_bytes, **asked), WithHost(), explain=False)


CARD = {"gpu": "t4", "seq_len": 2048, "without": ("checkpointing", "optimizer-in-backward", "param-offload")}
"""Too small for 1.2 B fp32 weights, gradients and Adam's 9.9 GB, large enough without the latter."""


def test_host_bound_computed_by_hand():
    """Llama-3.2-1B: AdamW's two fp32 states for each of 1,235,814,400 weights, and the fp32 weights."""
    asked = question("llama-3.2-1b", gpu="2xa100-80gb")

    def host(**options):
        one = Candidate(job=asked.job, plan=replace(asked.plan, **options))
        return bound_candidate(one, asked.cluster).host_bytes

    assert host(shard="ddp") == 0
    assert host(shard="ddp", optimizer_offload="cpu") == 2 * 8 * 1_235_814_400
    assert host(shard="zero3", param_offload="cpu") == 12 * 1_235_814_400
    assert host(shard="ddp", optimizer_offload="nvme") == host(shard="ddp", activation_offload="nvme") == 0


@pytest.mark.ghost
@pytest.mark.parametrize("name", ON_HOST)
def test_host_bound_is_below_the_peak(worker, name):
    """What is pinned and kept in tensors is counted above that of the same plan without offload."""
    gpu, plan = ON_HOST[name]
    job, cluster = question("smollm2-135m").job, parse_cluster(gpu)
    on_card = replace(plan, activation_offload="none", optimizer_offload="none", param_offload="none")
    runs = [estimate(Case(job, one, cluster), worker=worker, rank=0).estimate for one in (plan, on_card)]
    held, without = (run.ranks[0]["host"]["pinned"] + run.ranks[0]["host"]["tensors"] for run in runs)
    bound = bound_candidate(Candidate(job=job, plan=plan), cluster).host_bytes
    assert 0 < bound <= (held - without) * cluster.gpus_per_node


def test_small_activations_stay_on_the_card():
    """Keys and values of 512 tokens have 192 KiB, below the smallest tensor that is offloaded."""
    asked = question("smollm2-135m", gpu="a100-80gb", seq_len=512, activation_offload="cpu-streamed")
    assert bound_candidate(Candidate(job=asked.job, plan=asked.plan), asked.cluster).host_bytes == 0


def test_no_files_without_stated_host_memory():
    best = planned(None, **CARD).plans[0].candidate.plan
    assert best.optimizer_offload == "cpu"
    assert host_verdict(planned(None, **CARD).plans[0].estimate) == (
        "Host memory fits: a machine with H100-80GB needs 17.34 GiB and usually has 31.00 GiB."
    )


def test_unstated_host_memory_is_what_is_usual_with_the_card():
    """12 bytes for each of 405 billion weights are 4.4 TiB."""
    asked = {"gpu": "8xh100-80gb", "model": "llama-3.1-405b", "seq_len": 512}
    alone = search(question(**asked), WithHost(), explain=False)
    assert alone.status == "too_large"
    why = {refused.what: refused.why for refused in alone.refused}["offload to the host"]
    assert why == (
        "needs at least 4535.77 GiB of host memory on each machine, machines with 8 x h100-80gb usually have "
        "1880.00 GiB (--host-memory says what yours has)"
    )
    said = search(question(host_memory_bytes=16 * 2**40, **asked), WithHost(), explain=False)
    assert said.plans[0].candidate.plan.param_offload == "cpu"
    assert alone.nearest is not None
    assert question(**asked).cluster.host_limit_bytes == 8 * 235 * GIB


def test_a_card_with_unknown_machines_has_no_limit():
    """RTX A5000: 24 GB, in no machine of the catalog."""
    asked = question("llama-3.1-8b", gpu="rtx-a5000", without=("param-offload",))
    assert asked.cluster.host_limit_bytes is None
    assert fits_host(2**60, asked)


def test_files_are_used_if_the_host_is_too_small():
    small = planned(4 * GIB, **CARD)
    best = small.plans[0].candidate.plan
    assert best.optimizer_offload == "nvme"
    assert small.unpriced == "How fast this machine's files are is not known, so neither is the step's time."
    assert small.question["host_memory_bytes"] == 4 * GIB
    why = {refused.what: refused.why for refused in small.refused}["offload to the host"]
    assert why == "needs at least 9.21 GiB of host memory on each machine, which has 4.00 GiB"
    large = planned(64 * GIB, **CARD).plans[0]
    assert large.candidate.plan.optimizer_offload == "cpu"
    assert host_verdict(large.estimate).endswith("and has 64.00 GiB.")


def test_whole_run_decides_about_the_host():
    """With more than the bound (9.21 GiB) and less than a run needs (14.06 GiB) a plan is run and refused."""
    middle = planned(10 * GIB, **CARD)
    assert middle.plans[0].candidate.plan.optimizer_offload == "nvme"
    assert any("of host memory on each machine, which has 10.00 GiB" in refused.why for refused in middle.refused)


def test_more_host_memory_is_a_remedy():
    """Torch's FSDP cannot keep weights in files."""
    asked = {"gpu": "2xt4", "model": "llama-3.1-8b", "without": ("tp", "pp", "cp"), "micro_batch": 1, "seq_len": 512}
    tight = search(question(host_memory_bytes=32 * GIB, **asked), WithHost())
    assert tight.status == "too_large"
    assert tight.nearest is not None
    assert tight.nearest.missing_bytes > 0
    assert "--host-memory 256GiB" in [remedy.what for remedy in tight.nearest.remedies]
    assert search(question(host_memory_bytes=256 * GIB, **asked), WithHost(), explain=False).status == "found"


def test_host_memory_without_unit_raises():
    with pytest.raises(UsageError, match="less than 1 MiB; give its unit too, such as 256GiB"):
        question(host_memory_bytes=256)
