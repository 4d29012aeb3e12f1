"""torchvision's two-stage detectors: how many of the boxes that a network finds are sampled, and kept.

The match of boxes and objects is computed.  If a computed mask selected every box, losses and masks would be those of
all proposals, while a sampler takes at most 512 of an image, a quarter of them objects.
"""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .integers import known_integers

if TYPE_CHECKING:
    from .policy import Policy

DENOISING = ("d_fine", "deimv2", "pp_doclayout_v2", "pp_doclayout_v3", "rt_detr", "rt_detr_v2")
"""Types of transformers whose queries are noised boxes."""


def patch_sampler(policy: Policy, module: ModuleType) -> None:
    """Patch `torchvision.models.detection._utils`: a sampler finds as many of both kinds as it takes."""
    kind, torch = module.BalancedPositiveNegativeSampler, policy.torch
    original = kind.__call__

    @functools.wraps(original)
    def call(sampler: Any, matched: Any) -> Any:
        if not any(each.is_cuda for each in matched):
            return original(sampler, matched)
        policy.use("detected")
        with policy.covered():
            masks = original(sampler, matched)
        for objects, others in zip(*masks, strict=True):
            positions = torch.arange(objects.numel())
            is_object = positions < _objects(sampler)
            policy.write(objects, is_object)
            policy.write(others, ~is_object & (positions < sampler.batch_size_per_image))
        return masks

    kind.__call__ = call


def patch_proposals(policy: Policy, module: ModuleType) -> None:
    """Patch `torchvision.models.detection.rpn`: the loss is that of the sampled anchors."""
    kind = module.RegionProposalNetwork
    kind.compute_loss = _following(policy, kind.compute_loss)


def patch_heads(policy: Policy, module: ModuleType) -> None:
    """Patch `torchvision.models.detection.roi_heads`: losses and masks of sampled boxes, one class for each found."""
    kind, torch = module.RoIHeads, policy.torch
    sample, finish = kind.select_training_samples, kind.postprocess_detections

    @functools.wraps(sample)
    def select_training_samples(heads: Any, *args: Any) -> Any:
        sampled = sample(heads, *args)
        for labels in sampled[2]:
            if labels.is_cuda:
                policy.write(labels, torch.arange(labels.numel()) < _objects(heads.fg_bg_sampler))
        return sampled

    @functools.wraps(finish)
    def postprocess_detections(heads: Any, logits: Any, regression: Any, proposals: Any, *args: Any) -> Any:
        if not logits.is_cuda:
            return finish(heads, logits, regression, proposals, *args)
        classes = logits.shape[-1] - 1  # the first is background
        scored = {len(boxes) * classes for boxes in proposals}

        def one_each(shape: Any) -> Any:
            return torch.arange(shape[-1]) % classes == 0 if shape[-1] in scored else None

        policy.use("detected")
        with policy.covered(), policy.using_mask_rule(one_each):
            return finish(heads, logits, regression, proposals, *args)

    kind.select_training_samples = select_training_samples
    kind.postprocess_detections = postprocess_detections
    kind.forward = _following(policy, kind.forward)


def patch_denoising(policy: Policy, module: ModuleType) -> None:
    """Make known which noised queries of RT-DETR's family come from real boxes: that follows from their counts."""
    torch = policy.torch
    original = module.get_contrastive_denoising_training_group  # type: ignore[attr-defined]

    @functools.wraps(original)
    def group(targets: Any, *args: Any, **kwargs: Any) -> Any:
        counts = torch.tensor([len(target["class_labels"]) for target in targets]).unsqueeze(1)
        most = int(counts.max())

        def positive(shape: Any) -> Any:
            places = torch.arange(shape[-1]).expand(shape) % (2 * most)
            return places < counts

        with policy.using_mask_rule(positive) if targets[0]["class_labels"].is_cuda else contextlib.nullcontext():
            return original(targets, *args, **kwargs)

    module.get_contrastive_denoising_training_group = group  # type: ignore[attr-defined]


def _objects(sampler: Any) -> int:
    """Return the most objects that a sampler takes of an image."""
    return int(sampler.batch_size_per_image * sampler.positive_fraction)


def _following(policy: Policy, original: Any) -> Any:
    """Return the method with known results for computations from known masks and labels."""
    integers = known_integers(policy)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        with integers():
            return original(*args, **kwargs)

    return method
