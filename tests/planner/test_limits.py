"""The limits of what fits, with trial runs that follow a formula."""

from dataclasses import replace

import pytest

from solutions import FormulaRunner, question
from tonnage.catalog.devices import device_names, parse_cluster
from tonnage.errors import GhostUnavailable, UsageError
from tonnage.estimates.estimate import Host
from tonnage.planner import limits
from tonnage.planner.candidates import list_candidates
from tonnage.planner.limits import find_limit
from tonnage.planner.nearest import keeping_way
from tonnage.planner.solve import search
from tonnage.plans import Plan
from tonnage.trainers import engine
from tonnage.units import GIB, MIB


@pytest.fixture(autouse=True)
def _formula(monkeypatch):
    class TrialRunner(FormulaRunner):
        def __init__(self, *_args, **_options):
            super().__init__()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(limits, "TrialRunner", TrialRunner)


def test_longest_sequence_fits_and_the_next_does_not():
    asked = question(gpu="a100-80gb", model="llama-3.2-1b", without=("activation-offload",), micro_batch=8)
    solution = find_limit("max-seq-len", asked, top=1)
    tokens = solution.question["job"]["seq_len"]
    assert solution.question["found"] == f"seq-len {tokens}"
    assert solution.status == "found"
    assert ("limit" in solution.question) == (tokens == 131072)
    longer = question(
        gpu="a100-80gb", model="llama-3.2-1b", without=("activation-offload",), micro_batch=8, seq_len=tokens + 1024
    )
    assert tokens == 131072 or search(longer, FormulaRunner(), top=1, explain=False).status != "found"


def test_longest_sequence_fits_on_the_host_too(monkeypatch):
    """A machine needs 1 MiB for each token here."""
    on_card = FormulaRunner._answer

    def answer(candidate, cluster):
        needed = candidate.job.seq_len * MIB
        host = Host(peak_bytes=needed, pinned_bytes=0).with_machine(needed, {}, cluster.host_limit_bytes)
        return on_card(candidate, cluster).with_host(host)

    monkeypatch.setattr(FormulaRunner, "_answer", staticmethod(answer))
    for gibs in (8, 16):
        asked = question(gpu="a100-80gb", model="llama-3.2-1b", host_memory_bytes=gibs * GIB)
        assert find_limit("max-seq-len", asked, top=1).question["found"] == f"seq-len {gibs * 1024}"


@pytest.mark.parametrize(("positions", "found"), [(512, 512), (1500, 1500), (2048, 2048)])
def test_limit_of_the_positions_is_reported(positions, found):
    asked = question(gpu="a100-80gb", model="llama-3.2-1b")
    model = replace(asked.job.model, config={**asked.job.model.config, "max_position_embeddings": positions})
    solution = find_limit("max-seq-len", replace(asked, job=replace(asked.job, model=model)), top=1)
    assert solution.question["found"] == f"seq-len {found}"
    assert "positions end there" in solution.question["limit"]


def test_only_the_smallest_candidate_of_each_length_is_run_whole(monkeypatch):
    whole, run_whole, tried = [], FormulaRunner.run_whole, []

    def record(self, candidates, cluster, budget=None):
        whole.extend(candidate.job.seq_len for candidate in candidates)
        return run_whole(self, candidates, cluster, budget)

    def record_search(*given, **options):
        tried.extend(whole)
        return search(*given, **options)

    monkeypatch.setattr(FormulaRunner, "run_whole", record)
    monkeypatch.setattr(limits, "search", record_search)
    find_limit("max-seq-len", question(gpu="a100-80gb", model="smollm2-135m"), top=1)
    assert tried == [1024, 2048, 8192]  # its last position


def test_largest_micro_batch():
    asked = question(gpu="a100-80gb", model="llama-3.2-1b", without=("activation-offload", "checkpointing"))
    solution = find_limit("max-micro-batch", asked, top=1)
    number = int(solution.question["found"].split()[1])
    assert number > 1
    assert solution.plans[0].candidate.job.micro_batch == number


@pytest.mark.parametrize(("said", "micro_batches"), [({}, 1), ({"grad_accum": 4}, 4), ({"pp": 2}, 2)])
def test_largest_micro_batch_keeps_the_stated_accumulation(said, micro_batches):
    offloads = ("activation-offload", "optimizer-offload", "param-offload")
    asked = question(gpu="2xa100-80gb", model="llama-3.2-1b", without=("tp", "cp", *offloads), **said)
    solution = find_limit("max-micro-batch", asked, top=1)
    best = solution.plans[0].candidate
    assert solution.question["found"] == f"micro-batch {best.job.micro_batch}"
    assert best.job.grad_accum >= micro_batches
    assert solution.question["job"]["grad_accum"] == micro_batches


def test_no_other_micro_batch_is_shown_if_the_smallest_does_not_fit():
    """All sequences at once need less than one after the other: no gradients are accumulated."""
    offloads = ("activation-offload", "optimizer-offload", "param-offload")
    asked = question(gpu="l4", model="llama-3.2-1b", seq_len=512, grad_accum=4, without=offloads)
    ones = [one for one in list_candidates(asked) if one.job.micro_batch == 1]
    least = min(need.process_bytes for need in FormulaRunner().probe(ones, asked.cluster))
    device = asked.cluster.device.with_capacity(int(0.94 * least / (1 - asked.headroom)))
    asked = replace(asked, cluster=replace(asked.cluster, device=device))
    assert search(asked, FormulaRunner(), top=1, explain=False).status == "found"
    assert find_limit("max-micro-batch", asked, top=1).status == "too_large"


def test_longest_sequence_is_divided_by_the_stated_degrees():
    asked = question(gpu="3xl4", model="smollm2-135m", tp=3)
    solution = find_limit("max-seq-len", asked, top=1)
    tokens = solution.question["job"]["seq_len"]
    assert (solution.status, tokens % 3) == ("found", 0)
    assert tokens >= 3072


def test_fewest_gpus_and_smallest_gpu():
    asked = question(
        gpu="h100-80gb", model="llama-3.1-8b", without=("activation-offload", "optimizer-offload", "param-offload")
    )
    fewest = find_limit("min-gpus", asked, top=1)
    assert fewest.question["found"].startswith("4 GPUs") or fewest.question["found"].startswith("2 GPUs")
    smallest = find_limit("min-gpu", question(gpu="h100-80gb", model="smollm2-135m"), top=1)
    assert smallest.status == "found"


@pytest.mark.parametrize(
    ("degrees", "first"),
    [
        ({}, "h100-80gb"),
        ({"tp": 2}, "2xh100-80gb"),
        ({"tp": 2, "pp": 3}, "6xh100-80gb"),
        ({"tp": 4, "cp": 3}, "3x4xh100-80gb"),
        ({"ep": 8}, "8xh100-80gb"),
        ({"tp": 8, "pp": 4}, "4x8xh100-80gb"),
        ({"tp": 16}, "16x8xh100-80gb"),  # across machines, which Question refuses
    ],
)
def test_first_cluster_is_divided_by_the_stated_degrees(degrees, first):
    given = parse_cluster("h100-80gb")
    assert str(limits.initial_cluster("min-gpus", given, Plan(**degrees))) == first
    assert limits.initial_cluster("max-seq-len", given, Plan(**degrees)) is given


def test_fewest_gpus_name_the_cards():
    asked = question(gpu="3xh100-80gb", model="smollm2-135m", tp=3, seq_len=3072)
    fewest = find_limit("min-gpus", asked, top=1)
    assert (fewest.status, fewest.question["found"]) == ("found", "3 GPUs (3xh100-80gb)")
    assert (fewest.question["gpu"], fewest.question["gpu_memory_bytes"]) == ("3xh100-80gb", None)


def test_no_card_is_needed_to_find_one():
    assert limits.initial_card("min-gpu", "h100-80gb") == "h100-80gb"
    assert limits.initial_card("min-gpu", None) in device_names()
    assert limits.initial_card("min-gpus", None) is None
    assert limits.initial_card(None, None) is None


@pytest.mark.parametrize(
    ("find", "given", "reason"),
    [
        ("min-gpu", {"gpu": "t4"}, "looks for the card, and --gpu says it"),
        ("min-gpu", {"gpu_memory": 2**34}, "looks for the card, and --gpu-memory says it"),
        ("min-gpu", {"here": True}, "looks for the card, and --here says it"),
        ("min-gpus", {"gpu": "t4", "gpus": 64}, "the number of GPUs, and --gpus says 64; .*: --gpu t4"),
        ("min-gpus", {"gpu": "4xt4"}, "the number of GPUs, and --gpu says 4; .*: --gpu t4"),
    ],
)
def test_card_to_be_found_may_not_be_stated(find, given, reason):
    cluster = parse_cluster(given.get("gpu", "t4"), gpus=given.get("gpus"))
    with pytest.raises(UsageError, match=reason):
        limits.check_cards(find, cluster, **given)


@pytest.mark.parametrize(
    ("find", "given"),
    [
        ("min-gpus", {"gpu": "t4"}),
        ("min-gpus", {"here": True}),
        ("min-gpu", {"gpus": 8}),
        ("max-seq-len", {"gpu": "t4", "gpus": 8}),
        (None, {"gpu": "t4", "gpus": 8}),
    ],
)
def test_other_cards_may_be_stated(find, given):
    limits.check_cards(find, parse_cluster("t4", gpus=8 if given.get("here") else given.get("gpus")), **given)


@pytest.mark.parametrize(
    ("find", "said", "reason"),
    [
        ("max-seq-len", "seq_len", "leave --seq-len out"),
        ("max-micro-batch", "micro_batch", "leave --micro-batch out"),
        ("max-micro-batch", "global_batch_tokens", "leave --global-batch-tokens out and say grad-accum"),
    ],
)
def test_option_to_be_found_may_not_be_stated(find, said, reason):
    with pytest.raises(UsageError, match=reason):
        limits.check_find_options(find, {said: 512})
    for other in (None, "min-gpus", "min-gpu"):
        limits.check_find_options(other, {said: 512})
    limits.check_find_options(find, {"grad_accum": 4})


def test_cards_below_the_bound_are_not_probed(monkeypatch):
    asked = []
    probed = FormulaRunner.probe

    def probe(self, candidates, cluster):
        asked.append(cluster.device.id)
        return probed(self, candidates, cluster)

    monkeypatch.setattr(FormulaRunner, "probe", probe)
    smallest = find_limit("min-gpu", question(gpu="t4", model="llama-3.1-8b", method="lora"), top=1)
    assert smallest.status == "found"
    assert asked
    assert "t4" not in asked


def test_cards_without_kernels_are_skipped_when_finding_a_card(monkeypatch):
    answered = FormulaRunner.probe

    def probe(self, candidates, cluster):
        if cluster.device.id == first:
            raise GhostUnavailable("torch has no kernels for this card.")
        return answered(self, candidates, cluster)

    asked = question(gpu="h100-80gb", model="smollm2-135m")
    first = find_limit("min-gpu", asked, top=1).question["found"]
    monkeypatch.setattr(FormulaRunner, "probe", probe)
    other = find_limit("min-gpu", asked, top=1)
    assert other.status == "found"
    assert other.question["found"] != first
    here = replace(asked, cluster=parse_cluster(first))
    with pytest.raises(GhostUnavailable):
        find_limit("min-gpus", here, top=1)


def test_frontier_is_that_of_the_limit():
    asked = question(gpu="a100-80gb", model="smollm2-135m")
    solution = find_limit("min-gpus", asked, top=1, pareto=True)
    assert solution.frontier
    assert not find_limit("min-gpus", asked, top=1).frontier


def test_unknown_find_raises():
    with pytest.raises(UsageError, match="max-seq-len"):
        find_limit("max-fun", question())


@pytest.mark.parametrize("find", [None, *limits.FINDS])
def test_missing_trainer_is_reported_before_any_pricing(find, monkeypatch):
    monkeypatch.setattr(engine, "find_version", lambda package: None)
    asked, formula = question(gpu="8xa100-80gb", model="llama-3.2-1b", engine="torchtitan"), FormulaRunner()
    solution = find_limit(find, asked) if find else search(asked, formula)
    assert (solution.status, solution.looked_at) == ("unsupported", None)
    assert [one.why for one in solution.refused] == [
        "engine=torchtitan: the package torchtitan is not installed; pip install torchtitan."
    ]


def test_larger_batches_than_one_that_failed_are_not_probed(monkeypatch):
    failed, skipped = {}, []
    probed, rule_out = FormulaRunner.probe, limits.KnownFailures.rule_out
    asked = question(gpu="a100-80gb", model="llama-3.2-1b", without=("optimizer-offload", "param-offload"))

    def probe(self, candidates, cluster):
        found = probed(self, candidates, cluster)
        for one, answer in zip(candidates, found, strict=True):
            assert one.job.micro_batch < failed.get(keeping_way(one), 4097)
            if answer.uncached_bytes > asked.budget_bytes:
                failed[keeping_way(one)] = one.job.micro_batch
        return found

    def record(self, candidate, cluster):
        skipped.append(rule_out(self, candidate, cluster))
        return skipped[-1]

    class LimitFound(Exception):
        """Raised instead of the final search."""

    def stop(*_, **__):
        raise LimitFound

    monkeypatch.setattr(FormulaRunner, "probe", probe)
    monkeypatch.setattr(limits.KnownFailures, "rule_out", record)
    monkeypatch.setattr(limits, "search", stop)
    with pytest.raises(LimitFound):
        find_limit("max-micro-batch", asked, top=1)
    assert failed
    assert any(skipped)
