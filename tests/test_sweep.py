"""A few cases of benchmarks/sweep, the same each time: one question asked in several ways."""

from collections.abc import Iterator
from itertools import count

import pytest
from benchmarks.sweep.cases import case
from benchmarks.sweep.ways import Asking, differences, tell

from tonnage.engines import libraries

ANSWERED = 5
NETWORKS = ("llama-3.1-8b", "qwen3-8b", "gemma-3-1b", "qwen3-30b-a3b", "gpt2", "bert", "vit", "t5")
WAYS = ("invariants", "repeated", "continued", "kept")


def test_a_number_makes_the_same_case_again() -> None:
    assert case("0-1") == case("0-1")
    assert case("0-1") != case("0-2")


def test_differences_are_told_by_their_place() -> None:
    assert list(differences({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}], "c": 4})) == ["a[1].b 2 3", "c None 4"]


@pytest.fixture(scope="module")
def asking() -> Iterator[Asking]:
    made = Asking()
    yield made
    made.worker.close()


@pytest.mark.ghost
def test_the_same_answer_in_every_way(asking: Asking) -> None:
    """Those that transformers alone can run; what is refused when the network is there does not count."""
    answered = 0
    for number in count():
        one = case(f"ci-{number}", NETWORKS, (3, 15))
        found = dict(tell(asking, one, WAYS)) if libraries(one.job, one.plan) == {"transformers"} else {}
        assert not any(found[way] for way in (*WAYS, "failed") if way in found), (str(one), found)
        answered += "invariants" in found
        if answered == ANSWERED:
            return
