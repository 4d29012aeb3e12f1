"""Spell the command that gives the answer with a change in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tonnage.advice.changes import Change
from tonnage.catalog.devices import spell_options
from tonnage.cluster import Cluster
from tonnage.options import spell_words


def spell_command(
    model: str, cluster: Cluster, options: Mapping[str, Any], change: Change, others: Sequence[str] = ()
) -> str:
    """Return the `tonnage estimate` command of a model with these options and the change; `others` are kept as they
    are."""
    words = ["tonnage", "estimate", model, *shlex.split(spell_options(change.cluster or cluster))]
    for name, value in {**options, **change.options}.items():
        words += spell_words(name, value)
    return shlex.join([*words, *others])
