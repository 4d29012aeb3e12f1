"""Seconds of a step: parts that sum up, directions that must hold, and our own card's steps."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.catalog.devices import find_device, generic_device
from tonnage.catalog.models import find_model
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate
from tonnage.job import Job
from tonnage.mesh import Axes
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.techniques import choices
from tonnage.timing import rates
from tonnage.timing import timing as timings
from tonnage.timing.kinds import read_shape
from tonnage.timing.memory import STATE_BYTES, offloaded_bytes
from tonnage.timing.software import software, software_of, softwares
from tonnage.timing.timing import model_flops, split_of, timing
from tonnage.timing.work import Work

LLAMA = read_shape(find_model("llama-3.1-8b").config())
MIXTRAL = read_shape(find_model("mixtral-8x7b").config())
ONE = Cluster(device=find_device("h200"))
EIGHT = Cluster(device=find_device("h100-80gb"), gpus_per_node=8)
MANY = Cluster(device=find_device("h100-80gb"), gpus_per_node=8, nodes=8)
EAGER = software("eager")
BORROWED = ("adamw-8bit-ao", "adamw-fp8-ao", "adamw-4bit", "paged-adamw", "adamw-fused", "adamw-foreach")
PLAIN = Work(seq_len=4096, weight_bytes=2, gradient_bytes=2, autocast=False)


def job(**fields):
    model = find_model("llama-3.1-8b")
    return Job(model=ModelRef(name=model.id, kind="config", config=model.config()), **fields)


def test_the_parts_sum_to_the_step():
    work = replace(PLAIN, axes=Axes(pp=4, dp_shard=2, tp=8), grad_accum=16, shard="zero3", checkpointing="full")
    found = timing(LLAMA, work, MANY, EAGER)
    parts = (
        *(found.compute_seconds, found.recompute_seconds, found.communication_seconds, found.bubble_seconds),
        *(found.optimizer_seconds, found.copy_seconds, found.host_seconds),
    )
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(found.step_seconds)
    assert found.low_seconds < found.step_seconds < found.high_seconds


def test_model_flops_and_utilisation_by_hand():
    # 6 x 8.03e9 + 12 x 32 layers x 4096 wide x 4096 tokens, each of 4096 tokens
    flops = (6 * 8_030_261_248 + 12 * 32 * 4096 * 4096) * 4096
    assert model_flops(LLAMA, PLAIN) == flops
    found = timing(LLAMA, PLAIN, ONE, EAGER)
    assert found.mfu == pytest.approx(flops / found.step_seconds / 989.5e12)
    assert found.tokens_per_second_per_gpu == pytest.approx(4096 / found.step_seconds)


WORKS = st.builds(
    replace,
    st.just(PLAIN),
    axes=st.builds(
        Axes,
        **{name: st.sampled_from([1, 2, 4]) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")},
        ep=st.sampled_from([1, 8]),
    ),
    micro_batch=st.sampled_from([1, 4]),
    grad_accum=st.sampled_from([1, 8]),
    accumulated_bytes=st.sampled_from([0, 6]),
    virtual_stages=st.sampled_from([1, 2]),
    stage_layers=st.sampled_from([(), (20, 12)]),
    schedule=st.sampled_from(["1f1b", "interleaved"]),
    gradient_bytes=st.sampled_from([2, 4]),
    weight_bytes=st.sampled_from([2, 4]),
    autocast=st.booleans(),
    checkpointing=st.sampled_from(["none", "full", "selective"]),
    loss=st.sampled_from(["plain", "chunked"]),
    optimizer=st.sampled_from(["adamw", "sgd", "adamw-fused"]),
    shard=st.sampled_from(["none", "ddp", "zero1", "zero2", "zero3", "hsdp"]),
    **dict.fromkeys(
        ("clipped", "averages_each", "optimizer_offload", "param_offload", "activation_offload", "copies_beside"),
        st.booleans(),
    ),
)


@pytest.mark.parametrize(("priced", "part"), [(timings._network, "of_layers"), (timings._laid, "of_weights")])
@settings(max_examples=200)
@given(
    work=WORKS,
    shape=st.sampled_from([LLAMA, MIXTRAL]),
    cluster=st.sampled_from([ONE, EIGHT, MANY]),
    name=st.sampled_from(sorted(softwares())),
)
def test_one_price_does_for_all_works_that_have_the_same_part(priced, part, work, shape, cluster, name):
    """Layers take as long whatever becomes of gradients, exchanges of weights whatever passes through these."""
    rest, anew = (cluster, rates.card(cluster.device), software(name)), priced.__wrapped__
    assert anew(shape, work, *rest) == anew(shape, getattr(work, part), *rest)


@settings(max_examples=30)
@given(st.sampled_from([512, 1024, 2048, 4096, 8192]), st.integers(1, 8), st.sampled_from(["none", "full"]))
def test_longer_sequences_and_larger_batches_take_longer(seq_len, micro_batch, checkpointing):
    work = replace(PLAIN, seq_len=seq_len, micro_batch=micro_batch, checkpointing=checkpointing)
    seconds = timing(LLAMA, work, ONE, EAGER).step_seconds
    assert timing(LLAMA, replace(work, seq_len=2 * seq_len), ONE, EAGER).step_seconds >= seconds
    assert timing(LLAMA, replace(work, micro_batch=micro_batch + 1), ONE, EAGER).step_seconds >= seconds
    assert timing(LLAMA, replace(work, grad_accum=2), ONE, EAGER).step_seconds > seconds


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["ddp", "zero1", "zero3"]))
def test_more_ranks_do_more_in_a_step_but_no_rank_is_faster_for_it(ranks, shard):
    def per_gpu(count):
        cluster = replace(EIGHT, gpus_per_node=count)
        layout = Axes(dp_shard=count) if shard == "zero3" else Axes(dp_replicate=count)
        return timing(LLAMA, replace(PLAIN, axes=layout, shard=shard, optimizer="adamw-fused"), cluster, EAGER)

    assert per_gpu(2 * ranks if ranks < 8 else 8).step_seconds * 2 * ranks > per_gpu(ranks).step_seconds * ranks
    assert per_gpu(ranks).tokens_per_second_per_gpu * ranks <= per_gpu(8).tokens_per_second_per_gpu * 8


def test_torchs_own_offload_of_activations_hides_no_copy():
    """`save_on_cpu` waits for each: 60 GB there and back take longer than the layers, however long those take."""

    def copies(**changes):
        return timing(LLAMA, replace(PLAIN, activation_offload=True, **changes), ONE, EAGER).copy_seconds

    there_and_back = 2 * 32 * offloaded_bytes(LLAMA, replace(PLAIN, activation_offload=True))
    assert copies() == pytest.approx(there_and_back / (0.85 * ONE.device.pcie_bytes_per_second))
    assert copies() > timing(LLAMA, replace(PLAIN, checkpointing="full"), ONE, EAGER).recompute_seconds
    assert copies(copies_beside=True) < copies() / 2
    assert copies(checkpointing="full") < copies() / 20


def test_recomputing_costs_about_a_forward_pass():
    plain = timing(LLAMA, PLAIN, ONE, EAGER)
    again = timing(LLAMA, replace(PLAIN, checkpointing="full"), ONE, EAGER)
    assert again.compute_seconds == plain.compute_seconds
    assert 0.25 < again.recompute_seconds / plain.compute_seconds < 0.4


def test_what_runs_again_stops_before_a_layers_last_product():
    def again(shape=LLAMA, code=EAGER, **changes):
        return timing(shape, replace(PLAIN, checkpointing="full", **changes), ONE, code).recompute_seconds

    whole = again(repeats_to_end=True)
    down = LLAMA.hidden * LLAMA.intermediate / LLAMA.dense_layer_parameters
    assert 0.6 * down < 1 - again() / whole < down, "of arithmetic, and there is more than arithmetic"
    assert again(replace(LLAMA, ends_in_norm=True)) == again(replace(LLAMA, ends_in_norm=True), repeats_to_end=True)
    assert again(lora_rank=8) == again(lora_rank=8, repeats_to_end=True), "adapters follow it"
    assert again(code=software("nanotron")) == again(code=software("nanotron"), repeats_to_end=True)


def test_what_of_a_layer_runs_again_takes_its_part():
    ways = ("none", "attention", "attention-module", "full")
    parts = [timing(LLAMA, replace(PLAIN, checkpointing=way), ONE, EAGER).recompute_seconds for way in ways]
    assert parts == sorted(set(parts))
    kinds = {
        "full-reentrant": ("full", True),
        "attention-module": ("attention-module", False),
        "sqrt": ("full", False),
    }
    for way, expected in kinds.items():
        work = Work.of(job(), Plan(checkpointing=way), ONE)
        assert (work.checkpointing, work.repeats_to_end) == expected


def test_small_steps_wait_for_the_host_and_large_ones_do_not():
    small = read_shape(find_model("smollm2-135m").config())
    assert timing(small, replace(PLAIN, seq_len=128), ONE, EAGER).bound_by == "host"
    assert timing(LLAMA, PLAIN, ONE, EAGER).bound_by == "compute"


def test_tensor_parallelism_across_machines_is_slower_than_within():
    within = replace(PLAIN, axes=Axes(tp=8, dp_replicate=8), shard="ddp", micro_batch=4)
    across = replace(PLAIN, axes=Axes(tp=16, dp_replicate=4), shard="ddp", micro_batch=8)
    near, far = (timing(LLAMA, work, MANY, EAGER) for work in (within, across))
    assert far.communication_seconds > 1.3 * near.communication_seconds


def relative(found):
    return tuple(round(end / found.step_seconds, 12) for end in (found.low_seconds, found.high_seconds))


@pytest.mark.parametrize("device", ["t4", "rtx-4090", "b300"])
def test_a_card_never_measured_widens_the_interval_and_says_so(device):
    work = replace(PLAIN, dtype="fp16")
    low, high = relative(timing(LLAMA, work, ONE, EAGER))
    elsewhere_low, elsewhere_high = relative(timing(LLAMA, work, Cluster(device=find_device("rtx-4090")), EAGER))
    found = timing(LLAMA, work, Cluster(device=find_device(device)), EAGER)
    measured = find_device(device).capability in ((8, 9), (10, 3))
    assert relative(found)[0] <= elsewhere_low < low < high < elsewhere_high <= relative(found)[1]
    assert (relative(found) == (elsewhere_low, elsewhere_high)) == measured
    assert any("was measured" in line for line in found.assumed) != measured
    assert any("no steps of this code on such a cluster" in line for line in found.assumed)


@pytest.mark.parametrize("device", ["rtx-5090", "rtx-pro-6000"])
def test_blackwells_own_cards_for_games_take_adas_parts_and_not_those_of_a_data_center(device):
    reached = rates.card(find_device(device))
    assert (reached.capability, reached.known) == ("8.9", False)
    assert rates.card(find_device("b300")).capability == "10.3"
    found = timing(LLAMA, PLAIN, Cluster(device=find_device(device)), EAGER)
    assert any("no card of capability 12.0 was measured" in line and "one of 8.9" in line for line in found.assumed)


def test_the_interval_is_that_of_the_clusters_that_calibrated_the_code():
    megatron = software("megatron")
    on_its_own = timing(LLAMA, replace(PLAIN, axes=Axes(dp_replicate=8), shard="ddp"), EIGHT, megatron)
    assert relative(on_its_own) == pytest.approx((megatron.low_factor, megatron.high_factor))
    places = [(ONE.device.id, 1, 1), ("a100-80gb", 1, 1), ("h200", 8, 1), ("h200", 8, 2)]
    highs = []
    for card, gpus, nodes in places:
        cluster = Cluster(device=find_device(card), gpus_per_node=gpus, nodes=nodes)
        work = replace(PLAIN, axes=Axes(dp_replicate=cluster.gpus), shard="ddp" if cluster.gpus > 1 else "none")
        highs.append(relative(timing(LLAMA, work, cluster, EAGER))[1])
    assert highs == pytest.approx([EAGER.high_factor, 1.2, 1.3, 1.25])


def test_adapters_and_experts_widen_the_interval():
    low, high = EAGER.low_factor, EAGER.high_factor
    adapters = timing(LLAMA, replace(PLAIN, lora_rank=16), ONE, EAGER)
    assert relative(adapters) == pytest.approx((low**1.2, high**1.2))
    mixtral = read_shape(find_model("mixtral-8x7b").config())
    assert relative(timing(mixtral, PLAIN, ONE, EAGER)) == pytest.approx((low**2.5, high**2.5))


def test_cards_with_a_bridge_bought_apart_exchange_over_the_host():
    work = replace(PLAIN, dtype="fp16", axes=Axes(dp_replicate=2), shard="ddp")
    card = find_device("rtx-3090")
    apart = timing(LLAMA, work, Cluster(device=card, gpus_per_node=2), EAGER)
    bridged = timing(LLAMA, work, Cluster(device=replace(card, nvlink_bridged=False), gpus_per_node=2), EAGER)
    assert apart.communication_seconds > 3 * bridged.communication_seconds
    assert any("no NVLink bridges" in line for line in apart.assumed)
    assert not any("bridges" in line for line in bridged.assumed)


def test_averaging_beside_sharded_weights_hides_layer_by_layer():
    # 8 GPUs hold all weights, 2 machines the same ones: gradients of 2 GB cross an adapter of each rank
    within = replace(PLAIN, axes=Axes(dp_replicate=1, dp_shard=8), shard="zero3", micro_batch=2)
    across = replace(within, axes=Axes(dp_replicate=2, dp_shard=8), shard="hsdp")
    two = replace(EIGHT, nodes=2)
    one, both = (timing(LLAMA, work, place, EAGER) for work, place in ((within, EIGHT), (across, two)))
    moved = LLAMA.parameters / 8 * 2  # bytes of each rank's gradients, once there and once back through its adapter
    lasting = moved / (50e9 * EAGER.far_part)
    assert 0 < both.communication_seconds - one.communication_seconds < 0.35 * lasting
    slow = replace(two, network_bytes_per_second=1e9)
    late = timing(LLAMA, across, slow, EAGER).communication_seconds
    assert late > both.communication_seconds + 0.5 * moved / (1e9 * EAGER.far_part)


def test_what_is_not_known_is_refused_in_one_line():
    with pytest.raises(CannotEstimate, match="How fast Tesla T4 is with bf16 is not known"):
        timing(LLAMA, PLAIN, Cluster(device=find_device("t4")), EAGER)
    with pytest.raises(CannotEstimate, match="not known"):
        timing(LLAMA, PLAIN, Cluster(device=generic_device(24 * 2**30)), EAGER)
    with pytest.raises(CannotEstimate, match="calibrated: eager"):
        software("horovod")


def test_every_calibrated_software_says_on_what():
    for found in softwares().values():
        assert found.rows
        assert found.low_factor < 1 < found.high_factor
    assert software_of("accelerate") is software_of("tonnage")


def test_work_of_a_job_under_a_plan():
    plan = Plan(precision="bf16-mixed", shard="zero3", tp=2, pp=2, checkpointing="every-4")
    work = Work.of(job(seq_len=2048, grad_accum=4), plan, EIGHT)
    assert work.axes == Axes(pp=2, dp_shard=2, tp=2)
    assert (work.weight_bytes, work.dtype, work.autocast) == (4, "bf16", False)
    assert (work.checkpointing, work.checkpointed_fraction) == ("full", 0.25)
    assert work.step_tokens == 2048 * 4 * 2
    assert Work.of(job(), Plan(), ONE).autocast


def test_adapters_are_what_is_trained():
    full = Work.of(job(), Plan(precision="bf16-true"), ONE)
    lora = Work.of(job(method="lora"), Plan(precision="bf16-true"), ONE)
    assert timing(LLAMA, lora, ONE, EAGER).optimizer_seconds < 0.1 * timing(LLAMA, full, ONE, EAGER).optimizer_seconds


def test_adapters_beside_two_products_are_fewer_and_faster():
    """Of 32 layers 8 x (4,096 + 4,096) weights beside the queries, 8 x (4,096 + 1,024) beside the values."""
    all_linear, two = (
        Work.of(job(method="lora", lora_rank=8, lora_targets=targets), Plan(precision="bf16-true"), ONE)
        for targets in (("all-linear",), ("q_proj", "v_proj"))
    )
    assert timings.trained_weights(LLAMA, two, 8e9) == 32 * 8 * (8192 + 5120)
    assert timing(LLAMA, two, ONE, EAGER).step_seconds < 0.92 * timing(LLAMA, all_linear, ONE, EAGER).step_seconds


@pytest.mark.parametrize(
    ("plan", "wide"),
    [
        (Plan(precision="bf16-true"), False),
        (Plan(precision="fp16-true"), True),
        (Plan(precision="bf16-true", weights_dtype="fp32"), True),
        (Plan(precision="bf16-true", engine="hf-trainer"), True),
        (Plan(precision="bf16-true", engine="hf-trainer", weights_dtype="bf16"), False),
        (Plan(precision="bf16-mixed", engine="hf-trainer"), False),
        (Plan(precision="fp32"), False),
    ],
)
def test_adapters_are_wide_beside_16_bits_without_autocast(plan, wide):
    assert Work.of(job(method="lora"), plan, ONE).wide_adapters == wide
    assert not Work.of(job(), plan, ONE).wide_adapters


@pytest.mark.parametrize(
    ("plan", "wide"),
    [
        (Plan(precision="bf16-true"), True),
        (Plan(precision="bf16-true", unquantized_dtype="compute"), False),
        (Plan(precision="bf16-mixed"), False),
    ],
)
def test_what_is_not_quantized_is_fp32_without_autocast(plan, wide):
    assert Work.of(job(method="qlora"), plan, ONE).wide_between == wide
    assert not Work.of(job(method="lora"), plan, ONE).wide_between


def test_a_quantized_network_in_fp32_takes_longer_for_attention_and_head():
    narrow, wide = (
        Work.of(job(method="qlora"), Plan(precision="bf16-true", unquantized_dtype=dtype), ONE)
        for dtype in ("compute", "fp32")
    )
    known = [timing(LLAMA, work, ONE, EAGER) for work in (narrow, wide)]
    assert known[1].step_seconds > 1.5 * known[0].step_seconds
    assert known[1].high_seconds == pytest.approx(2.7 * known[1].step_seconds)
    assert [any("beside fp32 ones without autocast" in line for line in one.assumed) for one in known] == [
        False,
        True,
    ]


def test_an_optimizer_that_looks_states_up_is_bound_by_that():
    """27.7 ps a weight of Adam in 8 bits on an H200, whatever the weights' dtype; moving 16 bytes takes 3.8."""
    for precision in ("bf16-true", "fp32"):
        work = Work.of(job(), Plan(precision=precision, optimizer="adamw-8bit"), ONE)
        assert timing(LLAMA, work, ONE, EAGER).optimizer_seconds == pytest.approx(8.03e9 * 27.6e-12, rel=0.01)


def test_trainers_fuse_their_optimizer_and_scale_gradients_down():
    by_trainer, own = (Work.of(job(), Plan(engine=engine), ONE) for engine in ("hf-trainer", "tonnage"))
    assert (by_trainer.optimizer, by_trainer.clipped) == ("adamw-fused", True)
    assert (own.optimizer, own.clipped) == ("adamw", False)
    assert Work.of(job(), Plan(engine="hf-trainer", optimizer="adamw-foreach"), ONE).optimizer == "adamw-foreach"


def test_ddp_copies_gradients_into_buckets_and_back():
    """16 bytes for each fp32 gradient; Megatron's buffers are the gradients themselves."""
    replicated, alone = (Work.of(job(), Plan(shard=shard), EIGHT) for shard in ("ddp", "none"))
    more = (
        timing(LLAMA, replicated, EIGHT, EAGER).optimizer_seconds
        - timing(LLAMA, alone, EIGHT, EAGER).optimizer_seconds
    )
    assert more == pytest.approx(8.03e9 * 16 / (3350e9 * rates.card(EIGHT.device).memory), rel=0.01)
    assert not Work.of(job(), Plan(shard="zero1", precision="megatron-bf16"), EIGHT).bucketed


def test_hooks_of_deepspeeds_third_stage_take_the_host_3_ms_a_layer_and_pass():
    """Two passes, three where layers run again; nothing beside 8,192 tokens, which keep the card busy for longer."""

    def step(seq_len, **plan):
        work = Work.of(job(seq_len=seq_len), Plan(engine="deepspeed", **plan), ONE)
        return timing(LLAMA, work, ONE, EAGER)

    assert step(64, shard="zero3").step_seconds > 32 * 2 * 3.1e-3
    assert step(64, shard="zero3", checkpointing="full").step_seconds > 32 * 3 * 3.1e-3
    assert step(64, shard="zero1").step_seconds < 32 * 2 * 3.1e-3
    assert step(8192, shard="zero3").host_seconds < 1e-3


def test_fsdp2_copies_gathered_weights_out_of_their_buffer():
    """4 bytes for each weight in 16 bits, and again for backward in stage 3; DeepSpeed's buffers are the weights."""
    whole = 8.03e9 * 4 / (3350e9 * rates.card(EIGHT.device).memory)

    def exchanged(shard, **plan):
        work = Work.of(job(seq_len=8192), Plan(shard=shard, **plan), EIGHT)
        step, without = (timing(LLAMA, each, EIGHT, EAGER) for each in (work, replace(work, unpacked=False)))
        return step.step_seconds - without.step_seconds

    assert exchanged("zero2") == pytest.approx(whole, rel=0.01)
    assert exchanged("zero3") == pytest.approx(2 * whole, rel=0.01)
    assert exchanged("zero3", engine="deepspeed") == exchanged("ddp") == 0


def test_megatrons_own_layers_keep_all_scores():
    assert Work.of(job(), Plan(engine="megatron"), ONE).attention == "eager"


def test_stalls_are_counted_by_hand_overs_and_only_where_there_are_enough_ranks():
    calm = replace(software("megatron"), crowded_ranks=64, handing_seconds=0.0)
    stalling = replace(calm, handing_seconds=0.1)
    work = replace(PLAIN, axes=Axes(pp=4, dp_replicate=2, tp=8), grad_accum=8, shard="zero1")

    def more(work, cluster):
        return timing(LLAMA, work, cluster, stalling).step_seconds - timing(LLAMA, work, cluster, calm).step_seconds

    assert more(work, MANY) == pytest.approx(0.1 * (4 * 8 + 3))  # a middle stage's, and three to get there
    assert more(replace(work, axes=Axes(pp=2, dp_replicate=4, tp=8)), MANY) == pytest.approx(0.1 * (2 * 8 + 1))
    assert more(replace(work, axes=Axes(dp_replicate=8, tp=8)), MANY) == 0.0
    assert more(replace(work, axes=Axes(pp=4, tp=8)), replace(MANY, nodes=4)) == 0.0


def test_latencies_between_machines_add_to_the_work_and_not_to_the_waiting_host():
    near = replace(software("megatron"), far_hop_seconds=0.0, kernel_seconds=0.0)
    far = replace(near, far_hop_seconds=1e-4)
    work = replace(PLAIN, axes=Axes(tp=16, dp_replicate=4), sequence_parallel=True, shard="ddp")
    slow, fast = (timing(LLAMA, work, MANY, code).step_seconds for code in (far, near))
    rings = 10 * LLAMA.layers + 2 + 3 + 6  # of the layers, the embedding, the head, the loss
    assert slow - fast == pytest.approx(rings * 15 * 1e-4)


def test_beside_a_pipeline_the_host_waits_in_a_collective_for_each_of_its_ranks():
    """10 collectives a layer, of 16 layers on the first of two stages; two more of the embedding."""
    code = replace(software("nanotron"), balanced=False, kernel_seconds=0.0, handing_seconds=0.0)
    far_too = {"piped_far_rank_seconds": 2e-2}
    slow, fast = (replace(code, piped_rank_seconds=each, **far_too) for each in (2e-2, 1e-2))

    def waits(tp):
        work = replace(PLAIN, axes=Axes(pp=2, dp_replicate=32 // tp, tp=tp), sequence_parallel=True, shard="none")
        return timing(LLAMA, work, MANY, slow).step_seconds - timing(LLAMA, work, MANY, fast).step_seconds

    ends = 2 + 3 + 6
    assert waits(8) == pytest.approx(8 * 1e-2 * (10 * LLAMA.layers + ends))
    assert waits(4) == pytest.approx(waits(8) / 2)
    assert waits(16) == 0


def test_a_token_goes_to_another_machine_once_or_once_for_each_of_its_experts_there():
    work = replace(PLAIN, axes=Axes(dp_replicate=64, ep=64), shard="zero1", experts_once=True)
    code = replace(software("megatron"), far_part=1.0, expert_overlap=1.0)
    two, one = (handing(shape, work, code) for shape in (MIXTRAL, replace(MIXTRAL, experts_per_token=1)))
    tokens, n = 4096 * 4096 * 2, 8  # bytes, machines
    assert one == pytest.approx(4 * 32 * tokens * (n - 1) / n / (0.9 * 50e9))
    assert two == pytest.approx(4 * 32 * tokens * (n - 1) * (1 - (1 - 1 / n) ** 2) / (0.9 * 50e9))
    assert handing(MIXTRAL, replace(work, experts_once=False), code) == pytest.approx(2 * one)
    assert handing(MIXTRAL, replace(work, checkpointing="full"), code) == pytest.approx(6 / 4 * two)
    half = replace(code, expert_overlap=0.5)  # hides half of what it computes, and half of the exchange at most
    assert handing(MIXTRAL, work, half) == pytest.approx(two / 2)


def handing(shape, work, code):
    """Seconds of a step's exchanges with experts that overlapping hides."""
    overlapped = replace(work, experts_overlapped=True)
    return timing(shape, work, MANY, code).step_seconds - timing(shape, overlapped, MANY, code).step_seconds


def test_what_a_graph_replays_the_host_does_not_launch():
    """Each launch takes 1 ms more: of each layer all, those of the one expert on a rank (up and down, forward and
    twice backward, a cast in each pass), or none; and those of the embedding and the head."""
    each = replace(software("megatron"), looped_kernel_seconds=0.0)
    slow, slower = (replace(each, kernel_seconds=seconds) for seconds in (1e-2, 1.1e-2))

    def launches(captured):
        work = replace(PLAIN, axes=Axes(dp_replicate=8, ep=8), dtype="fp8", shard="none", captured=captured)
        times = [timing(MIXTRAL, work, EIGHT, code).step_seconds for code in (slower, slow)]
        return (times[0] - times[1]) / 1e-3

    assert launches("part") - launches("all") == pytest.approx(MIXTRAL.layers * 2 * (1 + 2 + 2))
    assert launches("none") > 2 * launches("part")
    assert launches("all") < 50


def test_kernels_that_a_loop_over_experts_launches_have_seconds_of_their_own():
    slow = replace(software("megatron"), kernel_seconds=1e-3, looped_kernel_seconds=0.0)
    work = replace(PLAIN, axes=Axes(dp_replicate=8, ep=8))
    found = [timing(MIXTRAL, work, EIGHT, replace(slow, looped_kernel_seconds=looped)) for looped in (0.0, 1e-4)]
    launched = 32 * 2 * (2 + 1) * 1  # layers, products, forward and two backward, one expert on a rank
    assert found[0].step_seconds - found[1].step_seconds == pytest.approx(launched * 9e-4)


def test_experts_with_equally_many_rows_are_plain_products():
    slow = replace(software("megatron"), expert_factor=3.0)
    work = replace(PLAIN, micro_batch=8, axes=Axes(dp_replicate=8, ep=8))
    uneven, even = (timing(MIXTRAL, replace(work, experts_even=even), EIGHT, slow) for even in (False, True))
    assert uneven.compute_seconds > 2 * even.compute_seconds


@pytest.mark.parametrize("ep", [1, 8])
def test_gradients_that_are_added_are_those_of_all_experts_of_a_rank(ep):
    """8 experts of 3 x 4,096 x 14,336 weights a layer, beside attention, norms and the router."""
    found = [
        timing(MIXTRAL, replace(PLAIN, axes=Axes(dp_replicate=8, ep=ep), accumulated_bytes=each), EIGHT, EAGER)
        for each in (0, 10)
    ]
    rate = 3350e9 * rates.card(EIGHT.device).memory
    weights = 32 * (8 / ep * 3 * 4096 * 14336 + 2 * 4096 * (4096 + 1024) + 2 * 4096 + 8 * 4096)
    more = found[1].compute_seconds - found[0].compute_seconds
    assert more == pytest.approx(weights * 10 / rate * EAGER.memory_factor, rel=0.001)


def test_the_layers_of_stages_may_be_said():
    work = replace(PLAIN, axes=Axes(pp=4), grad_accum=8)
    said = replace(work, stage_layers=(9, 9, 9, 5))
    assert split_of(LLAMA, said, EAGER).layers == (9, 9, 9, 5)
    assert split_of(LLAMA, work, EAGER).layers == (8, 8, 8, 8)


def test_tensor_parallelism_that_nothing_hides_takes_longer():
    work = replace(PLAIN, micro_batch=4, axes=Axes(tp=8))
    beside, alone = (
        timing(LLAMA, replace(work, tensor_beside=it), EIGHT, software("megatron")) for it in (True, False)
    )
    assert alone.communication_seconds > 1.5 * beside.communication_seconds


def test_a_second_predicted_token_takes_the_head_once_more():
    twice = replace(LLAMA, predicted=2)
    once, again = (timing(shape, replace(PLAIN, micro_batch=8), ONE, EAGER) for shape in (LLAMA, twice))
    head = timing(replace(LLAMA, layers=1), replace(PLAIN, micro_batch=8), ONE, EAGER).compute_seconds
    assert 0 < again.compute_seconds - once.compute_seconds < head


def test_experts_in_one_kernel_have_a_factor_of_their_own():
    code = replace(software("megatron"), kernel_seconds=0.0, expert_factor=2.0, fused_expert_factor=1.0)
    work = replace(PLAIN, axes=Axes(dp_replicate=8, ep=8), shard="none")
    apart, together = (
        timing(MIXTRAL, replace(work, experts_fused=fused), EIGHT, code).compute_seconds for fused in (False, True)
    )
    widest = timing(MIXTRAL, work, EIGHT, replace(code, expert_factor=3.0)).compute_seconds
    assert widest - apart == pytest.approx(apart - together)


def test_running_a_layer_again_costs_the_host_more_than_its_kernels():
    small = read_shape(find_model("smollm2-135m").config())
    work = replace(PLAIN, seq_len=256, checkpointing="full")
    with_it, without = (
        timing(small, work, ONE, replace(EAGER, again_seconds=seconds)).step_seconds for seconds in (1e-3, 0.0)
    )
    assert with_it - without == pytest.approx(1e-3 * small.layers)


def test_shared_keys_are_too_much_for_the_efficient_attention():
    own = replace(LLAMA, kv_heads=LLAMA.heads)
    work = replace(PLAIN, dtype="fp32", weight_bytes=4, gradient_bytes=4)
    explicit = {
        way: timing(LLAMA, replace(work, attention=way), ONE, EAGER).step_seconds for way in ("math", "efficient")
    }
    assert timing(LLAMA, work, ONE, EAGER).step_seconds == explicit["math"] > explicit["efficient"]
    assert (
        timing(own, work, ONE, EAGER).step_seconds
        < timing(own, replace(work, attention="math"), ONE, EAGER).step_seconds
    )


def test_gathering_weights_hides_behind_computation_but_slows_it_down():
    alone = timing(LLAMA, replace(PLAIN, micro_batch=4), ONE, EAGER).communication_seconds
    sharded = replace(PLAIN, micro_batch=4, axes=Axes(dp_shard=8), shard="zero3")
    near = timing(LLAMA, sharded, EIGHT, EAGER)
    assert alone == 0
    gathered = 3 * LLAMA.layers * LLAMA.dense_layer_parameters * 2 * 7 / 8
    link = 450e9 * 0.8 * EAGER.near_part
    assert near.communication_seconds < 0.8 * gathered / link  # half of it, and the ends
    # what nothing is computed beside takes all its time
    few = timing(LLAMA, replace(sharded, micro_batch=1, seq_len=128), EIGHT, EAGER)
    assert few.communication_seconds + few.host_seconds > near.communication_seconds


def test_whole_gradients_are_handed_over_once_a_step():
    """Of eight small micro-batches, behind which nothing hides: 16 gathers and 1 or 8 sums of 16 GB."""

    def exchanged(**changes):
        work = replace(PLAIN, axes=Axes(dp_shard=8), shard="zero3", seq_len=64, grad_accum=8, **changes)
        return timing(LLAMA, work, EIGHT, EAGER).communication_seconds

    each, once = exchanged(averages_each=True), exchanged()
    assert 0.66 < once / each < 0.76  # 17 of 24, less what the layers hide, more the ends of the network
    assert exchanged(whole_gradient_bytes=4) > once
    in_pipeline = replace(PLAIN, axes=Axes(dp_shard=8, pp=8), shard="zero2", seq_len=64, grad_accum=8)
    again = replace(in_pipeline, grad_accum=80)
    first, tenfold = (timing(LLAMA, work, MANY, EAGER).communication_seconds for work in (in_pipeline, again))
    assert tenfold < 5 * first  # what stages send grows, what they gathered stays


def test_zero_hands_gradients_over_after_each_micro_batch_and_weights_after_a_step():
    work = Work.of(job(grad_accum=4), Plan(shard="zero2", engine="deepspeed"), EIGHT)
    assert (work.sharded, work.averages_each, work.weight_bytes, work.main_weights) == (False, True, 2, True)
    one, four = (timing(LLAMA, replace(work, grad_accum=n), EIGHT, EAGER) for n in (1, 4))
    assert four.optimizer_seconds == one.optimizer_seconds
    assert 1.2 < four.communication_seconds / one.communication_seconds < 4


def test_weights_of_one_gpu_come_from_its_host():
    """Twice and their gradients once a micro-batch; half of it, and what is longer than its computation, shows."""
    plan = Plan(shard="zero3", param_offload="cpu", accum_sync=True)
    rate = 0.85 * ONE.device.pcie_bytes_per_second

    def copies(seq_len, **changes):
        work = replace(Work.of(job(seq_len=seq_len), plan, ONE), **changes)
        return timing(LLAMA, work, ONE, EAGER).copy_seconds

    whole = 3 * 4 * LLAMA.parameters / rate
    assert copies(16384) == pytest.approx(whole / 2)
    assert whole / 2 < copies(8) < whole
    assert copies(16384, grad_accum=4) == pytest.approx(4 * whole / 2)
    assert copies(16384, grad_accum=4, averages_each=False) == pytest.approx((4 * 2 / 3 + 1 / 3) * whole / 2)
    assert copies(16384, shard="zero2") == pytest.approx(2 / 3 * whole / 2)
    assert timing(LLAMA, Work.of(job(seq_len=16384), plan, ONE), ONE, EAGER).communication_seconds == 0


def test_experts_are_averaged_among_those_that_have_the_same():
    # of 64 ranks each 8th has the same experts: none shares a machine with another, so each has an adapter
    code = replace(software("megatron"), far_part=1.0, data_overlap=0.0, matmul_factor=1e-9, memory_factor=1e-9)
    code = replace(code, expert_factor=1e-9, attention_factor=1e-9, kernel_seconds=1e-12, looped_kernel_seconds=1e-12)

    def averaging(ep):
        work = replace(PLAIN, axes=Axes(dp_replicate=64, ep=ep), experts_overlapped=True)
        kept = timing(MIXTRAL, replace(work, shard="none"), MANY, code).communication_seconds
        return timing(MIXTRAL, replace(work, shard="ddp"), MANY, code).communication_seconds - kept

    routed = MIXTRAL.layers * MIXTRAL.experts * MIXTRAL.expert_parameters
    plain = 2 * (MIXTRAL.parameters - routed) * 2 * 63 / 64 / (8 * 50e9)
    assert averaging(8) == pytest.approx(plain + 2 * routed / 8 * 2 * 7 / 8 / 50e9, rel=0.01)
    assert averaging(64) == pytest.approx(plain, rel=0.01)


def test_experts_that_run_again_leave_attention_alone():
    work = replace(PLAIN, micro_batch=2)
    again = {
        way: timing(MIXTRAL, replace(work, checkpointing=way), ONE, software("megatron")).recompute_seconds
        for way in ("norms", "experts", "full")
    }
    assert again["norms"] < again["experts"] < again["full"]


@pytest.mark.parametrize("optimizer", choices("optimizer"))
def test_every_optimizer_has_its_bytes_and_says_where_they_are_borrowed(optimizer):
    work = replace(PLAIN, optimizer=optimizer)
    assert timings.OPTIMIZER_BYTES[optimizer] > 0
    assert STATE_BYTES[optimizer] >= 0
    said = [text for text in timing(LLAMA, work, ONE, EAGER).assumed if f"{optimizer} was measured only" in text]
    assert len(said) == (optimizer in timings.UNMEASURED)


def test_momentum_is_a_state_and_is_read_and_written():
    assert STATE_BYTES["sgd"] == 1.0 > STATE_BYTES["sgd-plain"] == 0.0
    seconds = {
        name: timing(LLAMA, replace(PLAIN, optimizer=name), ONE, EAGER).optimizer_seconds
        for name in ("sgd", "sgd-plain")
    }
    assert seconds["sgd"] > 2 * seconds["sgd-plain"]


def test_torchaos_optimizers_take_the_host_long_and_the_card_no_longer_than_what_they_are_taken_for():
    seconds = {name: timing(LLAMA, replace(PLAIN, optimizer=name), ONE, EAGER).optimizer_seconds for name in BORROWED}
    assert seconds["adamw-8bit-ao"] == seconds["adamw-fp8-ao"] == seconds["adamw-4bit"] < seconds["adamw-foreach"]
    assert seconds["adamw-fused"] < seconds["adamw-4bit"]
    assert seconds["adamw-fused"] < seconds["paged-adamw"] < seconds["adamw-foreach"]
    few = replace(PLAIN, seq_len=16)
    alone, torchs = (
        timing(LLAMA, replace(few, optimizer=name), ONE, EAGER) for name in ("adamw-8bit-ao", "adamw-fused")
    )
    assert alone.optimizer_seconds == pytest.approx(32 * 9 * 60 * 10e-6, rel=0.05), "60 for each of nine tensors"
    assert torchs.optimizer_seconds < 0.25 * alone.optimizer_seconds


def test_torchtitans_own_checkpointing_runs_every_second_product_again():
    """Half of the products' forward seconds more than op-level checkpointing that keeps them all."""
    chosen = Plan(checkpointing="selective", shard="zero3")
    works = [Work.of(job(seq_len=8192), replace(chosen, engine=name), EIGHT) for name in ("tonnage", "torchtitan")]
    assert [work.checkpointing for work in works] == ["selective", "alternate"]
    ours, half, full = (
        timing(LLAMA, replace(works[0], checkpointing=way), EIGHT, EAGER).recompute_seconds
        for way in ("selective", "alternate", "full")
    )
    products = 32 * 2.0 * 8192 * 6.98e9 / 32 / (989.5e12 * rates.card(EIGHT.device).matmul) * EAGER.matmul_factor
    assert half - ours == pytest.approx(products / 2, rel=0.05)
    assert ours < half < full


def test_states_of_16_bits_take_six_tenths_of_those_of_32():
    narrow = timing(LLAMA, PLAIN, ONE, EAGER).optimizer_seconds
    wide = timing(LLAMA, replace(PLAIN, weight_bytes=4, gradient_bytes=4), ONE, EAGER).optimizer_seconds
    assert narrow == pytest.approx(0.6 * wide)
    main = timing(LLAMA, replace(PLAIN, main_weights=True), ONE, EAGER).optimizer_seconds
    assert main == pytest.approx(wide), "fp32 weights and states of its own"


def test_the_host_hides_the_optimizers_launches_behind_the_card():
    """DTensors take it 200 us each: 0.058 s of 288, for which the card is busy anyway with 8,192 tokens."""
    sharded = replace(PLAIN, axes=Axes(dp_shard=8), shard="zero3", unpacked=True)
    short, long = (timing(LLAMA, replace(sharded, seq_len=s), EIGHT, EAGER).optimizer_seconds for s in (16, 8192))
    assert short == pytest.approx(32 * 9 * 200e-6, rel=0.05)
    assert long < 0.5 * short
    fused = timing(LLAMA, replace(sharded, seq_len=16, optimizer="adamw-fused"), EIGHT, EAGER)
    assert fused.optimizer_seconds < 0.25 * short


def test_fsdp2_takes_the_host_75_us_for_each_tensor_and_gather():
    """Nine tensors of 32 layers, gathered twice; with adapters 23; quantized ones 0.5 ms more for each matrix."""
    alone = replace(PLAIN, seq_len=16, shard="zero3", axes=Axes(dp_shard=1), optimizer="adamw-fused")

    def more(**changes):
        work = replace(alone, **changes)
        with_it, without = (timing(LLAMA, replace(work, unpacked=on), ONE, EAGER) for on in (True, False))
        return with_it.host_seconds - without.host_seconds + with_it.compute_seconds - without.compute_seconds

    copied = 2 * 2 * 2 * LLAMA.parameters / (4800e9 * rates.card(ONE.device).memory)
    assert more() == pytest.approx(32 * 9 * 2 * 75e-6 + copied, rel=0.03)
    assert more(shard="zero2") == pytest.approx(32 * 9 * 75e-6 + copied / 2, rel=0.03)
    assert more(lora_rank=16) == pytest.approx(32 * 23 * 2 * 75e-6 + copied, rel=0.03)
    assert more(quantized=True) > more() + 32 * 7 * 2 * 500e-6 - copied


def test_llm_int8_takes_the_host_six_tenths_of_a_millisecond_a_product_and_pass():
    four = replace(PLAIN, seq_len=16, quantized=True, lora_rank=16)
    eight = replace(four, int8=True)
    more = [timing(LLAMA, each, ONE, EAGER).step_seconds for each in (four, eight)]
    assert more[1] - more[0] == pytest.approx(32 * 7 * 2 * 600e-6)
    assert Work.of(job(method="qlora"), Plan(quant="int8"), ONE).int8
    assert not Work.of(job(method="qlora"), Plan(), ONE).int8
    assert not Work.of(job(method="lora"), Plan(), ONE).int8


def test_steps_that_wait_for_the_host_have_a_wider_interval_and_say_so():
    short, long = (timing(LLAMA, replace(PLAIN, seq_len=s), ONE, EAGER) for s in (16, 8192))
    assert any("waits for the host" in text for text in short.assumed)
    assert not any("waits for the host" in text for text in long.assumed)
    width = [one.high_seconds / one.low_seconds for one in (short, long)]
    assert width[0] > 1.4 > 1.25 > width[1]
