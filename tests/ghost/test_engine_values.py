"""Lines of engines' logs, modules that do nothing in place of compiled ones, and tokens that nothing has computed."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from tonnage.ghost.environment import PATH

sys.path.extend(PATH.split(":"))
from tonnage_inside.values import jit, serving
from tonnage_recorder.engines import read_words
from tonnage_recorder.outcome import describe

GIB = 1 << 30


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("GPU KV cache size: 466,432 tokens", {"kv_cache_tokens": 466432}),
        ("Maximum concurrency for 8,192 tokens per request: 56.94x", {"max_len": 8192, "concurrency": 56.94}),
        (
            "GPU KV cache size: 50 tokens, Maximum concurrency for 8,192 tokens per request: 3.00x",
            {"kv_cache_tokens": 50, "max_len": 8192, "concurrency": 3.0},
        ),
        ("Graph capturing finished in 14 secs, took 0.50 GiB", {"graphs_bytes": GIB // 2}),
        ("KV Cache is allocated. #tokens: 9, K size: 1.50 GB, V size: 1.50 GB", {"kv_cache_bytes": 3 * GIB}),
        (
            "max_total_num_tokens=418001, chunked_prefill_size=8192, context_len=131072",
            {"kv_cache_tokens": 418001, "max_len": 131072},
        ),
        ("Loading weights took 3 seconds", {}),
        (f"GPU KV cache size: {'9' * 400} tokens", {}),
        ("GPU KV cache size: , tokens", {}),
        ("torch_compile_cache/" * 50_000, {}),
        ("torch.compile " * 50_000, {}),
        ("Graph capturing finished in " * 50_000, {}),
        ("Compiling a graph for compile range (1, 8192) takes 9.31 s", {"compile_cache": "cold"}),
        ("Compiling a graph for dynamic shape takes 30.12 s", {"compile_cache": "cold"}),
        (
            "Directly load the compiled graph(s) for dynamic shape from the cache, took 2.1 s",
            {"compile_cache": "warm"},
        ),
        ("torch.compile took 41.20 s in total", {"compile_seconds": 41.2}),
        ("torch.compile and initial profiling/warmup run together took 4 s in total", {"compile_seconds": 4.0}),
        (
            "Directly load AOT compilation from path /c/torch_compile_cache/torch_aot_compile/6/rank_0_0/model",
            {"compile_cache": "warm", "compiled_into": "/c/torch_compile_cache/torch_aot_compile/6/rank_0_0"},
        ),
    ],
)
def test_facts_are_read_from_the_engines_own_words(line, facts):
    assert read_words(line) == facts


class ValidationError(ValueError):
    """An error such as pydantic's."""

    def errors(self):
        return self.args[0]


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([{"loc": (), "msg": "Value error, max_model_len (9)\n is too long."}], "max_model_len (9) is too long."),
        (
            [{"loc": ("a", 1), "msg": "Input should be less than 1"}, {"msg": "b"}],
            "a.1: Input should be less than 1; b",
        ),
        ([], "ValidationError"),
    ],
    ids=str,
)
def test_a_refused_argument_is_told_without_all_the_others(found, told):
    assert describe(ValidationError(found))["message"] == told


class Policy:
    """Collects what patches use and write."""

    torch = torch

    def __init__(self):
        self.used, self.written = [], []

    def use(self, name):
        self.used.append(name)

    def write(self, tensor, values):
        tensor.copy_(values)


class JitSpec:
    def build_and_load(self):
        raise RuntimeError("no compiler")


def flashinfer(**members):
    """Return a package with the members of `flashinfer.jit` that are patched, imported under that name."""
    package = ModuleType("flashinfer.jit")
    package.core = SimpleNamespace(JitSpec=type("JitSpec", (JitSpec,), {}))
    package.cubin_loader = SimpleNamespace()
    vars(package).update(members)
    return package


def test_a_module_that_would_be_compiled_does_nothing():
    policy, package = Policy(), flashinfer()
    jit.patch_flashinfer(policy, package)
    module = package.core.JitSpec().build_and_load()
    assert policy.used == []
    assert module.run(1, a=2) is None
    assert module["run"]() is None
    assert policy.used == ["jit", "jit"]
    assert module.init("bf16").run_moe(1) is None
    assert module.init("bf16").get_tactic_num() == 0
    assert module.init("bf16").get_valid_tactics_for_shape(1) == module.trtllm_get_valid_moe_configs() == []
    assert module.plan(1) == []  # FlashInfer refuses to run attention without a plan


@pytest.mark.parametrize(
    "missing", [AssertionError("no checksums.txt"), RuntimeError("no header"), OSError("no link")]
)
def test_a_module_whose_description_needs_files_is_not_described(missing, monkeypatch):
    """B200: kernels of experts are described by a list that FlashInfer loads from the network."""
    loaded = []

    def gen_experts_module(rubin):
        loader.download_file("checksums.txt")
        raise missing

    def gen_norm_module():
        return package.core.JitSpec()

    loader = SimpleNamespace(download_file=loaded.append, setup_cubin_loader=loaded.append)
    package = flashinfer(gen_experts_module=gen_experts_module, gen_norm_module=gen_norm_module, cubin_loader=loader)
    part = ModuleType("flashinfer.jit.moe")
    part.gen_experts_module, part.setup_cubin_loader = gen_experts_module, loader.setup_cubin_loader
    monkeypatch.setitem(sys.modules, "flashinfer.jit", package)
    monkeypatch.setitem(sys.modules, "flashinfer.jit.moe", part)
    policy = Policy()
    jit.patch_flashinfer(policy, package)
    for gen in (package.gen_experts_module, part.gen_experts_module):
        spec = gen(True)
        assert spec.build_and_load().run_moe(1) is None
        assert list(spec.get_library_paths()) == []
        part.setup_cubin_loader(spec.get_library_path())
    assert isinstance(package.gen_norm_module(), JitSpec)
    assert loaded == []
    loader.download_file("cubin")  # others still load
    assert loaded == ["cubin"]


def test_kernels_of_cutlass_are_not_compiled():
    class CompileCallable:
        def __call__(self, *arguments):
            raise RuntimeError("no driver")

    policy = Policy()
    jit.patch_cutlass(policy, SimpleNamespace(CompileCallable=CompileCallable))
    kernel = CompileCallable()(print, 1)
    assert kernel(1, 2) is None
    assert policy.used == ["jit"]


def test_each_complete_prompt_gets_one_token_that_ends_nothing():
    class GPUModelRunner:
        model_config = SimpleNamespace(hf_config=SimpleNamespace(eos_token_id=[0, 2]))

        def sample(self, hidden_states, batch, grammar):
            tokens = torch.zeros(3, 2, dtype=torch.int64)
            counts, rejected = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
            return SimpleNamespace(sampled_token_ids=tokens), counts, rejected

    policy = Policy()
    serving.patch_sampler(policy, SimpleNamespace(GPUModelRunner=GPUModelRunner))
    batch = SimpleNamespace(  # a decoding request with a drafted token, a last piece of a prompt, and an earlier one
        num_computed_tokens_np=np.array([50, 64, 64]),
        num_scheduled_tokens=np.array([2, 36, 30]),
        prefill_len_np=np.array([40, 100, 100]),
        cu_num_logits_np=np.array([0, 2, 3, 4]),
    )
    output, counts, rejected = GPUModelRunner().sample(None, batch, None)
    assert counts.tolist() == [1, 1, 0]
    assert rejected.tolist() == [1, 0, 0]
    assert set(output.sampled_token_ids.flatten().tolist()) == {1}
    assert policy.used == ["sampled"]


def test_the_lengths_of_requests_are_those_that_the_host_knows():
    class GPUModelRunner:
        def prepare_inputs(self, output):
            lengths = torch.zeros(4, dtype=torch.int32)  # what a kernel computes reads as zero
            return SimpleNamespace(seq_lens=lengths, seq_lens_cpu_upper_bound=torch.tensor(output))

    policy = Policy()
    serving.patch_lengths(policy, SimpleNamespace(GPUModelRunner=GPUModelRunner))
    assert GPUModelRunner().prepare_inputs([52, 100, 94]).seq_lens.tolist() == [52, 100, 94, 0]


def test_the_scales_of_an_8_bit_cache_are_positive():
    class BaseKVCacheMethod:
        def process_weights_after_loading(self, layer):
            assert layer.k_scale > 0.0
            return layer.k_scale.to("cpu").tolist()

    serving.patch_cache_scales(SimpleNamespace(torch=torch), SimpleNamespace(BaseKVCacheMethod=BaseKVCacheMethod))
    layer = torch.nn.Module()
    layer.k_scale = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
    assert BaseKVCacheMethod().process_weights_after_loading(layer) == 1.0
    assert not hasattr(layer, "v_scale")


@pytest.mark.parametrize("completes", ["resolve_once", "__post_init__"])
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_sglang_reads_no_weights_and_needs_no_tokenizer(tmp_path, completes, has_tokenizer, monkeypatch):
    monkeypatch.setenv("TONNAGE_ENGINE", '{"tp_size": 2}')
    if has_tokenizer:
        (tmp_path / "tokenizer.json").write_text("{}")

    class ServerArgs:
        def __init__(self):
            self.model_path, self.tokenizer_path = str(tmp_path), None
            self.load_format, self.skip_tokenizer_init = "auto", False
            getattr(self, completes)()

    seen = []
    setattr(ServerArgs, completes, lambda arguments: seen.append(arguments.load_format))
    policy = Policy()
    serving.patch_server_arguments(policy, SimpleNamespace(ServerArgs=ServerArgs))
    arguments = ServerArgs()
    assert arguments.skip_tokenizer_init is not has_tokenizer
    assert arguments.tp_size == 2
    assert (seen, policy.used) == (["dummy"], ["weights", *([] if has_tokenizer else ["tokenizer"])])
