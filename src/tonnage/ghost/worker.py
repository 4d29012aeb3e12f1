"""The process that answers estimates: imports torch and transformers once, then forks children that do the jobs.

Started by `tonnage.ghost.pool` inside a ghost environment.  Requests come as JSON lines on standard input, an
answer line goes to standard output for each: `{"error": null}`, with the process that did it, when the trace is in
the file that was asked for, else the message and the exit code.  The parent never touches CUDA, so each child meets a
fresh card of its own.
"""

import json
import os
import sys
from typing import Any, Final, TextIO

import torch
from tonnage_inside import decided, kernels, native, values

from tonnage.ghost import child, failing, jobs, preload
from tonnage.ghost.child import Child
from tonnage.plans import Plan
from tonnage.step import heads, sources
from tonnage.techniques import chosen
from tonnage.trainers import engine_of

_LATE = (
    "numpy.ma",
    "tonnage.step.adapters",
    "tonnage.step.clipping",
    "tonnage.techniques.vocabulary",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "torch.utils._sympy.reference",
    "triton.experimental.gluon",
)
"""Modules that a step imports while it runs: here once, not again in each fork."""

_FULLER: Final = {child.EVERY_EVENT: {"every_event": True}, child.EVERY_MICRO_BATCH: {"every_micro_batch": True}}
"""How a child is asked that says so."""

_STAYING: Final = 3
"""Children that wait for jobs like those that they did, at most: a search asks for plans under either allocator, and
for several ranks of a pipeline."""


def serve() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print must not mix with the answers
    for module in _LATE:
        preload.imported(module)
    kernels.key_by_dates()
    ghost = native.load()
    if ghost is not None:
        ghost.back_python()
    policy = values.Policy(torch, ghost)
    values.patch_torch(policy)  # once for all forks, which begin with nothing used
    answers.write(json.dumps({"ready": True}) + "\n")
    family = _Family(policy, answers)
    for line in sys.stdin:
        request = json.loads(line)
        said = family.answer(request)
        while said in _FULLER:
            request |= _FULLER[said]
            said = family.answer(request)


class _Family:
    """The children of this process."""

    def __init__(self, policy: values.Policy, answers: TextIO) -> None:
        self._policy, self._answers = policy, answers
        self._staying: dict[str, Child] = {}
        """By what the jobs have in common that each does; who was asked last comes last."""

    def answer(self, request: dict[str, Any]) -> str:
        """Have a child do the job and pass on what it says; that is returned, too."""
        common = child.alike(request) if torch.__version__ >= child.SINCE else None
        asked, said = self._asked(request, common)
        if said and said not in _FULLER:
            self._answers.write(said)  # before its memory is taken back, which takes a while
        if common is not None and said and said not in _FULLER and json.loads(said).get("completed"):
            self._stay(common, asked)
        else:
            status = asked.end()
            if not said:
                self._answers.write(json.dumps(failing.answer(failing.died(status))) + "\n")
        decided.learn(request["decided"])
        return said

    def _asked(self, request: dict[str, Any], common: str | None) -> tuple[Child, str]:
        """Who does the job, and what it says: one that did such jobs before, or else a new one."""
        waiting = self._staying.pop(common, None) if common is not None else None
        if waiting is not None:
            said = waiting.another(request)
            if said != child.AFRESH:
                return waiting, said
            waiting.end()
        _import_libraries(request)
        decided.learn(request["decided"])  # what runs of other workers have left meanwhile
        new = Child(request, self._policy, stays=common is not None)
        return new, new.reply(request)

    def _stay(self, common: str, asked: Child) -> None:
        while len(self._staying) >= _STAYING:
            self._staying.pop(next(iter(self._staying))).end()
        self._staying[common] = asked


def _import_libraries(request: dict[str, Any]) -> None:
    """Import what the job needs in the parent, so that the next one like it need not."""
    for module in engine_of(Plan(**request["plan"])).imports:
        preload.imported(module)
    for technique in chosen(jobs.job_of(request), Plan(**request["plan"])):
        for library in technique.libraries:
            preload.imported(library)
    _build_tables()
    config = request["job"]["model"]["config"]
    if config and preload.imported(sources.NAMES):
        for module in sources.modules(config):
            preload.imported(module)
        heads.trainable_types()  # which is kept


def _build_tables() -> None:
    """What PEFT asks transformers about each network, which builds it once a process."""
    mapping = sys.modules.get("transformers.conversion_mapping") if "peft" in sys.modules else None
    build = getattr(mapping, "get_checkpoint_conversion_mapping", None)
    if build is not None:
        build("")


if __name__ == "__main__":
    serve()
