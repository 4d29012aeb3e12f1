"""torchvision's Mask R-CNN, tiny: trains on two images, then finds boxes in them."""

import json

import torch
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator

backbone = torch.nn.Conv2d(3, 8, 16, stride=16)
backbone.out_channels = 8  # type: ignore[assignment]
anchors = AnchorGenerator(sizes=((32, 64, 128),), aspect_ratios=((0.5, 1.0, 2.0),))
heads = {"rpn_anchor_generator": anchors, "box_detections_per_img": 40}
network = MaskRCNN(backbone, num_classes=5, min_size=256, max_size=256, **heads).cuda()
seen: dict[str, list[int]] = {"boxes": [], "masks": []}
network.roi_heads.box_head.register_forward_pre_hook(lambda _, given: seen["boxes"].append(len(given[0])))
network.roi_heads.mask_head.register_forward_pre_hook(lambda _, given: seen["masks"].append(len(given[0])))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
images = [torch.rand(3, 256, 256, device="cuda") for _ in range(2)]
objects = {
    "boxes": torch.tensor([[8.0, 8.0, 99.0, 99.0]], device="cuda"),
    "labels": torch.tensor([3], device="cuda"),
    "masks": torch.ones(1, 256, 256, dtype=torch.uint8, device="cuda"),
}
sum(network(images, [objects, objects]).values()).backward()
optimizer.step()
with torch.no_grad():
    found = network.eval()(images)
print(json.dumps({**seen, "found": [len(each["boxes"]) for each in found]}), flush=True)
optimizer.step()
