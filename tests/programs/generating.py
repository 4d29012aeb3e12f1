"""Generates after a training step, as many scripts do to look at samples."""

import json

import torch
from families import VOCABULARY, build


def main() -> None:
    model = build("llama").to("cuda", torch.bfloat16)
    model.config.use_cache = True
    optimizer = torch.optim.AdamW(model.parameters())
    prompt = torch.randint(2, VOCABULARY, (2, 16), device="cuda")
    model(input_ids=prompt, labels=prompt).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    greedy = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    sampled = model.generate(prompt, max_new_tokens=24, do_sample=True, temperature=0.8, top_k=20, pad_token_id=0)
    print(json.dumps({"greedy": list(greedy.shape), "sampled": list(sampled.shape)}))


if __name__ == "__main__":
    main()
