"""Which changes are proposed follows what holds the bytes at the peak, and each is one that the engine takes."""

from dataclasses import replace

import pytest

from tonnage.advice.changes import NOTHING, Change, apply, limit_together, list_changes, list_host_changes
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.estimate import CATEGORIES, Host, Peak
from tonnage.trainers import cases
from tonnage.units import GIB


def make_case(gpu: str = "a100-40gb", model: str = "llama-3.2-1b", **options: object) -> Case:
    return cases.make_case(model, parse_cluster(gpu), options, offline=True)


def make_peak(phase: str = "backward", **gib_by_category: int) -> Peak:
    held = dict.fromkeys(CATEGORIES, 0) | {name: size * GIB for name, size in gib_by_category.items()}
    total = sum(held.values())
    return Peak(
        allocated_bytes=total - held["cached"],
        reserved_bytes=total,
        process_bytes=total,
        low_bytes=total,
        high_bytes=total,
        phase=phase,
        layer="",
        step=1,
        by_category=held,
    )


def options_of(case: Case, peak: Peak) -> list[dict[str, object]]:
    return [dict(change.options) for change in list_changes(case, peak)]


def test_activations_are_recomputed_or_made_fewer():
    listed = options_of(make_case(micro_batch=4), make_peak(activation=30, parameter=2))
    assert {"checkpointing": "full"} in listed
    assert {"micro_batch": 2, "grad_accum": 2} in listed
    assert {"micro_batch": 1, "grad_accum": 4} in listed
    assert not any("optimizer" in change for change in listed)


def test_a_global_batch_decides_the_accumulation():
    listed = options_of(make_case(micro_batch=4, global_batch_tokens=2048 * 8), make_peak(activation=30))
    assert {"micro_batch": 2} in listed


def test_states_are_divided_where_there_are_several_cards():
    peak = make_peak("optimizer", parameter=10, gradient=10, optimizer_state=20)
    assert not any(change.get("shard") in ("zero1", "zero2") for change in options_of(make_case(), peak))
    listed = options_of(make_case("4xa100-40gb", shard="ddp"), peak)
    assert [change["shard"] for change in listed if list(change) == ["shard"]] == ["zero3", "zero2", "zero1"]
    sharded = options_of(make_case("4xa100-40gb", shard="zero2"), peak)
    assert [change["shard"] for change in sharded if list(change) == ["shard"]] == ["zero3"]


def test_logits_are_sliced_if_the_network_makes_words():
    peak = make_peak(workspace=20)
    assert {"loss": "chunked"} in options_of(make_case(), peak)
    assert {"loss": "fused"} in options_of(make_case(method="lora"), peak)
    assert not any("loss" in change for change in options_of(make_case(loss="chunked"), peak))


def test_attention_that_holds_scores_is_replaced():
    peak = make_peak(activation=20)
    assert {"attention": "efficient"} in options_of(make_case("t4", precision="fp16-mixed"), peak)
    assert {"attention": "auto"} in options_of(make_case(attention="math"), peak)
    assert not any("attention" in change for change in options_of(make_case(), peak))


def test_what_can_gain_little_is_not_listed():
    assert options_of(make_case(), make_peak(runtime=20)) == []


def test_a_limit_is_never_more_than_what_is_held():
    peak = make_peak("optimizer", parameter=8, gradient=8, optimizer_state=16, activation=4, workspace=8, cached=2)
    for change in list_changes(make_case("8xa100-40gb", shard="ddp", micro_batch=2), peak):
        assert 0 < change.limit_bytes <= peak.process_bytes


def test_changes_together_gain_no_more_of_a_category_than_it_holds():
    peak = make_peak("forward", activation=8, workspace=2, cached=4)
    kept, passing = {"activation": 8 * GIB}, {"activation": 8 * GIB, "workspace": 2 * GIB}
    changes = [Change(options={}, limits=limits) for limits in (kept, passing, {"cached": 4 * GIB})]
    assert limit_together(changes[:1], peak) == 8 * GIB
    assert limit_together(changes, peak) == 10 * GIB


def test_fast_changes_come_before_slow_ones():
    peak = make_peak("optimizer", parameter=8, gradient=8, optimizer_state=16, activation=4)
    slow = [change.is_slow for change in list_changes(make_case(), peak)]
    assert slow == sorted(slow)
    assert any(slow)


@pytest.mark.parametrize("options", [{"tp": 3}, {"shard": "zero3", "optimizer_in_backward": True, "grad_accum": 2}])
def test_a_refused_change_gives_no_case(options):
    assert apply(Change(options=options), make_case()) is None


def test_changes_one_after_the_other_are_one():
    first = Change(options={"checkpointing": "selective"}, limits={"activation": 1})
    second = Change(options={"checkpointing": "full"}, limits={"activation": 2}, changes_mathematics=True)
    both = second.after(first)
    assert (dict(both.options), both.limit_bytes, both.changes_mathematics) == ({"checkpointing": "full"}, 3, True)
    assert first.after(NOTHING) == first


def test_other_cards_are_part_of_a_change():
    larger = parse_cluster("b200")
    changed = apply(Change(options={}, cluster=larger), make_case())
    assert changed == replace(make_case(), cluster=larger)


def test_host_memory_is_freed_where_it_is_used():
    held = {"pinned": 8 * GIB, "tensors": 8 * GIB, "checkpoint": 5 * GIB, "loading": 0}
    host = Host(peak_bytes=16 * GIB, pinned_bytes=8 * GIB, machine_bytes=21 * GIB, limit_bytes=16 * GIB, fits=False)
    host = replace(host, by_category=held)
    case = make_case(shard="zero3", param_offload="cpu", save_checkpoint="full")
    listed = [dict(change.options) for change in list_host_changes(case, host)]
    assert {"param_offload": "none"} in listed
    assert {"save_checkpoint": "sharded"} in listed
    assert {"optimizer_offload": "none"} not in listed
    copies = [
        dict(change.options)
        for change in list_host_changes(
            make_case("8xa100-40gb", shard="ddp"), replace(host, by_category={"loading": 9})
        )
    ]
    assert {"shard": "zero3"} in copies


def test_bringing_back_what_was_offloaded_makes_no_step_slow():
    assert not Change(options={"param_offload": "none"}, limits={"activation": 1}).is_slow
    assert Change(options={"param_offload": "cpu"}, limits={"activation": 1}).is_slow
