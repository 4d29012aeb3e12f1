"""The process that answers estimates: imports torch and transformers once, then forks a child for each job.

Started by `tonnage.ghost.pool` inside a ghost environment.  Requests come as JSON lines on standard input, an
answer line goes to standard output for each: `{"error": null}` when the trace is in the file that was asked for,
else the message and the exit code.  The parent never touches CUDA, so each child meets a fresh card of its own.
"""

import ctypes
import errno
import gc
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import fields
from typing import Any, Final, TextIO

import torch
from tonnage_inside import (
    decided,
    kernels,
    micro_batches,
    native,
    outcome,
    pairs,
    repeating,
    requested,
    shortcuts,
    values,
    worked,
    written,
)
from tonnage_inside.watch import Watch

from tonnage import inputs
from tonnage.engines import engine_of, libraries
from tonnage.engines.own import TONNAGE
from tonnage.errors import CannotEstimate, GhostUnavailable, TonnageError
from tonnage.ghost import card, preload
from tonnage.ghost.running import PR_SET_PDEATHSIG
from tonnage.job import Job, ModelRef
from tonnage.layers.few import is_first_alike, micro_batches_alike
from tonnage.plans import Plan
from tonnage.step import heads, occasions, repeats, sketched, sources
from tonnage.step.step import World
from tonnage.techniques import chosen

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
    for line in sys.stdin:
        request = json.loads(line)
        said = _answered(request, policy, answers)
        while said in _FULLER:
            request |= _FULLER[said]
            said = _answered(request, policy, answers)


_EVERY_EVENT, _EVERY_MICRO_BATCH = "every event\n", "every micro-batch\n"
"""What a child says in place of an answer where the allocator's notes would not do, and where the memory ran out in
a micro-batch that was not made."""

_FULLER: Final = {_EVERY_EVENT: {"every_event": True}, _EVERY_MICRO_BATCH: {"every_micro_batch": True}}
"""How it is asked then."""


def _answered(request: dict[str, Any], policy: values.Policy, answers: TextIO) -> str:
    """Have a child do the job and pass on what it says; that is returned, too."""
    child, pipe = _asked(request, policy)
    with pipe:
        _wait(pipe, request)
        reply = pipe.readline()
    if reply and reply not in _FULLER:
        answers.write(reply)  # before its memory is taken back, which takes a while
    _, status = os.waitpid(child, 0)
    decided.learn(request["decided"])
    if not reply:
        answers.write(json.dumps(_failed(_died(status))) + "\n")
    return reply


def _wait(pipe: TextIO, request: dict[str, Any]) -> None:
    """Until the child answers or ends; where whoever asked is no more, all of this ends, however long the job is."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    poll.register(sys.stdin, 0)  # hears of its other end alone
    if all(source == sys.stdin.fileno() for source, _ in poll.poll()):
        shutil.rmtree(os.path.dirname(request["trace"]), ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _asked(request: dict[str, Any], policy: values.Policy) -> tuple[int, TextIO]:
    """A forked child that does the job, and what it will say how it went into: one line, or none if it dies."""
    read_end, write_end = os.pipe()
    _import_libraries(request)
    decided.learn(request["decided"])  # what runs of other workers have left meanwhile
    worker = os.getpid()
    gc.freeze()  # what was imported stays; a child that looked through it for garbage would also copy its pages
    child = os.fork()
    if child == 0:
        os.close(read_end)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != worker:  # it died before it could be said that its death ends this process
            os._exit(1)
        built: list[object] = []  # lives until this process ends: to take it apart takes time
        try:
            answer = json.dumps(_do(request, policy, built)) + "\n"
        except pairs.Uncertain:
            answer = _EVERY_EVENT
        except micro_batches.RanOut:
            answer = _EVERY_MICRO_BATCH
        except BaseException as error:  # the child must answer whatever happens
            answer = json.dumps(_failed(_told(error))) + "\n"
            if os.environ.get("TONNAGE_DEBUG"):
                traceback.print_exc()
        os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    return child, os.fdopen(read_end)


def _failed(error: TonnageError) -> dict[str, Any]:
    """The answer for it."""
    return {"error": str(error), "kind": type(error).__name__}


def _died(status: int) -> CannotEstimate:
    """What is said of a child that ended without a word."""
    reason = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {status >> 8}"
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    why = "; the system kills processes so when this machine's memory is used up" if killed else ""
    return CannotEstimate(f"The process that ran the step died ({reason}{why}).")


def _import_libraries(request: dict[str, Any]) -> None:
    """Import what the job needs in the parent, so that the next one like it need not."""
    for module in engine_of(Plan(**request["plan"])).imports:
        preload.imported(module)
    for technique in chosen(_job(request["job"]), Plan(**request["plan"])):
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


def _do(request: dict[str, Any], policy: values.Policy, built: list[object]) -> dict[str, Any]:
    """Run the job's steps in this process and write the trace; `built` gets what the caller is to keep alive."""
    began = time.perf_counter()
    os.environ.update(request["environment"])
    ghost = card.take(request["settings"], rank=request["rank"], world_size=request["world_size"])
    job, plan = _job(request["job"]), Plan(**request["plan"])
    values.patch_libraries(policy)
    shortcuts.install()
    decided.install()
    if request.get("sketched"):
        sketched.install()
    every_event = request.get("every_event", not _on_one_stream(plan, request["world_size"]))
    watch = Watch(torch, ghost, unwritten=() if every_event else (pairs.TAKEN,))
    watch.start()
    occasions.listen(watch.occasion)
    ghost.log(True)
    if micro_batches_alike(job, plan) and not {"every_micro_batch", "worked"} & request.keys():
        repeats.listen(micro_batches.Alike(watch, as_first=is_first_alike(job, plan)).ask)
    ended: dict[str, Any] = {}
    asked: requested.Requested | None = None
    try:
        world = World(
            size=request["world_size"],
            rank=request["rank"],
            gpus_per_node=request["gpus_per_node"],
            device=torch.device("cuda"),
        )
        if "requests" in request:
            asked = requested.read(request["requests"], watch)
            asked.make()
        else:
            if "worked" in request:
                built.append(_counted(request, job, plan, world, watch, ghost))
            else:
                built.append(engine_of(plan).run(job, plan, world, request["steps"]))
        gc.disable()  # what follows leaves no cycles, and this process ends with it
        if request["repeated"]:
            before = asked.columns() if asked is not None else written.event_columns(torch, watch)
            asked = repeating.repetitions(watch, before, request["repeated"])
            asked.make()
    except Exception as error:
        if not outcome.ran_out(error):
            raise
        ended = outcome.of_exception(error, watch)
        built.append(error)
    watch.began = began
    columns = asked.columns() if asked is not None else None
    assumed = [*policy.assumed(), *inputs.assumed()]
    written.write(request["trace"], watch, ended, assumed, "ghost", columns, libraries(job, plan))
    decided.leave(request["decided"])
    return {"error": None, "seconds": time.perf_counter() - began}


def _counted(
    request: dict[str, Any], job: Job, plan: Plan, world: World, watch: Watch, ghost: native.Native
) -> object:
    """Run the job's steps and write down what the operations of the last of them work."""
    counted = worked.Worked(torch, ghost, lambda: watch.marks[-1][1])

    def begin(steps: int) -> None:
        if steps == request["steps"] - 1:
            counted.start()

    watch.on_step = begin
    ran = engine_of(plan).run(job, plan, world, request["steps"])
    counted.stop()
    counted.write(request["worked"], lambda mark: watch.marks[mark][1])
    return ran


_BESIDE: Final = ("shard", "activation_offload", "optimizer_offload", "param_offload")
"""Families of techniques that copy and exchange on streams of their own."""


def _on_one_stream(plan: Plan, ranks: int) -> bool:
    """Whether blocks are likely to be taken as soon as they are given back."""
    return ranks == 1 and engine_of(plan) is TONNAGE and all(getattr(plan, family) == "none" for family in _BESIDE)


def _job(document: dict[str, Any]) -> Job:
    """The Job that `asdict` wrote."""
    plain = {item.name: document[item.name] for item in fields(Job) if item.name != "model"}
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    return Job(model=ModelRef(**document["model"]), **plain)


_LAST_FOR_VOLTA: Final = "2.10.0"
"""The last torch whose plain wheel has kernels for capability 7.0: the next is made by CUDA 13, which has none."""


def _torch_for_old_cards() -> str:
    """What to type where a torch has no kernels for a card."""
    if torch.cuda.get_device_capability() == (7, 0) and torch.version.cuda >= "13":
        return f"the last that has is --torch {_LAST_FOR_VOLTA}."
    return "try another --torch."


def _told(error: BaseException) -> TonnageError:
    """One of ours, in one line, for whatever a step may raise."""
    if isinstance(error, TonnageError):
        return error
    if isinstance(error, ImportError) and "'transformers" in str(error):
        import transformers

        lacking = error.msg.partition(" (")[0]  # behind it comes a path
        version = transformers.__version__
        return CannotEstimate(f"transformers {version} does not have what was asked for ({lacking}); upgrade it.")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = error.filename or os.path.dirname(tempfile.gettempdir())  # which is a folder of tonnage's
        return CannotEstimate(
            f"No space is left on the device of {where}; free some, or set TMPDIR to a folder elsewhere."
        )
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return CannotEstimate("Files may not be as large as one that is needed here (ulimit -f says how large).")
    if "CUDA error: invalid device function" in str(error):
        return _without_kernels()
    told = [f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"]
    if error.__cause__ is not None and str(error.__cause__) not in str(error):  # a pipeline's says where, not what
        told.append(f"{type(error.__cause__).__name__}: {' '.join(str(error.__cause__).split())[:600]}")
    return CannotEstimate(f"The step failed: {'; because of '.join(told)}")


def _without_kernels() -> CannotEstimate:
    """That this torch has no kernel of a kind for the card; where it has none at all, no plan would have them."""
    made_for = torch.cuda.get_arch_list()
    said = f"torch {torch.__version__} has no kernels for this card, only for {', '.join(made_for)}; "
    major, minor = torch.cuda.get_device_capability()
    runs = {f"sm_{major}{earlier}" for earlier in range(minor + 1)}
    return (CannotEstimate if runs & set(made_for) else GhostUnavailable)(said + _torch_for_old_cards())


if __name__ == "__main__":
    serve()
