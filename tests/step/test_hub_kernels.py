"""No kernel of the Hub is fetched while a network is built, whatever its configuration says or is."""

import subprocess
import sys
from pathlib import Path

from tonnage.step import hub_kernels

STAND_IN = """
import pathlib
def get_kernel(*arguments, **named):
    pathlib.Path({log!r}).write_text(repr(arguments))
    raise RuntimeError("fetched")
class _Any:
    def __init__(self, *arguments, **named): pass
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return _Any
"""

PROGRAM = """
import importlib.util, json, sys, torch
from pathlib import Path
assert importlib.util.find_spec("kernels") is not None
from tonnage.step import hub_kernels
hub_kernels.hide()
from tonnage.catalog.configurations import resolve
from tonnage.step import model
common = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "num_attention_heads": 4}
llama = {"model_type": "llama", **common}
for config in (
    {"model_type": "mamba2", **common, "num_heads": 8, "head_dim": 16, "state_size": 16},
    {"model_type": "mamba", **common},
    {**llama, "attn_implementation": "org/kernel"},
    {**llama, "attn_implementation": "flash_attention_2"},
    {**llama, "_attn_implementation_internal": "org/kernel", "use_kernels": True},
    {**llama, "attribute_map": {"name": "_attn_implementation"}, "name": "org/kernel"},
    {"model_type": "qwen3_moe", **common, "num_experts": 4, "experts_implementation": "sonicmoe"},
):
    Path("config.json").write_text(json.dumps(config))
    ref = resolve("./config.json")
    model.build(ref, dtype=torch.float32, attention=None, device=torch.device("meta"))
from transformers.utils.import_utils import is_kernels_available
assert not is_kernels_available()
print("built")
"""


def test_no_configuration_fetches_a_kernel(tmp_path: Path) -> None:
    log = tmp_path / "fetched"
    (tmp_path / "kernels.py").write_text(STAND_IN.format(log=str(log)))
    about = tmp_path / "kernels-0.18.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    source = Path(hub_kernels.__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{source}", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert not log.exists(), log.read_text()
    assert ran.stdout == "built\n", ran.stderr[-2000:]
