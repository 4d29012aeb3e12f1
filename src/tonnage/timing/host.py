"""Seconds that the host of a machine adds to a step: an optimizer that runs there, and copies that nothing hides.

The processors' memory decides how long the optimizer takes, and all ranks of a machine share it.
"""

from typing import Final

from tonnage.cluster import Cluster, Device
from tonnage.timing import schedule
from tonnage.timing.memory import offloaded_bytes, resting_bytes
from tonnage.timing.shape import Shape
from tonnage.timing.work import Work

_SERVER_BYTES_PER_SECOND: Final = 105e9
"""Bandwidth of the memory of a server, in an optimizer of one pass, all ranks together.

28 bytes a weight: 8 billion take 8 ranks 2.1 s (ml-engineering's Llama 3.1 8B on H200 and on B200, six lengths each);
70 billion of 14 bytes take 8 less than 13.6 (torchtune's pull request 993)."""

_DESKTOP_BYTES_PER_SECOND: Final = 35e9
"""The same for machines that carry cards of workstations: 28 (Qwen3 4B beside an RTX PRO 6000, prime-rl's pull
request 3210) to 41 (torchao's ViT of 1.1 billion beside a Ryzen 5600, its README, less our link's copies)."""

_LOOPED: Final = 4.6
"""Passes over memory of torch's step-by-step arithmetic / those of an optimizer of one pass: between our
own H200's record (4.2) and prime-rl's 3210 (20.6 s and 4.1 in one pass, which changed the gradients' way as well)."""

_ONE_PASS_BYTES: Final = 28
"""For each fp32 weight: weight, gradient and two states are read, three of them written."""

_LINK: Final = 0.85
"""Part of the link's bandwidth that copies reach."""

_ACTIVATIONS_BESIDE: Final = 0.8
"""Part of the copies of activations on a stream of their own that computation hides: 77 to 93 % by
our link and step (torchtitan's pull request 3521: 5, 8 and 10 GB of Llama 8B on H100), 99 % (torchtune, A100)."""

_WEIGHTS_BESIDE: Final = 0.5
"""Part of the copies of a layer's weights and gradients that other layers' computation hides: an assumption."""

_STATES: Final = {"sgd": 0.4, "sgd-plain": 0.2, "muon": 2.0}
"""Passes of other optimizers on the host / Adam's, by the tensors that they read and write; Adafactor makes as many.
Nobody measured them there."""


def update_seconds(trained: float, work: Work, cluster: Cluster) -> float:
    """Return the seconds of the optimizer on the host; `trained`: weights that each rank updates in all."""
    part = 1.0 if work.param_offload else work.optimizer_offload
    passes = 1.0 if work.optimizer == "adamw-fused" else _LOOPED * _STATES.get(work.optimizer, 1.0)
    moved = _ONE_PASS_BYTES * passes * (0.5 if work.states_narrow else 1.0)
    return part * trained * cluster.gpus_per_node * moved / _bytes_per_second(cluster.device)


def copy_seconds(shape: Shape, work: Work, cluster: Cluster, weights: float, trained: float, hiding: float) -> float:
    """Return the seconds of copies between card and host that a step does not hide.

    `weights`: those of a rank; `trained`: those of them that it updates; `hiding`: seconds of a micro-batch's
    computation.
    """
    device = cluster.device
    link = device.host_link_bytes_per_second or device.pcie_bytes_per_second
    if not (work.optimizer_offload or work.param_offload or work.activation_offload) or link is None:
        return 0.0
    rate = _LINK * link
    gradients = trained * work.gradient_bytes / work.gradient_shards
    total = 0.0
    if work.optimizer_offload and not work.param_offload:
        total += work.optimizer_offload * gradients * (1 + work.weight_bytes / work.gradient_bytes) / rate
    if work.param_offload:
        coming = weights * resting_bytes(shape, work) / work.axes.shards / rate * (2 if work.gathers_again else 1)
        last = schedule.exposed_seconds(coming + gradients / rate, hiding, _WEIGHTS_BESIDE)
        others = schedule.exposed_seconds(coming, hiding, _WEIGHTS_BESIDE) if work.gradients_whole else last
        total += last + (work.grad_accum - 1) * others
    if work.activation_offload:
        there_and_back = 2 * offloaded_bytes(shape, work) * shape.layers / work.axes.pp / rate
        beside = schedule.exposed_seconds(there_and_back, hiding, _ACTIVATIONS_BESIDE)
        total += work.grad_accum * (beside if work.copies_beside else there_and_back)
    return total


def assumption(cluster: Cluster) -> str:
    """Return the sentence about what is assumed of a host on which an optimizer runs."""
    rate = _bytes_per_second(cluster.device) / 1e9
    return (
        f"time: a machine's host is assumed to move {rate:.0f} GB/s in the optimizer's step, all its ranks together; "
        "published steps were up to nine times slower"
    )


def _bytes_per_second(device: Device) -> float:
    """Return the memory bandwidth of the usual host of a card."""
    return _DESKTOP_BYTES_PER_SECOND if device.id.startswith("rtx") else _SERVER_BYTES_PER_SECOND
