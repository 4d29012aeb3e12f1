"""Options that several commands share, each worded once."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer
from typer.models import OptionInfo

from tonnage.errors import UsageError
from tonnage.job import Job
from tonnage.options import Option, options, spelled
from tonnage.options import words as words_in
from tonnage.plans import Plan
from tonnage.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from tonnage.cluster import Cluster

COMMON = "Common options"
MODEL_AND_JOB = "Model and job"
MEMORY = "Memory techniques"
PARALLELISM = "Parallelism"
SEARCH = "Search"
HARDWARE = "Hardware and run"
OUTPUT = "Output"

PANELS: Final[Mapping[str, tuple[str, ...]]] = {
    COMMON: (
        *("gpu", "gpus", "gpu_memory", "method", "seq_len", "micro_batch", "grad_accum"),
        *("precision", "optimizer", "checkpointing", "shard", "json"),
    ),
    MODEL_AND_JOB: (
        *("plan", "engine", "lora_rank", "lora_targets", "lora_dropout", "global_batch_tokens", "packing", "lengths"),
        *("images", "image_size", "clip_grad_norm", "eval_batch", "eval_logits", "generate", "resume"),
        "save_checkpoint",
    ),
    MEMORY: (
        *("loss", "attention", "activation_offload", "optimizer_offload", "param_offload", "optimizer_in_backward"),
        *("allocator", "compile", "outputs", "weights_dtype", "reduce_dtype", "base_dtype", "quant"),
        "unquantized_dtype",
    ),
    PARALLELISM: ("tp", "sequence_parallel", "pp", "pp_schedule", "pp_stages", "cp", "ep", "accum_sync"),
    SEARCH: ("find", "allow", "only", "without", "headroom", "host_memory", "settings"),
    HARDWARE: ("here", "rank", "steps", "timeout", "torch", "source", "fresh", "offline"),
    OUTPUT: ("save", "html", "snapshot", "out", "top", "pareto", "strict", "force"),
}
"""The panels of `--help` in their order, and in each the parameters of commands in theirs."""

_PLACES: Final = {
    name: (panel, place) for panel, names in enumerate(PANELS.values()) for place, name in enumerate(names)
}


def _count(text: str) -> int:
    try:
        return parse_count(str(text))
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error


def _bytes(text: str) -> int:
    try:
        return parse_bytes(str(text))
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error


def count(name: str, text: str) -> Any:
    """Return an option that takes a whole number such as 4096 or 4M."""
    return typer.Option(name, help=text, metavar="N", parser=_count)


def in_panels(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with its options sorted into the PANELS of its help."""
    signature = inspect.signature(command)
    parameters = _sorted_into_panels(signature.parameters.values())

    @functools.wraps(command)
    def called(**given: Any) -> Any:
        return command(**given)

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return called


def _sorted_into_panels(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters in the order of PANELS, arguments first; each option learns its panel."""
    titles = list(PANELS)
    placed: list[tuple[tuple[int, int], inspect.Parameter]] = []
    for parameter in parameters:
        place = (-1, 0)
        for option in get_args(parameter.annotation)[1:]:
            if isinstance(option, OptionInfo) and parameter.name in _PLACES:
                place = _PLACES[parameter.name]
                option.rich_help_panel = titles[place[0]]
        placed.append((place, parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)))
    return [parameter for _, parameter in sorted(placed, key=lambda item: item[0])]


def beginning(names: Iterable[str], incomplete: str) -> list[str]:
    """The names that a shell may complete what was typed to."""
    return [name for name in names if name.startswith(incomplete.lower())]


def _gpu_names(incomplete: str) -> list[str]:
    from tonnage.catalog.devices import device_names

    return beginning(device_names(), incomplete)


def _model_names(incomplete: str) -> list[str]:
    from tonnage.catalog.models import model_names

    return beginning(model_names(), incomplete)


_MODEL: Any = typer.Argument(
    help="A name from `tonnage models`, a Hub id, a folder, a config.json, or package.module:factory.",
    autocompletion=_model_names,
)
Model = Annotated[str, _MODEL]
ModelOrCommand = Annotated[
    list[str],
    typer.Argument(
        help="A model as in `tonnage estimate`; or, after two dashes, your own script: -- python train.py ...",
        metavar="MODEL | -- COMMAND...",
        autocompletion=_model_names,
    ),
]
ModelOrNone = Annotated[str | None, _MODEL]
Offline = Annotated[bool, typer.Option("--offline", help="Do not look models up on the Hub.")]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        autocompletion=_gpu_names,
        help="The GPU or GPUs: t4, 8xA100-80GB, or 4x8xH100 for 4 machines of 8. `tonnage devices` lists all.",
        metavar="NAME",
    ),
]
Here = Annotated[
    bool,
    typer.Option("--here", help="Use the GPUs of this machine, as its driver reports them."),
]
Gpus = Annotated[int | None, count("--gpus", "Number of GPUs, if --gpu names only one.")]
GpuMemory = Annotated[
    int | None,
    typer.Option(
        "--gpu-memory",
        help="Memory of each GPU, instead of the catalog's, or for a GPU that is not in the catalog: 24GiB.",
        metavar="SIZE",
        parser=_bytes,
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        "--host-memory",
        help="Host memory of each machine, as a limit: 256GiB. Default: 512 GiB for each GPU; with --here, what "
        "this machine has.",
        metavar="SIZE",
        parser=_bytes,
    ),
]
Steps = Annotated[int, count("--steps", "Optimizer steps to run.")]
TorchVersion = Annotated[
    str | None,
    typer.Option(
        "--torch",
        help="Run this version of torch instead of the installed one: 2.12.0.",
        metavar="VERSION",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Also write a web page, complete in one file.", metavar="FILE"),
]
Save = Annotated[
    Path | None,
    typer.Option("--save", help="Save the estimate and its traces, for `tonnage report`.", metavar="FILE"),
]
Snapshot = Annotated[
    Path | None,
    typer.Option(
        "--snapshot",
        help="Also write a memory snapshot for PyTorch's viewer (pytorch.org/memory_viz).",
        metavar="FILE",
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace existing files that tonnage did not write."),
]


def cluster_of(
    gpu: str | None, gpus: int | None, gpu_memory: int | None, here: bool, command: Sequence[str] = ()
) -> "Cluster":
    """The cards that the options name; what others hold on those of this machine is said on standard error.

    Raises UsageError where only the `command`, to which all belongs that stands behind it, seems to name any.
    """
    from tonnage.catalog.devices import parse_cluster
    from tonnage.cluster import HERE

    late = [word for word in command if word.partition("=")[0] in ("--gpu", "--gpu-memory", "--here")]
    if late and gpu is None and gpu_memory is None and not here:
        raise UsageError(f"No GPU named: {late[0]} stands behind the command, whose option it is; write it before.")
    if here and gpu is not None:
        raise UsageError(f"--gpu {gpu} and --here both say which cards; give one of the two.")
    found = parse_cluster(HERE if here else gpu, gpus=gpus, gpu_memory_bytes=gpu_memory)
    if here:
        from tonnage.catalog.local_gpus import in_use, visible

        for sentence in in_use(visible()):
            print(sentence, file=sys.stderr)
    return found


def with_request(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command that takes every option of Job and Plan where it says `**options`, and gets those that were said.

    What was said is known even where it says the default: beside a file it takes the place of the file's.
    """
    signature = inspect.signature(command)
    own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    known = {item.name for item in own}
    several = {item.name for kind in (Job, Plan) for item, option in options(kind) if option.kind == "names"}

    @functools.wraps(command)
    def called(context: typer.Context, **given: Any) -> Any:
        def said(name: str) -> bool:
            source = context.get_parameter_source(name)
            return source is not None and source.name == "COMMANDLINE"

        values = {name: value for name, value in given.items() if name in known or said(name)}
        return command(**{name: words(value) if name in several else value for name, value in values.items()})

    asked = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = _sorted_into_panels([*own, *_parameters(), asked])
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return called


def _parameters() -> Iterator[inspect.Parameter]:
    for kind in (Job, Plan):
        for item, option in options(kind):
            made, annotation, default = _declared(spelled(item.name), option, item.default)
            yield inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[annotation, made],
            )


def _declared(name: str, option: Option, default: Any) -> tuple[Any, Any, Any]:
    """What typer calls an option, the type of its value, and its default."""
    if option.kind == "switch":
        return typer.Option(f"--{name}", help=option.help), bool, default
    if option.kind == "number":
        return count(f"--{name}", option.help), int if default is not None else int | None, default
    if option.kind == "amount":
        made = typer.Option(f"--{name}", help=option.help, metavar="NUMBER")
        return made, float if default is not None else float | None, default
    if option.kind == "fraction":
        return typer.Option(f"--{name}", help=option.help, metavar="PART"), float, default
    if option.kind == "names":
        made = typer.Option(
            f"--{name}",
            help=f"{option.help} Separate several by commas, or repeat the option.",
            metavar="NAMES",
        )
        return made, list[str], list(default)

    def complete(incomplete: str) -> list[str]:
        return beginning(option.possible, incomplete)

    made = typer.Option(
        f"--{name}",
        help=f"{option.help} One of {', '.join(option.possible)}.",
        metavar="WORD",
        autocompletion=complete,
    )
    return made, str if default is not None else str | None, default


def words(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Words with commas between them, of an option that may be given several times; none for nothing."""
    return words_in(",".join(texts or ()))
