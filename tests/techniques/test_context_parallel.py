"""Context parallelism refuses networks without a causal mask or with more than tokens: they would be cut wrongly."""

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate
from tonnage.estimates.predict import estimate
from tonnage.plans import Plan


@pytest.mark.parametrize("name", ["bert", "t5", "vit", "whisper", "llava", "qwen2_5_vl"])
def test_only_causal_language_models_share_a_sequence(name: str) -> None:
    cluster = parse_cluster("2xa100-40gb")
    with pytest.raises(CannotEstimate, match=r"Context parallelism needs a causal language model, .*; choose cp 1"):
        estimate(Case(tiny_job(name), Plan(shard="zero3", cp=2), cluster), source="meta", steps=1, fresh=True)
