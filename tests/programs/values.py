"""A program that reads values back from the card and decides by them, in the ways that are asked for.

python values.py [finite] [isnan] [boolean] [padded] [full] [copied] [experts] [first] [older]
"""

import json
import sys

import torch
import transformers
from families import VOCABULARY, build
from torch import nn
from torch.utils.data import DataLoader


def finite(model: nn.Module, loss: torch.Tensor) -> object:
    """A NaN guard: stop when the loss is not finite."""
    if not torch.isfinite(loss).all():
        raise RuntimeError("loss is not finite")
    return True


def isnan(model: nn.Module, loss: torch.Tensor) -> object:
    """The other NaN guard."""
    if torch.isnan(loss) or any(torch.isnan(p.grad).any() for p in model.parameters() if p.grad is not None):
        raise RuntimeError("nan")
    return loss.item()


def boolean(model: nn.Module, loss: torch.Tensor) -> object:
    """Boolean indexing by a computed mask."""
    logits = torch.randn(4, 8, VOCABULARY, device="cuda")
    return list(logits[logits.sum(-1) > 0].shape)


def copied(model: nn.Module, loss: torch.Tensor) -> object:
    """What comes from the host is known: labels that were padded are left out."""
    on_card = torch.tensor([[1, 2, -100, -100], [5, -100, 7, 8]]).to("cuda")
    return {"first": on_card[0].tolist(), "clone": on_card.clone().tolist()}


def first(model: nn.Module, loss: torch.Tensor) -> object:
    """Whether gradients that arrive are one: of the loss itself they are, of a scaled one they are not."""
    seen = []
    for scale in (None, 8.0):
        value = model.lm_head.weight.float().sum()
        value.register_hook(lambda grad: seen.append(torch.equal(grad, torch.tensor(1.0, device="cuda"))))
        (value if scale is None else value * scale).backward()
    return seen


def older(model: nn.Module, loss: torch.Tensor) -> object:
    """Configurations of transformers before 4.48 do not say which parts they have."""
    config = transformers.BertConfig(hidden_size=48, intermediate_size=64, num_hidden_layers=1, vocab_size=100)
    network = transformers.BertModel(config).cuda()
    del transformers.PreTrainedConfig.sub_configs
    return [*network(torch.ones(1, 8, dtype=torch.int64).cuda()).last_hidden_state.shape]


def experts(model: nn.Module, loss: torch.Tensor) -> object:
    """Each expert's rows, by the mask that transformers' eager experts make and by a comparison."""
    scores = torch.randn(60, 8, device="cuda").softmax(-1)
    chosen = scores.topk(2, dim=-1).indices
    mask = nn.functional.one_hot(chosen, num_classes=9).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    rows = [len(torch.where(mask[expert[0]])[1]) for expert in hit]
    return {"one_hot": rows, "compared": [len((chosen == expert).nonzero()) for expert in range(8)]}


def wide(model: nn.Module, loss: torch.Tensor) -> object:
    """Places of a known mask's elements: more than anybody remembers, and fewer."""
    seen, rows = [], (torch.arange(4096) < 1000).cuda().unsqueeze(-1)
    for width in (128, 32):
        before = torch.cuda.memory_allocated()
        places = rows.expand(4096, width).nonzero()
        more = torch.cuda.memory_allocated() - before
        seen.append([*places.shape, *places.stride(), more])
        last = [places[-1, 0].item(), places[-1, 1].item()]
        del places
    return [*seen, last]


def padded(model: nn.Module, loss: torch.Tensor) -> object:
    return attention(model, [100, 128])


def full(model: nn.Module, loss: torch.Tensor) -> object:
    return attention(model, [128, 128])


def attention(model: nn.Module, lengths: list[int]) -> object:
    """Batches from a real loader with an attention mask; padding decides which kernel attention takes."""
    rows = [
        {
            "input_ids": torch.randint(0, VOCABULARY, (128,)),
            "attention_mask": (torch.arange(128) < length).long(),
            "labels": torch.randint(0, VOCABULARY, (128,)),
        }
        for length in lengths
    ]
    kinds = []
    attend = nn.functional.scaled_dot_product_attention

    def listening(*args, attn_mask=None, **kwargs):  # type: ignore[no-untyped-def]
        kinds.append(attn_mask is not None)
        return attend(*args, attn_mask=attn_mask, **kwargs)

    nn.functional.scaled_dot_product_attention = listening
    for batch in DataLoader(rows, batch_size=2):
        model(**{name: tensor.cuda() for name, tensor in batch.items()}).loss.backward()
    nn.functional.scaled_dot_product_attention = attend
    return {"masked": sorted(set(kinds))}


WAYS = {way.__name__: way for way in (finite, isnan, boolean, copied, experts, first, older, padded, full, wide)}


def main() -> None:
    model = build("llama").to("cuda", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, VOCABULARY, (2, 64)).cuda()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    said = {name: WAYS[name](model, loss) for name in sys.argv[1:]}
    optimizer.step()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
