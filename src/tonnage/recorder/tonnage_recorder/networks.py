"""Networks that a program trains: which modules they are, and how many numbers they have.

Of several networks (a reference, a teacher, a reward) those that are trained are reported, often a single one.
"""

import gc
import weakref
from typing import Any

from .claims import Claims
from .script import Script
from .sharded import elsewhere
from .tensors import elements


class Networks:
    """The networks that were called in one process, and the one that its trace describes."""

    def __init__(self, torch: Any, claims: Claims) -> None:
        self.torch = torch
        self.script: Script | None = None
        self.model: dict[str, Any] = {}
        """Description of the trained network; before an optimizer has stepped, of the largest one that was called."""
        self.roots: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        """Modules that were called from outside any other, with their descriptions."""
        self.names: dict[int, str] = {}
        """Names of modules inside their networks, by `id`."""
        self._claims = claims
        self._trained: set[int] = set()
        self._is_trained_found = False
        self._optimizers = 0
        self._is_outdated = False
        self._loose_elements = 0

    def add(self, root: Any, given: tuple[Any, ...] = ()) -> None:
        """Learn the names inside a module that was called from outside any other, and count what it owns.

        `given`: the arguments of the call that have no names.
        """
        self.names.update({id(module): name for name, module in root.named_modules()})
        parameters = list(root.parameters())
        for parameter in parameters:
            self._claims.parameters[id(parameter)] = weakref.ref(parameter)
        if self.script is not None:
            self.script.meet(root, given)
        self.roots[root] = describe_network(root, parameters)
        if not self._is_trained_found and self.roots[root]["parameters"] >= self.model.get("parameters", 0):
            self.model = self.roots[root]

    def is_beside_training(self, module: Any) -> bool:
        """Return whether a module is called for another that is in training: a reference, a teacher, a reward."""
        trained = self._trained
        if not trained or any(id(parameter) in trained for parameter in module.parameters()):
            return False
        return any(root.training and description["trainable_parameters"] for root, description in self.roots.items())

    def knows_trained(self) -> bool:
        """Return whether an optimizer has said what it trains."""
        return bool(self._trained)

    def add_trained(self, updated: list[Any]) -> None:
        """Learn which parameters an optimizer trains, when it makes its first step."""
        self._trained.update(id(parameter) for parameter in updated)
        strangers = (parameter for parameter in updated if id(parameter) not in self._claims.parameters)
        self._add_uncalled([parameter for parameter in strangers if self._claims.is_trained_here(parameter)])
        self._optimizers += 1
        self._is_outdated = True
        if self._optimizers.bit_count() == 1:  # there may be one for each parameter: the rest is counted at the end
            self.update_model()

    def update_model(self) -> None:
        """Describe the networks that are trained, if an optimizer was added since the last time."""
        if not self._is_outdated:
            return
        self._is_outdated = False
        with self.torch._C.DisableTorchFunction():  # modes that follow what a program does need not see this
            self._describe_trained()

    def find_whole(self) -> None:
        """Describe the network that the largest called module is part of, where no optimizer has said what it trains.

        A program may call its layers one by one, and run out of memory before its first step, or make none.
        """
        if self.script is None or self._is_trained_found or len(self.roots) < 2:
            return
        largest = max(self.roots, key=lambda root: self.roots[root]["parameters"])
        for whole in owners(self.torch, list(largest.parameters())):
            description = describe_network(whole, list(whole.parameters()))
            if description["parameters"] > self.model.get("parameters", 0):
                self.model = description

    def claim_uncalled(self) -> None:
        """Claim parameters that were in no forward, in a program that we did not write.

        Such are those of a program that ran out of memory, or of a running mean of others.  Tensors in a list are
        claimed too if they have, one by one, the shapes of those that are trained: diffusers keeps such a mean so.
        """
        if self.script is None:
            return
        claims = self._claims
        parameter = self.torch.nn.Parameter
        trained = [shape for known in claims.parameters.values() if (shape := self._trained_shape(known()))]
        claimed = {address for _, address, _ in claims.rows}
        for candidate in gc.get_objects():
            kind = type(candidate)  # isinstance would wake objects that warn when they are asked
            if issubclass(kind, parameter) and id(candidate) not in claims.parameters:
                claims.parameters[id(candidate)] = weakref.ref(candidate)
                if claims.address(candidate) not in claimed:
                    claims.claim(candidate, "parameter")
            elif kind is list and len(candidate) == len(trained) > 1 and self._are_copies(candidate, trained):
                for tensor in candidate:
                    if claims.address(tensor) not in claimed:
                        claims.claim(tensor, "parameter")

    def note_reruns(self) -> None:
        """Add to the description which operations run again, where a budget of activations decided that."""
        for module in (part for root in list(self.roots) for part in root.modules()):
            if "run_again" in vars(module):
                self.model["run_again"] = module.run_again

    def _describe_trained(self) -> None:
        parameters = {root: list(root.parameters()) for root in list(self.roots)}
        trained_elements = {
            root: sum(elements(parameter) for parameter in inside if id(parameter) in self._trained)
            for root, inside in parameters.items()
        }
        descriptions = []
        if any(trained_elements.values()):
            largest_first = sorted(
                trained_elements, key=lambda root: (-trained_elements[root], -self.roots[root]["parameters"])
            )
            described: set[int] = set()
            for root in largest_first:
                own = {id(parameter) for parameter in parameters[root]} & self._trained
                if own and not own & described:  # else a wrapper, or a part that was also called by itself
                    described |= own
                    # Once more: it may have been called before what is trained was chosen.
                    descriptions.append(describe_network(root, self._without_copies(parameters[root])))
        if self._loose_elements:
            loose = dict.fromkeys(("parameters", "trainable_parameters"), self._loose_elements)
            descriptions.append({"class": "Tensor", "module": "torch", **loose})
        if descriptions:
            self._is_trained_found = True
            self.model = merge_descriptions(descriptions)

    def _without_copies(self, parameters: list[Any]) -> list[Any]:
        """Return a network's parameters without a frozen copy of those that are trained, such as a running mean."""
        trained = [parameter for parameter in parameters if id(parameter) in self._trained]
        frozen = [parameter for parameter in parameters if id(parameter) not in self._trained]
        is_copy = len(trained) > 1 and [p.shape for p in trained] == [p.shape for p in frozen]
        return trained if is_copy and not any(p.requires_grad for p in frozen) else parameters

    def _add_uncalled(self, strangers: list[Any]) -> None:
        """Add networks whose modules nobody called: a program may call `forward` itself, or compute with raw tensors.

        If a network that was called has trainable parameters and no optimizer has any of its parameters, the
        strangers are its master copies and no network is added.
        """
        claims = self._claims
        known = [parameter for reference in claims.parameters.values() if (parameter := reference()) is not None]
        is_copied = any(parameter.requires_grad for parameter in known)
        if not strangers or (is_copied and not any(id(parameter) in self._trained for parameter in known)):
            return
        for root in owners(self.torch, strangers):
            self.add(root)
            claims.claim_network(root)
        for parameter in strangers:
            if id(parameter) not in claims.parameters:
                claims.parameters[id(parameter)] = weakref.ref(parameter)
                self._loose_elements += elements(parameter)
                claims.claim(parameter, "parameter")

    def _trained_shape(self, parameter: Any) -> tuple[int, ...] | None:
        return tuple(parameter.shape) if parameter is not None and id(parameter) in self._trained else None

    def _are_copies(self, tensors: list[Any], shapes: list[tuple[int, ...]]) -> bool:
        plain = self.torch.Tensor
        return all(type(t) is plain and tuple(t.shape) == shape for t, shape in zip(tensors, shapes, strict=True))


def describe_network(root: Any, parameters: list[Any]) -> dict[str, Any]:
    """Return a network's class, the class's module, its current number of parameters, and the number to train."""
    others, trainable_of_others = elsewhere(root)
    return {
        "class": type(root).__name__,
        "module": type(root).__module__,
        "parameters": sum(elements(parameter) for parameter in parameters) + others,
        "trainable_parameters": sum(elements(p) for p in parameters if p.requires_grad) + trainable_of_others,
    }


def owners(torch: Any, parameters: list[Any]) -> list[Any]:
    """Return the outermost existing modules that own some of these parameters."""
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


def merge_descriptions(networks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return networks that one optimizer trains (an actor and a critic) as one: `Actor + Critic`."""
    sums = {name: sum(network[name] for network in networks) for name in ("parameters", "trainable_parameters")}
    names = {name: " + ".join(dict.fromkeys(network[name] for network in networks)) for name in ("class", "module")}
    return {**names, **sums}
