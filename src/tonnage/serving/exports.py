"""The flags of an engine for a plan, and files that start it: shell, Docker Compose, Kubernetes.

`engine_command("vllm", ...)` returns the words of `vllm serve ...`; the exported files hold the same words.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tonnage.catalog.models import find_model
from tonnage.errors import UsageError
from tonnage.serving.closed_form import ServingEstimate
from tonnage.serving.extras import OF_VLLM, as_draft, has_adapters
from tonnage.serving.facts import USUAL_VERSIONS
from tonnage.serving.kv_cache import BLOCK_TOKENS
from tonnage.serving.settings import FullSettings, ServeSettings

TARGETS: Final = ("vllm", "sglang", "compose", "kubernetes")
ENGINES_WITH_COMMANDS: Final = ("vllm", "sglang")
PORT: Final = 8000

_IMAGES: Final = {"vllm": "vllm/vllm-openai", "sglang": "lmsysorg/sglang"}
_STARTED_BY: Final = {"vllm": ("vllm", "serve"), "sglang": ("python3", "-m", "sglang.launch_server")}
"""The engines' own images, and the first words of their commands there."""

_LONG_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16"}
"""vLLM's words for keys and values of 16 bits, which `auto` means unless the checkpoint says otherwise."""

_VLLM_LIMITS: Final = ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization")
_SGLANG_LIMITS: Final = (
    *("--context-length", "--max-running-requests", "--chunked-prefill-size"),
    "--mem-fraction-static",
)
"""Flags for the longest request, the requests and the tokens of a step, and the part of the card."""


@dataclass(frozen=True, kw_only=True)
class ServeFiles:
    """Files of an export."""

    files: tuple[tuple[str, str], ...]
    """Names and contents."""
    command: str
    """Command to run in their folder."""
    notes: tuple[str, ...]


def repository(model: str) -> str:
    """Return the Hub repository of a catalog model; another model as it is."""
    known = find_model(model)
    return model if known is None else known.hub


def notes_of(estimate: ServingEstimate) -> tuple[str, ...]:
    """Return what the flags cannot say."""
    quantization, published = estimate.settings.quantization, estimate.network.published
    if quantization.name == published.name or quantization.online:
        return ()
    return (
        f"{quantization.name} weights need a checkpoint in that format: name it in place of "
        f"{repository(estimate.network.model)}.",
    )


def vllm_words(estimate: ServingEstimate) -> list[str]:
    """Return `vllm serve` with every setting of the estimate."""
    limits: dict[str, float | None] = dict(zip(_VLLM_LIMITS, _limits(estimate.settings), strict=True))
    if estimate.settings.engine.name != "vllm":
        del limits[_VLLM_LIMITS[-1]]  # another engine's part of the card is of something else
    return ["vllm", "serve", repository(estimate.network.model), *_flags(estimate, limits)]


def _limits(full: FullSettings) -> tuple[float, ...]:
    return full.max_len, full.max_seqs, full.max_batched_tokens, full.utilization


def stated_words(estimate: ServingEstimate, *, draft: str | None) -> list[str]:
    """Return the engine's flags of the settings that were stated; `draft` is the folder of the model that drafts.

    Raises UsageError for settings whose flags are not known of the engine.
    """
    stated = estimate.settings.stated
    limits = (stated.max_len, stated.max_seqs, stated.max_batched_tokens, stated.gpu_memory_utilization)
    if estimate.settings.engine.name == "sglang":
        return _sglang_flags(estimate, dict(zip(_SGLANG_LIMITS, limits, strict=True)))
    return _flags(estimate, dict(zip(_VLLM_LIMITS, limits, strict=True)), draft)


def _flags(estimate: ServingEstimate, limits: Mapping[str, float | None], draft: str | None = None) -> list[str]:
    """Return vLLM's flags; limits that are None have its defaults."""
    full = estimate.settings
    stated = full.stated
    words = []
    degrees = (
        ("--tensor-parallel-size", stated.tp),
        ("--pipeline-parallel-size", stated.pp),
        ("--data-parallel-size", stated.dp),
    )
    for name, value in degrees:
        words += [name, f"{value}"] if value > 1 else []
    words += ["--enable-expert-parallel"] if stated.ep > 1 else []
    words += _spell_limits(limits)
    words += ["--kv-cache-dtype", stated.kv_dtype] if stated.kv_dtype.startswith("fp8") else []
    if estimate.network.has_fp8_cache and stated.kv_dtype in _LONG_DTYPES:
        words += ["--kv-cache-dtype", _LONG_DTYPES[stated.kv_dtype]]
    if full.quantization.flags is not None and full.quantization.name != estimate.network.published.name:
        words += [word for pair in full.quantization.flags.items() for word in pair]
    words += ["--enforce-eager"] if stated.eager else []
    if has_adapters(stated):
        words += ["--enable-lora", "--max-loras", f"{stated.max_loras or 1}"]
        words += ["--max-lora-rank", f"{stated.max_lora_rank}"] if stated.max_lora_rank else []
    words += ["--speculative-config", _speculation(stated, draft)] if stated.draft is not None else []
    words += ["--no-enable-prefix-caching"] if stated.no_prefix_caching else []
    words += ["--enable-sleep-mode"] if stated.sleep_mode else []
    words += ["--mm-encoder-tp-mode", stated.mm_encoder_tp_mode] if stated.mm_encoder_tp_mode else []
    words += ["--block-size", f"{stated.block_tokens}"] if stated.block_tokens != BLOCK_TOKENS else []
    return words


def _speculation(stated: ServeSettings, folder: str | None) -> str:
    """Return vLLM's description of what drafts: the model in a folder, or by its name."""
    draft = as_draft(stated.draft)
    how = {"method": stated.draft} if draft is None else {"model": folder or repository(draft)}
    return json.dumps({**how, "num_speculative_tokens": stated.draft_tokens})


def sglang_words(estimate: ServingEstimate) -> list[str]:
    """Return SGLang's launch command with every setting that it has.

    Raises UsageError for settings whose flags are known of vLLM alone.
    """
    limits: dict[str, float | None] = dict(zip(_SGLANG_LIMITS, _limits(estimate.settings), strict=True))
    if estimate.settings.engine.name != "sglang":
        del limits[_SGLANG_LIMITS[-1]]  # another engine's part of the card is of something else
    words = ["python", "-m", "sglang.launch_server", "--model-path", repository(estimate.network.model)]
    return [*words, *_sglang_flags(estimate, limits), "--host", "0.0.0.0", "--port", f"{PORT}"]


def _sglang_flags(estimate: ServingEstimate, limits: Mapping[str, float | None]) -> list[str]:
    """Return SGLang's flags; limits that are None have its defaults."""
    full = estimate.settings
    stated = full.stated
    lost = sorted({words for name, words in OF_VLLM.items() if getattr(stated, name)})
    if lost:
        raise UsageError(f"SGLang's flags for {' and '.join(lost)} are not known here; export to vllm.")
    words = []
    for name, value in (("--tp-size", stated.tp), ("--pp-size", stated.pp), ("--dp-size", stated.dp)):
        words += [name, f"{value}"] if value > 1 else []
    words += ["--ep-size", f"{stated.ep}"] if stated.ep > 1 else []
    words += _spell_limits(limits)
    words += ["--kv-cache-dtype", "fp8_e4m3"] if stated.kv_dtype.startswith("fp8") else []
    if full.quantization.flags is not None and full.quantization.name != estimate.network.published.name:
        words += [word for pair in full.quantization.flags.items() for word in pair]
        words += ["--load-format", "bitsandbytes"] if full.quantization.method == "bitsandbytes" else []
    return [*words, *(["--disable-cuda-graph"] if stated.eager else [])]


def _spell_limits(limits: Mapping[str, float | None]) -> list[str]:
    spelled = ((name, f"{limit:g}" if isinstance(limit, float) else f"{limit}") for name, limit in limits.items())
    return [word for name, text in spelled if limits[name] is not None for word in (name, text)]


def own_command(estimate: ServingEstimate) -> str | None:
    """Return the command of the engine that was computed on one line; None for one that a script runs."""
    name = estimate.settings.engine.name
    return engine_command(name, estimate) if name in ENGINES_WITH_COMMANDS else None


def engine_command(target: str, estimate: ServingEstimate) -> str:
    """Return the command of an engine on one line."""
    return shlex.join(sglang_words(estimate) if target == "sglang" else vllm_words(estimate))


def export_serving(target: str, estimate: ServingEstimate) -> ServeFiles:
    """Return the files of a target.  Raises UsageError for an unknown one."""
    if target not in TARGETS:
        raise UsageError(f"Unknown target {target!r} for a serving plan; possible: {', '.join(TARGETS)}.")
    notes = notes_of(estimate)
    started, computed = target if target in ENGINES_WITH_COMMANDS else _contained(estimate), estimate.settings.engine
    if started != computed.name:
        notes += (f"The plan was computed for {computed}, not for {started}, which may start otherwise.",)
    if target in ENGINES_WITH_COMMANDS:
        script = f'#!/bin/sh\nexec {engine_command(target, estimate)} "$@"\n'
        return ServeFiles(files=(("serve.sh", script),), command="sh serve.sh", notes=notes)
    if target == "compose":
        return ServeFiles(files=(("compose.yaml", _compose(estimate)),), command="docker compose up", notes=notes)
    return ServeFiles(
        files=(("serve.yaml", _kubernetes(estimate)),), command="kubectl apply -f serve.yaml", notes=notes
    )


def _contained(estimate: ServingEstimate) -> str:
    """Return the engine that a container starts: that of the plan where it serves, else vLLM."""
    name = estimate.settings.engine.name
    return name if name in ENGINES_WITH_COMMANDS else "vllm"


def _image(estimate: ServingEstimate) -> str:
    engine, name = estimate.settings.engine, _contained(estimate)
    version = ".".join(map(str, engine.version)) if engine.name == name else USUAL_VERSIONS[name]
    return f"{_IMAGES[name]}:v{version}"


def _gpus(estimate: ServingEstimate) -> int:
    stated = estimate.settings.stated
    return stated.tp * stated.pp * stated.dp


def _local(estimate: ServingEstimate) -> str | None:
    """Return the path of a model's folder, which a container has at the same place; None for a repository."""
    path = Path(estimate.network.model).expanduser()
    return str(path.resolve()) if path.is_dir() else None


def _words(estimate: ServingEstimate) -> tuple[list[str], list[str]]:
    """Return the words that start the engine in a container, whatever its image starts, and what follows them."""
    engine = _contained(estimate)
    words = sglang_words(estimate) if engine == "sglang" else vllm_words(estimate)
    count = len(_STARTED_BY[engine])
    name = words.index(repository(estimate.network.model))
    words[name] = _local(estimate) or words[name]
    return list(_STARTED_BY[engine]), words[count:]


def _compose(estimate: ServingEstimate) -> str:
    local, (started_by, arguments) = _local(estimate), _words(estimate)
    words, folder = (  # compose puts a variable in place of a single $
        json.dumps(text).replace("$", "$$") for text in (arguments, f"{local}:{local}:ro")
    )
    return (
        "services:\n"
        "  engine:\n"
        f"    image: {_image(estimate)}\n"
        f"    entrypoint: {json.dumps(started_by)}\n"
        f"    command: {words}\n"
        f'    ports: ["{PORT}:{PORT}"]\n'
        "    ipc: host\n"
        "    environment:\n"
        '      HF_TOKEN: "${HF_TOKEN:-}"\n'
        "    volumes:\n"
        '      - "${HF_HOME:-~/.cache/huggingface}:/root/.cache/huggingface"\n'
        + ("" if local is None else f"      - {folder}\n")
        + "    deploy:\n"
        "      resources:\n"
        "        reservations:\n"
        "          devices:\n"
        f"            - {{driver: nvidia, count: {_gpus(estimate)}, capabilities: [gpu]}}\n"
    )


def _kubernetes(estimate: ServingEstimate) -> str:
    started_by, words = _words(estimate)
    arguments = "".join(f"            - {json.dumps(word)}\n" for word in words)
    path = None if (local := _local(estimate)) is None else json.dumps(local)
    mount = "" if path is None else f", {{name: model, mountPath: {path}, readOnly: true}}"
    volume = "" if path is None else f", {{name: model, hostPath: {{path: {path}}}}}"
    token = "{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf-token, key: token, optional: true}}}"
    return (
        "apiVersion: apps/v1\n"
        "kind: Deployment\n"
        "metadata: {name: engine}\n"
        "spec:\n"
        "  replicas: 1\n"
        "  selector: {matchLabels: {app: engine}}\n"
        "  template:\n"
        "    metadata: {labels: {app: engine}}\n"
        "    spec:\n"
        "      containers:\n"
        "        - name: engine\n"
        f"          image: {_image(estimate)}\n"
        f"          command: {json.dumps(started_by)}\n"
        "          args:\n"
        f"{arguments}"
        f"          ports: [{{containerPort: {PORT}}}]\n"
        f"          resources: {{limits: {{nvidia.com/gpu: {_gpus(estimate)}}}}}\n"
        f"          readinessProbe: {{httpGet: {{path: /health, port: {PORT}}}, periodSeconds: 10}}\n"
        f"          env: [{token}]\n"
        f"          volumeMounts: [{{name: shm, mountPath: /dev/shm}}{mount}]\n"
        f"      volumes: [{{name: shm, emptyDir: {{medium: Memory}}}}{volume}]\n"
        "---\n"
        "apiVersion: v1\n"
        "kind: Service\n"
        "metadata: {name: engine}\n"
        f"spec: {{selector: {{app: engine}}, ports: [{{port: {PORT}, targetPort: {PORT}}}]}}\n"
    )
