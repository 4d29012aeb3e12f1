"""The warm worker: imports torch and transformers once, then forks a child for each job.

`tonnage.workers.worker` starts it inside a ghost environment.  Each line of standard input is a request in JSON; each
gets one line on standard output: `{"error": null}` once the trace is in the requested file, else the error's message
and class.  The parent never touches CUDA, so each child gets an unused card of its own.
"""

import json
import os
import sys
from typing import Any, TextIO

import torch
from tonnage_inside import kernels, values
from tonnage_recorder import native

from tonnage.job import read_job
from tonnage.plans import Plan
from tonnage.step import heads, hub_kernels, modeling_modules
from tonnage.techniques import select_techniques
from tonnage.trainers import engine_of
from tonnage.workers import child, failures, preload
from tonnage.workers.start import ended_with_asker


def serve() -> None:
    """Answer requests until standard input ends."""
    hub_kernels.hide()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    kernels.key_by_dates()
    ghost = native.load()
    if ghost is not None:
        ghost.back_python()
    policy = values.Policy(torch, ghost)
    values.patch_torch(policy)  # once for all children, each of which starts with nothing used
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        if _answer(request, policy, answers) == child.EVERY_MICRO_BATCH:
            _answer(request | {"every_micro_batch": True}, policy, answers)


def _answer(request: dict[str, Any], policy: values.Policy, answers: TextIO) -> str:
    """Let a child do the job, write its answer unless the job has to be repeated, and return the child's reply."""
    with ended_with_asker():
        _import_libraries(request)
    job = child.Child(request, policy)
    reply = job.reply()
    if reply and reply != child.EVERY_MICRO_BATCH:
        answers.write(reply)  # before the child's memory is released, which takes a while
    status = job.end()
    if not reply:
        answers.write(json.dumps(failures.answer(failures.explain_death(status))) + "\n")
    return reply


def _import_libraries(request: dict[str, Any]) -> None:
    """Import the job's libraries in the parent, so that no child has to."""
    for module in engine_of(Plan(**request["plan"])).imports:
        preload.try_import(module)
    for technique in select_techniques(read_job(request["job"]), Plan(**request["plan"])):
        for library in technique.libraries:
            preload.try_import(library)
    _build_tables()
    config = request["job"]["model"]["config"]
    if config and preload.try_import(modeling_modules.NAMES):
        for module in modeling_modules.list_modules(config):
            preload.try_import(module)
        heads.trainable_types()  # fills its cache


def _build_tables() -> None:
    """Build the tables that transformers builds once a process and PEFT uses for each network."""
    mapping = sys.modules.get("transformers.conversion_mapping") if "peft" in sys.modules else None
    build = getattr(mapping, "get_checkpoint_conversion_mapping", None)
    if build is not None:
        build("")
