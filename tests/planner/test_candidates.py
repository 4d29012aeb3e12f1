"""The candidates of a question: every possible combination, and no other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from solutions import question
from tonnage.errors import UsageError
from tonnage.mesh import make_mesh
from tonnage.planner.candidates import check_precision, list_candidates, with_free_choices
from tonnage.planner.search_space import OFFLOADS, ORDER
from tonnage.units import GIB


@settings(max_examples=25)
@given(
    gpu=some.sampled_from(["a100-80gb", "2xa100-80gb", "8xh100-80gb", "2x8xh100-80gb", "3x4xa100-40gb"]),
    micro_batch=some.integers(1, 6),
    grad_accum=some.integers(1, 4),
)
def test_every_candidate_makes_the_global_batch(gpu, micro_batch, grad_accum):
    asked = question("llama-3.2-1b", gpu, micro_batch=micro_batch, grad_accum=grad_accum)
    sequences = micro_batch * grad_accum * asked.cluster.gpus
    found = list(list_candidates(asked))
    assert found
    for one in found:
        layout = make_mesh(one.plan, asked.cluster.gpus, asked.cluster.gpus_per_node)
        assert layout.ranks == asked.cluster.gpus
        assert one.job.micro_batch * one.job.grad_accum * layout.data_parallel == sequences
        assert 32 % one.plan.tp == 8 % one.plan.tp == 16 % one.plan.pp == 0
        assert one.job.grad_accum >= one.plan.pp


def test_global_batch_in_tokens_is_exact():
    asked = question(gpu="4x8xh100-80gb", seq_len=8192, global_batch_tokens=4_000_000)
    assert asked.sequences == 512  # 4M of 8,192 tokens is 4 x 2**20
    for one in list_candidates(asked):
        data = make_mesh(one.plan, 32, 8).data_parallel
        assert one.job.micro_batch * one.job.grad_accum * data == 512


def test_free_choices():
    plan = with_free_choices(question())
    assert (plan.allocator, plan.optimizer, plan.loss) == ("expandable", "adamw-fused", "plain")
    assert with_free_choices(question(optimizer="adamw-loop")).optimizer == "adamw-loop"
    assert with_free_choices(question(gpu="t4")).precision == "fp16-mixed"


def test_stated_defaults_are_kept():
    named = question(gpu="8xh100-80gb", stated=("tp", "checkpointing", "loss", "optimizer"))
    plans = [one.plan for one in list_candidates(named)]
    assert {plan.tp for plan in plans} == {1} != {one.plan.tp for one in list_candidates(question(gpu="8xh100-80gb"))}
    assert {plan.checkpointing for plan in plans} == {"none"}
    assert {(plan.loss, plan.optimizer) for plan in plans} == {("plain", "adamw")}
    assert not list(list_candidates(question(gpu="8xh100-80gb", stated=("shard", "tp", "pp", "cp"))))


def test_stated_bf16_raises_on_a_card_without_it():
    check_precision(question(gpu="t4"))
    check_precision(question(gpu="t4", precision="fp16-mixed"))
    check_precision(question(gpu="a100-40gb", precision="bf16-true"))
    for asked in ({"precision": "bf16-true"}, {"stated": ("precision",)}):
        with pytest.raises(UsageError, match=r"t4 does not compute in bf16.* 7\.5"):
            check_precision(question(gpu="t4", **asked))


def test_layout_decides_the_shardings():
    def shards(**asked):
        return {one.plan.shard for one in list_candidates(question(**asked))}

    assert shards(gpu="2xh100-80gb", tp=2) == {"none"}
    assert shards(gpu="8xh100-80gb", tp=2, without=("pp", "cp")) == {"ddp", "zero1", "zero2", "zero3"}
    assert "zero3" not in shards(gpu="8xh100-80gb", pp=2, grad_accum=2)
    assert shards(model="mixtral-8x7b", gpu="8xh100-80gb", ep=8) > {"zero2", "zero3"}
    with pytest.raises(UsageError, match="ep 8 must divide the 1 ranks"):
        question(model="mixtral-8x7b", gpu="8xh100-80gb", ep=8, shard="ddp")


def test_offload_is_listed_only_on_request():
    asked = question(gpu="a100-80gb")
    assert {getattr(one.plan, name) for one in list_candidates(asked) for name in OFFLOADS} == {"none"}
    with_host = list(list_candidates(asked, offload=True))
    assert with_host
    assert all(any(getattr(one.plan, name) != "none" for name in OFFLOADS) for one in with_host)
    assert {one.plan.activation_offload for one in with_host} == {"none", "cpu-streamed", "cpu"}
    assert all(getattr(one.plan, name) != "nvme" for one in with_host for name in OFFLOADS)
    in_files = list(list_candidates(asked, offload=True, files=True))
    assert in_files
    assert all(any(getattr(one.plan, name) == "nvme" for name in OFFLOADS) for one in in_files)
    assert not {str(one.plan) for one in with_host} & {str(one.plan) for one in in_files}
    assert [*asked.places] == [{"offload": False}, {"offload": True}]
    assert question(gpu="a100-80gb", host_memory_bytes=GIB).places[2] == {"offload": True, "files": True}


def test_offload_on_one_gpu():
    def ways(**asked):
        found = list_candidates(question("llama-3.2-1b", "t4", grad_accum=2, **asked), offload=True)
        return {(one.plan.shard, one.plan.optimizer_offload, one.plan.param_offload) for one in found}

    states = {("none", "cpu", "none")}
    weights = {("zero2", "none", "cpu"), ("zero3", "none", "cpu")}
    assert ways(activation_offload="none", stated=("activation_offload",)) == states | weights
    by_zero = {(stage, "cpu", "none") for stage in ("zero1", "zero2", "zero3")}
    assert by_zero < ways(engine="deepspeed")
    assert ways(shard="zero3") == {("zero3", *rest) for rest in (("none", "cpu"), ("cpu", "none"), ("none", "none"))}
    assert {one.plan.shard for one in list_candidates(question("llama-3.2-1b", "t4"))} == {"none"}


def test_accum_sync_on_one_gpu_needs_param_offload():
    found = [one.plan for one in list_candidates(question("llama-3.2-1b", "t4", grad_accum=2), offload=True)]
    assert {plan.param_offload for plan in found if plan.accum_sync} == {"cpu"}


def test_stated_accum_sync_is_kept_with_one_micro_batch():
    said = [one.plan for one in list_candidates(question("llama-3.2-1b", "2xt4", accum_sync=True, tp=1, pp=1, cp=1))]
    assert {plan.accum_sync for plan in said} == {True}
    unsaid = list_candidates(question("llama-3.2-1b", "2xt4", stated=("tp", "pp", "cp")))
    assert {one.plan.accum_sync for one in unsaid} == {False}


def test_excluded_sharding_is_undecided():
    assert question(without=("shard",)).is_undecided("shard")
    assert not question(without=("tp",)).is_undecided("tp")
    assert not question(stated=("shard",)).is_undecided("shard")


def test_stated_sharding_and_offload_agree():
    found = [one.plan for one in list_candidates(question("llama-3.2-1b", "4xt4", shard="zero3"), offload=True)]
    assert {plan.shard for plan in found} == {"zero3"}
    assert "cpu" in {plan.param_offload for plan in found}
    assert {one.plan.shard for one in list_candidates(question(gpu="t4", param_offload="cpu"))} == {"zero2", "zero3"}


def test_stated_combinations_are_kept():
    both = question("llama-3.2-1b", "4xt4", shard="zero3", optimizer_offload="cpu", param_offload="cpu")
    assert {one.plan.optimizer_offload for one in list_candidates(both)} == {"cpu"}
    piped = question("llama-3.2-1b", "4xt4", grad_accum=4, pp=2, shard="zero3", accum_sync=True)
    plans = [one.plan for one in list_candidates(piped)]
    assert {(plan.pp, plan.shard, plan.accum_sync) for plan in plans} == {(2, "zero3", True)}
    only_pipe = list_candidates(question("llama-3.2-1b", "4xt4", grad_accum=4, pp=2))
    assert {one.plan.shard for one in only_pipe} == {"none", "ddp", "zero1", "zero2"}


def test_constraints():
    def values(name, **constraints):
        return {getattr(one.plan, name) for one in list_candidates(question(**constraints))}

    assert values("tp") == {1, 2, 4, 8}
    assert values("tp", without=("tp",)) == {1}
    assert values("tp", without=("tp=8", "tp=2")) == {1, 4}
    assert values("tp", tp=4) == {4}
    assert values("tp", only=("shard", "checkpointing")) == {1}
    assert values("checkpointing", only=("shard", "checkpointing")) == set(ORDER["checkpointing"])
    assert values("optimizer") == {"adamw-fused"}
    others = {"adamw-8bit", "adamw-4bit", "adafactor", "muon"}
    assert values("optimizer", allow=("optimizer",)) == {"adamw-fused", *others}
    assert values("ep") == {1}
    assert values("ep", model="mixtral-8x7b", gpu="8xh100-80gb") > {1, 2}


@pytest.mark.parametrize(
    "wrong",
    [{"only": ("spoon",)}, {"without": ("spoon=1",)}, {"allow": ("tp",)}, {"headroom": 1.0}, {"methods": ("x",)}],
)
def test_wrong_constraints_raise(wrong):
    with pytest.raises(UsageError):
        question(**wrong)


def test_unknown_opt_in_raises_with_what_is_possible():
    possible = r"precision, optimizer \(values that change the mathematics of training\), budget \(activation budgets"
    with pytest.raises(UsageError, match=rf"--allow does not know 'tp'; possible: {possible}"):
        question(allow=("tp",))


def test_budgets_are_an_opt_in():
    asked = question(gpu="a100-80gb", allow=("budget",))
    assert asked.has_budgets()
    assert not question(gpu="a100-80gb").has_budgets()
    assert not question(gpu="a100-80gb", allow=("optimizer",)).has_budgets()
    assert not question(gpu="a100-80gb", allow=("budget",), checkpointing="full").has_budgets()
    assert list(list_candidates(asked)) == list(list_candidates(question(gpu="a100-80gb")))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"without": ("shard=zero9",)}, r"Unknown shard 'zero9' in --without; possible: none, ddp"),
        ({"only": ("shard",), "without": ("shard",)}, "shard is both in --only and in --without"),
        ({"only": ("param-offload",), "without": ("param_offload",)}, "param-offload is both in --only"),
        ({"without": ("tp=abc",)}, "Unknown tp 'abc' in --without; possible: whole numbers of at least 1"),
        ({"without": ("micro-batch=0",)}, "Unknown micro-batch '0' in --without; possible: whole numbers of at"),
        ({"without": ("tp=",)}, "Unknown tp '' in --without; possible: whole numbers"),
        ({"without": ("accum_sync=maybe",)}, "Unknown accum-sync 'maybe' in --without; possible: true, false"),
        ({"only": ("shard=zero3",)}, "Unknown technique 'shard=zero3'; .* A value is said by its own option"),
    ],
)
def test_constraints_without_effect_raise(asked, said):
    with pytest.raises(UsageError, match=said):
        question(**asked)


def test_numbers_can_be_excluded():
    assert not question(without=("tp=2",)).is_allowed("tp", 2)


@pytest.mark.parametrize(
    ("said", "name", "value"),
    [
        ("optimizer_offload=cpu", "optimizer_offload", "cpu"),
        ('shard = "zero2"', "shard", "zero2"),
        ("micro_batch = 4", "micro_batch", 4),
        ("accum_sync = true", "accum_sync", True),
        ("optimizer-in-backward=True", "optimizer_in_backward", True),
        ("tp=08", "tp", 8),
        ("checkpointing=budget", "checkpointing", "budget"),
    ],
)
def test_constraints_spelled_as_in_plan_files(said, name, value):
    asked = question(without=(said,))
    assert not asked.is_allowed(name, value)
    assert asked == question(without=asked.without)
    assert not question(without=(name,)).is_open(name)
    assert question(only=(name,)).only == (name.replace("_", "-"),)


@pytest.mark.parametrize("constraint", [{"without": ("micro-batch",)}, {"only": ("shard",)}])
def test_closed_micro_batch_is_the_stated_one(constraint):
    found = list_candidates(question(gpu="8xa100-80gb", micro_batch=2, grad_accum=4, **constraint))
    assert {one.job.micro_batch for one in found} == {2}
    both = list_candidates(question(gpu="8xa100-80gb", micro_batch=2, grad_accum=4, only=("shard", "micro_batch")))
    assert {one.job.micro_batch for one in both} == {1, 2, 4, 8}


def test_huge_global_batch_is_divided_quickly():
    asked = question(gpu="a100-80gb", global_batch_tokens=4096 * 10**15)
    assert {one.job.micro_batch for one in list_candidates(asked)} == {1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, 50, 64}


def test_interleaved_stages_divide_the_layers():
    """GPT-2 has 12 layers (`n_layer`), which four ranks with two stages each do not divide."""
    asked = question(model="gpt2", gpu="8xh100-80gb", seq_len=1024, grad_accum=8)
    turns = [one.plan for one in list_candidates(asked) if one.plan.pp_schedule == "interleaved"]
    assert turns
    assert all(12 % (plan.pp * plan.pp_stages) == 0 for plan in turns)


@pytest.mark.parametrize(
    ("stated", "sizes"), [(("micro_batch", "global_batch_tokens"), {4}), (("global_batch_tokens",), {1, 2, 4, 8, 16})]
)
def test_micro_batch_stated_with_a_global_batch_is_kept(stated, sizes):
    said = {"seq_len": 512, "micro_batch": 4, "global_batch_tokens": 2**14, "shard": "ddp"}
    asked = question("llama-3.2-1b", "2xa100-80gb", **said, stated=stated)
    found = [one.job for one in list_candidates(asked) if one.plan.tp * one.plan.cp * one.plan.pp == 1]
    assert {job.micro_batch for job in found} == sizes
    assert {job.micro_batch * job.grad_accum for job in found} == {16}


@pytest.mark.parametrize(
    "constraint", [{"only": ("checkpointing",)}, {"without": ("shard",)}, {"only": ("tp", "pp")}], ids=str
)
def test_ranks_without_sharding_are_replicas(constraint):
    """Otherwise each rank would train its own network."""
    asked = question(gpu="4xa100-80gb", **constraint)
    found = list(list_candidates(asked))
    assert found
    for one in found:
        together = make_mesh(one.plan, 4, 4).data_parallel * one.plan.cp
        assert one.plan.shard == ("none" if together == 1 else "ddp")


def test_unsynchronized_copies_are_left_out():
    asked = question(gpu="4xa100-80gb", without=("shard=ddp",), only=("tp",))
    assert {one.plan.tp for one in list_candidates(asked)} == {4}
    named = question(gpu="4xa100-80gb", only=("tp",), stated=("shard",))
    assert {one.plan.shard for one in list_candidates(named)} == {"none"}


@pytest.mark.parametrize(
    ("said", "without", "word"),
    [
        ({"checkpointing": "full"}, "checkpointing=full", "checkpointing"),
        ({"checkpointing": "budget=2GiB"}, "checkpointing=budget", "checkpointing"),
        ({"shard": "zero3"}, "shard", "shard"),
        ({"tp": 2}, "tp=2", "tp"),
        ({"accum_sync": True}, "accum-sync", "accum-sync"),
        ({"optimizer": "adamw-8bit"}, "optimizer", "optimizer"),
    ],
)
def test_stated_and_excluded_option_raises(said, without, word):
    with pytest.raises(UsageError, match=rf"{word} is said to be .*, and --without {without} leaves that out"):
        question(gpu="2xa100-80gb", without=(without,), **said)
    assert question(gpu="2xa100-80gb", without=("cp",), **said)


def test_checkpointing_is_what_the_trainer_has_settings_for():
    ours, trainers = (question(gpu="8xa100-80gb", engine=engine) for engine in ("tonnage", "hf-trainer"))
    assert ours.list_values("checkpointing") == ("none", "every-4", "every-2", "selective", "full")
    assert trainers.list_values("checkpointing") == ("none", "every-4", "every-2", "full")
    assert {one.plan.checkpointing for one in list_candidates(trainers)} == set(trainers.list_values("checkpointing"))
    axolotl = question(engine="axolotl", gpu="a100-80gb", precision="bf16-true")
    assert axolotl.list_values("checkpointing") == ("none", "full")


@pytest.mark.parametrize(("gpu", "fastest"), [("rtx-4090", "flash"), ("2xa100-40gb", "flash"), ("h100-80gb", "auto")])
def test_the_fastest_of_a_trainers_own_attentions_is_a_free_choice(gpu, fastest, monkeypatch):
    """torchtitan's own is flex; its flash attention wants a package of its own from capability 9.0 on."""
    monkeypatch.setattr("tonnage.trainers.engine.find_version", lambda package: "0.3.0")
    asked = question("llama-3.2-1b", gpu, engine="torchtitan")
    assert with_free_choices(asked).attention == fastest


def test_attention_that_keeps_no_scores_is_a_free_choice():
    assert with_free_choices(question("gpt-oss-20b", "8xh100-80gb")).attention == "flex"
    assert with_free_choices(question("gemma-2-2b", "a100-80gb")).attention == "flex"
    assert with_free_choices(question("gemma-2-2b", "t4")).attention == "auto"
    assert with_free_choices(question("llama-3.2-1b", "t4")).attention == "efficient"
    assert with_free_choices(question("llama-3.2-1b", "a100-80gb", precision="fp32")).attention == "efficient"
    assert with_free_choices(question("gpt2", "t4", seq_len=1024)).attention == "auto"
    assert with_free_choices(question("llama-3.1-8b", "8xh100-80gb")).attention == "auto"
    assert with_free_choices(question("gpt-oss-20b", "8xh100-80gb", without=("attention",))).attention == "auto"
    assert with_free_choices(question("gpt-oss-20b", "8xh100-80gb", attention="eager")).attention == "eager"
    assert with_free_choices(question("gpt-oss-20b", "8xh100-80gb", engine="megatron")).attention == "auto"
