"""`tonnage dry-run`: run the user's own command, unchanged, for a few optimizer steps on ghost GPUs.

Each process of the command that uses the GPU writes its trace into the folder of the run (`tonnage_recorder`).  The
traces are summed up in an Estimate; a command that left none fails with a sentence that says why.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from tonnage.case import Case
from tonnage.catalog.models import hub_repositories
from tonnage.catalog.overheads import ghost_settings
from tonnage.cluster import CPU, Cluster
from tonnage.errors import TonnageError, TrialFailed, UsageError
from tonnage.estimates import history
from tonnage.estimates.ddp_buckets import with_buckets_of_script
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.from_traces import Run, estimate_from_traces
from tonnage.estimates.step_time import add_counted_time, add_time, needs_counting, saying
from tonnage.ghost import cards, termination
from tonnage.ghost.environment import NO_CACHING, any_libraries, environment, interpreter, programs
from tonnage.ghost.scratch import scratch
from tonnage.ghost.wheel import Torch, find
from tonnage.job import read_job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.recorder.tonnage_recorder.engines import SERVED
from tonnage.recorder.tonnage_recorder.record_layout import EVENT_COLUMNS
from tonnage.script import ending, engine_results, further, launchers, trackers
from tonnage.script.process_results import ProcessResults, collect_results
from tonnage.serving.facts import list_growth
from tonnage.serving.lengths import Lengths
from tonnage.trace.trace import Trace

Progress = Callable[[str], None]

WRITING_SECONDS: Final = 120.0
"""Time limit for processes that are stopped to write their traces."""

AFTER_SECONDS: Final = 30.0
"""Least time that a command has to end by itself when all its processes have made their steps."""

LATER_SECONDS: Final = 10.0
"""Time limit for ranks after the process that started them has ended well: some launchers do not wait for them."""

_POLL_SECONDS: Final = 0.2
"""Time between two looks whether an engine's server is ready."""

REQUESTS: Final = 1000
"""Requests that an engine is given to serve."""

STEP_SECONDS: Final = 0.025
"""Seconds that a step of an engine is taken to last, where requests arrive at a rate: assumed."""

_SERVING_PART: Final = 0.9
"""Part of the time limit after which an engine makes no further step for requests: what it did is then reported."""

_LONGEST_REQUEST: Final = 10**7
"""Tokens of a request, prompt and answer together; an engine cuts it to its own maximal length."""

_ACCOUNT: Final = "cards"
"""Name of the file in the folder of a run that counts the memory of each GPU."""

_LOADER_EXIT: Final = 127
"""Exit code of a process that calls a function which the loader does not find."""

_LOADER_EXIT_OF_RANK: Final = re.compile(rf"(exitcode\s*:|exit status) {_LOADER_EXIT}\b")
"""The same exit code in the messages of torchrun and accelerate launch."""

_UNUSED: Final = Trace(
    source="ghost", versions={}, device={}, event_columns={name: array("q") for name in EVENT_COLUMNS}
)
"""Trace of an engine that refused before it used a GPU."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One run of the command."""

    command: list[str]
    """The command as it was run; of one rank alone, without the launcher."""
    ended: int | None
    """Exit code; None if the command had to be stopped."""
    results: ProcessResults
    """Everything that its processes recorded."""
    cards: tuple[cards.Card, ...]
    """Memory of each GPU that the processes held."""


def run(
    command: list[str],
    cluster: Cluster,
    *,
    steps: int | None = 3,
    timeout_seconds: float = 900.0,
    rank: int | None = None,
    torch_version: str | None = None,
    variables: Mapping[str, str] | None = None,
    seconds: bool = True,
    requests: Lengths | None = None,
    progress: Progress = lambda text: None,
) -> Run:
    """Run `command` on ghost GPUs, and sum up each rank.

    Each of its training loops ends after `steps` optimizer steps (None: by itself).
    With `rank` only this rank of the cluster runs, in one process and without the launcher of the command (torchrun,
    accelerate launch, deepspeed); so one of hundreds of ranks runs on a laptop.  With `seconds` one more step is run,
    whose operations are counted (`step_time.add_counted_time`).  `requests` are served by an inference engine (vLLM)
    right after it has started, for at most half of the time.

    A command that is stopped at the time limit is summed up if every rank made two steps.  The output of the command
    goes to standard error.

    Raises TrialFailed if it fails for a reason other than memory, hangs, or never uses the GPU; GhostUnavailable if
    no ghost can run here; CannotEstimate if it has an optimizer that makes no step; UsageError for a command that
    cannot be run.
    """
    if not command:
        raise UsageError("No command to run; write it after two dashes: tonnage dry-run --gpu t4 -- python train.py")
    if steps is not None and steps < 1:
        raise UsageError(f"{steps} steps cannot be run; give at least 1.")
    if flag := launchers.find_isolating_flag(command):
        raise UsageError(
            f"With {flag}, Python ignores the environment or the site directory through which it finds the ghost; "
            f"leave {flag} out."
        )
    if cluster.device.id == CPU:
        raise UsageError("A dry-run needs GPUs, and cpu is none; name one with --gpu.")
    given = os.environ if variables is None else variables
    if NO_CACHING in given:
        raise UsageError(f"{NO_CACHING} is set. {ending.ONE_ALLOCATOR}")
    any_libraries()
    python = interpreter(command)
    torch = find(python, torch_version, progress)

    def attempt(inherit: Mapping[str, str] | None, *, counting: bool = seconds) -> Attempt:
        with scratch("tonnage-") as folder:
            prepared = _prepare_environment(torch, cluster, steps, inherit, folder)
            prepared |= {"TONNAGE_COUNTED": "1"} if counting else {}
            if requests is not None:
                prepared["TONNAGE_REQUESTS"] = _write_requests(requests, _SERVING_PART * timeout_seconds, folder)
            started = command
            if rank is not None:
                started, rank_variables = launchers.make_rank_command(command, python, rank, cluster, prepared)
                prepared |= rank_variables
            progress(f"running {shlex.join(started)} on {cluster.gpus_per_node} ghost {cluster.device.id}")
            ended = _run_command(started, prepared, timeout_seconds, folder)
            results = collect_results(folder, ended)
            return Attempt(command=started, ended=ended, results=results, cards=cards.read(folder / _ACCOUNT))

    made = attempt(variables)
    if _lacks_function(made):
        progress("running it again, to find the library that needs a missing function")
        if reason := _find_missing_function(attempt({**given, "LD_BIND_NOW": "1"}).results):
            raise TrialFailed(reason)
    failed_again: list[str] = []
    if made.results.needs_more:
        progress("running it again, without counting a step: what comes after its steps may need more memory")
        again = attempt(variables, counting=False)
        try:
            ending.judge(again.command, again.results, again.ended, steps, timeout_seconds)
            made = replace(again, results=again.results.with_counted_steps(made.results))
        except TonnageError as failure:  # what the first run wrote may be in the way of a second one
            failed_again = [ending.note_failed_again(failure)]
    serves = engine_results.is_serving(made.results)
    how = engine_results.judge(made.results, made.ended, timeout_seconds) if serves else None
    try:
        notes = ending.judge(made.command, made.results, made.ended, steps, timeout_seconds) if how is None else how
    except TrialFailed as failure:
        raise TrialFailed(f"{failure}{ending.name_on_the_hub(command, str(failure))}") from None
    notes += failed_again
    notes += [ending.note_shared(card, made.results.names, cluster) for card in made.cards if len(card.holders) > 1]
    summed = estimate_from_traces(
        made.results.traces or [_UNUSED],
        cluster,
        model={"name": launchers.program(made.command)},
        job={"command": made.command, "steps": steps or "all"},
        plan={},
        notes=notes,
    )
    documents = tuple(_card_document(card, made.results.names) for card in made.cards)
    estimate = further.with_later_phases(with_buckets_of_script(summed.estimate), summed.traces[0])
    if serves:
        estimate = engine_results.with_serving(estimate, made.results)
    else:
        estimate = engine_results.with_engine_in_training(estimate, made.results)
        estimate = _with_time(estimate, made.results.traces, cluster) if seconds else estimate
    return replace(summed, estimate=replace(estimate, cards=documents))


def _with_time(estimate: Estimate, ranks: Sequence[Trace], cluster: Cluster) -> Estimate:
    """Return the estimate with the seconds of a step, or with the reason why they are not known.

    A run of `tonnage train` is priced as the estimate of its plan is.
    """
    counted_steps = [trace.worked for trace in ranks if trace.worked is not None]
    case = _planned_case(ranks[0], cluster) if ranks else None
    if case is not None and not needs_counting(case):
        return history.correct(add_time(estimate, case), case)
    if counted_steps:
        return add_counted_time(estimate, counted_steps, cluster)
    why = "the command ended before it, or it could not be counted to its end"
    if any(trace.script.get("compiled") for trace in ranks):
        why = "code that torch.compile made cannot be counted"
    return saying(estimate, f"time: unknown. The operations of a step are counted in one more step; {why}.")


def _planned_case(trace: Trace, cluster: Cluster) -> Case | None:
    """Return the case of a run of `tonnage train`; None for any other program."""
    noted = trace.script.get("planned")
    if noted is None:
        return None
    model = ModelRef(name=str(noted["config"].get("model_type", "")), kind="config", config=noted["config"])
    job = read_job({**noted["job"], "model": asdict(model)})
    return Case(job, Plan(**noted["plan"]), cluster)


def _prepare_environment(
    torch: Torch, cluster: Cluster, steps: int | None, inherit: Mapping[str, str] | None, folder: Path
) -> dict[str, str]:
    """Return the environment of the command, and write the files that it needs into the folder."""
    cards.create(folder / _ACCOUNT)
    settings = {key.removeprefix("GHOST_").lower(): value for key, value in ghost_settings(cluster).items()}
    prepared = environment(
        torch=torch,
        inherit=inherit,
        watch_into=folder,
        steps=steps,
        devices=cluster.gpus_per_node,
        cards=str(folder / _ACCOUNT),
        **settings,
    )
    prepared["TONNAGE_GROWTH"] = json.dumps(list_growth(cluster.device))
    catalog = folder / "catalog.json"
    catalog.write_text(json.dumps(hub_repositories()), encoding="utf-8")
    prepared["TONNAGE_CATALOG"] = str(catalog)
    prepared["PATH"] = os.pathsep.join([str(programs(folder)), prepared.get("PATH", os.defpath)])
    return prepared | trackers.offline(folder, prepared)


def _write_requests(lengths: Lengths, most_seconds: float, folder: Path) -> str:
    """Write requests of these lengths, for an engine to serve until so many seconds from now are over; return the
    file (`tonnage_recorder.load`)."""
    drawn = lengths.draw(REQUESTS, most=_LONGEST_REQUEST)
    columns = {name: getattr(drawn, name).tolist() for name in ("prompts", "outputs", "arrivals")}
    document = {
        **columns,
        "prefix": drawn.prefix,
        "step_seconds": STEP_SECONDS,
        "until": time.monotonic() + most_seconds,
    }
    file = folder / "requests.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return str(file)


def _lacks_function(made: Attempt) -> bool:
    """Return True if the loader ended a process because a function that was called does not exist."""
    messages = (str(failed["message"]) for failed in made.results.failed)  # of a launcher about its ranks
    ended = made.ended == _LOADER_EXIT or any(_LOADER_EXIT_OF_RANK.search(message) for message in messages)
    return ended and made.results.reached and not made.results.traces


def _find_missing_function(results: ProcessResults) -> str | None:
    """Return the failure of the library that needs a missing function, after a run that bound all when loading."""
    outcomes = [*results.failed, *map(ending.outcome_with_cuda, results.traces)]
    failure = next((outcome for outcome in outcomes if "undefined symbol" in str(outcome.get("message"))), None)
    return None if failure is None else ending.describe_failure(failure)


def _card_document(card: cards.Card, names: Mapping[int, tuple[int, str]]) -> dict[str, Any]:
    """Return a GPU as the JSON document has it; a process that did not use torch has neither rank nor name."""
    holders = []
    for holder in card.holders:
        rank, name = names.get(holder.process, (None, None))
        process = {"process": holder.process, "rank": rank, "name": name}
        holders.append({**process, "held_bytes": holder.held_bytes, "peak_bytes": holder.peak_bytes})
    return {"index": card.index, "peak_bytes": card.peak_bytes, "processes": holders}


def _run_command(command: list[str], variables: dict[str, str], timeout_seconds: float, folder: Path) -> int | None:
    """Run the command and return its exit code, or None if it had to be stopped.

    All processes that it started end with it, and with this process.
    """
    with _open_stop_pipe(folder) as stop, termination.held_open(folder / "alive"):
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            preexec_fn=termination.ends_with(os.getpid()),
        )
        try:
            ended = _wait(process, timeout_seconds, folder)
            if ended == 0:
                _wait_for_traces(folder, LATER_SECONDS)
            stop()
            _wait_for_traces(folder, WRITING_SECONDS)
            return ended
        finally:
            termination.end(process, variables["GHOST_SHM"])
            _end_line()


def _end_line() -> None:
    """End the line in which a progress bar may have left the cursor, where other text would go on in it."""
    with contextlib.suppress(OSError):
        if os.isatty(2) or os.path.sameopenfile(1, 2):
            os.write(2, b"\n")


def _wait(process: "subprocess.Popen[bytes]", timeout_seconds: float, folder: Path) -> int | None:
    """Return the exit code of a process; None at the time limit, long after its steps, or when its engine serves."""
    begun, served = time.time(), folder / SERVED
    while (now := time.time()) < (limit := min(begun + timeout_seconds, _latest_end(folder, begun))):
        if served.exists():
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=min(limit - now, _POLL_SECONDS))
    return process.poll()


def _latest_end(folder: Path, begun: float) -> float:
    """Return the time at which a command is stopped that has made its steps: it may wait for what was unwound.

    After the last step or trace it has as long as it took until then, at least `AFTER_SECONDS`.
    """
    traces = {path: path.with_suffix(".trace") for path in folder.glob("*.progress")}
    if not traces or not all(trace.exists() for trace in traces.values()):
        return float("inf")
    latest = max(path.stat().st_mtime for path in (*traces, *folder.glob("*.trace")))
    return latest + max(AFTER_SECONDS, latest - begun)


@contextlib.contextmanager
def _open_stop_pipe(folder: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that stops all processes: it closes the pipe on which they wait (`recording`)."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(termination.held_open(folder / "stop"))
        yield stack.close


def _wait_for_traces(folder: Path, most_seconds: float) -> None:
    """Wait until every running process that used the GPU has written its trace."""
    deadline = time.monotonic() + most_seconds
    while time.monotonic() < deadline:
        if all(path.with_suffix(".trace").exists() or not _is_alive(path.stem) for path in folder.glob("*.progress")):
            return
        time.sleep(0.05)


def _is_alive(process: str) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while the file is read
        return False
