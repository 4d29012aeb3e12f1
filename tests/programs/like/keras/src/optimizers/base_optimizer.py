"""As much of Keras's optimizer as whoever listens to it meets: variables that hold tensors, and `apply`."""

import torch


class Variable:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = torch.nn.Parameter(value, requires_grad=False)


class BaseOptimizer:
    def __init__(self) -> None:
        self.variables: list[Variable] = []

    def apply(self, grads: list[torch.Tensor], trainable_variables: list[Variable] | None = None) -> None:
        assert trainable_variables is not None
        if not self.variables:
            self.variables = [Variable(torch.zeros_like(each.value)) for each in trainable_variables]
        for gradient, moment, variable in zip(grads, self.variables, trainable_variables, strict=True):
            moment.value.add_(gradient)
            variable.value.sub_(moment.value)
