"""Which networks of a few layers stand for one of many."""

from dataclasses import replace
from math import lcm

from networks import tiny_job
from tonnage.layers import few
from tonnage.layers.few import depths, depths_to_continue, layers_of, with_layers
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
    for unsaid in ({"sliding_window_pattern": "LLLG"}, {"layer_types": None}):
        assert depths(of_tiny(model_type="exaone4", **unsaid), Plan()) == (4, 8)
    assert depths(of_tiny(num_hidden_layers=8), Plan()) is None  # two of 12 layers together are no less work
    assert depths(of_tiny(layer_types=["full", "sliding"] * 24), Plan(checkpointing="every-3")) == (6, 12)
    assert depths(of_tiny(num_hidden_layers=47, sliding_window_pattern=6), Plan()) == (
        5,
        11,
    )  # the last are like those
    assert depths(of_tiny(), Plan(checkpointing="sqrt")) is None
    assert depths(of_tiny(is_encoder_decoder=True), Plan()) is None
    assert with_layers(of_tiny(layer_types=["a", "b"] * 24), 4).model.config["layer_types"] == ["a", "b", "a", "b"]


def test_of_several_stacks_the_one_of_words_is_cut():
    pictured = tiny_job("gemma3")
    words = {**pictured.model.config["text_config"], "num_hidden_layers": 48}
    config = {name: value for name, value in pictured.model.config.items() if name != "num_hidden_layers"}
    job = replace(pictured, model=replace(pictured.model, config={**config, "text_config": words}))
    assert layers_of(job) == 48
    assert depths(job, Plan()) == (6, 12)
    cut = with_layers(job, 6).model.config
    assert cut["text_config"]["num_hidden_layers"] == 6
    assert cut["vision_config"] == config["vision_config"]
    assert words["num_hidden_layers"] == 48


def usual_kinds(kind):
    """The type of a family's default decoder, its layers, and what transformers lists for each of them."""
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[kind]().get_text_config()
    except Exception:  # some cannot be made of defaults, or have two decoders
        return kind, 0, []
    found = getattr(config, "num_hidden_layers", 0)
    layers = found if isinstance(found, int) else 0
    lists = [list(each) for each in config.to_dict().values() if isinstance(each, (list, tuple))]
    return config.model_type, layers, [each for each in lists if layers and len(each) == layers]


def test_what_configurations_leave_unsaid_is_what_transformers_takes():
    """Of families whose layers are regular; in the others the first or the last are of another kind."""
    from transformers import CONFIG_MAPPING

    checked = 0
    for kind in CONFIG_MAPPING:
        decoder, layers, lists = usual_kinds(kind)
        repeats = [next((n for n in range(1, layers) if each[:-n] == each[n:]), None) for each in lists]
        if layers > 12 and None not in repeats and lcm(*repeats) in range(2, 13):
            checked += 1
            assert few._period({"model_type": decoder, "num_hidden_layers": layers}) % lcm(*repeats) == 0, decoder
    assert checked > 10


def test_only_layers_that_take_long_are_continued():
    job = of_tiny()
    assert depths_to_continue(job, Plan(shard="zero3")) == (3, 4, 5)
    assert depths_to_continue(replace(job, method="lora"), Plan()) == (2, 3, 4)
    assert depths_to_continue(job, Plan()) is None
    assert depths_to_continue(job, Plan(shard="ddp", tp=2)) is None  # whose second step is another
    assert depths_to_continue(job, Plan(shard="zero2", pp=4)) is None
    assert depths_to_continue(of_tiny(num_hidden_layers=11), Plan(shard="zero3")) is None
    alternating = of_tiny(sliding_window_pattern=6, num_hidden_layers=74)
    assert depths_to_continue(alternating, Plan(shard="zero3")) == (14, 20, 26)  # two of each kind, at least
    assert depths_to_continue(of_tiny(sliding_window_pattern=6), Plan(shard="zero3")) is None
    deep = of_tiny(num_hidden_layers=80)
    assert depths_to_continue(deep, Plan(shard="zero2", pp=2)) == (6, 8, 10)  # a layer of a stage beyond `depths`
    assert depths_to_continue(deep, Plan(shard="zero2", pp=8)) is None  # ten layers a stage


def test_layers_for_images_would_be_run_three_times():
    job = of_tiny(num_hidden_layers=40)
    words = {"model_type": "llava", "text_config": job.model.config}
    for tower, continued in ((8, (3, 4, 5)), (24, None)):
        config = {**words, "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": tower}}
        seeing = replace(job, model=replace(job.model, config=config))
        assert depths_to_continue(seeing, Plan(shard="zero3")) == continued
        assert depths(seeing, Plan(shard="zero3")) == (3, 4)
