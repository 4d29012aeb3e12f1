"""The kernel of attention that torch takes on a GPU; the rows were read off ghosts with torch 2.13."""

import pytest
import torch
from torch.torch_version import TorchVersion

from tonnage.meta.choices import choose_kernel

CAUSAL = {"causal": True}
MASKED = {"mask": True}
ROWS = [
    ((8, 0), torch.bfloat16, CAUSAL, "flash"),
    ((8, 0), torch.bfloat16, MASKED, "efficient"),
    ((8, 0), torch.bfloat16, {**MASKED, "groups": 2}, "math"),
    ((8, 0), torch.float32, CAUSAL, "efficient"),
    ((8, 0), torch.float32, {**CAUSAL, "groups": 2}, "math"),
    ((8, 0), torch.bfloat16, {**CAUSAL, "width": 320}, "efficient"),
    ((8, 9), torch.bfloat16, {**CAUSAL, "width": 200}, "efficient"),
    ((8, 9), torch.bfloat16, {**CAUSAL, "width": 200, "trained": False}, "flash"),
    ((9, 0), torch.bfloat16, {**MASKED, "groups": 2}, "cudnn"),
    ((9, 0), torch.bfloat16, {**CAUSAL, "dropout": 0.1}, "flash"),
    ((9, 0), torch.bfloat16, {**CAUSAL, "width": 256}, "cudnn"),
    ((10, 0), torch.bfloat16, {**CAUSAL, "width": 256}, "flash"),
    ((10, 0), torch.bfloat16, {**CAUSAL, "width": 192, "value_width": 128}, "cudnn"),
    ((9, 0), torch.bfloat16, {**CAUSAL, "width": 192, "value_width": 128}, "cudnn"),
    ((8, 0), torch.bfloat16, {**CAUSAL, "width": 192, "value_width": 128}, "efficient"),
    ((10, 3), torch.bfloat16, CAUSAL, "cudnn"),
    ((12, 0), torch.float16, CAUSAL, "flash"),
    ((7, 5), torch.bfloat16, CAUSAL, "math"),
    ((7, 5), torch.float16, CAUSAL, "efficient"),
    ((7, 0), torch.float16, {**CAUSAL, "width": 60}, "math"),
]


@pytest.mark.parametrize(("capability", "dtype", "call", "kernel"), ROWS)
def test_the_kernel_of_attention(
    capability: tuple[int, int], dtype: torch.dtype, call: dict[str, object], kernel: str
) -> None:
    groups, width = (int(call.get(name, default)) for name, default in (("groups", 8), ("width", 64)))  # type: ignore[call-overload]

    def part(heads: int, width: int = width) -> torch.Tensor:
        return torch.empty(2, heads, 128, width, dtype=dtype, device="meta", requires_grad=call.get("trained", True))  # type: ignore[arg-type]

    mask = torch.empty(2, 1, 128, 128, dtype=torch.bool, device="meta") if call.get("mask") else None
    dropout = float(call.get("dropout", 0.0))  # type: ignore[arg-type]
    value = part(groups, int(call.get("value_width", width)))  # type: ignore[call-overload]
    found = choose_kernel(
        part(8), part(groups), value, mask, dropout, bool(call.get("causal")), groups != 8, capability
    )
    assert found == kernel


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_what_is_strided_within_a_row_is_for_plain_operations(capability: tuple[int, int]) -> None:
    query = torch.empty(2, 8, 128, 64, dtype=torch.bfloat16, device="meta")
    lying = torch.empty(2, 8, 64, 128, dtype=torch.bfloat16, device="meta").transpose(2, 3)
    bias = torch.empty(2, 128, 128, 8, dtype=torch.bfloat16, device="meta").permute(0, 3, 1, 2)
    assert choose_kernel(lying, query, query, None, 0.0, False, False, capability) == "math"
    assert choose_kernel(query, query, query, bias, 0.0, False, False, capability) == "math"
    learned = bias.contiguous().requires_grad_()
    assert choose_kernel(query, query, query, learned, 0.0, False, False, capability) == "efficient"


@pytest.mark.parametrize(
    ("version", "dropout", "kernel"),
    [("2.9.1", 0.0, "flash"), ("2.10.0", 0.1, "cudnn"), ("2.12.0", 0.1, "flash"), ("2.12.0", 0.0, "cudnn")],
)
def test_hoppers_kernel_by_version(
    version: str, dropout: float, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    query = torch.empty(2, 8, 128, 64, dtype=torch.bfloat16, device="meta")
    assert choose_kernel(query, query, query, None, dropout, True, False, (9, 0)) == kernel


def test_no_kernel_is_told_in_torchs_words() -> None:
    query = torch.empty(1, 8, 128, 64, device="meta")
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match="No available kernel"),
    ):
        choose_kernel(query, query, query, None, 0.0, True, False, (8, 0))
