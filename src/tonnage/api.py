"""The Python API, with the names, defaults and errors of the command line.

tonnage.estimate("llama-3.1-8b", gpu="8xA100-80GB", seq_len=8192, shard="zero3").peak.process_bytes
tonnage.plan("llama-3.1-8b", gpu="8xA100-80GB").plans[0].candidate.plan
tonnage.estimate("llama-3.1-8b", task="serve", gpu="h100-80gb", max_len=8192).serving.kv_cache_tokens
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from tonnage.errors import UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.from_traces import Run
from tonnage.estimates.training import TrainingGoal, with_training
from tonnage.options import check_number, check_switch, is_number, parse_words, spell_option
from tonnage.planner.solution import Solution
from tonnage.plans import HEADROOM
from tonnage.report import html, plans, plans_html, serving, serving_plans, terminal
from tonnage.serving.asking import SETTINGS, ServingAnswer, ask_plans
from tonnage.serving.planning import ServeFind, ServeSolution
from tonnage.serving.tasks import Task, check_task

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from tonnage.case import Options, SearchOptions
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.serving.settings import ServeOptions
    from tonnage.train.trainable import Trainable
    from tonnage.tuning.decisions import Tuned
    from tonnage.workers.worker import Worker

Source = Literal["ghost", "meta"]
Find = Literal["max-seq-len", "max-micro-batch", "min-gpus", "min-gpu"]
Progress = Callable[[str], None]

Estimate.terminal_view, Estimate.notebook_view = terminal.render, html.fragment
Solution.terminal_view, Solution.notebook_view = plans.render, plans_html.fragment
ServingAnswer.terminal_view, ServeSolution.terminal_view = serving.render, serving_plans.render


@overload
def estimate(
    model: str,
    job: "Job | None" = None,
    plan: "Plan | None" = None,
    cluster: "str | Cluster | None" = None,
    *,
    task: Literal["train"] = "train",
    gpu: "str | Cluster | None" = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    rank: int | None = None,
    steps: int | None = None,
    torch_version: str | None = None,
    offline: bool = False,
    worker: "Worker | None" = None,
    source: Source = "ghost",
    fresh: bool = False,
    advice: bool = True,
    tokens: int | None = None,
    samples: int | None = None,
    price: float | None = None,
    progress: Progress = lambda text: None,
    **options: "Unpack[Options]",
) -> Estimate: ...
@overload
def estimate(
    model: str,
    *,
    task: Literal["serve"],
    cluster: "str | Cluster | None" = None,
    gpu: "str | Cluster | None" = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    offline: bool = False,
    source: Source = "ghost",
    engine_python: str | None = None,
    advice: bool = True,
    progress: Progress = lambda text: None,
    **options: "Unpack[ServeOptions]",
) -> ServingAnswer: ...
def estimate(
    model: str,
    job: "Job | None" = None,
    plan: "Plan | None" = None,
    cluster: "str | Cluster | None" = None,
    *,
    task: Task = "train",
    gpu: "str | Cluster | None" = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    rank: int | None = None,
    steps: int | None = None,
    torch_version: str | None = None,
    offline: bool = False,
    worker: "Worker | None" = None,
    source: Source = "ghost",
    fresh: bool = False,
    advice: bool = True,
    tokens: int | None = None,
    samples: int | None = None,
    price: float | None = None,
    progress: Progress = lambda text: None,
    **options: Any,
) -> Estimate | ServingAnswer:
    """Return the memory and time of a training step of `model` on each rank, as `tonnage estimate` prints them.

    `options` are fields of Job and Plan.  They override the fields of `job` and `plan`, so these two are the same:

        tonnage.estimate("llama-3.1-8b", gpu="8xA100-80GB", seq_len=8192, shard="zero3", checkpointing="full")
        tonnage.estimate(
            "llama-3.1-8b", Job(seq_len=8192), Plan(shard="zero3", checkpointing="full"), "8xA100-80GB"
        )

    `host_memory` is the memory of each machine beside its GPUs, such as "256GiB"; by default what machines with this
    card usually have.  `worker` is a warm `tonnage.Worker`, for many estimates in a row.  `source="meta"` needs no
    ghost: it imitates the GPU on any platform, with a wider interval.  `fresh` runs the steps even if their trace is
    cached.  By default there are three steps; if all are alike, only the first one is run and its requests are
    repeated (`predict.usual_steps`).  If the number of `steps` is given, all of them run.  If they do not fit, or
    only barely, `advice` tries changes for some seconds and adds those that fit (`Estimate.advice`).  `tokens` or
    `samples` of the whole training, and the `price` of a GPU's hour, give `time["training"]`.

    With `task="serve"`, whether an inference engine starts and how much it holds; `options` are then its settings,
    `lengths` and `concurrency`:

        tonnage.estimate("llama-3.1-8b", task="serve", gpu="h100-80gb", max_len=8192, kv_dtype="fp8").starts

    Raises UsageError, CannotEstimate and their subclasses; a step that does not fit is an answer (`Estimate.fits`),
    not an error.
    """
    from tonnage.advice.advise import Asked, answers
    from tonnage.script.engine_start import ask_engine
    from tonnage.trainers import cases

    if cluster is not None and gpu is not None:
        raise UsageError("Both cluster and gpu name the GPUs; give one of the two.")
    _check_switches(offline=offline, fresh=fresh, advice=advice)
    _check_numbers(gpus=gpus, steps=steps, tokens=tokens, samples=samples)
    refused = {
        "job": job,
        "plan": plan,
        "rank": rank,
        "steps": steps,
        "torch": torch_version,
        "worker": worker,
        "host_memory": host_memory,
        "fresh": fresh,
        "tokens": tokens,
        "samples": samples,
        "price": price,
    }
    _check_task(task, options, refused)
    if task == "serve":
        cards = _parse_gpus(cluster if gpu is None else gpu, gpus, gpu_memory, None)
        how = {"source": source, "engine_python": options.pop("engine_python", None), "progress": progress}
        requests = {**_requests(options), "advice": advice, "offline": offline}
        return ask_engine(model, options, cards, **how, **requests)
    goal = TrainingGoal(tokens=tokens, samples=samples, price=price)
    cards = _parse_gpus(cluster if gpu is None else gpu, gpus, gpu_memory, host_memory)
    asked = Asked(
        model=model,
        case=cases.make_case(model, cards, options, job=job, plan=plan, offline=offline),
        options={**_list_fields(job), **_list_fields(plan), **options},
        rank=rank,
        steps=steps,
    )
    *_, run = answers(
        asked,
        advise=advice,
        torch_version=torch_version,
        worker=worker,
        source=source,
        fresh=fresh,
        progress=progress,
    )
    return with_training(run.estimate, goal)


def _list_fields(value: "Job | Plan | None") -> dict[str, Any]:
    """Return the fields of a Job or a Plan that differ from their defaults."""
    if value is None:
        return {}
    named = ((item.name, getattr(value, item.name), item.default) for item in dataclasses.fields(value))
    return {name: chosen for name, chosen, default in named if name != "model" and chosen != default}


@overload
def plan(
    model: str,
    *,
    task: Literal["train"] = "train",
    gpu: "str | Cluster | None" = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    only: str | Sequence[str] = (),
    without: str | Sequence[str] = (),
    allow: str | Sequence[str] = (),
    headroom: float = HEADROOM,
    host_memory: str | int | None = None,
    find: Find | None = None,
    top: int = 4,
    pareto: bool = False,
    torch_version: str | None = None,
    offline: bool = False,
    tokens: int | None = None,
    samples: int | None = None,
    price: float | None = None,
    progress: Progress = lambda text: None,
    **options: "Unpack[SearchOptions]",
) -> Solution: ...
@overload
def plan(
    model: str,
    *,
    task: Literal["serve"],
    gpu: "str | Cluster | None" = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    find: ServeFind | None = None,
    top: int = 4,
    offline: bool = False,
    price: float | None = None,
    **options: "Unpack[ServeOptions]",
) -> ServeSolution: ...
def plan(
    model: str,
    *,
    task: Task = "train",
    gpu: "str | Cluster | None" = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    only: str | Sequence[str] = (),
    without: str | Sequence[str] = (),
    allow: str | Sequence[str] = (),
    headroom: float = HEADROOM,
    host_memory: str | int | None = None,
    find: Find | ServeFind | None = None,
    top: int = 4,
    pareto: bool = False,
    torch_version: str | None = None,
    offline: bool = False,
    tokens: int | None = None,
    samples: int | None = None,
    price: float | None = None,
    progress: Progress = lambda text: None,
    **options: Any,
) -> Solution | ServeSolution:
    """Return the fastest plans that fit, as `tonnage plan` prints them.

        tonnage.plan("llama-3.1-8b", gpu="8xA100-80GB", seq_len=8192)

    `options` are fields of Job and Plan: those that are given are kept, the search chooses the others.  `method` may
    be `any`, or several methods with commas between them, which are compared.  `headroom` is the fraction of each GPU
    that stays free.  `host_memory`, `tokens`, `samples` and `price` are those of `tonnage.estimate`.
    With `task="serve"`, the fastest ways to serve `concurrency` requests of these `lengths`:

        tonnage.plan("llama-3.1-70b", task="serve", gpu="4xh100-80gb", concurrency=64, lengths="p50=1000,p95=4000")

    Raises UsageError, CannotEstimate and their subclasses; that nothing fits is an answer (`Solution.status`), not an
    error.
    """
    from tonnage.planner.ask import answer, ask
    from tonnage.planner.limits import check_cards, initial_card

    _check_switches(pareto=pareto, offline=offline)
    _check_numbers(gpus=gpus, tokens=tokens, samples=samples)
    refused = {
        "only": only,
        "without": without,
        "allow": allow,
        "headroom": None if headroom == HEADROOM else headroom,
        "host_memory": host_memory,
        "pareto": pareto,
        "torch": torch_version,
        "tokens": tokens,
        "samples": samples,
    }
    _check_task(task, options, refused)
    if task == "serve":
        cards = _parse_gpus(initial_card(find, gpu) if gpu is None else gpu, gpus, gpu_memory, None)
        check_cards(find, cards, gpu=gpu, gpus=gpus, gpu_memory=gpu_memory)
        requests = {**_requests(options), "find": find, "top": top, "price": price, "offline": offline}
        return ask_plans(model, options, cards, **requests)
    goal = TrainingGoal(tokens=tokens, samples=samples, price=price)
    check_number("top", top)
    if not is_number(headroom):
        raise UsageError(f"headroom is {headroom!r}; it must be a number such as 0.04.")
    cluster = _parse_gpus(initial_card(find, gpu) if gpu is None else gpu, gpus, gpu_memory, host_memory)
    check_cards(find, cluster, gpu=gpu, gpus=gpus, gpu_memory=gpu_memory)
    question = ask(
        model,
        cluster,
        options,
        find=find,
        offline=offline,
        only=_words("only", only),
        without=_words("without", without),
        allow=_words("allow", allow),
        headroom=headroom,
    )
    solution = answer(question, find, top=top, pareto=pareto, torch_version=torch_version, progress=progress)
    return solution.with_training(goal)


def dry_run(
    command: str | Sequence[str],
    cluster: "str | Cluster | None" = None,
    *,
    gpu: "str | Cluster | None" = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    steps: int = 3,
    timeout_seconds: float = 900.0,
    rank: int | None = None,
    torch_version: str | None = None,
    variables: Mapping[str, str] | None = None,
    seconds: bool = True,
    progress: Progress = lambda text: None,
) -> Run:
    """Return the memory and time of a training command on ghost GPUs, as `tonnage dry-run` prints them.

        tonnage.dry_run("torchrun --nproc-per-node 2 train.py", gpu="2xt4").estimate

    `host_memory` is that of `tonnage.estimate`.  `variables` replace the environment; without `seconds` no step is
    counted for its time (`tonnage.script.dry_run.run`).  Raises TrialFailed, UsageError and GhostUnavailable.
    """
    import shlex

    from tonnage.script import dry_run as script

    if cluster is not None and gpu is not None:
        raise UsageError("Both cluster and gpu name the GPUs; give one of the two.")
    _check_switches(seconds=seconds)
    _check_numbers(gpus=gpus, steps=steps)
    if not is_number(timeout_seconds):
        raise UsageError(f"timeout_seconds is {timeout_seconds!r}; it must be a number of seconds.")
    return script.run(
        shlex.split(command) if isinstance(command, str) else list(command),
        _parse_gpus(cluster if gpu is None else gpu, gpus, gpu_memory, host_memory),
        steps=steps,
        timeout_seconds=timeout_seconds,
        rank=rank,
        torch_version=torch_version,
        variables=variables,
        seconds=seconds,
        progress=progress,
    )


def apply(
    plan: "Plan | str | Path",
    model: "nn.Module | str | Path",
    optimizer: "Mapping[str, Any] | Callable[[list[Any]], Optimizer] | None" = None,
    *,
    job: "Job | None" = None,
) -> "Trainable":
    """Return a network under a plan, ready to train by the step that `estimate` ran.

        trainable = tonnage.apply("plan.toml", model, optimizer={"lr": 2e-5, "weight_decay": 0.1})
        for batches in loader:  # lists of micro-batches, dicts of tensors
            print(trainable.step(batches).loss)
        trainable.unapply().save_pretrained("trained")

    `plan` is a Plan, a plan file, or `auto`: the fastest that is predicted to fit this machine's GPUs.  `model` is
    the network with its weights, which is changed in place, or a folder of `save_pretrained`.  `optimizer` are
    hyperparameters by name (lr, weight_decay, betas, eps, momentum), or a function that makes the plan's optimizer
    from a list of parameters; by default they are those of the estimate.  `job` says what is trained (`method`,
    LoRA's rank); by default that of the file, or all weights.  Raises UsageError, CannotEstimate and their
    subclasses, and leaves the network as it was.
    """
    from tonnage.train import applying

    return applying.apply(plan, model, optimizer, job=job)


def tune(
    model_or_plan: str | Sequence[str],
    *,
    out: "str | Path",
    gpu: str | None = None,
    gpus: int | None = None,
    trials: int = 12,
    steps: int = 20,
    timeout_seconds: float = 900.0,
    forget: bool = False,
    offline: bool = False,
    progress: Progress = lambda text: None,
    **options: "Unpack[SearchOptions]",
) -> "Tuned":
    """Return what the best plans gave on this machine's devices, as `tonnage tune` prints it.

        tonnage.tune("llama-3.2-1b", out="tuned", global_batch_tokens=65536).best
        tonnage.tune(["python", "train.py", "--bf16", "True"], out="tuned").best.changed.line

    `model_or_plan` is a model as in `estimate`, a plan file, or the words of a training command.  Each trial has
    processes of its own; those in the folder `out` are not run again.  `steps` are the most timed steps of a trial.
    What is measured corrects later estimates of the network on this GPU; `forget` deletes what was measured before.
    `options` are those of `plan`.
    Raises UsageError if the devices are not in this machine.
    """
    from pathlib import Path

    from tonnage.tuning.here import tune_here

    _check_switches(forget=forget, offline=offline)
    _check_numbers(gpus=gpus, trials=trials, steps=steps)
    if not isinstance(model_or_plan, str):
        from tonnage.script.planning import Asked, check_options
        from tonnage.tuning.here import check_hardware
        from tonnage.tuning.scripts import tune_script

        cluster = check_hardware(gpu, gpus)
        stated = check_options(dict(options), cluster)
        asked = Asked(command=list(model_or_plan), cluster=cluster, stated=stated, timeout_seconds=timeout_seconds)
        return tune_script(asked, out=Path(out), trials=trials, steps=steps, forget=forget, progress=progress)
    return tune_here(
        str(model_or_plan),
        options,
        out=Path(out),
        gpu=gpu,
        gpus=gpus,
        trials=trials,
        steps=steps,
        timeout_seconds=timeout_seconds,
        forget=forget,
        offline=offline,
        progress=progress,
    )


def _check_task(task: str, options: dict[str, Any], refused: dict[str, Any]) -> None:
    """Raise UsageError for an unknown task, or arguments and options of the other one."""
    from tonnage.job import Job
    from tonnage.options import options as list_options
    from tonnage.plans import Plan

    known = {*SETTINGS, "concurrency", "engine_python"}
    training = {item.name for kind in (Job, Plan) for item, _ in list_options(kind)}
    serving = {name: value for name, value in options.items() if name in known}
    check_task(task, serving, {**refused, **{name: v for name, v in options.items() if name in training - known}})


def _requests(options: dict[str, Any]) -> dict[str, Any]:
    """Return the lengths of requests and their number, taken out of the options."""
    return {name: options.pop(name, None) for name in ("lengths", "concurrency")}


def _check_switches(**values: object) -> None:
    """Raise UsageError for a value that is neither True nor False."""
    for name, value in values.items():
        check_switch(name, value)


def _check_numbers(**values: object) -> None:
    """Raise UsageError for a value that is no whole number; None means that it was not given."""
    for name, value in values.items():
        if value is not None and type(value) is not int:
            check_number(name, value)


def _words(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Return the words of a comma-separated text or a list.  Raises UsageError."""
    try:
        return parse_words(value)
    except ValueError as error:
        raise UsageError(f"{spell_option(name)}: {error}; give words with commas between them.") from error


def _parse_gpus(
    gpu: "str | Cluster | None", gpus: int | None, gpu_memory: str | int | None, host_memory: str | int | None
) -> "Cluster":
    """Return the cluster that a name such as `8xA100-80GB`, a number of GPUs and the memories describe."""
    from tonnage.catalog.devices import parse_cluster
    from tonnage.cluster import Cluster

    if gpu is not None and not isinstance(gpu, str | Cluster):
        raise UsageError(
            f"GPUs are given by a name such as '8xA100-80GB' or a Cluster, not by a {type(gpu).__name__}."
        )
    host_bytes = _parse_memory(host_memory)
    if isinstance(gpu, Cluster):
        return gpu if host_bytes is None else dataclasses.replace(gpu, host_memory_bytes=host_bytes)
    return parse_cluster(gpu, gpus=gpus, gpu_memory_bytes=_parse_memory(gpu_memory), host_memory_bytes=host_bytes)


def _parse_memory(memory: str | int | None) -> int | None:
    """Return a number of bytes, which a text such as `24GiB` may spell."""
    from tonnage.units import parse_bytes

    if isinstance(memory, str):
        return parse_bytes(memory)
    if memory is not None:
        check_number("a number of bytes", memory)
    return memory
