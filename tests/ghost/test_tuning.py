"""Of an autotuner's forms the first that compiles is measured, and each kernel's anew."""

import sys
from types import ModuleType
from typing import Any

from tonnage.ghost.environment import PATH

sys.path.extend(PATH.split(":"))
from tonnage_inside.values import tuning

FAILED = [float("inf")] * 3


class Autotuner:
    """As Triton's: measures every form of a kernel and takes the fastest."""

    def __init__(self, *forms: int) -> None:
        self.forms, self.compiled = forms, []

    def prune_configs(self, _kwargs: dict[str, Any]) -> tuple[int, ...]:
        return self.forms

    def _bench(self, *, config: int) -> list[float]:
        self.compiled.append(config)
        return FAILED if config < 0 else [0.0] * 3

    def run(self) -> int:
        timings = {config: self._bench(config=config) for config in self.prune_configs({})}
        return min(timings, key=timings.__getitem__)


def test_the_first_form_that_compiles_is_taken() -> None:
    module = ModuleType("autotuner")
    module.Autotuner = Autotuner  # type: ignore[attr-defined]
    alone = Autotuner(-1, 2, 3, 4)
    assert (alone.run(), alone.compiled) == (2, [-1, 2, 3, 4])
    tuning.patch(None, module)
    tuner = Autotuner(-1, 2, 3, 4)
    assert (tuner.run(), tuner.compiled) == (2, [-1, 2])
    assert (tuner.run(), tuner.compiled) == (2, [-1, 2, -1, 2]), "another shape of its arguments"
    assert (Autotuner(-1, -2).run(), Autotuner(5).run()) == (-1, 5)


def test_inductor_times_its_forms_in_every_run() -> None:
    module, older = ModuleType("config"), ModuleType("config")
    module.autotune_local_cache = True  # type: ignore[attr-defined]
    for each in (module, older):
        tuning.patch_inductor(None, each)
    assert module.autotune_local_cache is False
    assert not hasattr(older, "autotune_local_cache")
