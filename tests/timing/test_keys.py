"""Costs that are cached for all works of one key are the same for all of them."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from timed_steps import EIGHT, LLAMA, MANY, MIXTRAL, ONE, PLAIN
from tonnage.mesh import Mesh
from tonnage.timing import keys, rates
from tonnage.timing.keys import cached_by, layer_key, weight_key
from tonnage.timing.micro_batch import network_seconds
from tonnage.timing.software import software, softwares
from tonnage.timing.timing import step_costs

WORKS = st.builds(
    replace,
    st.just(PLAIN),
    axes=st.builds(
        Mesh,
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


SHAPES = st.sampled_from([LLAMA, MIXTRAL])
CLUSTERS = st.sampled_from([ONE, EIGHT, MANY])
CODES = st.sampled_from(sorted(softwares()))


def check_one_cost(compute, key, work, alike, shape, cluster, code):
    """Assert that two works of one key cost the same, each computed without the cache."""
    rest, uncached = (cluster, rates.card(cluster.device), software(code)), compute.__wrapped__
    assert key(work) == key(alike)
    assert uncached(shape, work, *rest) == uncached(shape, alike, *rest)


def with_fields_of(work, other, names):
    return replace(work, **{name: getattr(other, name) for name in names})


@settings(max_examples=200)
@given(work=WORKS, other=WORKS, shape=SHAPES, cluster=CLUSTERS, code=CODES)
def test_layers_take_as_long_whatever_becomes_of_gradients(work, other, shape, cluster, code):
    mine, others = work.axes, other.axes
    stages = max(others.pp, 2) if mine.pp > 1 else 1
    alike = replace(
        with_fields_of(work, other, set(keys._BESIDE_LAYERS) - {"axes"}),
        axes=replace(others, pp=stages, cp=mine.cp, tp=mine.tp, ep=mine.ep),
    )
    check_one_cost(network_seconds, layer_key, work, alike, shape, cluster, code)


@settings(max_examples=200)
@given(work=WORKS, other=WORKS, shape=SHAPES, cluster=CLUSTERS, code=CODES)
def test_exchanges_of_weights_take_as_long_whatever_passes_through_these(work, other, shape, cluster, code):
    alike = with_fields_of(work, other, keys._BESIDE_WEIGHTS)
    check_one_cost(step_costs, weight_key, work, alike, shape, cluster, code)


def test_a_cost_is_computed_once_for_a_key():
    computed = []

    @cached_by(lambda work: work.seq_len)
    def count(shape, work, *rest):
        computed.append((work, *rest))
        return len(computed)

    assert count(LLAMA, PLAIN) == count(LLAMA, replace(PLAIN, grad_accum=2)) == 1
    assert count(LLAMA, replace(PLAIN, seq_len=8)) == 2
    assert count(MIXTRAL, PLAIN) == 3
    assert count(LLAMA, PLAIN, "other code") == 4
    assert count(LLAMA, PLAIN) == 1


def test_a_full_cache_is_emptied(monkeypatch):
    monkeypatch.setattr(keys, "_MOST", 2)
    computed = []

    @cached_by(lambda work: work.seq_len)
    def length(shape, work):
        computed.append(work.seq_len)
        return work.seq_len

    for tokens in (1, 2, 3, 3, 1):
        assert length(LLAMA, replace(PLAIN, seq_len=tokens)) == tokens
    assert computed == [1, 2, 3, 1]
