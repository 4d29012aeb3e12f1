"""A loss in chunks of labels whose number is a quotient of computed numbers, in a module named as TRL's."""

import json
import sys
from pathlib import Path

import torch

LOSS = '''
def _chunked_cross_entropy_loss(hidden, head, chunk_size, labels):
    """The sum over labels that count, and in how many chunks it was made."""
    counted = (labels != -100).sum()
    padded = (counted / chunk_size).ceil().clamp(min=1).to(int_type) * chunk_size
    starts = list(range(0, padded, chunk_size))
    parts = [(hidden[start : start + chunk_size] @ head).sum() for start in starts]
    return sum(parts), len(starts)
'''

folder = Path(sys.argv[1]) / "trl" / "trainer"
folder.mkdir(parents=True, exist_ok=True)
for package in (folder, folder.parent):
    (package / "__init__.py").touch()
(folder / "sft_trainer.py").write_text(f"import torch\n\nint_type = torch.int64\n{LOSS}")
sys.path.insert(0, sys.argv[1])

from trl.trainer import sft_trainer  # noqa: E402

labels = torch.full((1000,), -100)
labels[300:] = 7
head = torch.nn.Parameter(torch.ones(32, 8, device="cuda"))
optimizer = torch.optim.SGD([head], lr=0.1)
loss, chunks = sft_trainer._chunked_cross_entropy_loss(torch.randn(1000, 32, device="cuda"), head, 256, labels.cuda())
print(json.dumps({"chunks": chunks}), flush=True)
loss.backward()
optimizer.step()
