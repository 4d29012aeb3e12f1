"""The benchmark that runs every type: what it makes of configurations, and how it sorts what happened."""

import pytest

from benchmarks import architectures


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (None, "run"),
        (architectures.FP32, "fp32"),
        (f"{architectures.OWN} ImportError: XModel requires the timm library but it was not found", "library"),
        (f"{architectures.OWN} KeyError: 'full_attention'", "default"),
        ("The step failed: NotImplementedError: Training is not implemented yet", "no loss"),
        ("Batches of sounds are not made for dia; give package.module:factory with batch(job).", "refused"),
    ],
)
def test_outcomes_are_sorted(reason: str | None, kind: str) -> None:
    assert architectures.kind(reason) == kind


def test_configurations_are_cut_with_what_has_an_entry_for_each_layer() -> None:
    config = {"num_hidden_layers": 6, "layer_types": list("abcdef"), "out_features": ["stage6"], "hidden_size": 8}
    assert architectures.shortened(config) == {
        "num_hidden_layers": 4, "layer_types": list("abcd"), "hidden_size": 8
    }  # fmt: skip
    stages = {"depths": [1, 2], "out_features": ["stage2"]}  # whose names do not follow from a number of layers
    assert architectures.shortened(stages) == stages


def test_fields_are_changed_within_parts() -> None:
    config = {"text_config": {"vocab_size": 8, "hidden_size": 4}, "image_token_id": None}
    changed = architectures.merged(config, {"text_config": {"hidden_size": 2}, "image_token_id": 7})
    assert changed == {"text_config": {"vocab_size": 8, "hidden_size": 2}, "image_token_id": 7}


def test_the_table_counts_every_type_once() -> None:
    found = {"llama": None, "dia": "Batches of sounds are not made for dia.", "deberta": architectures.FP32}
    lines = architectures.table(found).splitlines()
    assert "| all | 3 | 1 | 1 | 0 | 0 | 0 | 1 |" in lines
    assert lines[-1] == "| dia | speech-seq2seq | Batches of sounds are not made for dia. |"
