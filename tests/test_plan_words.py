"""The words of a Plan's options are data; techniques, trainers and catalogs answer for exactly these words."""

import pytest

from tonnage import plans
from tonnage.catalog.conventions import conventions_of
from tonnage.catalog.optimizers import OPTIMIZERS
from tonnage.options import options
from tonnage.plans import Plan
from tonnage.techniques import choices
from tonnage.trainers import names

VOCABULARIES = [
    ("precision", plans.PRECISIONS, ()),
    ("weights_dtype", plans.DTYPES, ()),
    ("reduce_dtype", plans.DTYPES, ()),
    ("optimizer", plans.OPTIMIZERS, ()),
    ("checkpointing", plans.CHECKPOINTINGS, ("none",)),
    ("activation_offload", plans.ACTIVATION_OFFLOADS, ("none",)),
    ("optimizer_offload", plans.OPTIMIZER_OFFLOADS, ("none",)),
    ("shard", plans.SHARDS, ("none",)),
    ("param_offload", plans.PARAM_OFFLOADS, ("none",)),
    ("attention", plans.ATTENTIONS, ("auto",)),
    ("loss", plans.LOSSES, ("plain",)),
    ("compile", plans.COMPILES, ("none",)),
    ("outputs", plans.OUTPUTS, ("freed",)),
    ("allocator", plans.ALLOCATORS, ("default",)),
]
"""The option, its words, and the word that uses no technique."""

MODIFIERS = ("quant", "unquantized_dtype", "base_dtype", "sequence_parallel", "pp_schedule")
"""Options that change the technique of another option: qlora, lora, tp, pp."""

POSSIBLE = {item.name: option.possible for item, option in options(Plan) if option.possible}


@pytest.mark.parametrize(("option", "vocabulary", "neutral"), VOCABULARIES)
def test_techniques_answer_for_every_word(option: str, vocabulary: tuple[str, ...], neutral: tuple[str, ...]) -> None:
    assert sorted(vocabulary) == sorted((*neutral, *choices(option)))
    assert POSSIBLE[option] == vocabulary


def test_every_option_with_words_is_covered() -> None:
    covered = {option for option, _, _ in VOCABULARIES}
    assert covered | {*MODIFIERS, "engine"} == set(POSSIBLE)
    assert not any(choices(option) for option in MODIFIERS)


def test_engines_are_the_trainers() -> None:
    assert names() == plans.ENGINES == POSSIBLE["engine"]


@pytest.mark.parametrize("engine", plans.ENGINES)
def test_every_engine_has_its_conventions(engine: str) -> None:
    assert conventions_of(engine)


def test_optimizers_are_those_of_the_table() -> None:
    assert tuple(optimizer.name for optimizer in OPTIMIZERS) == plans.OPTIMIZERS == choices("optimizer")
