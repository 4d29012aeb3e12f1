"""Questions asked backwards, answered by a formula."""

from dataclasses import replace

import pytest

from solutions import Formula, question
from tonnage.catalog.devices import device_names, parse_cluster
from tonnage.errors import GhostUnavailable, UsageError
from tonnage.plans import Plan
from tonnage.search import backwards as module
from tonnage.search.backwards import backwards
from tonnage.search.nearest import way_of
from tonnage.search.solve import search
from tonnage.search.space import candidates
from tonnage.trainers import engine


@pytest.fixture(autouse=True)
def _formula(monkeypatch):
    class Ghosts(Formula):
        def __init__(self, *_args, **_options):
            super().__init__()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(module, "Ghosts", Ghosts)


def test_the_longest_sequence_fits_and_the_next_does_not():
    asked = question(gpu="a100-80gb", model="llama-3.2-1b", without=("activation-offload",), micro_batch=8)
    solution = backwards("max-seq-len", asked, top=1)
    tokens = solution.question["job"]["seq_len"]
    assert solution.question["found"] == f"seq-len {tokens}"
    assert solution.status == "found"
    assert ("limit" in solution.question) == (tokens == 131072)
    longer = question(
        gpu="a100-80gb", model="llama-3.2-1b", without=("activation-offload",), micro_batch=8, seq_len=tokens + 1024
    )
    assert tokens == 131072 or search(longer, Formula(), top=1, explain=False).status != "found"


@pytest.mark.parametrize(("positions", "found"), [(512, 512), (1500, 1500), (2048, 2048)])
def test_the_networks_positions_are_a_limit_that_is_said(positions, found):
    asked = question(gpu="a100-80gb", model="llama-3.2-1b")
    model = replace(asked.job.model, config={**asked.job.model.config, "max_position_embeddings": positions})
    solution = backwards("max-seq-len", replace(asked, job=replace(asked.job, model=model)), top=1)
    assert solution.question["found"] == f"seq-len {found}"
    assert "positions end there" in solution.question["limit"]


def test_of_each_length_the_smallest_is_run_whole_and_no_other_where_it_fits(monkeypatch):
    whole, fit, tried = [], Formula.fit, []

    def noted(self, some, cluster, budget=None):
        whole.extend(one.job.seq_len for one in some)
        return fit(self, some, cluster, budget)

    def found(*given, **options):
        tried.extend(whole)
        return search(*given, **options)

    monkeypatch.setattr(Formula, "fit", noted)
    monkeypatch.setattr(module, "search", found)
    backwards("max-seq-len", question(gpu="a100-80gb", model="smollm2-135m"), top=1)
    assert tried == [1024, 2048, 8192]  # as far as its positions go


def test_the_largest_micro_batch():
    asked = question(gpu="a100-80gb", model="llama-3.2-1b", without=("activation-offload", "checkpointing"))
    solution = backwards("max-micro-batch", asked, top=1)
    number = int(solution.question["found"].split()[1])
    assert number > 1
    assert solution.plans[0].candidate.job.micro_batch == number


@pytest.mark.parametrize(("said", "micro_batches"), [({}, 1), ({"grad_accum": 4}, 4), ({"pp": 2}, 2)])
def test_the_largest_micro_batch_is_that_of_as_many_as_were_said(said, micro_batches):
    offloads = ("activation-offload", "optimizer-offload", "param-offload")
    asked = question(gpu="2xa100-80gb", model="llama-3.2-1b", without=("tp", "cp", *offloads), **said)
    solution = backwards("max-micro-batch", asked, top=1)
    best = solution.plans[0].candidate
    assert solution.question["found"] == f"micro-batch {best.job.micro_batch}"
    assert best.job.grad_accum >= micro_batches
    assert solution.question["job"]["grad_accum"] == micro_batches


def test_where_no_micro_batch_fits_no_other_division_is_shown():
    """All sequences at once would need less than one after the other: no gradients wait for the next."""
    offloads = ("activation-offload", "optimizer-offload", "param-offload")
    asked = question(gpu="l4", model="llama-3.2-1b", seq_len=512, grad_accum=4, without=offloads)
    ones = [one for one in candidates(asked) if one.job.micro_batch == 1]
    least = min(need.process_bytes for need in Formula().need(ones, asked.cluster))
    device = asked.cluster.device.with_capacity(int(0.98 * least / (1 - asked.headroom)))
    asked = replace(asked, cluster=replace(asked.cluster, device=device))
    assert search(asked, Formula(), top=1, explain=False).status == "found"
    assert backwards("max-micro-batch", asked, top=1).status == "too_large"


def test_the_longest_sequence_is_one_that_the_given_degrees_divide():
    asked = question(gpu="3xl4", model="smollm2-135m", tp=3)
    solution = backwards("max-seq-len", asked, top=1)
    tokens = solution.question["job"]["seq_len"]
    assert (solution.status, tokens % 3) == ("found", 0)
    assert tokens >= 3072


def test_the_fewest_gpus_and_the_smallest():
    asked = question(
        gpu="h100-80gb", model="llama-3.1-8b", without=("activation-offload", "optimizer-offload", "param-offload")
    )
    fewest = backwards("min-gpus", asked, top=1)
    assert fewest.question["found"].startswith("4 GPUs") or fewest.question["found"].startswith("2 GPUs")
    smallest = backwards("min-gpu", question(gpu="h100-80gb", model="smollm2-135m"), top=1)
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
        ({"tp": 16}, "16x8xh100-80gb"),  # across machines, which a Question refuses
    ],
)
def test_the_fewest_gpus_are_those_that_the_given_degrees_divide(degrees, first):
    given = parse_cluster("h100-80gb")
    assert str(module.cluster_asked("min-gpus", given, Plan(**degrees))) == first
    assert module.cluster_asked("max-seq-len", given, Plan(**degrees)) is given


def test_the_fewest_gpus_for_given_degrees_say_the_cards():
    asked = question(gpu="3xh100-80gb", model="smollm2-135m", tp=3, seq_len=3072)
    fewest = backwards("min-gpus", asked, top=1)
    assert (fewest.status, fewest.question["found"]) == ("found", "3 GPUs (3xh100-80gb)")
    assert (fewest.question["gpu"], fewest.question["gpu_memory_bytes"]) == ("3xh100-80gb", None)


def test_who_asks_for_a_card_need_not_give_one():
    assert module.card_asked("min-gpu", "h100-80gb") == "h100-80gb"
    assert module.card_asked("min-gpu", None) in device_names()
    assert module.card_asked("min-gpus", None) is None
    assert module.card_asked(None, None) is None


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
def test_cards_that_are_looked_for_are_not_given(find, given, reason):
    cluster = parse_cluster(given.get("gpu", "t4"), gpus=given.get("gpus"))
    with pytest.raises(UsageError, match=reason):
        module.check_cards(find, cluster, **given)


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
def test_the_others_are(find, given):
    module.check_cards(find, parse_cluster("t4", gpus=8 if given.get("here") else given.get("gpus")), **given)


@pytest.mark.parametrize(
    ("find", "said", "reason"),
    [
        ("max-seq-len", "seq_len", "leave --seq-len out"),
        ("max-micro-batch", "micro_batch", "leave --micro-batch out"),
        ("max-micro-batch", "global_batch_tokens", "leave --global-batch-tokens out and say grad-accum"),
    ],
)
def test_what_is_looked_for_is_not_said(find, said, reason):
    with pytest.raises(UsageError, match=reason):
        module.check_looked_for(find, {said: 512})
    for other in (None, "min-gpus", "min-gpu"):
        module.check_looked_for(other, {said: 512})
    module.check_looked_for(find, {"grad_accum": 4})


def test_cards_that_are_too_small_by_any_count_are_not_run(monkeypatch):
    asked = []
    looked = Formula.need

    def need(self, candidates, cluster):
        asked.append(cluster.device.id)
        return looked(self, candidates, cluster)

    monkeypatch.setattr(Formula, "need", need)
    smallest = backwards("min-gpu", question(gpu="t4", model="llama-3.1-8b", method="lora"), top=1)
    assert smallest.status == "found"
    assert asked
    assert "t4" not in asked


def test_cards_without_kernels_are_passed_over_where_a_card_is_asked_for(monkeypatch):
    answered = Formula.need

    def need(self, candidates, cluster):
        if cluster.device.id == first:
            raise GhostUnavailable("torch has no kernels for this card.")
        return answered(self, candidates, cluster)

    asked = question(gpu="h100-80gb", model="smollm2-135m")
    first = backwards("min-gpu", asked, top=1).question["found"]
    monkeypatch.setattr(Formula, "need", need)
    other = backwards("min-gpu", asked, top=1)
    assert other.status == "found"
    assert other.question["found"] != first
    here = replace(asked, cluster=parse_cluster(first))
    with pytest.raises(GhostUnavailable):
        backwards("min-gpus", here, top=1)


def test_the_frontier_is_that_of_what_was_found():
    asked = question(gpu="a100-80gb", model="smollm2-135m")
    solution = backwards("min-gpus", asked, top=1, pareto=True)
    assert solution.frontier
    assert not backwards("min-gpus", asked, top=1).frontier


def test_an_unknown_word():
    with pytest.raises(UsageError, match="max-seq-len"):
        backwards("max-fun", question())


@pytest.mark.parametrize("find", [None, *module.FINDS])
def test_a_trainer_that_is_not_installed_is_said_before_anything_is_looked_at(find, monkeypatch):
    """All combinations were priced first, by which each found the same."""
    monkeypatch.setattr(engine, "installed", lambda package: None)
    asked, formula = question(gpu="8xa100-80gb", model="llama-3.2-1b", engine="torchtitan"), Formula()
    solution = backwards(find, asked) if find else search(asked, formula)
    assert (solution.status, solution.looked_at) == ("unsupported", None)
    assert [one.why for one in solution.refused] == [
        "engine=torchtitan: the package torchtitan is not installed; pip install torchtitan."
    ]


def test_what_did_not_do_is_not_looked_at_for_more_tokens(monkeypatch):
    failed, spared = {}, []
    looked, lost = Formula.need, module.Lost.has
    asked = question(gpu="a100-80gb", model="llama-3.2-1b", without=("optimizer-offload", "param-offload"))

    def need(self, candidates, cluster):
        found = looked(self, candidates, cluster)
        for one, answer in zip(candidates, found, strict=True):
            assert one.job.micro_batch < failed.get(way_of(one), 4097)
            if answer.least_bytes > asked.budget_bytes:
                failed[way_of(one)] = one.job.micro_batch
        return found

    def has(self, one, cluster):
        spared.append(lost(self, one, cluster))
        return spared[-1]

    class EndFound(Exception):
        """What follows is a search like any other."""

    def search_(*_, **__):
        raise EndFound

    monkeypatch.setattr(Formula, "need", need)
    monkeypatch.setattr(module.Lost, "has", has)
    monkeypatch.setattr(module, "search", search_)
    with pytest.raises(EndFound):
        backwards("max-micro-batch", asked, top=1)
    assert failed
    assert any(spared)
