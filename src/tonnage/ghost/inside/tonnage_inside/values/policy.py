"""Values that are known, rules for others, and the assumptions that were made."""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tonnage_recorder import outcome
from tonnage_recorder.native import Native

from .integers import hidden_from_modes, is_sparse

MOST_BRANCHES = 20
"""Branches on computed numbers that are listed one by one."""

BIG_ELEMENTS = 1 << 16
"""Size from which tensors are not filled on the host, and masks not written."""

ASSUMED = {
    "numbers": "computed numbers read as plausible ones: losses and norms are positive, chances equal, indices 0",
    "finite": "torch.isfinite of a computed tensor is True",
    "all": "tensor.all() of a computed mask is True",
    "checks": "conditions that were computed and checked hold",
    "exact": "no computed number equals the constant that it is compared with",
    "nonzero": "nonzero() (also boolean indexing, where(mask)) of a computed mask selects every element",
    "descending": "L-BFGS does not converge: each step makes all its iterations, and each of them is remembered",
    "sized": "unique of computed values finds one value (of rows: all), and bincount and one_hot find one class",
    "routing": "topk, argmax, max of computed scores pick in turn: each expert gets its balanced share of the tokens",
    "detected": "a detector's samplers find as many objects as they take, and each box that it finds has one class",
    "outliers": "LLM.int8 finds no column with a value above its threshold, which it would keep in 16 bits",
    "padding": "attention masks computed on the GPU hold no padding",
    "packing": "position_ids computed on the GPU are one unpacked sequence",
    "generation": "generation meets no end token: it goes on to its length limit",
    "weights": "pretrained weights were not read: shapes and dtypes come from the configuration",
    "tokenizer": "the folder has no tokenizer: the engine takes and gives tokens, not text",
    "sampled": "an engine samples one token, which ends no text, for each complete prompt; it accepts no drafted one",
    "jit": "kernels that FlashInfer or CUTLASS would compile were not compiled: they do nothing, the rest is run",
    "files": "what was saved went into a folder that was deleted, without values; nothing was sent to the Hub",
    "trackers": "experiment trackers worked offline, in a folder that was deleted where they can be told one",
    "initialisation": "host tensors were not filled with random numbers",
    "host_optimizer": "optimizers did no arithmetic on host tensors (offloaded parameters)",
    "compiled_adam": "DeepSpeed's FusedAdam and CPUAdam were not compiled: their kernels do nothing, the rest is run",
    "swapped": "DeepSpeed's files of tensors were not written: reads and writes of them are counted alone",
}

DECIDING = frozenset({"all", "checks", "exact", "nonzero", "sized", "routing"})
"""Assumptions by which a patch gives the program a value that it would otherwise have copied from the card."""


class Policy:
    """Known values and assumptions of one process."""

    def __init__(self, torch: Any, native: Native | None) -> None:
        self.torch = torch
        self.native = native
        self._used: dict[str, None] = {}
        self._branches: dict[str, str] = {}
        self.completed_steps: Callable[[], int] = lambda: 0
        """Returns the number of steps that the program has made."""
        self._library = torch.library.Library("aten", "IMPL")
        self._turns: dict[int, tuple[Any, Callable[[Any], Any]]] = {}
        self.mask_rule: Callable[[Any], Any] | None = None
        """The rule of `telling`."""
        self._quiet = False

    def assumed(self) -> list[str]:
        """Return one sentence for each assumption that was made, and one for each branch on a computed number."""
        branches = list(self._branches.values())
        more = [f"{len(branches) - MOST_BRANCHES} more branches like these"] if len(branches) > MOST_BRANCHES else []
        return [*(ASSUMED[name] for name in self._used), *branches[:MOST_BRANCHES], *more]

    def note_branch(self, what: str) -> None:
        """Note that the program goes one of two ways by a computed number; `what` was found true or false."""
        place = outcome.locate_caller()
        if not self._quiet and place not in self._branches:
            self._branches[place] = f"{place}: {what}, from a computed number that reads as a plausible one"

    def use(self, name: str) -> None:
        """Note that the assumption `name` was made, unless a more telling one covers it."""
        if name in DECIDING and self.native is not None:
            self.native.note_computed_read()
        if not self._quiet:
            self._used[name] = None

    @contextlib.contextmanager
    def covered(self) -> Iterator[None]:
        """Note no assumptions inside: the caller notes one that covers them."""
        self._quiet, before = True, self._quiet
        try:
            yield
        finally:
            self._quiet = before

    @contextlib.contextmanager
    def using_mask_rule(self, rule: Callable[[Any], Any]) -> Iterator[None]:
        """Give masks that are not known the values `rule(shape)`, unless it returns None."""
        self.mask_rule, before = rule, self.mask_rule
        try:
            yield
        finally:
            self.mask_rule = before

    def read(self, tensor: Any) -> Any:
        """Return the tensor's values on the host if they are known or follow a rule (see `follow`), else None."""
        if self.torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # of vmap: it stands for many
            return None
        values = self.known(tensor)
        following = self.following(tensor) if values is None else None
        return values if following is None else following()

    def known(self, tensor: Any) -> Any:
        """Return the tensor's values on the host if they are known, else None."""
        if not tensor.is_cuda:
            return tensor
        if is_sparse(self.torch, tensor):
            return None
        if self.native is None or tensor.numel() == 0:
            return tensor.cpu()
        reach = _reach(tensor)
        if not self.native.known(tensor.data_ptr(), reach * tensor.element_size()):
            return None
        with hidden_from_modes(self.torch):
            flat = self.torch.empty(reach, dtype=tensor.dtype, device="cpu")
            self.native.copy_values(flat.data_ptr(), tensor.data_ptr(), flat.nbytes)
            return self.torch.as_strided(flat, tensor.shape, tensor.stride())

    def readable(self, tensor: Any) -> Any:
        """Return the values on the host that a read of a tensor on the card gives: known or guessed, else None."""
        if self.native is None or not tensor.numel() or is_sparse(self.torch, tensor) or not self.is_readable(tensor):
            return None
        reach = _reach(tensor)
        with hidden_from_modes(self.torch):
            flat = self.torch.empty(reach, dtype=tensor.dtype, device="cpu")
            self.native.copy_values(flat.data_ptr(), tensor.data_ptr(), flat.nbytes)
            return self.torch.as_strided(flat, tensor.shape, tensor.stride())

    def is_readable(self, tensor: Any) -> bool:
        """Return whether a tensor on the card is known or was guessed."""
        return self.native is not None and self.native.readable(*memory_of(tensor))

    def forget(self, tensor: Any) -> None:
        """Forget what was known or guessed of a tensor that a kernel has overwritten."""
        self.forget_memory(*memory_of(tensor))

    def forget_memory(self, address: int, count_bytes: int) -> None:
        """Forget what was known or guessed of a part of the card's memory."""
        if self.native is not None and count_bytes:
            self.native.forget_values(address, count_bytes)

    def guess(self, tensor: Any, values: Any) -> None:
        """Let a tensor that was computed read as `values`, on the host and in what follows from it.

        What lies in the gaps of a tensor reads as the first of them, unless it reads as something already.
        """
        torch = self.torch
        if self.native is None or tensor.numel() == 0 or 0 in tensor.stride():
            return
        with hidden_from_modes(torch):
            memory = torch.as_strided(tensor, (_reach(tensor),), (1,), tensor.storage_offset())
            flat = self.readable(memory)
            if flat is None:
                flat = torch.full(memory.shape, values.flatten()[0].item(), dtype=tensor.dtype, device="cpu")
            torch.as_strided(flat, tensor.shape, tensor.stride()).copy_(values)
            self.native.guess(memory.data_ptr(), flat.data_ptr(), flat.nbytes)

    def write(self, tensor: Any, values: Any) -> None:
        """Make `values` known at `tensor`, by one copy to the card that needs no memory there.

        A tensor with gaps that are not known stays as it is: a copy could not leave them out.
        """
        torch, reach = self.torch, _reach(tensor)
        if tensor.numel() == 0 or 0 in tensor.stride():
            return
        with hidden_from_modes(torch):
            memory = torch.as_strided(tensor, (reach,), (1,), tensor.storage_offset())
            whole = reach == tensor.numel()
            flat = torch.empty(reach, dtype=tensor.dtype, device="cpu") if whole else self.known(memory)
            if flat is not None:
                torch.as_strided(flat, tensor.shape, tensor.stride()).copy_(values)
                if self.native is None:
                    memory.copy_(flat)
                else:
                    self.native.copy_values(memory.data_ptr(), flat.data_ptr(), flat.nbytes)

    def follow(self, tensor: Any, rule: Callable[[Any], Any]) -> None:
        """Give a new tensor, and all views of it, the values `rule(offsets of its elements)`."""
        storage = tensor.untyped_storage()
        reductions = importlib.import_module("torch.multiprocessing.reductions")
        self._turns = {address: entry for address, entry in self._turns.items() if not entry[0].expired()}
        self._turns[storage.data_ptr()] = (reductions.StorageWeakRef(storage), rule)

    def rule(self, tensor: Any) -> Callable[[Any], Any] | None:
        """Return the rule that gives a tensor's values from their offsets; None if its memory has no rule."""
        if is_sparse(self.torch, tensor):
            return None
        entry = self._turns.get(tensor.untyped_storage().data_ptr()) if self._turns else None
        return None if entry is None or entry[0].expired() else entry[1]

    def following(self, tensor: Any) -> Callable[[], Any] | None:
        """Return a function that computes a tensor's values by its rule and notes that; None if it has no rule."""
        torch, rule = self.torch, self.rule(tensor)
        if rule is None:
            return None
        start, dtype = tensor.storage_offset(), tensor.dtype
        layout = [*zip(tensor.shape, tensor.stride(), strict=True)]

        def values() -> Any:
            self.use("routing")
            offsets = torch.tensor(start)
            for size, stride in layout:
                offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
            return rule(offsets).to(dtype)

        return values

    def filled(self, result: Any, values: Any) -> Any:
        """Return a result after giving it these values, by the program's own copy if it is wrapped."""
        if not self.is_plain(result):
            return result.copy_(values)
        self.write(result, values)
        return result

    def is_plain(self, tensor: Any) -> bool:
        """Return whether this is a tensor with its own memory: not sparse, and not one of vmap for many."""
        wrapped = self.torch._C._functorch.is_functorch_wrapped_tensor
        return type(tensor) is self.torch.Tensor and not wrapped(tensor) and not is_sparse(self.torch, tensor)

    def implement(self, operation: str, kernel: Callable[..., Any], device: str) -> None:
        """Replace torch's own kernel of an operation."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._library.impl(operation, kernel, device)


def memory_of(tensor: Any) -> tuple[int, int]:
    """Return address and bytes of a tensor's memory, from its first element to its last."""
    return tensor.data_ptr(), _reach(tensor) * tensor.element_size() if tensor.numel() else 0


def _reach(tensor: Any) -> int:
    """Return the number of elements from a tensor's first to its last, including gaps."""
    if tensor.is_contiguous():
        return int(tensor.numel()) or 1
    return int(1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
