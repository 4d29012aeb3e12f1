"""Generates after a training step, as many scripts do to look at samples; then a loss of functional gradients."""

import json

import torch
from families import VOCABULARY, build


def masked_loss(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """With the guards of losses that are made to be compiled: Unsloth's, by `torch.func`."""
    safe = torch.where(torch.isfinite(logits), logits, torch.zeros_like(logits))
    rows = mask.sum(1) + torch.isnan(logits).any() + (mask == 1).all()
    return (safe.float().logsumexp(-1) * mask).sum() / rows.sum()


def slopes(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Like the logits."""
    [gradient], _ = torch.func.grad_and_value(masked_loss, argnums=(0,))(logits, mask)
    return gradient


def by_hand(model: torch.nn.Module, prompt: torch.Tensor, how: str) -> int:
    """How many words a loop of the program's own makes until one ends each text, at most 6."""
    text, ended = prompt, torch.zeros(len(prompt), dtype=torch.bool, device="cuda")
    for count in range(1, 7):
        with torch.no_grad():
            logits = model(input_ids=text).logits[:, -1].float()
        word = logits.argmax(-1) if how == "largest" else torch.multinomial(logits.softmax(-1), 1).squeeze(1)
        text = torch.cat([text, word[:, None]], dim=1)
        ended |= word == 2
        stop = {"largest": (word == 2).all(), "flags": ended.all(), "going": not torch.ne(word, 2).any()}
        if stop.get(how, ended.all()):
            return count
    return count


def main() -> None:
    model = build("llama").to("cuda", torch.bfloat16)
    model.config.use_cache = True
    optimizer = torch.optim.AdamW(model.parameters())
    prompt = torch.randint(2, VOCABULARY, (2, 16), device="cuda")
    model(input_ids=prompt, labels=prompt).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loops = [by_hand(model, prompt, how) for how in ("largest", "flags", "going")]
    greedy = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    sampled = model.generate(prompt, max_new_tokens=24, do_sample=True, temperature=0.8, top_k=20, pad_token_id=0)
    words = [[3, 4, 5, 6], [7, 8, 9, 10]]
    ended = model.generate(torch.tensor(words).cuda(), max_new_tokens=8, pad_token_id=0, eos_token_id=[1, 2])
    ends = torch.isin(ended, torch.tensor([1, 2], device="cuda"))
    first = torch.full((2,), ended.shape[1], device="cuda")
    first[ends.any(dim=1)] = ends.int().argmax(dim=1)[ends.any(dim=1)]
    logits = model(input_ids=ended).logits.detach()
    compiled = torch.compile(slopes, fullgraph=True, backend="aot_eager")
    kept = (torch.arange(ended.shape[1], device="cuda") <= first[:, None])[:, 4:]
    print(
        json.dumps(
            {
                "loops": loops,
                "greedy": list(greedy.shape),
                "sampled": list(sampled.shape),
                "slopes": [list(way(logits, (ended > 3).long()).shape) for way in (slopes, compiled)],
                "prompt": ended[:, :4].tolist(),
                "lengths": [len(row[mask].tolist()) for row, mask in zip(ended[:, 4:], kept, strict=True)],
            }
        )
    )


if __name__ == "__main__":
    main()
