"""Networks of several stacks: their weights are the published ones, and their time is that of the parts."""

from dataclasses import replace

import pytest

from tonnage.case import Case
from tonnage.catalog.devices import find_device
from tonnage.catalog.models import find_model
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate
from tonnage.estimates.step_time import price
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.timing.stacks import read_stacks

ONE = Cluster(device=find_device("h200"))


def job(name, **fields):
    known = find_model(name)
    return Job(model=ModelRef(name=known.id, kind="config", config=known.config()), **{"seq_len": 1024, **fields})


@pytest.mark.parametrize(
    ("name", "within"),
    [
        *(("vit-base", 1e-3), ("vit-large", 1e-3), ("t5-small", 1e-3), ("t5-large", 1e-3)),
        *(("whisper-small", 1e-3), ("qwen2.5-vl-3b", 1e-3), ("qwen2.5-vl-7b", 1e-3), ("gemma-3-4b", 2e-3)),
        *(("llava-1.5-7b", 4e-3), ("qwen3-vl-8b", 0.02)),  # without projector, without what merges deep layers
    ],
)
def test_weights_are_those_published(name, within):
    counted = sum(one.shape.parameters for one in read_stacks(job(name)))
    assert counted == pytest.approx(find_model(name).parameters, rel=within)


def test_stacks_see_patches_and_frames_as_tokens():
    assert [one.seq_len for one in read_stacks(job("vit-base"))] == [197]  # 14 x 14, and the class
    assert [one.seq_len for one in read_stacks(job("whisper-small", seq_len=448))] == [1500, 448, 448]
    images, text = read_stacks(job("qwen2.5-vl-3b", images=2, image_size="560x280"))
    assert (images.seq_len, images.sequences, text.seq_len) == (40 * 20, 2, 1024)
    assert [one.name for one in read_stacks(job("gemma-3-4b", images=0))] == ["text"]


def test_an_image_costs_time_and_the_interval_is_wide():
    none, one, two = (price(Case(job("llava-1.5-7b", images=n, micro_batch=8), Plan(), ONE)) for n in (0, 1, 2))
    assert none.step_seconds < one.step_seconds < two.step_seconds
    assert one.high_seconds / one.step_seconds >= 1.7 > none.high_seconds / none.step_seconds
    assert any("images, text" in line for line in one.assumed)
    assert 0 < one.mfu < 0.7


def test_the_speed_of_an_image_classifier_is_in_patches():
    step = price(Case(job("vit-large", micro_batch=64), Plan(), ONE))
    assert step.tokens_per_second_per_gpu == pytest.approx(64 * 197 / step.step_seconds)


def test_stacks_are_timed_under_data_parallelism_alone():
    many = replace(ONE, gpus_per_node=8)
    assert price(Case(job("vit-large", micro_batch=8), Plan(shard="zero3"), many)).step_seconds > 0
    with pytest.raises(CannotEstimate, match="'vit' network under tp, pp, cp or ep"):
        price(Case(job("vit-large"), Plan(tp=2), many))
    with pytest.raises(CannotEstimate, match="does not say 'd_model'"):
        price(Case(Job(model=ModelRef(name="w", kind="config", config={"model_type": "whisper"})), Plan(), ONE))


@pytest.mark.parametrize(("name", "kind"), [("llava-1.5-7b", "llama"), ("gemma-3-4b", "gemma3_text")])
def test_layers_of_an_unstated_text_model_are_those_of_its_family(name, kind):
    known = job(name)
    config = known.model.config
    assert config["text_config"]["model_type"] == kind
    text = {field: value for field, value in config["text_config"].items() if field != "model_type"}
    unsaid = replace(known, model=replace(known.model, config={**config, "text_config": text}))
    assert read_stacks(unsaid)[-1].shape == read_stacks(known)[-1].shape
