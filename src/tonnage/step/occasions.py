"""What happens in a training run beside its steps: resuming from a checkpoint, evaluating, generating, saving one.

Each is a phase of its own in the report.  Whoever watches the run hears of it through `listen`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tonnage.errors import CannotEstimate, UsageError
from tonnage.step import model as models

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.step.step import ReadyStep, Step

_listeners: list[Callable[[str], None]] = []


def listen(heard: Callable[[str], None]) -> None:
    """From now on call `heard` with the name of each phase as it begins, and with an empty one at its end."""
    _listeners.append(heard)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Everything inside is this phase."""
    for heard in _listeners:
        heard(name)
    try:
        yield
    finally:
        for heard in _listeners:
            heard("")


def before_steps(ready: ReadyStep) -> None:
    """What the job asks for before its first step."""
    if ready.step.job.resume != "none":
        with phase("resume"):
            resume(ready)


def besides_steps(ready: ReadyStep) -> None:
    """Whatever the job asks for besides its steps, each once."""
    job = ready.step.job
    if job.eval_batch is not None:
        with phase("evaluate"):
            evaluate(ready)
    if job.generate is not None:
        with phase("generate"):
            generate(ready)
    if job.save_checkpoint != "none":
        with phase("save"):
            save(ready)


@contextmanager
def _inference(ready: ReadyStep) -> Iterator[None]:
    ready.model.eval()
    try:
        with torch.no_grad(), ready.around(), ready.autocast():
            yield
    finally:
        ready.model.train()


def evaluate(ready: ReadyStep) -> None:
    """Forward passes over evaluation batches.

    With `eval_logits` batches their logits are gathered on the card, as Hugging Face's Trainer does when it computes
    metrics: what was gathered and the new ones are joined into new memory after each batch.
    """
    job = ready.step.job
    gathered: torch.Tensor | None = None
    with _inference(ready):
        for _ in range(job.eval_logits or 1):
            output = ready.model(**ready.next_batch(sequences=job.eval_batch))
            if job.eval_logits is not None:
                logits = _logits(output)
                gathered = logits if gathered is None else torch.cat((gathered, logits))
            del output


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise CannotEstimate(
            "The forward returns no logits that could be kept; leave eval-logits out, or choose loss plain."
        )
    return logits.detach()


def generate(ready: ReadyStep) -> None:
    """Greedy generation by transformers with its cache of keys and values, for as many prompts as a micro-batch has.

    Prompts and what is generated are together as long as a training sequence.
    """
    job = ready.step.job
    assert job.generate is not None
    network = models.hugging_face(ready.model)
    if network is None or not network.can_generate():
        raise CannotEstimate(f"{job.model.name} is not a network of transformers that generates; leave generate out.")
    read = _read(ready, network)
    with _inference(ready), _own_forward(network):
        _generating(ready.model, network)(
            **read,
            max_new_tokens=job.generate,
            min_new_tokens=job.generate,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )


def _generating(called: torch.nn.Module, network: Any) -> Any:
    """The network's `generate`; of adapters around it theirs, before which FSDP2 gathers what is in no layer."""
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    if called is network or not isinstance(called, FSDPModule):
        return network.generate
    register_fsdp_forward_method(called, "generate")
    return called.generate


@contextmanager
def _own_forward(network: Any) -> Iterator[None]:
    """Losses in slices put a forward without logits in the place of the network's own."""
    replaced = vars(network).pop("forward", None)
    try:
        yield
    finally:
        if replaced is not None:
            network.forward = replaced


_SOUNDS = "input_features"
"""What a network that writes what it hears is given."""


def _read(ready: ReadyStep, network: Any) -> dict[str, torch.Tensor]:
    """What words are generated from: prompts, or as many sounds."""
    if network.main_input_name == _SOUNDS:
        return {_SOUNDS: ready.next_batch()[_SOUNDS]}
    prompt = _prompts(ready.step.job, network, ready.step.world.device)
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


def _prompts(job: Job, network: Any, device: torch.device) -> torch.Tensor:
    length = job.seq_len - (job.generate or 0)
    if network.config.is_encoder_decoder:
        length = job.seq_len
    if length < 1:
        raise UsageError(f"generate is {job.generate}, and a sequence has {job.seq_len} tokens; choose fewer.")
    vocabulary = network.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (job.micro_batch, length)).to(device)


def resume(ready: ReadyStep) -> None:
    """Weights and optimizer states from a checkpoint, as torch.load and load_state_dict bring them in.

    `gpu`: the whole checkpoint is on the card first (map_location), beside the weights; states are then taken as they
    are.  `cpu`: it is on the host, and goes to the card piece by piece.  Nothing is read: the checkpoint is made up.
    """
    step = ready.step
    if step.job.method == "qlora":
        raise CannotEstimate(
            "Resuming is not known for quantized weights, which a checkpoint of adapters leaves out; leave resume "
            "out, or choose method lora."
        )
    if step.shards_parameters or any(type(one) not in _TORCHS for one in ready.optimizers):
        raise CannotEstimate(
            "Resuming is known for whole parameters with torch's AdamW, SGD or Muon only, and here there is "
            f"{_in_the_way(step)}; leave resume out, or that."
        )
    place = step.world.device if step.job.resume == "gpu" else torch.device("cpu")
    states = [_states_after_a_step(optimizer) for optimizer in ready.optimizers]
    weights, *loaded = _made_up([ready.model.state_dict(), *states], place)
    ready.model.load_state_dict(weights)
    for optimizer, state in zip(ready.optimizers, loaded, strict=True):
        optimizer.load_state_dict(state)


def _in_the_way(step: Step) -> str:
    """What of the plan makes the parameters others than whole, or the optimizer another one."""
    plan = step.plan
    if plan.shard not in ("none", "ddp"):
        return f"shard {plan.shard}"
    if plan.optimizer_in_backward:
        return "optimizer-in-backward"
    if plan.optimizer_offload != "none":
        return f"optimizer-offload {plan.optimizer_offload}"
    return f"precision {plan.precision}" if plan.precision == "megatron-bf16" else f"optimizer {plan.optimizer}"


_TORCHS = (torch.optim.AdamW, torch.optim.SGD, getattr(torch.optim, "Muon", torch.optim.AdamW))
"""Whose step can be done in shapes alone; Adafactor's asks for values."""


def _states_after_a_step(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state_dict of such an optimizer after one step, in shapes alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), models.quiet():  # whoever watches optimizers asks where these tensors are
        groups = []
        for group in optimizer.param_groups:
            like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in group["params"]]
            empty = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in like]
            parameters = [torch.nn.Parameter(tensor) for tensor in empty]
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            groups.append({**group, "params": parameters})
        shapes = type(optimizer)(groups)
        shapes.step()
        found: dict[str, Any] = shapes.state_dict()
    return found


def _made_up(values: Any, place: torch.device) -> Any:
    """The same structure with memory of its own at a place, each tensor once; counts of steps stay on the host."""
    made: dict[int, torch.Tensor] = {}

    def at_place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = (
                torch.ones(value.shape, dtype=value.dtype)
                if value.device.type == "cpu" and value.ndim == 0
                else torch.empty(value.shape, dtype=value.dtype, device=place)
            )
        return made[id(value)]

    return tree_map(at_place, values)


def _known_to_torch(optimizer: torch.optim.Optimizer) -> Iterable[torch.optim.Optimizer]:
    """The optimizer; where each parameter has its own, which is updated in backward, all of them."""
    parts: dict[Any, torch.optim.Optimizer] = getattr(optimizer, "each", {None: optimizer})
    return parts.values()


def _states(optimizer: torch.optim.Optimizer, job: Job) -> dict[str, Any]:
    """What an optimizer has; of one whose states are divided by parameter (ZeRO-1) this rank's part.

    Raises CannotEstimate where all of them are wanted: ranks would send each other pickles, which no ghost can read.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found: dict[str, Any]
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        found = optimizer.state_dict()
        return found
    if job.save_checkpoint == "full":
        raise CannotEstimate(
            "How ZeroRedundancyOptimizer gathers all states is not known: its ranks send each other pickles; choose "
            "save-checkpoint sharded, or shard zero2."
        )
    found = optimizer.optim.state_dict()
    return found


def save(ready: ReadyStep) -> None:
    """Weights and optimizer states to the host, piece by piece as torch.save and torch's distributed checkpoints do.

    `full`: of the whole network, gathered from the shards; `sharded`: what this rank has.  Nothing is written.
    """
    if ready.step.shards_parameters:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        whole = ready.step.job.save_checkpoint == "full"
        options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
        each = [one for optimizer in ready.optimizers for one in _known_to_torch(optimizer)]
        states: Any = get_state_dict(ready.model, each, options=options)
    else:
        states = [ready.model.state_dict(), *(_states(optimizer, ready.step.job) for optimizer in ready.optimizers)]
    for tensor in tree_leaves(states):
        if isinstance(tensor, torch.Tensor):
            tensor = getattr(tensor, "_local_tensor", tensor)
            tensor.to("cpu")
