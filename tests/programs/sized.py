"""Operations whose result is as large as values say, or that torch checks: what is known, and what is computed.

python sized.py known|computed|sparse
"""

import json
import sys

import torch
from torch import nn


def shape(tensor: torch.Tensor) -> list[int]:
    return [*tensor.shape]


def known() -> dict[str, object]:
    """Of numbers that come from the host."""
    some = torch.tensor([3, 1, 3, 7]).cuda()
    rows = torch.tensor([[1, 2], [3, 4], [1, 2]]).cuda()
    words = nn.Embedding(100, 8, sparse=True, device="cuda")
    words(some).sum().backward()
    try:
        torch.normal(0.0, torch.tensor([-1.0]).cuda())
        refused = False
    except RuntimeError:
        refused = True
    return {
        "unique": some.unique(return_inverse=True, return_counts=True)[2].tolist(),
        "rows": rows.unique(dim=0).tolist(),
        "consecutive": torch.unique_consecutive(some).tolist(),
        "bincount": shape(some.bincount()),
        "one_hot": shape(nn.functional.one_hot(some)),
        "repeated": shape(torch.randn(4, 5, device="cuda").repeat_interleave(some, dim=0)),
        "places": shape(torch.repeat_interleave(some)),
        "twice": shape(torch.randn(4, 5, device="cuda").repeat_interleave(torch.tensor([2]).cuda(), 1)),
        "sparse": shape(words.weight.grad.coalesce().values()),
        "close": torch.allclose(some.float(), some.float() + 0.0),
        "far": torch.allclose(torch.tensor([1.0]).cuda(), torch.tensor([2.0]).cuda()),
        "refused": refused,
    }


def computed() -> dict[str, object]:
    """Of numbers that a kernel of a large tensor would compute."""
    scores = torch.randn(600, 1000, device="cuda")
    some = scores.argmax(-1)
    return {
        "unique": [shape(each) for each in some.unique(return_inverse=True, return_counts=True)],
        "rows": [shape(each) for each in scores.unique(dim=0, return_counts=True)],
        "bincount": [shape(some.bincount()), shape(some.bincount(minlength=9))],
        "one_hot": [shape(nn.functional.one_hot(some)), shape(nn.functional.one_hot(some, 9))],
        "sparse": shape(
            torch.sparse_coo_tensor(some[None], scores, (1000, 1000), check_invariants=False).coalesce().values()
        ),
        "close": torch.allclose(scores, scores * 2),
        "drawn": [
            shape(torch.normal(scores, scores.exp())),
            shape(torch.distributions.Normal(scores, scores.exp()).sample()),
            shape(torch.normal(1.0, scores.exp())),
        ],
    }


def sparse() -> dict[str, object]:
    """Sparse tensors, where known values are followed, because a size hangs on some."""
    some = torch.tensor([3, 1, 3, 7]).cuda()
    places, values = torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3, 4, 5])
    graph = torch.sparse_coo_tensor(places, values, (2, 3), check_invariants=False).cuda()
    rows = torch.sparse_csr_tensor(torch.tensor([0, 1, 3]), places[1], values.float(), (2, 3)).cuda()
    words = nn.Embedding(100, 8, sparse=True, device="cuda")
    optimizer = torch.optim.SparseAdam(words.parameters())
    words(some).sum().backward()
    optimizer.step()
    return {
        "unique": (some + some).unique().tolist(),
        "places": graph.coalesce().indices().tolist(),
        "products": [shape(each @ torch.ones(3, 4, device="cuda")) for each in (graph.float(), rows)],
        "rows": rows.crow_indices().tolist(),
        "isnan": torch.isnan(graph).layout == torch.sparse_coo,
        "gradient": shape(words.weight.grad.coalesce().values()),
    }


def main() -> None:
    said = {"known": known, "computed": computed, "sparse": sparse}[sys.argv[1]]()
    layer = nn.Linear(8, 8).cuda()
    layer(torch.randn(4, 8, device="cuda")).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
