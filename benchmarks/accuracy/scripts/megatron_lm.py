"""Megatron-LM's own training program, unchanged, for one rank of a job.

The folder that the variable MEGATRON_LM names is a checkout of NVIDIA/Megatron-LM; nothing of it is here.  What it
needs of others and cannot get without CUDA is stood in for by functions that ask for the same memory: Apex's fused
softmax (a result of the size of the scores; its backward works in place), its products that add to a gradient in
place, and its layer norms (which save what torch's saves: input, mean and reciprocal deviation).  FusedAdam is
torch's AdamW, as Megatron-LM falls back to: the states are the same.  Experts get equal shares of the tokens.
"""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
import tempfile
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.accuracy.scripts import compilers, equal_shares
from torch._functorch import config as functorch_config
from torch.utils.data import Dataset

IMPORTS = (
    "megatron.training",
    "megatron.training.datasets.fim_dataset",
    "megatron.training.datasets.sft_dataset",
    "megatron.training.yaml_arguments",
    "megatron.core.datasets.bert_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.t5_dataset",
    "megatron.core.models.mimo",
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs",
    "megatron.core.tokenizers.text",
    "megatron.core.tokenizers.text.utils.build_tokenizer",
    "megatron.post_training.arguments",
    "megatron.post_training.loss_func",
    "gpt_builders",
    "model_provider",
    *compilers.IMPORTS,
)

FOLDER = "MEGATRON_LM"
"""The variable that names the checkout."""

LAUNCHER = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TESTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
}
"""What the functional tests with local layers set (`ENV_VARS` of their model_config.yaml)."""


def measure(program: str, options: dict[str, Any]) -> dict[str, int]:
    """Bytes as `training_log` writes them to TensorBoard: the most so far, and what is left after a step."""
    return run(program_in(checkout(), program), options, TESTS)


def checkout() -> Path:
    """Raises RuntimeError where none is named."""
    if FOLDER not in os.environ:
        raise RuntimeError(f"{FOLDER} names no checkout of NVIDIA/Megatron-LM")
    return Path(os.environ[FOLDER])


def program_in(folder: Path, program: str) -> Path:
    """Where a program is: those of T5 and BERT lay beside that of GPT up to 2025."""
    place = folder / program
    return place if place.exists() else folder / place.name


def run(program: Path, options: dict[str, Any], environment: dict[str, str], timed: bool = False) -> dict[str, int]:
    """As `measure`, with what is installed and the variables of `environment`.

    `timed`: Inductor times the forms of each kernel in the first step, as it does with nothing on its shelf.
    """
    os.environ.update(LAUNCHER | environment)
    _give_samples(program, options)
    equal_shares.install()
    if timed:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    else:
        compilers.leave_kernels_out()
        functorch_config.force_non_lazy_backward_lowering = True  # else what is not run backward is not kept
    logged = _listen()
    start(program, options)
    return logged


def start(program: Path, options: dict[str, Any]) -> None:
    """Run a program to its end, here, with options as on its command line."""
    sys.argv = [str(program), *_words(options)]
    runpy.run_path(str(program), run_name="__main__")


def prepare() -> None:
    """Make the checkout importable, once for all jobs; without Transformer Engine, also where that is installed."""
    if FOLDER in os.environ:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
        make_importable()


def make_importable() -> None:
    sys.path.insert(0, os.environ[FOLDER])
    _newer_typing()
    _stand_in_for_apex()


def rehearse() -> None:
    """What each job would do for the first time otherwise, once for all of them."""
    if FOLDER in os.environ:
        _read_help()
        compilers.read()
        _register_patterns()
        compilers.rehearse()


def _read_help() -> None:
    """Megatron-LM (since December 2025) finds its options' help in its own source each time that it parses them."""
    if find_spec("megatron.training.argument_utils") is None:
        return
    from megatron.training import argument_utils, arguments

    group = argument_utils.ArgumentGroupFactory
    of_class = functools.cache(functools.partial(group._get_field_docstrings, object.__new__(group)))
    group._get_field_docstrings = lambda self, config: of_class(config)
    arguments.add_megatron_arguments(argparse.ArgumentParser())


def _register_patterns() -> None:
    """Those of Inductor that are the same for all cards: each is traced to be known.  None is asked what it is."""
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._inductor.pattern_matcher import init_once_fakemode

    def register() -> None:
        card = torch.device("cuda:0")
        pad_mm._pad_mm_init(card)
        fuse_attention._sfdp_init(card)

    with patch.object(torch.cuda, "is_available", lambda: False):
        init_once_fakemode(register)()


def _words(options: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}", *str(value).split()]
    return words


def _newer_typing() -> None:
    """`typing.override` came with Python 3.12."""
    import typing

    import typing_extensions

    setattr(typing, "override", typing_extensions.override)  # noqa: B010


def _listen() -> dict[str, int]:
    """What `training_log` sees each time it is called; the last call's figures stay."""
    from megatron.training import training

    seen: dict[str, int] = {}
    original = training.training_log

    def training_log(*args: Any, **kwargs: Any) -> Any:
        seen.update(figures())
        return original(*args, **kwargs)

    training.training_log = training_log
    return seen


def figures() -> dict[str, int]:
    """Bytes by torch's own counters: the most so far, and what is left now."""
    statistics = torch.cuda.memory_stats()
    return {
        "allocated_bytes": statistics["allocated_bytes.all.peak"],
        "reserved_bytes": statistics["reserved_bytes.all.peak"],
        "after_bytes": statistics["allocated_bytes.all.current"],
    }


class _Samples(Dataset[dict[str, torch.Tensor]]):  # type: ignore[misc, unused-ignore]
    """Made-up samples with the names, shapes and dtypes of Megatron-LM's data sets."""

    def __init__(self, program: Path, options: dict[str, Any]) -> None:
        of = {"pretrain_t5": _of_t5, "pretrain_bert": _of_bert}.get(program.stem, _of_gpt)
        self.sample = of(options)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.sample


def _of_gpt(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    length = int(options["seq-length"])
    ids = torch.zeros(length, dtype=torch.int64)
    batch = {"tokens": ids, "labels": ids, "loss_mask": torch.ones(length), "position_ids": torch.arange(length)}
    if "no-create-attention-mask-in-dataloader" not in options:
        batch["attention_mask"] = torch.ones(1, length, length).tril() < 0.5
    return batch


def _of_bert(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    names = ("text", "types", "labels", "loss_mask", "padding_mask")
    tokens = torch.ones(int(options["seq-length"]), dtype=torch.int64)
    return {**dict.fromkeys(names, tokens), "is_random": torch.tensor(0)}


def _of_t5(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    encoder, decoder = (torch.ones(int(options[f"{part}-seq-length"]), dtype=torch.int64) for part in _PARTS)
    return {
        "text_enc": encoder,
        "text_dec": decoder,
        "labels": decoder,
        "loss_mask": decoder,
        "truncated": torch.tensor(0),
        "enc_mask": encoder,
        "dec_mask": decoder,
    }


_PARTS = ("encoder", "decoder")


def _give_samples(program: Path, options: dict[str, Any]) -> None:
    """In place of files that rank 0 would have prepared for all ranks with a tokenizer from the Hub."""
    from megatron.core.datasets import bert_dataset, blended_megatron_dataset_builder, t5_dataset, utils
    from megatron.core.tensor_parallel import data

    def sizes(keys: list[str], batch: dict[str, torch.Tensor], group: object = None) -> tuple[Any, Any, int]:
        """What the first tensor-parallel rank would have sent."""
        counts = {key: batch[key].numel() for key in keys}
        return {key: list(batch[key].shape) for key in keys}, counts, sum(counts.values())

    data._build_key_size_numel_dictionaries = sizes
    utils.compile_helpers = lambda: None  # rank 0 would compile what reads files
    samples = _Samples(program, options)
    builder = SimpleNamespace(build=lambda: (samples, samples, samples))
    blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder = lambda *of_files: builder
    t5_dataset.T5MaskedWordPieceDatasetConfig = lambda **of_files: None
    bert_dataset.BERTMaskedWordPieceDatasetConfig = lambda **of_files: None


def _stand_in_for_apex() -> None:
    stand_in_for_softmax(
        "scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda", "scaled_softmax_cuda"
    )
    in_place = dict.fromkeys(("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"), lambda *tensors: None)
    stand_in("fused_weight_gradient_mlp_cuda", **in_place)
    for name in ("apex", "apex.contrib", "apex.contrib.layer_norm", "apex.normalization"):
        stand_in(name)
    stand_in("apex.contrib.layer_norm.layer_norm", FastLayerNormFN=_FastLayerNorm)
    stand_in("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=_FusedLayerNorm)


def stand_in_for_softmax(*names: str) -> None:
    """Modules with kernels of fused softmax: a result of the size of the scores, and a backward in place."""
    for name in names:
        stand_in(
            name,
            forward=lambda scores, *mask_and_scale: torch.empty_like(scores),
            backward=lambda gradients, probabilities, scale: gradients,
            get_batch_per_block=lambda *sizes: 1,
        )


def stand_in(name: str, **members: Any) -> None:
    """A module of this name with these members, for whoever imports it."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(members)
    sys.modules[name] = made


class _FastLayerNorm:
    @staticmethod
    def forward(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Looked at for the names of its arguments, and normalises the last axis."""
        return torch.nn.functional.layer_norm(values, weight.shape, weight, bias, epsilon)

    apply = forward


class _FusedLayerNorm:
    @staticmethod
    def forward(
        values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: Any, epsilon: float
    ) -> torch.Tensor:
        """As above, with the normalised shape named."""
        return torch.nn.functional.layer_norm(values, tuple(weight.shape), weight, bias, epsilon)

    apply = forward
