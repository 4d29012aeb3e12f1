"""Which networks of a few layers stand for one of many."""

from dataclasses import replace

from networks import tiny_job
from tonnage.layers.few import depths, depths_to_continue, with_layers
from tonnage.plans import Plan


def of_tiny(**changes):
    found = tiny_job("llama")
    config = {**found.model.config, "num_hidden_layers": 48, **changes}
    return replace(found, model=replace(found.model, config=config))


def test_depths_follow_the_pattern_of_layers():
    assert depths(of_tiny(), Plan()) == (2, 3)
    assert depths(of_tiny(), Plan(shard="zero3")) == (3, 4)
    assert depths(of_tiny(), Plan(pp=4)) == (4, 8)
    assert depths(of_tiny(layer_types=["full", "sliding", "sliding"] * 16), Plan()) == (3, 6)
    assert depths(of_tiny(layer_types=[f"kind {i}" for i in range(48)]), Plan()) is None
    assert depths(of_tiny(first_k_dense_replace=1), Plan()) == (3, 4)
    assert depths(of_tiny(num_hidden_layers=8), Plan()) is None  # two of 12 layers together are no less work
    assert depths(of_tiny(layer_types=["full", "sliding"] * 24), Plan(checkpointing="every-3")) == (6, 12)
    assert depths(of_tiny(num_hidden_layers=47, sliding_window_pattern=6), Plan()) == (
        5,
        11,
    )  # the last are like those
    assert depths(of_tiny(), Plan(checkpointing="sqrt")) is None
    assert depths(of_tiny(is_encoder_decoder=True), Plan()) is None
    assert with_layers(of_tiny(layer_types=["a", "b"] * 24), 4).model.config["layer_types"] == ["a", "b", "a", "b"]


def test_only_layers_that_take_long_are_continued():
    job = of_tiny()
    assert depths_to_continue(job, Plan(shard="zero3")) == (3, 4, 5)
    assert depths_to_continue(replace(job, method="lora"), Plan()) == (2, 3, 4)
    assert depths_to_continue(job, Plan()) is None
    assert depths_to_continue(job, Plan(shard="ddp", tp=2)) is None  # whose second step is another
    assert depths_to_continue(job, Plan(shard="zero2", pp=4)) is None
    assert depths_to_continue(of_tiny(num_hidden_layers=11), Plan(shard="zero3")) is None
    deep = of_tiny(num_hidden_layers=80)
    assert depths_to_continue(deep, Plan(shard="zero2", pp=2)) == (6, 8, 10)  # a layer of a stage beyond `depths`
    assert depths_to_continue(deep, Plan(shard="zero2", pp=8)) is None  # ten layers a stage
