"""Predicted against measured: the published rows, the arithmetic of errors, and a few rows run."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import select
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.errors import GhostUnavailable
from tonnage.ghost import environment as ghost_environment
from tonnage.ghost import wheel

ROOT = Path(__file__).parents[2]


def test_every_row_names_a_card_and_a_script_that_takes_its_arguments() -> None:
    from benchmarks.accuracy.rows import load

    rows = load()
    assert len(rows) > 200
    for row in rows:
        parse_cluster(row.gpu)
        script = importlib.import_module(f"benchmarks.accuracy.scripts.{row.script}")
        inspect.signature(script.measure).bind(**row.arguments)
        assert row.url
        assert all(value > 0 for value in row.measured.values())


def test_a_row_that_is_there_twice_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    from benchmarks.accuracy.rows import load

    row = {"name": "a", "source": "s", "url": "u", "public": True, "gpu": "t4", "script": "kernels"}
    whole = json.dumps({**row, "measured": {"allocated": 1.0}})
    (tmp_path / "rows.jsonl").write_text(f"{whole}\n{whole}\n")
    with pytest.raises(ValueError, match="2 times"):
        load(tmp_path)
    (tmp_path / "rows.jsonl").write_text(f"{whole}\n{json.dumps({**row, 'measured': {'weight': 1.0}})}\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: measured"):
        load(tmp_path)


def test_errors_count_predictions_but_not_what_a_constant_was_read_off() -> None:
    from benchmarks.accuracy.rows import Row
    from benchmarks.accuracy.table import errors, markdown

    def row(name: str, gib: float, calibrates: bool = False) -> Row:
        return Row(
            name=name,
            source="s",
            url="u",
            public=True,
            gpu="t4",
            script="kernels",
            measured={"allocated": gib},
            calibrates=calibrates,
        )

    off = [-4.5 if i == -5 else float(i) for i in range(-10, 10)]  # none at the border of 5 %
    answers = [(row(str(percent), 100.0), {"allocated": 100.0 + percent}) for percent in off]
    answers += [(row("constant", 1.0, calibrates=True), {"allocated": 9.0}), (row("none", 1.0), {"error": "broken"})]
    found = errors(answers, "allocated")
    assert found is not None
    # sorted absolute errors 0, 1, 1, ... 4, 4, 4.5, 5, 6, 6, ... 9, 9, 10: the 19th of 20 is 9
    assert (found.p95, found.worst, found.median) == pytest.approx((9.0, 10.0, 4.75))
    assert found.bias == pytest.approx(-0.5)
    text = markdown(answers)
    assert "| s | allocated | 20 | 4.750 | 9.000 | 10.000 | -0.500 | 5 |" in text
    assert "Not run: s, none: broken" in text
    assert errors(answers, "process") is None


def test_other_tools_are_beside_the_same_rows() -> None:
    from benchmarks.accuracy.rows import Row
    from benchmarks.accuracy.table import markdown

    def row(name: str, **rivals: dict[str, float]) -> Row:
        plain = {"url": "u", "public": True, "gpu": "t4", "script": "kernels", "measured": {"allocated": 4.0}}
        return Row(name=name, source="s", rivals=rivals, **plain)

    rows = [row("both", Other={"allocated": 3.0}), row("more", Other={"allocated": 4.4}), row("ours alone")]
    text = markdown([(one, {"allocated": 4.04}) for one in rows])
    assert "| s | allocated | 2 | Other | 17.500 | 25.000 | -7.500 | 1.000 | 1.000 | +1.000 |" in text
    assert "| tool |" not in markdown([(rows[-1], {"allocated": 4.04})])


def test_rows_whose_source_says_all_of_the_run_stand_apart() -> None:
    from benchmarks.accuracy.rows import Row, load
    from benchmarks.accuracy.table import markdown

    told = Row(
        name="told",
        source="s",
        url="u",
        public=True,
        gpu="t4",
        script="kernels",
        measured={"allocated": 4.0, "process": 5.0},
        versions={"torch": "2.10.0"},
    )
    others = [
        dataclasses.replace(told, name="card", assumed=("the card",)),
        dataclasses.replace(told, name="age", versions={}),
        dataclasses.replace(told, name="program", software_assumed=("the program of the day before",)),
        dataclasses.replace(told, name="script", public=False),
    ]
    text = markdown([(row, {"allocated": 4.04, "process": 4.7}) for row in (told, *others)])
    assert "| script and configuration are public | allocated | 3 | 1.000 | 0.1 | 1.000 | 0.5 | 0 |" in text
    assert "| script and configuration are public | process | 3 | 6.000 | 3 | 6.000 |  | 3 |" in text
    assert "| and so are all versions | allocated | 1 | 1.000 | 0.1 | 1.000 | 0.5 | 0 |" in text
    assert "| something of the configuration was assumed | allocated | 2 | 1.000 | 1 | 1.000 | 3 | 0 |" in text
    assert "| something of the configuration was assumed | process | 2 | 6.000 |  | 6.000 |  | 2 |" in text
    assert "| all | allocated | 5 | 1.000 | 0.1 | 1.000 | 0.5 | 0 |" in text
    rows = load()
    assert 0 < sum(row.complete for row in rows) < sum(row.configured for row in rows) < len(rows)


@pytest.mark.ghost
def test_published_peaks_of_torchs_own_operations_are_met() -> None:
    from benchmarks.accuracy import software
    from benchmarks.accuracy.rows import load
    from benchmarks.accuracy.runner import predict
    from benchmarks.accuracy.table import errors

    rows = [row for row in load() if row.arguments.get("kernel") == "cross_entropy" and "huggingface" in row.name]
    if lacking := software.missing(sorted({name for row in rows for name in row.software})):
        pytest.skip(f"{', '.join(lacking)} not here; python -m benchmarks.accuracy.software gets it")
    answers = predict(rows)
    found = errors(answers, "allocated")
    assert found is not None, answers
    assert len(found.percents) == len(rows) >= 3
    assert found.worst < 0.001


@pytest.mark.ghost
def test_peaks_that_were_predicted_unseen_are_met() -> None:
    from benchmarks.accuracy.rows import load
    from benchmarks.accuracy.runner import predict

    chosen = {"baseline loss-bw gemma2", "7 FlashAttention", "gpt2-xl, gradients cleared after the step"}
    chosen |= {"1 B on eight H100, from the second step on"}
    answers = predict([row for row in load() if row.name in chosen])
    assert {row.name for row, _ in answers} == chosen
    for row, predicted in answers:
        for metric, gib in row.measured.items():
            assert predicted[metric] == pytest.approx(gib, rel=0.0015), row.name


def test_slots_of_a_process_that_ends_early_serve_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.accuracy import runner
    from benchmarks.accuracy.rows import load

    of_one = [row for row in load() if row.script == "kernels"][:4]
    of_other = [row for row in load() if row.script == "attention_training"][:3]
    program = """if True:
        import json, sys
        for line in sys.stdin:
            request = json.loads(line)
            if request["script"] == "kernels" and request["number"] == 1:
                break
            print(json.dumps({"number": request["number"], "allocated_bytes": 1 << 30}), flush=True)
    """

    begun: list[subprocess.Popen[str]] = []

    def start(self: runner.Roots, given: object) -> runner.Process:
        piped = subprocess.PIPE
        one = subprocess.Popen([sys.executable, "-c", program], stdin=piped, stdout=piped, text=True, bufsize=1)
        begun.append(one)
        assert one.stdin is not None
        assert one.stdout is not None
        return runner.Process(one.stdin, one.stdout)

    monkeypatch.setattr(runner.Roots, "start", start)
    monkeypatch.setattr(runner.software, "given", lambda *names: None)
    answers = [predicted for _, predicted in runner.predict([*of_one, *of_other], at_once=1)]
    assert answers[0] == {"allocated": 1.0}
    assert answers[1:4] == [{"error": "the ghost process ended early"}] * 3
    assert answers[4:] == [{"allocated": 1.0}] * 3
    assert [one.wait() for one in begun] == [0, 0]


def test_a_process_that_cannot_begin_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.accuracy import runner
    from benchmarks.accuracy.rows import load

    def start(self: runner.Roots, given: object) -> runner.Process:
        raise GhostUnavailable("no libraries")

    monkeypatch.setattr(runner.Roots, "start", start)
    monkeypatch.setattr(runner.software, "given", lambda *names: None)
    rows = [next(row for row in load() if row.script == script) for script in ("kernels", "attention_training")]
    with pytest.raises(GhostUnavailable, match="no libraries"):
        runner.predict(rows, at_once=1)


@pytest.mark.ghost
def test_a_job_that_is_killed_is_answered_for_at_once() -> None:
    """Before whoever asks says that there is nothing more, for which they wait until they have all answers."""
    variables = ghost_environment.forking()
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(ROOT / "src"), str(ROOT)])
    program = """if True:
        import os, sys, types
        from benchmarks.accuracy import inside
        script = types.ModuleType("killed")
        script.measure = lambda: os.kill(os.getpid(), 9)
        sys.modules["benchmarks.accuracy.scripts.killed"] = script
        inside.serve()
    """
    request = {"number": 5, "script": "killed", "arguments": {}, "ranks": 1, "rank": 0}
    settings = parse_cluster("t4").device.ghost_settings()
    piped = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program], env=variables, stdin=piped, stdout=piped, text=True
    ) as asked:
        assert asked.stdin is not None
        assert asked.stdout is not None
        asked.stdin.write(json.dumps(request | {"settings": settings}) + "\n")
        asked.stdin.flush()
        assert select.select([asked.stdout], [], [], 120)[0], "no answer"
        assert json.loads(asked.stdout.readline()) == {"number": 5, "error": "the process died (status 9)"}


def test_another_rank_is_another_job() -> None:
    from benchmarks.accuracy.rows import load

    row = next(row for row in load() if row.rank > 0)
    assert row.rank < row.ranks
    assert dataclasses.replace(row, rank=0).job != row.job == dataclasses.replace(row, name="again").job


def test_a_checkout_that_is_not_there_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.accuracy.scripts import megatron_2021, megatron_lm

    monkeypatch.delenv(megatron_lm.FOLDER, raising=False)
    for measure in (partial(megatron_lm.measure, "pretrain_gpt.py"), megatron_2021.measure):
        with pytest.raises(RuntimeError, match="MEGATRON_LM names no checkout"):
            measure({})


def test_kernels_of_2021_are_stood_in_for_by_tensors_of_their_sizes() -> None:
    import torch
    from benchmarks.accuracy.scripts import megatron_2021 as script

    hidden = torch.zeros(6, 2, 8, dtype=torch.float16)
    weight = torch.ones(8, dtype=torch.float16)
    result, mean, deviation = script._normalised(hidden, weight.shape, weight, weight, 1e-5)
    assert (result.shape, result.dtype) == (hidden.shape, torch.float16)
    assert {(saved.shape, saved.dtype) for saved in (mean, deviation)} == {((12,), torch.float32)}
    gradients = script._normalised_backward(hidden, mean, deviation, hidden, weight.shape, weight, weight, 1e-5)
    assert [gradient.shape for gradient in gradients] == [hidden.shape, weight.shape, weight.shape]
    overflow = torch.zeros(1, dtype=torch.int32)
    norm, per_tensor = script._apply(script._norm, overflow, [[hidden, weight]], False)
    assert (norm.shape, norm.dtype, per_tensor.numel()) == ((1,), torch.float32, 0)


def test_networks_and_libraries_of_then_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.accuracy.scripts import attention_training, deepspeed_chat, kernels, lit_gpt_finetune

    monkeypatch.delenv("LIT_GPT", raising=False)
    with pytest.raises(RuntimeError, match="LIT_GPT does not name a folder"):
        lit_gpt_finetune.measure("lit_gpt", "phi-1_5", 1, 8, None, 1)
    with pytest.raises(RuntimeError, match=r"measured with transformers 4\.46"):
        attention_training.measure("OPTForCausalLM", {}, "eager", 1, 8, "4.46")
    monkeypatch.setattr(deepspeed_chat.transformers, "__version__", "5.23.0")
    with pytest.raises(RuntimeError, match=r"measured with a transformers up to 4\.46"):
        deepspeed_chat.measure("finetune", "opt-1.3b", 2, 8, 512)
    with pytest.raises(RuntimeError, match=r"measured with Liger-Kernel 0\.2\.1"):
        kernels.measure("rms_norm", "liger", 8, {}, version="0.2.1")


def test_transformer_engine_that_is_not_there_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.accuracy.scripts import megatron_te

    monkeypatch.setattr(megatron_te, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="transformer_engine is not installed"):
        megatron_te.measure("pretrain_gpt.py", {}, {})


def dispatchers(monkeypatch: pytest.MonkeyPatch, gathering: str, exchanging: str) -> SimpleNamespace:
    """Megatron-LM's two dispatchers of experts, in short, whose functions that look at the map have these names."""
    torch = pytest.importorskip("torch")
    from benchmarks.accuracy.scripts import equal_shares

    def look(self, hidden, chosen):  # of two local experts: how many tokens each has, and which
        return chosen.sum(dim=0).tolist(), hidden.new_ones(2, chosen.shape[0]).masked_select(chosen.T).numel()

    def select(self, hidden, chosen):
        return hidden.new_ones(chosen.shape[1], chosen.shape[0]).masked_select(chosen.T).numel()

    def count(self, chosen):
        self.input_splits = chosen.sum(dim=0).long()
        return torch.zeros(2, dtype=torch.long)

    config = SimpleNamespace(num_moe_experts=4, moe_router_topk=1)
    sizes = {"tp_size": 1, "ep_size": 2, "router_topk": 1, "num_experts": 4, "num_local_experts": 2}
    sizes |= {"config": config, "drop_and_pad": False}
    module = SimpleNamespace(
        MoEAllGatherTokenDispatcher=type("Gathering", (), {**sizes, gathering: look}),
        MoEAlltoAllTokenDispatcher=type("Exchanging", (), {**sizes, "preprocess": count, exchanging: select}),
    )
    name = "megatron.core.transformer.moe.token_dispatcher"
    for part in ("megatron", "megatron.core", "megatron.core.transformer", "megatron.core.transformer.moe"):
        monkeypatch.setitem(sys.modules, part, SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, module)
    equal_shares.install()
    return module


@pytest.mark.parametrize(
    ("gathering", "exchanging", "ranks"),
    [("token_permutation", "token_permutation", 2), ("dispatch_postprocess", "dispatch_preprocess", 1)],
)
def test_experts_of_each_year_get_equal_shares(monkeypatch, gathering: str, exchanging: str, ranks: int) -> None:
    """Up to the middle of 2025 the function that looks is given a rank's own tokens, since then all ranks' tokens."""
    torch = pytest.importorskip("torch")
    module = dispatchers(monkeypatch, gathering, exchanging)
    hidden = torch.zeros(4, 2, 3)  # eight tokens
    share = 8 * ranks // 4
    nowhere = torch.zeros(8 * ranks, 2, dtype=torch.bool)
    gather = getattr(module.MoEAllGatherTokenDispatcher(), gathering)
    assert gather(hidden, nowhere) == ([share, share], 2 * share)
    exchange = module.MoEAlltoAllTokenDispatcher()
    nobody = torch.zeros(8, 4, dtype=torch.bool)
    assert getattr(exchange, exchanging)(hidden, nobody) == 8  # two to each of four experts
    assert exchange.preprocess(nobody).tolist() == [4, 4]  # from two ranks
    assert exchange.input_splits.tolist() == [4] * 4
    assert torch.ones(3).masked_select(torch.tensor([True, False, True])).numel() == 2  # elsewhere it is torch's own
    assert torch.tensor([True, False, True]).sum().item() == 2


def test_programs_lie_where_they_did_then(tmp_path: Path) -> None:
    from benchmarks.accuracy.scripts import megatron_lm

    (tmp_path / "examples" / "t5").mkdir(parents=True)
    assert megatron_lm.program_in(tmp_path, "examples/t5/pretrain_t5.py") == tmp_path / "pretrain_t5.py"
    (tmp_path / "examples" / "t5" / "pretrain_t5.py").touch()
    assert megatron_lm.program_in(tmp_path, "examples/t5/pretrain_t5.py") == tmp_path / "examples/t5/pretrain_t5.py"


def begun_weights(weight_bytes: int) -> list[int]:
    """Of twelve weights, how many were begun when one after the other is handed over."""
    import torch
    from benchmarks.accuracy.scripts.reading import Readers

    begun: list[torch.Tensor] = []

    def read() -> torch.Tensor:
        begun.append(torch.empty(weight_bytes, dtype=torch.int8))
        return begun[-1]

    readers = Readers(max_workers=2)
    counts = []
    for one in [readers.submit(read) for _ in range(12)]:
        assert one.result() is begun[len(counts)]
        counts.append(len(begun))
    return counts


FUSED = """
import os
import torch
from benchmarks.accuracy.scripts import compilers
from pathlib import Path
from torch import nn
from torch._inductor.async_compile import AsyncCompile

def gated(x, bias):
    first, second = (x + bias).chunk(2, -1)
    return nn.functional.dropout(nn.functional.silu(first.float()) * second, 0.1).sum(0)

def second_step():
    torch._dynamo.reset()
    compiled = torch.compile(gated)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        result = compiled(x, bias)
        kept = torch.cuda.memory_allocated()
        result.sum().backward()
    kernels = list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))
    print(kept, torch.cuda.max_memory_allocated(), bool(kernels))

x = torch.empty(512, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
bias = torch.empty(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
ordinary = AsyncCompile.triton
compilers.leave_kernels_out()
second_step()
AsyncCompile.triton = ordinary
second_step()
"""


@pytest.mark.ghost
def test_what_inductor_makes_asks_for_the_same_without_its_kernels(tmp_path: Path) -> None:
    environment = ghost_environment.environment(torch=wheel.find(sys.executable))
    environment["PYTHONPATH"] += f":{ROOT}"
    for cache in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        environment[cache] = str(tmp_path / cache)
    done = subprocess.run([sys.executable, "-c", FUSED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (*without, none), (*with_kernels, some) = (line.split() for line in done.stdout.splitlines())
    assert without == with_kernels
    assert int(without[1]) > int(without[0]) > 512 * 4096 * 2
    assert (none, some) == ("False", "True")


REHEARSED = """
import threading
import torch
from benchmarks.accuracy.scripts import compilers
from tonnage.workers import preload
from tonnage_recorder import native

for name in compilers.IMPORTS:
    preload.try_import(name)
compilers.read()
compilers.rehearse()
print(torch.cuda.is_initialized(), threading.active_count())
native.load().set("TOTAL_BYTES", str(2**33))
compilers.leave_kernels_out()
print(torch.cuda.get_device_properties(0).total_memory, torch.compile(torch.sin)(torch.ones(8, device="cuda")).device)
"""


@pytest.mark.ghost
def test_what_was_compiled_before_the_fork_leaves_the_card_as_it_is() -> None:
    environment = ghost_environment.forking(torch=wheel.find(sys.executable))
    environment["PYTHONPATH"] += f":{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", REHEARSED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "1", str(2**33), "cuda:0"]


def test_large_weights_are_read_just_ahead_of_their_use_and_small_ones_at_once() -> None:
    # 2**24 bytes by one of four threads at 2 GB/s in all: 33.6 ms; four are used meanwhile, 1.5 ms each
    assert begun_weights(2**24) == [8, 8, 8, 8, *[12] * 8]
    assert begun_weights(2**10) == [8, *[12] * 11]  # 2 us each


TEMPORARIES = """
import torch
from benchmarks.accuracy.scripts import flash_attention

def most(step):
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before

for deterministic in (False, True):
    torch.use_deterministic_algorithms(deterministic)
    q = torch.empty(2, 300, 8, 80, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.empty(2, 300, 4, 80, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
    out, sums, _, state = flash_attention.forward(q, k, v, 0.0, softmax_scale=0.1, causal=True)
    rest = (None, None, 300, 300, 0.0, True, state, torch.empty(0, dtype=torch.uint64, device="cuda"))
    whole = most(lambda: torch.ops.aten._flash_attention_backward(out, q, k, v, out, sums, *rest, scale=0.1))
    beside = most(lambda: flash_attention.backward(out, q, k, v, out, sums, *gradients, deterministic=deterministic))
    print(whole - beside - sum(tensor.nbytes for tensor in gradients), whole)
"""


@pytest.mark.ghost
def test_the_stand_in_for_flash_attention_asks_for_what_torchs_operation_asks_for() -> None:
    environment = ghost_environment.environment(torch=wheel.find(sys.executable), capability="8.0", sms=108)
    environment["PYTHONPATH"] += f":{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", TEMPORARIES], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    once, repeatable = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert once[0] == repeatable[0] == 0
    assert repeatable[1] > 2 * once[1], "one fp32 sum of dQ for each group of blocks"


COMPILED = """
import torch
from benchmarks.accuracy.scripts.older_inductor import Functions

functions = Functions()
logits = torch.empty(1024, 4, 25216, dtype=torch.bfloat16, device="cuda")
target = torch.empty(1024, 4, dtype=torch.int64, device="cuda")

def most(step, *of):
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = step(*of)
    print(round((torch.cuda.max_memory_allocated() - before) / 2**20))
    return made

for call in range(2):
    copy, largest = most(functions.logits_max, logits)
    mask, masked, sums, copy = most(functions.predicted_logits, copy, target, largest, 0, 25216)
    copy, loss = most(functions.cross_entropy_loss, copy, sums)
    gradient = most(functions.gradients, copy, loss, mask, masked)
    del copy, largest, mask, masked, sums, loss, gradient
"""


@pytest.mark.ghost
def test_the_fused_cross_entropy_asks_for_what_torch_2_2_compiled_it_to() -> None:
    """MiB of each function of Megatron-LM's in torch 2.2.2 on a ghost that told registers, first and second call."""
    environment = ghost_environment.environment(torch=wheel.find(sys.executable), capability="8.0", sms=108)
    environment["PYTHONPATH"] += f":{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = [394, 1426, 1032, 1230], [394, 394, 0, 592]
    assert [int(line) for line in done.stdout.splitlines()] == pytest.approx(first + second, abs=1)


def test_a_resumed_rank_takes_part_in_what_others_would_have_said_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ranks in two copies of an optimizer, one has the same shards as this one and two have others."""
    torch = pytest.importorskip("torch")
    from benchmarks.accuracy.scripts import resuming

    @dataclasses.dataclass(frozen=True)
    class Shard:
        key: str

    arguments = SimpleNamespace(num_distributed_optimizer_instances=2)
    monkeypatch.setitem(sys.modules, "megatron", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(get_args=lambda: arguments))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 3)
    gathered: list[object] = [None] * 4
    mine = [Shard("embedding"), Shard("mlp.experts"), Shard("optimizer.moment")]
    resuming._gather_as_from_all(gathered, mine)
    other = [Shard("embedding"), Shard("mlp.experts at 0"), Shard("optimizer.moment at 0")]
    assert gathered == [other, mine, other, mine]

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group=None: None)
    broadcast = resuming._hold_until_next(lambda tensor, group=None, async_op=False: None)
    tensors = [torch.empty(1) for _ in range(3)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    broadcast(tensors.pop(0), group="a", async_op=True)
    broadcast(tensors.pop(0), group="b", async_op=True)
    broadcast(tensors.pop(0), group="a")  # waited for
    assert [made() is not None for made in alive] == [True, True, False]
    torch.distributed.all_reduce(torch.empty(1), group="a")
    assert [made() is not None for made in alive] == [False, True, False]


@pytest.mark.parametrize("logarithm", [False, True])
def test_the_softmax_of_2021_keeps_its_input_and_is_the_same_function(logarithm: bool) -> None:
    import torch
    from benchmarks.accuracy.scripts import older_softmax

    given = torch.randn(3, 5, requires_grad=True)
    ours = older_softmax._keeping(logarithm)(given, dim=-1)
    theirs = torch.log_softmax(given, -1) if logarithm else torch.softmax(given, -1)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn(3, 5)
    found, wanted = (torch.autograd.grad(each, given, weights, retain_graph=True)[0] for each in (ours, theirs))
    torch.testing.assert_close(found, wanted)
    assert ours.grad_fn.saved_tensors[0].data_ptr() == given.data_ptr()


@pytest.mark.ghost
def test_software_that_torch_has_imported_already_is_not_mixed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.accuracy import runner, software
    from benchmarks.accuracy.rows import load

    (tmp_path / "numpy.py").touch()
    given = software.Given(torch=wheel.find(sys.executable), paths=(str(tmp_path),))
    monkeypatch.setattr(runner.software, "given", lambda *names: given)
    [(_, predicted)] = runner.predict([next(row for row in load() if row.script == "divided_states")])
    assert predicted == {"error": "the ghost process ended early"}
    assert f"numpy of {tmp_path}: torch has imported another" in capfd.readouterr().err
