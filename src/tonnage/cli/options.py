"""Options that several commands share, each worded once."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.errors import UsageError
from tonnage.job import Job
from tonnage.options import Option, options, spelled
from tonnage.options import words as words_in
from tonnage.plans import Plan
from tonnage.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from tonnage.cluster import Cluster

CARD = "Where it runs"
JOB = "What is trained"
PLAN = "How it is trained"
OUTPUT = "What you get"


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


def count(name: str, text: str, panel: str | None = None) -> Any:
    """An option that takes a whole number such as 4096 or 4M."""
    return typer.Option(name, help=text, metavar="N", parser=_count, rich_help_panel=panel)


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
    help="A catalog name (`tonnage models`), a Hub id, a folder, a config.json, or package.module:factory.",
    autocompletion=_model_names,
)
Model = Annotated[str, _MODEL]
ModelOrCommand = Annotated[
    list[str],
    typer.Argument(
        help="As in `tonnage estimate`; or, after two dashes, a script of yours: -- python train.py ...",
        metavar="MODEL | -- COMMAND...",
        autocompletion=_model_names,
    ),
]
ModelOrNone = Annotated[str | None, _MODEL]
Offline = Annotated[
    bool, typer.Option("--offline", help="Never ask the network about a model.", rich_help_panel=CARD)
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        autocompletion=_gpu_names,
        help="The card: t4, 8xA100-80GB, 4x8xH100 (machines x GPUs). `tonnage devices` lists them.",
        metavar="NAME",
        rich_help_panel=CARD,
    ),
]
Here = Annotated[
    bool,
    typer.Option("--here", help="The GPUs of this machine, as its driver reports them.", rich_help_panel=CARD),
]
Gpus = Annotated[int | None, count("--gpus", "How many cards, where --gpu does not say.", CARD)]
GpuMemory = Annotated[
    int | None,
    typer.Option(
        "--gpu-memory",
        help="Memory of the card, in place of the catalog's or for a card that is not in it: 24GiB.",
        metavar="SIZE",
        parser=_bytes,
        rich_help_panel=CARD,
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        "--host-memory",
        help="What a machine has beside its GPUs, to be kept to: 256GiB. Without: up to 512 GiB for each GPU; with "
        "--here what this one has.",
        metavar="SIZE",
        parser=_bytes,
        rich_help_panel=CARD,
    ),
]
Steps = Annotated[int, count("--steps", "Optimizer steps to run.", CARD)]
TorchVersion = Annotated[
    str | None,
    typer.Option(
        "--torch",
        help="Run this version of torch instead of the installed one: 2.12.0.",
        metavar="VERSION",
        rich_help_panel=CARD,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.", rich_help_panel=OUTPUT)]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Also write a page that stands alone.", metavar="FILE", rich_help_panel=OUTPUT),
]
Save = Annotated[
    Path | None,
    typer.Option(
        "--save", help="Keep estimate and trace for `tonnage report`.", metavar="FILE", rich_help_panel=OUTPUT
    ),
]
Snapshot = Annotated[
    Path | None,
    typer.Option(
        "--snapshot",
        help="Also write a snapshot for PyTorch's memory viewer (pytorch.org/memory_viz).",
        metavar="FILE",
        rich_help_panel=OUTPUT,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Let the files take the place of others that tonnage did not write.", rich_help_panel=OUTPUT
    ),
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
    parameters = [*own, *_parameters(), asked]
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return called


def _parameters() -> Iterator[inspect.Parameter]:
    for kind, panel in ((Job, JOB), (Plan, PLAN)):
        for item, option in options(kind):
            made, annotation, default = _declared(spelled(item.name), option, item.default, panel)
            yield inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[annotation, made],
            )


def _declared(name: str, option: Option, default: Any, panel: str) -> tuple[Any, Any, Any]:
    """What typer calls an option, the type of its value, and its default."""
    if option.kind == "switch":
        return typer.Option(f"--{name}", help=option.help, rich_help_panel=panel), bool, default
    if option.kind == "number":
        return count(f"--{name}", option.help, panel), int if default is not None else int | None, default
    if option.kind == "amount":
        made = typer.Option(f"--{name}", help=option.help, metavar="NUMBER", rich_help_panel=panel)
        return made, float if default is not None else float | None, default
    if option.kind == "fraction":
        return typer.Option(f"--{name}", help=option.help, metavar="PART", rich_help_panel=panel), float, default
    if option.kind == "names":
        made = typer.Option(
            f"--{name}",
            help=f"{option.help} With commas between them, or one by one.",
            metavar="NAMES",
            rich_help_panel=panel,
        )
        return made, list[str], list(default)

    def complete(incomplete: str) -> list[str]:
        return beginning(option.possible, incomplete)

    made = typer.Option(
        f"--{name}",
        help=f"{option.help} One of {', '.join(option.possible)}.",
        metavar="WORD",
        autocompletion=complete,
        rich_help_panel=panel,
    )
    return made, str if default is not None else str | None, default


def words(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Words with commas between them, of an option that may be given several times; none for nothing."""
    return words_in(",".join(texts or ()))
