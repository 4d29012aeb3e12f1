"""Networks that a program trains: which modules they are, and how many numbers they have."""

import gc
from typing import Any

from .sharded import elsewhere
from .tensors import elements


def counted(root: Any, parameters: list[Any]) -> dict[str, Any]:
    """A network's class and where that is from, how many numbers its parameters have now, and how many to train."""
    others, trainable_of_others = elsewhere(root)
    return {
        "class": type(root).__name__,
        "module": type(root).__module__,
        "parameters": sum(elements(parameter) for parameter in parameters) + others,
        "trainable_parameters": sum(elements(p) for p in parameters if p.requires_grad) + trainable_of_others,
    }


def owners(torch: Any, parameters: list[Any]) -> list[Any]:
    """The outermost modules there are that own some of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    kind = torch.nn.Module
    modules = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    found = [each for each in modules if any(id(parameter) in wanted for parameter in each._parameters.values())]
    while True:
        inner = {id(each) for each in found}
        outer = [each for each in modules if any(id(child) in inner for child in each._modules.values())]
        if not outer:
            return found
        inside = {id(child) for each in outer for child in each._modules.values()}
        found = [*(each for each in found if id(each) not in inside), *(m for m in outer if id(m) not in inner)]


def together(networks: list[dict[str, Any]]) -> dict[str, Any]:
    """Networks that one optimizer trains (an actor and a critic) as one: `Actor + Critic`."""
    sums = {name: sum(network[name] for network in networks) for name in ("parameters", "trainable_parameters")}
    names = {name: " + ".join(dict.fromkeys(network[name] for network in networks)) for name in ("class", "module")}
    return {**names, **sums}
