"""The answer of `estimate --task serve` from the engine itself, where a Python on this machine has it.

The engine starts on ghost GPUs with the settings that were stated, as in a dry-run of `vllm serve`; all others have
its own defaults.  Where it cannot be run, the closed form stays, with a sentence that says why.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from tonnage.catalog.models import find_model
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate, UsageError
from tonnage.estimates.estimate import Advice
from tonnage.estimates.sources import SOURCES
from tonnage.ghost.scratch import scratch
from tonnage.options import unknown_word
from tonnage.script import dry_run
from tonnage.serving.advice import ServingAdvice, advise
from tonnage.serving.asking import ServingAnswer, ask_serving
from tonnage.serving.exports import stated_words
from tonnage.serving.extras import as_draft
from tonnage.serving.network import ServedNetwork

TIMEOUT_SECONDS: Final = 900.0

_SERVERS: Final = {
    "vllm": (("-m", "vllm.entrypoints.openai.api_server", "--model"), ("vllm", "serve")),
    "sglang": (
        ("-m", "sglang.launch_server", "--model-path"),
        ("python", "-m", "sglang.launch_server", "--model-path"),
    ),
}
"""Words behind the Python that start an engine, before its model, and those by which its users know the command."""

_LOOK: Final = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
_PROCESSOR: Final = "preprocessor_config.json"
_WITH_PROCESSOR: Final = ("qwen2_5_vl", "qwen3_vl")
"""Types of the catalog's networks with images whose processors are made up (`tonnage_inside.made_up_processors`)."""
_LOOK_SECONDS: Final = 60.0


def ask_engine(
    model: str,
    options: Mapping[str, Any],
    cluster: Cluster,
    *,
    source: str = "ghost",
    engine_python: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **requests: Any,
) -> ServingAnswer:
    """Return whether an engine starts: by the engine itself where a Python has it, else in closed form.

    `engine_python` is a Python that has it; by default this one is looked into.  `source="meta"` runs nothing.
    `requests` are the further arguments of `ask_serving`.  Raises as it and `dry_run.run` do.
    """
    if source not in SOURCES:
        raise unknown_word("source", source, tuple(SOURCES))
    if source != "ghost" and engine_python is not None:
        raise UsageError(f"--source {source} runs no engine; leave --engine-python out.")
    answer = ask_serving(model, options, cluster, **requests)
    if source != "ghost":
        return answer
    advice = requests.get("advice", True)
    return _with_engine(answer, cluster, python=engine_python, advice=advice, progress=progress)


def _with_engine(
    answer: ServingAnswer,
    cluster: Cluster,
    *,
    python: str | None,
    advice: bool,
    progress: Callable[[str], None],
) -> ServingAnswer:
    """Return the answer of the engine itself.  Raises CannotEstimate for a `python` that cannot run it."""
    full = answer.estimate.settings
    why = _why_not(answer, python)
    if why is not None:
        if python is not None:
            raise CannotEstimate(f"The engine cannot be run: {why}.")
        return replace(answer, lacks=f"closed form: {why}; the engine itself would tell its own peak and overheads")
    with scratch("tonnage-") as folder:
        network = answer.estimate.network
        model = _write_model(network, folder / "model")
        drafting = as_draft(full.stated.draft)
        if drafting is not None and network.draft is not None:
            drafting = _write_model(network.draft, folder / "draft")
        words = stated_words(answer.estimate, draft=drafting)
        start, known_as = _SERVERS[full.engine.name]
        command = [python or sys.executable, *start, model, "--port", f"{_free_port()}", *words]
        lengths = None if answer.load is None else answer.load.lengths
        run = dry_run.run(
            command,
            cluster,
            timeout_seconds=TIMEOUT_SECONDS,
            seconds=False,
            requests=lengths,
            variables={**os.environ, "HF_HUB_OFFLINE": "1"},
            progress=progress,
        )
    estimate = replace(
        run.estimate,
        model={**run.estimate.model, "name": network.name},
        job={**run.estimate.job, "task": "serve", "command": [*known_as, network.name, *words]},
    )
    changes = advise(answer.estimate) if advice and not estimate.fits else ()
    estimate = replace(estimate, advice=tuple(_as_advice(change) for change in changes))
    return replace(answer, ran=estimate, advice=changes)


def _why_not(answer: ServingAnswer, python: str | None) -> str | None:
    """Return why the engine cannot be run with these settings; None if it can."""
    full, network = answer.estimate.settings, answer.estimate.network
    engine = full.engine.name
    if engine not in _SERVERS:
        return f"{engine} has no server that is run here; tonnage dry-run runs a script with generate_batch"
    installed = _installed(python or sys.executable, engine)
    if installed is None:
        return f"{python or 'this Python'} has no {engine} (--engine-python names one that has it)"
    asked = _asked_version(full.stated.engine)
    if asked and installed.split(".")[: len(asked.split("."))] != asked.split("."):
        return f"{engine} {installed} is installed, and {asked} was asked about"
    known = find_model(network.model)
    states_format = network.is_quantized and (known is not None or Path(network.model).is_dir())
    is_online = full.quantization.flags is not None
    if full.quantization.bits < 16 and not is_online and not states_format:
        return f"the engine needs a checkpoint in {full.quantization.name}"
    if network.has_towers and not _has_processor(network):
        return f"with images the engine needs a folder with the tokenizer's files and {_PROCESSOR}"
    return None


def _has_processor(network: ServedNetwork) -> bool:
    is_made_up = find_model(network.model) is not None and network.config.get("model_type") in _WITH_PROCESSOR
    return is_made_up or (Path(network.model) / _PROCESSOR).is_file()


def _asked_version(engine: str) -> str:
    return engine.lower().replace("==", "@").partition("@")[2].removeprefix("v")


@cache
def _installed(python: str, engine: str) -> str | None:
    """Return the version of an engine that an interpreter has; None without it.

    Raises UsageError for no interpreter.
    """
    if python == sys.executable:
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(engine)
        except PackageNotFoundError:
            return None
    program = shutil.which(python)
    if program is None:
        raise UsageError(f"{python!r} is no program; give the path of a Python that has the engine.")
    try:
        ended = subprocess.run([program, "-c", _LOOK, engine], capture_output=True, text=True, timeout=_LOOK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{python!r} cannot be run ({type(error).__name__}); give the path of a Python.") from None
    return ended.stdout.strip() or None if ended.returncode == 0 else None


def _write_model(network: ServedNetwork, folder: Path) -> str:
    """Return the folder of a network, the user's own or one with its configuration; its name for one with images.

    The dry-run has the tokenizer and the processor of a name in the catalog.
    """
    if Path(network.model).is_dir():
        return str(Path(network.model).resolve())
    known = find_model(network.model)
    if known is not None and network.has_towers:
        return known.hub
    config = dict(network.config) if known is None else known.published_config()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _as_advice(change: ServingAdvice) -> Advice:
    return Advice(
        change=dict(change.change),
        command=change.command,
        fits=change.fits,
        peak_bytes=change.peak_bytes,
        gain_bytes=change.gain_bytes,
        step_seconds=None,
        changes_mathematics=change.changes_mathematics,
        kv_cache_tokens=change.kv_cache_tokens,
    )
