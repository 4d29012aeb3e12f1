"""CUDA graphs: a whole step captured and replayed, and layers made graphed callables."""

import gc
import json

import torch
from torch import nn


def captured() -> None:
    """Capture forward, backward and step once, with what programs ask of values on the way; replay three times."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    static = torch.randn(64, 256, device="cuda")
    words = torch.arange(64).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad()
            model(static).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        output = model(static)
        sound = torch.isfinite(output).all() & (words != 100).all()
        loss = output.square().mean() * sound
        loss.backward()
        optimizer.step()
    for _ in range(3):
        static.copy_(torch.randn(64, 256, device="cuda"))
        graph.replay()


def graphed() -> None:
    """A layer whose forward and backward are graphs, inside a plain loop."""
    layer = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
    head = nn.Linear(256, 8).cuda()
    layer = torch.cuda.make_graphed_callables(layer, (torch.randn(64, 256, device="cuda", requires_grad=True),))
    optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.1)
    for _ in range(3):
        head(layer(torch.randn(64, 256, device="cuda"))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def main() -> None:
    gc.disable()  # graphs are freed where they are let go, not where Python happens to collect
    captured()
    graphed()
    print(json.dumps({"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}))


if __name__ == "__main__":
    main()
