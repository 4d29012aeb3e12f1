"""Routers as they are written by hand: which tokens an expert gets is asked in many ways.

python counted_experts.py
"""

import json

import torch
from torch import nn

TOKENS, EXPERTS, CHOICES, WIDTH = 240, 8, 2, 16


def scores() -> torch.Tensor:
    return torch.randn(TOKENS, EXPERTS, device="cuda").softmax(-1)


def chosen() -> torch.Tensor:
    return scores().topk(CHOICES, dim=-1).indices


def bincount() -> list[int]:
    return chosen().flatten().bincount(minlength=EXPERTS).tolist()


def bincount_without_a_number() -> list[int]:
    return torch.bincount(chosen().view(-1)).tolist()


def histogram() -> list[int]:
    return [int(count) for count in torch.histc(chosen().view(-1), bins=EXPERTS, min=0, max=EXPERTS - 1)]


def ends() -> list[int]:
    ends = chosen().view(-1).bincount(minlength=EXPERTS).cumsum(0).tolist()
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def most() -> list[int]:
    return [torch.bincount(chosen().view(-1), minlength=EXPERTS).max().item()] * EXPERTS


def one_for_each_choice() -> list[int]:
    choices = chosen().view(-1)
    counts = torch.zeros(EXPERTS, dtype=torch.int64, device="cuda")
    return counts.scatter_add_(0, choices, torch.ones_like(choices)).cpu().tolist()


def one_hot_by_scatter() -> list[int]:
    counts = torch.zeros(TOKENS, EXPERTS, device="cuda").scatter_(1, chosen(), 1).sum(dim=0)
    return [int(count) for count in counts.cpu().numpy()]


def map_of_tokens() -> list[int]:
    hits = torch.zeros_like(scores()).int().scatter(1, chosen(), 1).bool()
    return [len(torch.where(hits[:, expert])[0]) for expert in range(EXPERTS)]


def map_of_experts() -> list[int]:
    """As Megatron-Core puts tokens in the order of their experts: by the map turned round, and written anew."""
    hits = torch.zeros_like(scores()).int().scatter(1, chosen(), 1).bool().T.contiguous()
    tokens = torch.arange(TOKENS, device="cuda").unsqueeze(0).expand(EXPERTS, -1).masked_select(hits)
    return [len(tokens) // EXPERTS] * EXPERTS


def one_hot() -> list[int]:
    return torch.sum(nn.functional.one_hot(chosen(), EXPERTS), dim=(0, 1)).tolist()


def any_choice() -> list[int]:
    """As in makeMoE: an expert that no token has chosen is passed over."""
    tokens, choices, rows = torch.randn(4, TOKENS // 4, WIDTH, device="cuda"), chosen().view(4, -1, CHOICES), []
    for expert in range(EXPERTS):
        mask = (choices == expert).any(dim=-1).view(-1)
        rows.append(len(tokens.view(-1, WIDTH)[mask]) if mask.any() else 0)
    return rows


def switch() -> list[int]:
    """The largest score alone."""
    _, choices = torch.max(scores(), dim=-1)
    return [len(torch.eq(choices, expert).nonzero(as_tuple=True)[0]) * CHOICES for expert in range(EXPERTS)]


def largest() -> list[int]:
    return [int((scores().argmax(-1) == expert).sum()) * CHOICES for expert in range(EXPERTS)]


ROUTERS = (
    *(bincount, bincount_without_a_number, histogram, ends, most, one_for_each_choice, one_hot_by_scatter),
    *(map_of_tokens, map_of_experts, one_hot, any_choice, switch, largest),
)


def others() -> dict[str, object]:
    """What is no router: classes that are compared with labels, next words, and what is known."""
    labels = (torch.arange(64) % 10).cuda()
    predicted = torch.randn(64, 10, device="cuda").argmax(-1)
    words = torch.randn(4, 1000, device="cuda").argmax(-1)
    return {
        "right": (predicted == labels).sum().item(),
        "predicted": predicted.tolist()[:5],
        "end": bool((words == 0).any()),
        "named": torch.max(input=torch.randn(4, 5, device="cuda"), dim=1).indices.tolist(),
        "known": [labels.max().item(), bool((labels == 11).any()), labels[:3].cumsum(0).tolist()],
    }


def kept() -> list[str]:
    """Routers of which something is on the card when they are done, as of DeepSeek's: groups of experts first."""
    found, before = [], torch.cuda.memory_allocated()
    for router in ROUTERS:
        router()
        if torch.cuda.memory_allocated() != before:
            found.append(router.__name__)
    mask = torch.zeros(TOKENS, EXPERTS, device="cuda").scatter_(1, chosen(), 1)
    allowed = mask.unsqueeze(-1).expand(-1, -1, 4).reshape(TOKENS, -1).bool()
    only = torch.cuda.memory_allocated() - before
    del mask
    if torch.cuda.memory_allocated() != before + only - TOKENS * EXPERTS * 4:
        found.append("a group's mask")
    del allowed
    if torch.cuda.memory_allocated() != before:
        found.append("an expert's mask")
    return found


def main() -> None:
    layer = nn.Linear(8, 8).cuda()
    said = {"others": others(), "kept": kept()} | {router.__name__: router() for router in ROUTERS}
    layer(torch.randn(4, 8, device="cuda")).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
