"""The flags of an engine for a plan, and files that start it: shell, Docker Compose, Kubernetes.

`engine_command("vllm", ...)` returns the words of `vllm serve ...`; the exported files hold the same words.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tonnage.catalog.models import find_model
from tonnage.errors import UsageError
from tonnage.serving.closed_form import ServingEstimate
from tonnage.serving.extras import OF_VLLM, as_draft, has_adapters
from tonnage.serving.facts import USUAL_VERSIONS
from tonnage.serving.kv_cache import BLOCK_TOKENS
from tonnage.serving.settings import ServeSettings

TARGETS: Final = ("vllm", "sglang", "compose", "kubernetes")
PORT: Final = 8000


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
    full = estimate.settings
    limits = {
        "--max-model-len": full.max_len,
        "--max-num-seqs": full.max_seqs,
        "--max-num-batched-tokens": full.max_batched_tokens,
        "--gpu-memory-utilization": full.utilization,
    }
    return ["vllm", "serve", repository(estimate.network.model), *_flags(estimate, limits)]


def stated_words(estimate: ServingEstimate, *, draft: str | None) -> list[str]:
    """Return vLLM's flags of the settings that were stated; `draft` is the folder of the model that drafts."""
    stated = estimate.settings.stated
    limits = {
        "--max-model-len": stated.max_len,
        "--max-num-seqs": stated.max_seqs,
        "--max-num-batched-tokens": stated.max_batched_tokens,
        "--gpu-memory-utilization": stated.gpu_memory_utilization,
    }
    return _flags(estimate, limits, draft)


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
    for name, limit in limits.items():
        words += [] if limit is None else [name, f"{limit:g}" if isinstance(limit, float) else f"{limit}"]
    words += ["--kv-cache-dtype", stated.kv_dtype] if stated.kv_dtype.startswith("fp8") else []
    if full.quantization.flags is not None and full.quantization.name != estimate.network.published.name:
        words += [word for pair in full.quantization.flags.items() for word in pair]
    words += ["--enforce-eager"] if stated.eager else []
    if has_adapters(stated):
        words += ["--enable-lora", "--max-loras", f"{stated.max_loras or 1}"]
        words += ["--max-lora-rank", f"{stated.max_lora_rank}"] if stated.max_lora_rank else []
    words += ["--speculative-config", _speculation(stated, draft)] if stated.draft is not None else []
    words += ["--no-enable-prefix-caching"] if stated.no_prefix_caching else []
    words += ["--enable-sleep-mode"] if stated.sleep_mode else []
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
    full = estimate.settings
    stated = full.stated
    lost = sorted({words for name, words in OF_VLLM.items() if getattr(stated, name)})
    if lost:
        raise UsageError(f"SGLang's flags for {' and '.join(lost)} are not known here; export to vllm.")
    words = ["python", "-m", "sglang.launch_server", "--model-path", repository(estimate.network.model)]
    for name, value in (("--tp-size", stated.tp), ("--pp-size", stated.pp), ("--dp-size", stated.dp)):
        words += [name, f"{value}"] if value > 1 else []
    words += ["--ep-size", f"{stated.ep}"] if stated.ep > 1 else []
    words += ["--context-length", f"{full.max_len}", "--max-running-requests", f"{full.max_seqs}"]
    words += ["--chunked-prefill-size", f"{full.max_batched_tokens}"]
    if full.engine.name == "sglang":
        words += ["--mem-fraction-static", f"{full.utilization:g}"]
    words += ["--kv-cache-dtype", "fp8_e4m3"] if stated.kv_dtype.startswith("fp8") else []
    if full.quantization.name == "fp8" and estimate.network.published.name != "fp8":
        words += ["--quantization", "fp8"]
    words += ["--disable-cuda-graph"] if stated.eager else []
    return [*words, "--host", "0.0.0.0", "--port", f"{PORT}"]


def engine_command(target: str, estimate: ServingEstimate) -> str:
    """Return the command of an engine on one line."""
    return shlex.join(sglang_words(estimate) if target == "sglang" else vllm_words(estimate))


def export_serving(target: str, estimate: ServingEstimate) -> ServeFiles:
    """Return the files of a target.  Raises UsageError for an unknown one."""
    if target not in TARGETS:
        raise UsageError(f"Unknown target {target!r} for a serving plan; possible: {', '.join(TARGETS)}.")
    notes = notes_of(estimate)
    if target in ("vllm", "sglang"):
        script = f'#!/bin/sh\nexec {engine_command(target, estimate)} "$@"\n'
        return ServeFiles(files=(("serve.sh", script),), command="sh serve.sh", notes=notes)
    if target == "compose":
        return ServeFiles(files=(("compose.yaml", _compose(estimate)),), command="docker compose up", notes=notes)
    return ServeFiles(
        files=(("serve.yaml", _kubernetes(estimate)),), command="kubectl apply -f serve.yaml", notes=notes
    )


def _image(estimate: ServingEstimate) -> str:
    engine = estimate.settings.engine
    version = ".".join(map(str, engine.version)) if engine.name == "vllm" else USUAL_VERSIONS["vllm"]
    return f"vllm/vllm-openai:v{version}"


def _gpus(estimate: ServingEstimate) -> int:
    stated = estimate.settings.stated
    return stated.tp * stated.pp * stated.dp


def _compose(estimate: ServingEstimate) -> str:
    words = json.dumps(vllm_words(estimate)[2:])  # the image's entry point is `vllm serve`
    return (
        "services:\n"
        "  engine:\n"
        f"    image: {_image(estimate)}\n"
        f"    command: {words}\n"
        f'    ports: ["{PORT}:{PORT}"]\n'
        "    ipc: host\n"
        "    environment:\n"
        '      HF_TOKEN: "${HF_TOKEN:-}"\n'
        "    volumes:\n"
        '      - "${HF_HOME:-~/.cache/huggingface}:/root/.cache/huggingface"\n'
        "    deploy:\n"
        "      resources:\n"
        "        reservations:\n"
        "          devices:\n"
        f"            - {{driver: nvidia, count: {_gpus(estimate)}, capabilities: [gpu]}}\n"
    )


def _kubernetes(estimate: ServingEstimate) -> str:
    words = vllm_words(estimate)
    arguments = "".join(f"            - {json.dumps(word)}\n" for word in words[2:])
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
        '          command: ["vllm", "serve"]\n'
        "          args:\n"
        f"{arguments}"
        f"          ports: [{{containerPort: {PORT}}}]\n"
        f"          resources: {{limits: {{nvidia.com/gpu: {_gpus(estimate)}}}}}\n"
        f"          readinessProbe: {{httpGet: {{path: /health, port: {PORT}}}, periodSeconds: 10}}\n"
        "          volumeMounts: [{name: shm, mountPath: /dev/shm}]\n"
        "      volumes: [{name: shm, emptyDir: {medium: Memory}}]\n"
        "---\n"
        "apiVersion: v1\n"
        "kind: Service\n"
        "metadata: {name: engine}\n"
        f"spec: {{selector: {{app: engine}}, ports: [{{port: {PORT}, targetPort: {PORT}}}]}}\n"
    )
