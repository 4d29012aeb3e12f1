"""Batches with their targets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from networks import tiny_job
from tonnage.errors import CannotEstimate
from tonnage.step.inputs import targets


class Detector(nn.Module):
    """A detector as transformers has them, without weights."""

    def __init__(self, model_type: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=model_type, num_labels=3)

    def forward(self, pixel_values: Any, labels: Any = None) -> None: ...


class Blind(Detector):
    """A detector without a loss."""

    def forward(self, pixel_values: Any) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("model_type", "size"), [("detr", (800, 1066)), ("rt_detr", (640, 640)), ("rf_detr", (560, 560))]
)
def test_objects_are_detected_in_images_as_processors_make_them(model_type: str, size: tuple[int, int]) -> None:
    made = targets.detected_objects(tiny_job("llama"), Detector(model_type), torch.float32)
    assert made["pixel_values"].shape[-2:] == size
    assert made["boxes"].shape[1:] == (targets.OBJECTS, 4)


def test_a_detector_without_a_loss_is_refused() -> None:
    with pytest.raises(CannotEstimate, match="Blind takes no labels"):
        targets.detected_objects(tiny_job("llama"), Blind("detr"), torch.float32)
