"""A process that a worker forks off: it does a job, and after it others like it.

Those have the card, the rank and the model in common (`alike`).  Between two of them everything is given
back (`tonnage_inside.anew`), so that each finds what it would find in a process of its own, for less than a forked
one takes.  Where anything is left, or a job does not go as foreseen, the process ends, and another one is forked.
"""

import ctypes
import gc
import json
import os
import select
import shutil
import signal
import sys
import traceback
from typing import Any, Final

import torch
from tonnage_inside import anew, decided, micro_batches, pairs, values

from tonnage.ghost import failing, jobs
from tonnage.ghost.running import PR_SET_PDEATHSIG
from tonnage.trainers.loop.run import TONNAGE

EVERY_EVENT, EVERY_MICRO_BATCH, AFRESH = "every event\n", "every micro-batch\n", "afresh\n"
"""What a child says in place of an answer where the allocator's notes would not do, where the memory ran out in a
micro-batch that was not made, and where only a new process can say what becomes of the job."""

_READY: Final = "ready\n"
"""What it says when it has begun anew."""

_PATIENCE_SECONDS: Final = 10.0
"""How long it may take to begin anew, which takes hundredths of a second; then a new process does the job."""

SINCE: Final = (2, 12)
"""The first torch whose jobs are done one after the other: those before take blocks of the card for some of what they
decide, once a process."""

_ALONE: Final = ("alone", "requests", "worked", "every_event", "every_micro_batch", "sketched")
"""What a request has that is asked of a process of its own."""

_PLAIN: Final[dict[str, tuple[str, ...]]] = {
    "engine": (TONNAGE.name,),
    "precision": ("bf16-mixed", "bf16-true", "fp16-mixed", "fp16-true", "fp32"),
    "optimizer": (
        *("adamw", "adamw-fused", "adamw-foreach", "adamw-loop", "adamw-8bit", "lion", "lion-8bit"),
        *("sgd", "sgd-plain", "adafactor", "muon"),
    ),
    "loss": ("plain", "chunked", "fused"),
    "attention": ("auto", "eager", "flash", "efficient", "cudnn", "math"),
    "compile": ("none",),
    **dict.fromkeys(("activation_offload", "optimizer_offload", "param_offload"), ("none",)),
}
"""Options of plans after which everything can be given back: nothing is compiled, and nothing waits on the host, of
which a process that has done other jobs holds more than it needs."""

_ONCE: Final = ("eval_batch", "generate", "lengths", "resume", "save_checkpoint")
"""Options of jobs that say what happens besides steps that are all the same; there is nothing of it."""


def alike(request: dict[str, Any]) -> str | None:
    """What jobs have in common that one process may do one after the other; None for one that wants its own."""
    job, plan = request["job"], request["plan"]
    plain = (
        not set(_ALONE) & request.keys()
        and all(plan[name] in words for name, words in _PLAIN.items())
        and not plan["checkpointing"].startswith("budget")  # which goes by what was seen before
        and job["model"]["kind"] == "config"  # else code of others, which may keep what it likes
        and all(not job[name] or job[name] == "none" for name in _ONCE)
    )
    if not plain:
        return None
    common = ("settings", "environment", "rank", "world_size", "gpus_per_node")
    return json.dumps([job["model"]["name"], *(request[name] for name in common)])


class Child:
    """The worker's end of it."""

    def __init__(self, request: dict[str, Any], policy: values.Policy, *, stays: bool) -> None:
        """Fork one that does this job and, if it `stays`, those that it is asked for afterwards."""
        asked, self._asks = os.pipe()
        reads, said = os.pipe()
        worker = os.getpid()
        gc.freeze()  # what was imported stays; a child that looked through it for garbage would also copy its pages
        self._process = os.fork()
        if self._process == 0:
            try:
                os.close(self._asks)
                os.close(reads)
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == worker:  # else it died before it could be said that its death ends this process
                    _live(request, policy, asked if stays else None, said)
            except BaseException:  # of what is done between jobs: the next one gets a new process
                _tell_developers()
            finally:
                os._exit(0)
        os.close(asked)
        os.close(said)
        self._replies = os.fdopen(reads, "rb", buffering=0)  # what is there is seen by who waits for it

    def reply(self, request: dict[str, Any]) -> str:
        """What it says of the job that it was asked for last: one line, empty if it died."""
        self._wait(request)
        return self._replies.readline().decode()

    def another(self, request: dict[str, Any]) -> str:
        """What it says of another job like those before; AFRESH where it does none any more."""
        begun, _, _ = select.select([self._replies], [], [], _PATIENCE_SECONDS)
        if not begun or self._replies.readline().decode() != _READY:
            return AFRESH
        line = (json.dumps(request) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._asks, line) :]
        except BrokenPipeError:
            return AFRESH
        return self.reply(request) or AFRESH

    def end(self) -> int:
        """Wait for its end, which comes now at the latest, and tell how it was, as `os.waitpid` does."""
        self._replies.close()
        os.close(self._asks)
        os.kill(self._process, signal.SIGKILL)
        return os.waitpid(self._process, 0)[1]

    def _wait(self, request: dict[str, Any]) -> None:
        """Until it says something or ends; where whoever asked is no more, all ends, however long the job is."""
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        poll.register(sys.stdin, 0)  # hears of its other end alone
        if all(source == sys.stdin.fileno() for source, _ in poll.poll()):
            shutil.rmtree(os.path.dirname(request["trace"]), ignore_errors=True)
            os.killpg(0, signal.SIGKILL)


def _live(request: dict[str, Any], policy: values.Policy, asked: int | None, said: int) -> None:
    """Do the job and, where others are `asked` for, one after the other as long as nothing of them is left."""
    built: list[object] = []  # lives as long as it may: to take it apart takes time
    reply, well = _done(request, policy, built, again=False)
    os.write(said, reply.encode())
    if asked is None:
        return
    with os.fdopen(asked) as more:
        while well and anew.is_possible(policy):
            built.clear()
            if not anew.begin(torch, policy):
                return
            os.write(said, _READY.encode())
            line = more.readline()
            if not line:
                return
            reply, well = _done(json.loads(line), policy, built, again=True)
            os.write(said, reply.encode())


def _done(request: dict[str, Any], policy: values.Policy, built: list[object], *, again: bool) -> tuple[str, bool]:
    """What is said of a job, and whether it went as foreseen: of one that is done `again` nothing else is said."""
    try:
        if again:
            decided.learn(request["decided"])
        else:
            jobs.settle(request, policy)
        answer = jobs.do(request, policy, built, again=again)
        return json.dumps(answer) + "\n", bool(answer["completed"])
    except pairs.Uncertain:
        return EVERY_EVENT, False
    except micro_batches.RanOut:
        return EVERY_MICRO_BATCH, False
    except BaseException as error:  # whatever happens, there is an answer
        _tell_developers()
        return AFRESH if again else json.dumps(failing.answer(failing.told(error))) + "\n", False


def _tell_developers() -> None:
    """The whole of the error that is handled, where it is wanted."""
    if os.environ.get("TONNAGE_DEBUG"):
        traceback.print_exc()
