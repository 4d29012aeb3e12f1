"""When a process may do another job, and what watched the one before."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tonnage.ghost.process import INSIDE

sys.path.append(str(INSIDE))
from tonnage_inside import anew, decided
from tonnage_inside.watch import Watch


class Native:
    """A ghost of which these functions were asked that it does not have."""

    def __init__(self, calls: dict[str, int], workspaces: dict[str, int]) -> None:
        self.unknown_calls = lambda: calls
        self.unknown_workspaces = lambda: workspaces


@pytest.mark.parametrize(
    ("native", "took", "possible"),
    [
        (Native({}, {}), [], True),
        (Native({"libcusolver.so.12:cusolverDnCreate": 1}, {}), [], False),
        (Native({}, {"modelled:cudnnBackend execution plan": 2}), [], False),
        (Native({}, {}), ["aten.embedding"], False),
    ],
    ids=["nothing is kept", "calls", "workspaces", "blocks"],
)
def test_what_torch_keeps_would_not_be_asked_for_again(
    native: Any, took: list[str], possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decided, "_took", took)
    assert anew.is_possible(SimpleNamespace(native=native)) is possible


def test_a_watch_takes_away_all_that_it_put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also around trainers that were there before: one around the other, watches of jobs that are over would stay."""
    engine, optimizer = (type(name, (), {}) for name in ("DeepSpeedEngine", "BaseOptimizer"))
    monkeypatch.setattr(engine, "_take_model_step", take := lambda self: None, raising=False)
    monkeypatch.setattr(optimizer, "apply", apply := lambda self, gradients, variables: None, raising=False)
    trainers = {"deepspeed.runtime.engine": SimpleNamespace(DeepSpeedEngine=engine, __spec__=None)}
    trainers["keras.src.optimizers.base_optimizer"] = SimpleNamespace(BaseOptimizer=optimizer, __spec__=None)
    for name, module in trainers.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda begins: None)
    modules = torch.nn.modules.module
    before = len(modules._global_forward_hooks), torch.optim.Optimizer.__init__, torch.autograd._engine_run_backward
    for _ in range(2):
        watch = Watch(torch)
        watch.start()
        assert vars(engine)["_take_model_step"] is not take
        assert vars(optimizer)["apply"] is not apply
        watch.end()
        assert vars(engine)["_take_model_step"] is take
        assert vars(optimizer)["apply"] is apply
        after = (
            len(modules._global_forward_hooks),
            torch.optim.Optimizer.__init__,
            torch.autograd._engine_run_backward,
        )
        assert after == before
