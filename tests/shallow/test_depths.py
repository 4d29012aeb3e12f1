"""Networks of a few layers that may replace one of many."""

from dataclasses import replace
from math import lcm

import pytest

from networks import tiny_job
from tonnage.plans import Plan
from tonnage.shallow import depths
from tonnage.shallow.depths import choose_assembly_depths, choose_probe_depths, layers_of, with_layers


def of_tiny(**changes):
    found = tiny_job("llama")
    config = {**found.model.config, "num_hidden_layers": 48, **changes}
    return replace(found, model=replace(found.model, config=config))


def test_depths_follow_the_pattern_of_layers():
    assert choose_probe_depths(of_tiny(), Plan()) == (2, 3)
    assert choose_probe_depths(of_tiny(), Plan(shard="zero3")) == (3, 4)
    assert choose_probe_depths(of_tiny(), Plan(pp=4)) == (8, 12)  # two layers a stage, and three
    assert choose_probe_depths(of_tiny(layer_types=["full", "sliding", "sliding"] * 16), Plan()) == (3, 6)
    assert choose_probe_depths(of_tiny(layer_types=[f"kind {i}" for i in range(48)]), Plan()) is None
    assert choose_probe_depths(of_tiny(first_k_dense_replace=1), Plan()) == (3, 4)
    for unsaid in ({"sliding_window_pattern": "LLLG"}, {"layer_types": None}):
        assert choose_probe_depths(of_tiny(model_type="exaone4", **unsaid), Plan()) == (4, 8)
    # Two runs of 12 layers together are no less work than 8 layers.
    assert choose_probe_depths(of_tiny(num_hidden_layers=8), Plan()) is None
    two_kinds = of_tiny(layer_types=["full", "sliding"] * 24)
    assert choose_probe_depths(two_kinds, Plan(checkpointing="every-3")) == (6, 12)
    # The last layers are like those.
    assert choose_probe_depths(of_tiny(num_hidden_layers=47, sliding_window_pattern=6), Plan()) == (5, 11)
    assert choose_probe_depths(of_tiny(), Plan(checkpointing="sqrt")) is None
    assert with_layers(of_tiny(layer_types=["a", "b"] * 24), 4).model.config["layer_types"] == ["a", "b", "a", "b"]


@pytest.mark.parametrize(("checkpointing", "least"), [("full", 4), ("none", 2), ("selective", 2)])
def test_a_shallow_network_has_as_many_inputs_under_way_as_a_deep_one(checkpointing, least):
    """Layers that run again send one block each to the host: two may be leaving, and two on their way back."""
    plan = Plan(activation_offload="cpu-streamed", checkpointing=checkpointing)
    assert choose_probe_depths(of_tiny(), plan) == (least, least + 1)
    assert choose_probe_depths(of_tiny(), replace(plan, activation_offload="cpu")) == (2, 3)


@pytest.mark.parametrize("name", ["n_layer", "n_layers"])
def test_older_families_call_the_number_otherwise(name):
    found = of_tiny()
    config = {key: value for key, value in found.model.config.items() if key != "num_hidden_layers"}
    job = replace(found, model=replace(found.model, config={**config, name: 48}))
    assert layers_of(job) == 48
    assert choose_probe_depths(job, Plan()) == (2, 3)
    assert with_layers(job, 3).model.config == {**config, name: 3}


def test_of_several_stacks_the_one_of_words_is_cut():
    pictured = tiny_job("gemma3")
    words = {**pictured.model.config["text_config"], "num_hidden_layers": 48}
    config = {name: value for name, value in pictured.model.config.items() if name != "num_hidden_layers"}
    job = replace(pictured, model=replace(pictured.model, config={**config, "text_config": words}))
    assert layers_of(job) == 48
    assert choose_probe_depths(job, Plan()) == (6, 12)
    cut = with_layers(job, 6).model.config
    assert cut["text_config"]["num_hidden_layers"] == 6
    assert cut["vision_config"] == config["vision_config"]
    assert words["num_hidden_layers"] == 48


T5 = {"model_type": "t5", "num_layers": 24, "num_decoder_layers": 24}
BART = {"model_type": "bart", "encoder_layers": 24, "decoder_layers": 24}


def of_both(**config):
    found = tiny_job("t5")
    return replace(found, model=replace(found.model, config={"is_encoder_decoder": True, **config}))


@pytest.mark.parametrize(
    ("config", "cut"),
    [
        (T5, {**T5, "num_layers": 2, "num_decoder_layers": 2}),
        ({"model_type": "t5", "num_layers": 24}, {"model_type": "t5", "num_layers": 2}),  # the decoder is as deep
        (
            {**BART, "num_hidden_layers": 24, "attention_window": [512] * 24},
            {
                **{"model_type": "bart", "encoder_layers": 2, "decoder_layers": 2, "num_hidden_layers": 2},
                "attention_window": [512] * 2,
            },
        ),
        (
            {"model_type": "florence2", "text_config": {**BART, "is_encoder_decoder": True}, "vision_config": {}},
            {
                "model_type": "florence2",
                "text_config": {**BART, "is_encoder_decoder": True, "encoder_layers": 2, "decoder_layers": 2},
                "vision_config": {},
            },
        ),
    ],
    ids=["t5", "t5 of one number", "led", "within"],
)
def test_an_encoder_and_a_decoder_are_cut_together(config, cut):
    job = of_both(**config)
    assert layers_of(job) == 24
    assert choose_probe_depths(job, Plan()) == (2, 3)
    assert choose_probe_depths(job, Plan(shard="zero3")) == (3, 4)
    assert with_layers(job, 2).model.config == {"is_encoder_decoder": True, **cut}
    assert choose_assembly_depths(job, Plan(shard="zero3")) is None  # three of them take as long as all


def test_an_encoder_and_a_decoder_may_have_configurations_of_their_own():
    own = {"model_type": "t5_gemma_module", "num_hidden_layers": 26}
    kinds = ["sliding_attention", "full_attention"] * 13
    job = of_both(model_type="t5gemma", encoder={**own, "layer_types": kinds}, decoder=own)
    assert choose_probe_depths(job, Plan()) == (2, 4)
    cut = with_layers(job, 4).model.config
    assert cut["encoder"] == {**own, "num_hidden_layers": 4, "layer_types": kinds[:4]}
    assert cut["decoder"] == {**own, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    "config",
    [
        {**BART, "encoder_layers": 32, "decoder_layers": 2},  # distilled Whisper
        {**T5, "num_layers": 36, "num_decoder_layers": 12},  # ByT5
        {**BART, "num_hidden_layers": 12},
        {"model_type": "t5gemma", "encoder": {"num_hidden_layers": 42}, "decoder": {"num_hidden_layers": 26}},
        {**T5, "model_type": "switch_transformers", "num_sparse_encoder_layers": 6},  # every fourth has experts
        {"model_type": "t5"},
    ],
)
def test_an_encoder_and_a_decoder_that_are_not_alike_are_run_whole(config):
    assert choose_probe_depths(of_both(**config), Plan()) is None


def test_a_decoder_alone_may_say_how_deep_its_encoder_was():
    assert choose_probe_depths(of_tiny(model_type="mbart", decoder_layers=4), Plan()) is None


def test_names_of_depths_are_those_of_transformers():
    """The cut network is what transformers builds: nothing besides the layers keeps the depth."""
    from transformers import CONFIG_MAPPING

    checked = 0
    for kind in (
        "t5",
        "mt5",
        "umt5",
        "longt5",
        "bart",
        "mbart",
        "pegasus",
        "m2m_100",
        "marian",
        "whisper",
        "t5gemma",
    ):
        config = CONFIG_MAPPING[kind]().to_dict()
        cut = with_layers(of_both(**config), 2)
        made = CONFIG_MAPPING[kind](**{name: value for name, value in cut.model.config.items() if value is not None})
        sides = (made.encoder, made.decoder) if kind == "t5gemma" else (made,)
        for side in sides:
            stated = {name: value for name, value in side.to_dict().items() if name.endswith("layers")}
            depth = [value for value in stated.values() if isinstance(value, int) and not isinstance(value, bool)]
            assert set(depth) == {2}, (kind, stated)
            checked += 1
    assert checked == 12


def usual_kinds(kind):
    """Return the type of a family's default decoder, its layers, and transformers' lists for them."""
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
    """Only families with regular layers are checked; in the others the first or the last layers differ."""
    from transformers import CONFIG_MAPPING

    checked = 0
    for kind in CONFIG_MAPPING:
        decoder, layers, lists = usual_kinds(kind)
        repeats = [next((n for n in range(1, layers) if each[:-n] == each[n:]), None) for each in lists]
        if layers > 12 and None not in repeats and lcm(*repeats) in range(2, 13):
            checked += 1
            assert depths._period({"model_type": decoder}, layers) % lcm(*repeats) == 0, decoder
    assert checked > 10


def test_only_layers_that_take_long_are_continued():
    job = of_tiny()
    assert choose_assembly_depths(job, Plan(shard="zero3")) == (3, 4, 5)
    assert choose_assembly_depths(replace(job, method="lora"), Plan()) == (2, 3, 4)
    assert choose_assembly_depths(job, Plan()) is None
    assert choose_assembly_depths(job, Plan(shard="ddp", tp=2)) is None  # whose second step is another
    assert choose_assembly_depths(job, Plan(shard="zero2", pp=4)) is None
    assert choose_assembly_depths(of_tiny(num_hidden_layers=11), Plan(shard="zero3")) is None
    alternating = of_tiny(sliding_window_pattern=6, num_hidden_layers=74)
    assert choose_assembly_depths(alternating, Plan(shard="zero3")) == (14, 20, 26)  # two of each kind, at least
    assert choose_assembly_depths(of_tiny(sliding_window_pattern=6), Plan(shard="zero3")) is None
    deep = of_tiny(num_hidden_layers=80)
    assert choose_assembly_depths(deep, Plan(shard="zero2", pp=2)) == (
        6,
        8,
        10,
    )  # a layer of a stage beyond `choose_probe_depths`
    assert choose_assembly_depths(deep, Plan(shard="zero2", pp=4)) == (8, 12, 16)
    assert choose_assembly_depths(deep, Plan(shard="zero3", pp=4)) is None  # three layers a stage, which are no fewer
    assert choose_assembly_depths(of_tiny(num_hidden_layers=96), Plan(shard="zero3", pp=4)) == (12, 16, 20)
    interleaved = Plan(pp=2, pp_schedule="interleaved")
    assert choose_assembly_depths(of_tiny(num_hidden_layers=96), interleaved) == (12, 16, 20)
    assert choose_assembly_depths(deep, Plan(shard="zero2", pp=8)) is None  # ten layers a stage


def test_looks_at_a_pipeline_have_layers_between_the_first_and_the_last_of_a_stage():
    assert choose_probe_depths(of_tiny(num_hidden_layers=80), Plan(shard="zero2", pp=4)) == (8, 12)
    assert choose_probe_depths(of_tiny(num_hidden_layers=32), Plan(shard="zero2", pp=4)) == (
        4,
        8,
    )  # where there are enough


def test_layers_for_images_would_be_run_three_times():
    job = of_tiny(num_hidden_layers=40)
    words = {"model_type": "llava", "text_config": job.model.config}
    for tower, continued in ((8, (3, 4, 5)), (24, None)):
        config = {**words, "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": tower}}
        seeing = replace(job, model=replace(job.model, config=config))
        assert choose_assembly_depths(seeing, Plan(shard="zero3")) == continued
        assert choose_probe_depths(seeing, Plan(shard="zero3")) == (3, 4)
