"""Claims: which memory holds parameters, gradients or optimizer states."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from .marks import Marks
from .sharded import find_unreduced
from .tensors import ORDINARY, plain_tensors, tensors_in


class Claims:
    """The owners of memory, as they are found while the program runs.

    `address` returns where a tensor's memory begins on the device that is watched, and 0 for memory elsewhere.
    """

    def __init__(self, torch: Any, marks: Marks, address: Callable[[Any], int]) -> None:
        self.torch = torch
        self.address = address
        self.rows: list[tuple[int, int, str]] = []
        """Mark, address and category of each claim."""
        self.parameters: dict[int, weakref.ref[Any]] = {}
        """Known parameters by their `id`."""
        self._marks = marks
        self._addresses: dict[int, int] = {}

    def claim(self, tensor: Any, category: str) -> None:
        """Assign the memory behind `tensor`, as it was when the current mark began, to this category."""
        number = self._marks.latest()
        for plain in plain_tensors(tensor):
            address = self.address(plain)
            if address:
                self.rows.append((number, address, category))

    def claim_network(self, root: Any) -> None:
        """Claim all parameters and buffers of a network as parameters."""
        # By their names: Megatron's wrapper has a list where modules have the method `buffers`.
        for _, tensor in [*root.named_parameters(), *root.named_buffers()]:
            self.claim(tensor, "parameter")

    def begin_pass(self) -> None:
        """Forget where gathered parameters are: in the next pass, new memory may be where the old was."""
        self._addresses.clear()

    def claim_gathered(self, module: Any) -> None:
        """Claim a module's own parameters where they are now, once for each forward and backward pass.

        Sharded parameters are gathered into new memory for each use.
        """
        for parameter in module._parameters.values():
            if parameter is None or self._is_claimed_there(parameter):
                continue
            for plain in plain_tensors(parameter):
                address = self.address(plain)
                if address and self._addresses.get(id(parameter)) != address:
                    self._addresses[id(parameter)] = address
                    self.rows.append((self._marks.latest(), address, "parameter"))

    def claim_gradients(self, roots: Iterable[Any]) -> None:
        """Claim the gradients of all known parameters, and those that FSDP2 keeps unreduced in these networks."""
        for reference in self.parameters.values():
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                self.claim(parameter.grad, "gradient")
        for root in list(roots):
            for gradient in find_unreduced(root):
                self.claim(gradient, "gradient")

    def claim_updated(self, parameters: Iterable[Any]) -> None:
        """Claim the gradients of parameters that are about to be updated, and the master copies among them."""
        for parameter in parameters:
            if id(parameter) not in self.parameters:
                self.claim(parameter, "optimizer_state")  # master copies that no module owns
            if parameter.grad is not None:
                self.claim(parameter.grad, "gradient")

    def claim_states(self, optimizer: Any) -> None:
        """Claim every tensor in the state of an optimizer, if there is one."""
        for state in optimizer.state.values() if optimizer is not None else ():
            for tensor in tensors_in(state, self.torch.Tensor):
                self.claim(tensor, "optimizer_state")

    def is_here(self, tensor: Any) -> bool:
        """Return whether a tensor is on the device that is watched."""
        return any(self.address(plain) for plain in plain_tensors(tensor))

    def is_trained_here(self, parameter: Any) -> bool:
        """Return whether a parameter is trained on the device that is watched."""
        return parameter.requires_grad and self.is_here(parameter)

    def _is_claimed_there(self, parameter: Any) -> bool:
        """Return whether an ordinary parameter is where it was claimed in this pass; true for most, and quick."""
        if type(parameter).__module__ not in ORDINARY or self.torch._C._len_torch_function_stack():
            return False
        try:
            return bool(self._addresses.get(id(parameter)) == parameter.data_ptr())
        except RuntimeError:  # torch.func's grad and vmap have tensors that stand for others
            return False
