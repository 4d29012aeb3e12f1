"""The step against a loop written out in plain PyTorch: same losses, same gradients, same weights."""

import dataclasses
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from networks import EVERY_KIND, SEEING, one_thread, tiny, tiny_job  # noqa: F401
from tonnage.errors import CannotEstimate
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.step import model
from tonnage.step.step import ReadyStep
from tonnage.techniques import build

FP32 = Plan(precision="fp32", optimizer="sgd")


def ready(job: Job, plan: Plan) -> ReadyStep:
    torch.manual_seed(0)
    made = build(job, plan, device="cpu", initialise=True)
    torch.manual_seed(1)  # what follows draws batches
    return made


def gradients(job: Job, plan: Plan) -> dict[str, torch.Tensor]:
    """Return the gradients after one micro-batch, by parameter name."""
    made = ready(job, plan)
    made.micro_batch(made.next_batch())
    return {name: p.grad for name, p in made.model.named_parameters() if p.grad is not None}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    assert any(tensor.abs().max() > 0 for tensor in ours.values())
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], **{"rtol": 1e-5, "atol": 1e-7, **tolerance}, msg=name)


def weights_after(job: Job, plan: Plan, count: int) -> dict[str, torch.Tensor]:
    made = ready(job, plan)
    made.run(count)
    return {name: p.detach() for name, p in made.model.named_parameters()}


def by_hand(job: Job, optimizer: Callable[[Any], torch.optim.Optimizer], count: int) -> dict[str, torch.Tensor]:
    """Return the weights after the same training in plain PyTorch and transformers."""
    torch.manual_seed(0)
    network = model.build(job.model, dtype=torch.float32, attention=None, device=torch.device("cpu"))
    model.initialise(network)
    chosen = optimizer(network.parameters())
    torch.manual_seed(1)
    for _ in range(count):
        for _ in range(job.grad_accum):
            batch = model.batch(job, network, torch.float32)
            (network(**batch).loss / job.grad_accum).backward()
        chosen.step()
        chosen.zero_grad()
    return {name: p.detach() for name, p in network.named_parameters()}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-4),
    "adamw-loop": lambda ps: torch.optim.AdamW(ps, lr=1e-4, foreach=False),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-4, foreach=True),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
    "sgd-plain": lambda ps: torch.optim.SGD(ps, lr=1e-3),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_torchs_own(name: str) -> None:
    job = tiny_job()
    expected = by_hand(job, OPTIMIZERS[name], 2)
    start = by_hand(job, OPTIMIZERS[name], 0)
    ours = weights_after(job, Plan(precision="fp32", optimizer=name), 2)
    assert any(not torch.equal(ours[key], start[key]) for key in ours)
    assert all(torch.equal(ours[key], expected[key]) for key in ours)


def test_muon_takes_the_matrices_of_the_layers() -> None:
    made = ready(tiny_job(), Plan(precision="fp32", optimizer="muon"))
    muon, adamw = made.optimizers
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    taken = {id(p) for p in muon.param_groups[0]["params"]}
    named = {name for name, p in made.model.named_parameters() if id(p) in taken}
    assert len(named) == 3 * 7  # q, k, v, o, gate, up, down of each layer
    assert all(name.startswith("model.layers.") and "norm" not in name for name in named)
    assert len(adamw.param_groups[0]["params"]) == 3 * 2 + 3  # norms, embedding, head, last norm
    made.run(1)


def test_accumulation_is_one_large_batch() -> None:
    job = tiny_job(micro_batch=1, grad_accum=3)
    ours = weights_after(job, FP32, 2)
    assert all(torch.equal(ours[name], weights) for name, weights in by_hand(job, OPTIMIZERS["sgd"], 2).items())


def test_run_calls_back_after_every_step() -> None:
    seen: list[int] = []
    ready(tiny_job(), FP32).run(3, seen.append)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize(
    "checkpointing", ["full", "full-reentrant", "every-2", "selective", "attention", "attention-module", "sqrt"]
)
def test_checkpointing_changes_no_gradient(name: str, checkpointing: str) -> None:
    plain = gradients(tiny_job(name), FP32)
    checkpointed = gradients(tiny_job(name), Plan(precision="fp32", optimizer="sgd", checkpointing=checkpointing))
    assert_close(checkpointed, plain)


@pytest.mark.parametrize("checkpointing", ["full", "full-reentrant"])
def test_layers_that_transformers_does_not_checkpoint_take_inputs_by_name(checkpointing: str) -> None:
    config = {
        **{"model_type": "albert", "architectures": ["AlbertForMaskedLM"], "vocab_size": 61, "hidden_size": 32},
        **{"embedding_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    }
    job = Job(model=ModelRef(name="albert", kind="config", config=config), seq_len=24)
    plan = Plan(precision="fp32", optimizer="sgd", checkpointing=checkpointing)
    assert_close(gradients(job, plan), gradients(job, FP32))


@pytest.mark.parametrize(
    ("checkpointing", "calls"),
    [("none", 1), ("full", 2), ("every-2", 5 / 3), ("selective", 2), ("sqrt", 2), ("attention-module", 1)],
)
def test_checkpointed_layers_run_twice(checkpointing: str, calls: float) -> None:
    made = ready(tiny_job(), Plan(precision="fp32", optimizer="sgd", checkpointing=checkpointing))
    count = 0

    def counted(module: nn.Module, arguments: Any) -> None:
        nonlocal count
        count += 1

    for layer in model.layers(made.model):
        layer.post_attention_layernorm.register_forward_pre_hook(counted)  # type: ignore[union-attr]
    made.micro_batch(made.next_batch())
    assert count == 3 * calls


def test_selective_checkpointing_saves_matrix_products() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return op(*args, **(kwargs or {}))

    def products(checkpointing: str) -> int:
        made = ready(tiny_job(), Plan(precision="fp32", optimizer="sgd", checkpointing=checkpointing))
        batch = made.next_batch()
        with Products() as counted:
            made.micro_batch(batch)
        return counted.count

    plain = products("none")
    assert products("selective") == plain
    assert products("full") > plain


def test_selective_checkpointing_keeps_no_product_that_a_bias_is_added_to_in_place() -> None:
    from tonnage.techniques.checkpointing import saved_ops

    grouped = torch.ops.aten._grouped_mm.default
    assert grouped in saved_ops(ready(tiny_job("mixtral"), Plan(precision="fp32")).model)
    assert grouped not in saved_ops(ready(tiny_job("gpt_oss"), Plan(precision="fp32")).model)


@pytest.mark.parametrize("loss", ["chunked", "fused"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "granite", "cohere", "mixtral", "gpt2"])
def test_a_loss_in_slices_is_the_plain_loss(name: str, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.techniques import chunked_loss, fused_loss

    for module in (chunked_loss, fused_loss):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 10)  # 48 tokens: four full slices and a rest
    plain = gradients(tiny_job(name), FP32)
    sliced = gradients(tiny_job(name), Plan(precision="fp32", optimizer="sgd", loss=loss))
    assert_close(sliced, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["chunked", "fused"])
@pytest.mark.parametrize("name", ["gemma3", *sorted(SEEING)])
def test_a_loss_in_slices_is_the_plain_loss_where_images_are_seen(
    name: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tonnage.techniques import chunked_loss, fused_loss

    for module in (chunked_loss, fused_loss):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 10)
    plain = gradients(tiny_job(name), FP32)
    sliced = gradients(tiny_job(name), Plan(precision="fp32", optimizer="sgd", loss=loss))
    assert_close(sliced, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["vit", "t5", "whisper"])
def test_a_network_that_does_not_write_from_hidden_states_has_no_loss_in_slices(name: str) -> None:
    with pytest.raises(CannotEstimate, match="choose loss plain"):
        ready(tiny_job(name), Plan(precision="fp32", optimizer="sgd", loss="chunked"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "granite", "logits_scaling": 4.0}, 0.5),
        ({"model_type": "hyperclovax", "logits_scaling": 4.0}, 8.0),
        ({"model_type": "cohere", "logit_scale": 0.5}, 1.0),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.25}, 0.5),
        ({"model_type": "muse", "output_multiplier": 3.0, "final_logit_softcapping": 2.0}, 2 * math.tanh(3)),
        ({"model_type": "recurrent_gemma", "logits_soft_cap": 2.0}, 2 * math.tanh(1)),
        ({"model_type": "xlstm", "output_logit_soft_cap": 2.0}, 2 * math.tanh(1)),
        ({"model_type": "llama", "logits_scaling": None}, 2.0),
    ],
)
def test_logits_of_a_slice_are_scaled_as_their_family_does(fields: dict[str, Any], expected: float) -> None:
    from tonnage.techniques.chunked_loss import logits

    config = SimpleNamespace(**fields)
    config.get_text_config = lambda: config
    network = SimpleNamespace(config=config, get_output_embeddings=lambda: nn.Identity())
    torch.testing.assert_close(logits(network, torch.tensor([2.0])), torch.tensor([expected]))


def test_chunked_loss_never_makes_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.techniques import chunked_loss

    monkeypatch.setattr(chunked_loss, "CHUNK_TOKENS", 10)
    made = ready(tiny_job(), Plan(precision="fp32", optimizer="sgd", loss="chunked"))
    shapes: list[int] = []
    head = made.model.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_hook(lambda module, arguments, output: shapes.append(output.shape[0]))
    made.micro_batch(made.next_batch())
    assert max(shapes) == 10
    assert sum(shapes) == 2 * 48  # once in forward, once again in backward


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Any]:
    """Provide a mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_slices_of_the_loss_are_longer_where_ranks_divide_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, ranks: Any
) -> None:
    from tonnage.techniques import chunked_loss

    monkeypatch.setattr(chunked_loss, "CHUNK_TOKENS", 10)
    made = ready(tiny_job(), Plan(precision="fp32", optimizer="sgd"))
    world = dataclasses.replace(made.step.world, mesh=ranks)
    shapes: list[int] = []
    for tp in (1, 2, 4):
        step = dataclasses.replace(made.step, plan=Plan(tp=tp), world=world, changes=())
        (change,) = chunked_loss.apply(step).changes
        network = change(made.model)
        head = network.get_output_embeddings().register_forward_pre_hook(
            lambda module, arguments: shapes.append(len(arguments[0]))
        )
        network(**made.next_batch())
        head.remove()
    assert shapes == [10, 10, 10, 10, 8, 20, 20, 8, 40, 8]


def test_chunked_loss_ignores_what_the_labels_say() -> None:
    from tonnage.techniques.chunked_loss import chunked_cross_entropy

    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 4), torch.randn(7, 4)
    labels = torch.tensor([[1, -100, 3, 4, -100], [0, 2, -100, 6, 5]])
    expected = nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(chunked_cross_entropy(hidden, labels, lambda part: part @ weight.T), expected)


@pytest.mark.parametrize("attention", ["eager", "math"])
def test_attention_backends_agree(attention: str) -> None:
    plain = gradients(tiny_job(), FP32)
    assert_close(
        gradients(tiny_job(), Plan(precision="fp32", optimizer="sgd", attention=attention)), plain, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("precision", "weights", "gradient"),
    [
        ("bf16-mixed", torch.float32, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("fp16-mixed", torch.float32, torch.float32),
        ("fp16-true", torch.float16, torch.float16),
        ("fp32", torch.float32, torch.float32),
    ],
)
def test_precisions(precision: str, weights: torch.dtype, gradient: torch.dtype) -> None:
    made = ready(tiny_job(), Plan(precision=precision))
    inside: set[torch.dtype] = set()
    made.model.model.layers[0].mlp.register_forward_hook(lambda m, a, output: inside.add(output.dtype))  # type: ignore
    made.micro_batch(made.next_batch())
    computed = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision.split("-")[0]]
    assert {p.dtype for p in made.model.parameters()} == {weights}
    assert {p.grad.dtype for p in made.model.parameters() if p.grad is not None} == {gradient}
    assert inside == {computed}


def test_fp16_scales_the_loss_and_skips_steps_that_overflow() -> None:
    made = ready(tiny_job(), Plan(precision="fp16-mixed"))
    assert made.scaler is not None
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.scaler.scale(torch.ones(()))  # it starts on first use
    made.scaler.update(1e30)  # far beyond what fp16 holds
    made.run(1)
    assert all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())
    made.scaler.update(2.0**8)
    made.run(1)
    assert any(not torch.equal(p, before[name]) for name, p in made.model.named_parameters())


class TestLora:
    """Adapters by PEFT."""

    @pytest.fixture(autouse=True)
    def _peft(self) -> None:
        pytest.importorskip("peft")

    def test_only_adapters_are_trained(self) -> None:
        made = ready(tiny_job(method="lora", lora_rank=4), Plan(precision="fp32"))
        frozen = {name: p.detach().clone() for name, p in made.model.named_parameters() if not p.requires_grad}
        trained = [name for name, p in made.model.named_parameters() if p.requires_grad]
        assert all("lora_" in name for name in trained)
        assert len(trained) == 3 * 7 * 2
        # q and o: 32 -> 32, k and v: 32 -> 16, gate and up: 32 -> 48, down: 48 -> 32, all of rank 4
        assert made.trainable_parameters == 3 * 4 * (2 * 64 + 2 * 48 + 3 * 80)
        made.run(1)
        assert all(torch.equal(p, frozen[name]) for name, p in made.model.named_parameters() if name in frozen)

    def test_targets_by_name(self) -> None:
        job = tiny_job(method="lora", lora_targets=("q_proj", "v_proj"), lora_dropout=0.1)
        made = ready(job, Plan(precision="fp32"))
        dropouts = [module.p for module in made.model.modules() if isinstance(module, torch.nn.Dropout)]
        assert dropouts == [0.1] * 6
        trained = {
            name.split(".lora_")[0].split(".")[-1] for name, p in made.model.named_parameters() if p.requires_grad
        }
        assert trained == {"q_proj", "v_proj"}

    @pytest.mark.parametrize(
        ("plan", "base", "adapters"),
        [
            (Plan(precision="bf16-mixed"), torch.bfloat16, torch.float32),
            (Plan(precision="bf16-mixed", base_dtype="fp32"), torch.float32, torch.float32),
            (Plan(precision="fp16-mixed"), torch.float16, torch.float32),
            (Plan(precision="bf16-true"), torch.bfloat16, torch.bfloat16),
            (Plan(precision="fp16-true"), torch.float16, torch.float32),
            (Plan(precision="bf16-true", weights_dtype="fp32"), torch.bfloat16, torch.float32),
            (Plan(precision="bf16-mixed", base_dtype="fp32", weights_dtype="bf16"), torch.float32, torch.bfloat16),
            (Plan(precision="fp32"), torch.float32, torch.float32),
        ],
    )
    def test_dtypes(self, plan: Plan, base: torch.dtype, adapters: torch.dtype) -> None:
        made = ready(tiny_job(method="lora"), plan)
        made.run(1)
        assert {p.dtype for p in made.model.parameters() if not p.requires_grad} == {base}
        assert {p.dtype for p in made.model.parameters() if p.requires_grad} == {adapters}

    def test_starts_as_the_base(self) -> None:
        """PEFT's B matrices are zero, so the first loss is that of the network without adapters."""
        losses = []
        for method in ("full", "lora"):
            made = ready(tiny_job(method=method), Plan(precision="fp32"))
            losses.append(model.loss_of(made.model(**tokens())).item())
        assert losses[0] == losses[1]

    @pytest.mark.parametrize("checkpointing", ["full", "selective"])
    def test_checkpointing_changes_no_gradient(self, checkpointing: str) -> None:
        job = tiny_job(method="lora")
        plan = Plan(precision="fp32", optimizer="sgd", checkpointing=checkpointing)
        assert_close(gradients(job, plan), gradients(job, FP32))

    def test_chunked_loss(self) -> None:
        job = tiny_job(method="lora")
        chunked = gradients(job, Plan(precision="fp32", optimizer="sgd", loss="chunked"))
        assert_close(chunked, gradients(job, FP32), rtol=1e-4, atol=1e-6)


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.arange(24).reshape(1, 24)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", EVERY_KIND)
def test_every_architecture_runs_under_autocast(name: str) -> None:
    made = ready(tiny_job(name), Plan())
    start = [p.detach().clone() for p in made.model.parameters()]
    made.run(2)
    assert all(math.isfinite(p.sum().item()) for p in made.model.parameters())
    assert any(not torch.equal(p, before) for p, before in zip(made.model.parameters(), start, strict=True))


def test_counts() -> None:
    made = ready(tiny_job("qwen3"), FP32)
    # embedding (tied with the head) + 3 layers of attention, head norms, mlp, two norms + the last norm
    layer = 2 * 32 * 64 + 2 * 32 * 32 + 2 * 16 + 3 * 32 * 48 + 2 * 32
    assert made.parameters == made.trainable_parameters == 61 * 32 + 3 * layer + 32


class Blocks(nn.Module):
    """A network that is not from transformers: checkpointed by its ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4))

    def batch(self, job: Job) -> dict[str, torch.Tensor]:
        return {"points": torch.rand(job.micro_batch, 4)}

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            points = layer(points)
        return points.square().mean()


def blocks_job() -> Job:
    return Job(model=ModelRef(name="blocks", kind="factory", factory=f"{__name__}:Blocks"))


@pytest.mark.parametrize("checkpointing", ["full", "every-3", "selective"])
def test_own_networks_are_checkpointed(checkpointing: str) -> None:
    plan = Plan(precision="fp32", optimizer="sgd", checkpointing=checkpointing)
    assert_close(gradients(blocks_job(), plan), gradients(blocks_job(), FP32))


def test_nothing_is_initialised_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*arguments: Any, **options: Any) -> None:
        raise AssertionError("random numbers were drawn")

    for name in ("normal_", "uniform_", "kaiming_uniform_", "trunc_normal_"):
        monkeypatch.setattr(nn.init, name, drawn)
    for method in ("full", "lora") if "peft" in sys.modules else ("full",):
        build(tiny_job(method=method), Plan(), device="cpu")


def test_one_rank_of_many_builds_alone() -> None:
    made = build(
        tiny_job(), Plan(precision="fp32", shard="zero3"), device="cpu", world_size=64, rank=3, gpus_per_node=8
    )
    try:
        local = made.model.get_input_embeddings().weight.to_local()  # type: ignore[operator]
        assert local.shape == (1, 32)  # 61 rows over 64 ranks
        assert made.parameters == parameters_of_llama()
    finally:
        made.close()
    assert not torch.distributed.is_initialized()


def parameters_of_llama() -> int:
    return sum(
        p.numel()
        for p in model.build(
            tiny("llama"), dtype=torch.float32, attention=None, device=torch.device("meta")
        ).parameters()
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("loss", ["fused", "torch"])
def test_fused_losses_in_every_precision(loss: str, precision: str) -> None:
    if loss == "torch" and not hasattr(nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    plain = gradients(tiny_job(), Plan(precision=precision, optimizer="sgd"))
    fused = gradients(tiny_job(), Plan(precision=precision, optimizer="sgd", loss=loss))
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.2, "atol": 2e-3}
    assert_close(fused, plain, **tolerance)


def test_a_fused_loss_runs_nothing_twice_and_scales_with_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.techniques import fused_loss
    from tonnage.techniques.fused_loss import fused_cross_entropy

    monkeypatch.setattr(fused_loss, "CHUNK_TOKENS", 2)
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    labels = torch.tensor([1, -100, 3, 4, 6])
    (nn.functional.cross_entropy(hidden @ weight.T, labels) * 3).backward()
    expected = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    rows: list[int] = []

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        rows.append(part.shape[0])
        return part @ weight.T

    (fused_cross_entropy(hidden, labels, [weight], logits_of) * 3).backward()
    assert rows == [2, 2, 1]
    for ours, theirs in zip([hidden.grad, weight.grad], expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("outputs", "in_backward", "after"), [("freed", 0, 0), ("step", 1, 0), ("loop", 1, 1)])
def test_outputs_are_kept_as_long_as_a_loop_does(outputs: str, in_backward: int, after: int) -> None:
    made = ready(tiny_job(grad_accum=2), Plan(precision="fp32", outputs=outputs))
    alive: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []
    made.model.register_forward_hook(lambda module, given, output: alive.append(weakref.ref(output.logits)))
    weight = next(made.model.parameters())
    weight.register_hook(lambda gradient: seen.append(sum(logits() is not None for logits in alive)))
    made.run(2)
    assert seen == [in_backward] * 4
    assert sum(logits() is not None for logits in alive) == after


def test_gradients_are_averaged_once_a_step_or_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice, expected in ((False, 1), (True, 0)):
        made = ready(tiny_job(grad_accum=3), Plan(precision="fp32", accum_sync=choice))
        entered: list[nn.Module] = []
        step = dataclasses.replace(
            made.step, gradients_stay_local=lambda module, entered=entered: entered.append(module) or nullcontext()
        )
        ReadyStep(step=step, model=made.model, optimizers=made.optimizers).run(1)
        assert len(entered) == expected
