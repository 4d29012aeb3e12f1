"""Activations and optimizer states on the host: the same training as without."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from networks import one_thread, tiny, tiny_job  # noqa: F401
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import UsageError
from tonnage.plans import Plan
from tonnage.techniques import activation_offload, build, disk, optimizer_offload
from tonnage.techniques.activation_offload import _allocate_in_memory, _Packed, _StreamedOffload
from tonnage.techniques.optimizer_offload import offloaded

Trained = dict[str, torch.Tensor]


def trained(name: str = "llama", count: int = 2, **choices: Any) -> Trained:
    """Return the weights after some steps."""
    torch.manual_seed(0)
    plan = Plan(**{"precision": "fp32", **choices})
    made = build(tiny_job(name), plan, device="cpu", initialise=True)
    torch.manual_seed(1)
    made.run(count)
    return {name: p.detach() for name, p in made.model.named_parameters()}


def assert_equal(ours: Trained, theirs: Trained, exactly: bool = True) -> None:
    assert ours.keys() == theirs.keys()
    for name, weights in ours.items():
        tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(weights, theirs[name], **tolerance, msg=name)


class TestActivations:
    """Saved tensors go to the host and come back as they were."""

    @pytest.fixture(autouse=True)
    def _everything_goes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(activation_offload, "SMALL_BYTES", 1)

    @pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
    @pytest.mark.parametrize("kind", ["cpu", "cpu-streamed", "nvme"])
    @pytest.mark.parametrize("checkpointing", ["none", "full"])
    def test_training_is_the_same(self, name: str, kind: str, checkpointing: str) -> None:
        plain = trained(name, checkpointing=checkpointing)
        assert_equal(trained(name, checkpointing=checkpointing, activation_offload=kind), plain)

    def test_checkpointed_layers_send_their_inputs_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[torch.Size] = []
        original = _StreamedOffload._send

        def noted(self: _StreamedOffload, key: Any, tensor: torch.Tensor) -> Any:
            sent.append(tensor.shape)
            return original(self, key, tensor)

        monkeypatch.setattr(_StreamedOffload, "_send", noted)
        torch.manual_seed(0)
        plan = Plan(precision="fp32", activation_offload="cpu-streamed", checkpointing="full")
        made = build(tiny_job(), plan, device="cpu", initialise=True)
        made.micro_batch(made.next_batch())
        assert sent.count(torch.Size((2, 24, 32))) >= 3  # the inputs of three layers
        assert len(sent) < 3 + 8  # and what embedding and last norm save, but nothing from inside a layer

    def test_views_of_one_piece_are_sent_once(self) -> None:
        streamed = _StreamedOffload(torch.device("cpu"), _allocate_in_memory)
        whole = torch.arange(12.0).reshape(3, 4)
        one, other = streamed.pack(whole[0]), streamed.pack(whole.t())
        assert isinstance(one, _Packed)
        assert one.storage is other.storage
        assert torch.equal(streamed.unpack(one), whole[0])
        assert torch.equal(streamed.unpack(other), whole.t())
        assert streamed.unpack(other).stride() == (1, 4)

    def test_what_is_written_to_after_it_was_saved_is_another_piece(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(activation_offload, "LEAVING", 0)
        streamed = _StreamedOffload(torch.device("cpu"), _allocate_in_memory)
        tensor = torch.zeros(4)
        before = streamed.pack(tensor)
        tensor.add_(1)
        after = streamed.pack(tensor)
        assert torch.equal(streamed.unpack(before), torch.zeros(4))
        assert torch.equal(streamed.unpack(after), torch.ones(4))

    def test_only_a_few_pieces_stay_on_the_card(self) -> None:
        streamed = _StreamedOffload(torch.device("cpu"), _allocate_in_memory)
        pieces = [torch.full((4,), float(number)) for number in range(6)]
        packed = [streamed.pack(piece) for piece in pieces]
        del pieces
        assert [item.storage.card is not None for item in packed] == [False] * 4 + [True] * 2
        streamed.unpack(packed[5])
        assert [item.storage.card is not None for item in packed] == [False, False, False, True, True, False]
        assert torch.equal(streamed.unpack(packed[3]), torch.full((4,), 3.0))

    def test_weights_stay(self) -> None:
        streamed = _StreamedOffload(torch.device("cpu"), _allocate_in_memory)
        weight = torch.nn.Parameter(torch.ones(4, 4))
        for saved in (weight, weight.t()):
            kept = streamed.pack(saved)
            assert isinstance(kept, torch.Tensor)
            assert kept.data_ptr() == weight.data_ptr()
            assert kept.stride() == saved.stride()

    def test_a_result_that_no_backward_asks_for_is_let_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """exp saves its own result: in a tower's unused last layer, for ever."""
        monkeypatch.setattr(activation_offload, "SMALL_BYTES", 1 << 20)
        with _StreamedOffload(torch.device("cpu"), _allocate_in_memory):
            result = torch.ones(4, requires_grad=True).exp()
        alive = weakref.ref(result)
        del result
        assert alive() is None


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.01])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_offloaded_optimizer_is_the_optimizer(name: str, fraction: float) -> None:
    def updated(make: Callable[[list[Any]], torch.optim.Optimizer]) -> list[torch.Tensor]:
        torch.manual_seed(2)
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in (7, 5, 3)]
        optimizer = make(parameters)
        for _ in range(3):
            for parameter in parameters[:2]:  # the third never gets a gradient
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in parameters]

    plain = updated(OPTIMIZERS[name])
    for ours, expected in zip(
        updated(lambda ps: offloaded(ps, OPTIMIZERS[name], fraction=fraction)), plain, strict=True
    ):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(("fraction", "counts"), [(1.0, [4]), (0.5, [2, 2]), (0.25, [1, 3])])
def test_a_fraction_is_one_of_elements(fraction: float, counts: list[int]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(8)) for _ in range(4)]
    made: Any = offloaded(parameters, OPTIMIZERS["sgd"], fraction=fraction)
    assert [len(part.param_groups[0]["params"]) for part in made.parts.values()] == counts


@pytest.mark.parametrize("place", ["cpu=0.5", "nvme"])
def test_optimizer_offload_trains_the_same(place: str) -> None:
    assert_equal(trained(optimizer_offload=place), trained(), exactly=False)


def test_states_rest_in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "SMALL_BYTES", 1)
    monkeypatch.setenv("TONNAGE_OFFLOAD_DIR", str(tmp_path))
    made = build(tiny_job(), Plan(precision="fp32", optimizer_offload="nvme"), device="cpu", initialise=True)
    made.run(1)
    maps = Path("/proc/self/maps").read_text()
    mapped = sum(f"{tmp_path}/{disk.PREFIX}" in line for line in maps.splitlines())
    assert mapped == 4 * len(list(made.model.parameters()))  # a copy, its gradient, two moments
    assert list(tmp_path.iterdir()) == [], "files without names: nothing is left behind"
    monkeypatch.setenv("TONNAGE_OFFLOAD_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="which is no folder"):
        disk.empty((1,), torch.float32)


def test_states_are_saved_with_their_part() -> None:
    made = build(tiny_job(), Plan(precision="fp32", optimizer_offload="cpu"), device="cpu", initialise=True)
    made.run(1)
    saved = made.optimizer.state_dict()
    made.optimizer.load_state_dict(saved)
    assert len(saved["host"]["state"]) == len(list(made.model.parameters()))


def test_states_of_weights_on_the_host_are_there_already():
    """The message names the redundant option."""
    job, cluster = tiny_job("llama"), parse_cluster("8xh100-80gb")
    both = Plan(shard="zero3", optimizer_offload="cpu", param_offload="cpu")
    assert "leave it out" in str(optimizer_offload.accepts(Case(job, both, cluster)))
    alone = replace(both, param_offload="none")
    assert "choose param-offload cpu" in str(optimizer_offload.accepts(Case(job, alone, cluster)))
