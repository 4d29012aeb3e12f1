"""Options that several commands share, and the options that commands take from the fields of Job and Plan."""

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
from tonnage.options import Option, options, parse_words, spell_option
from tonnage.plans import Plan
from tonnage.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from tonnage.cluster import Cluster

COMMON = "Common options"
MODEL_AND_JOB = "Model and job"
MEMORY = "Memory techniques"
PARALLELISM = "Parallelism"
TRAINING = "Training"
SERVING = "Serving (--task serve)"
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
    TRAINING: (
        *("model", "data", "out", "max_steps", "epochs", "lr", "resume", "schedule", "warmup_steps", "decay_steps"),
        *("weight_decay", "seed", "tokenizer", "eval_every", "eval_data", "eval_share", "save_every", "keep"),
        *("spike_sigmas", "log"),
    ),
    SERVING: (
        *("task", "max_len", "max_seqs", "max_batched_tokens", "gpu_memory_utilization", "kv_dtype", "quantization"),
        *("dp", "eager", "warm", "concurrency", "block_tokens", "max_loras", "max_lora_rank"),
        *("draft", "draft_tokens", "acceptance", "no_prefix_caching", "sleep_mode", "mm_encoder_tp_mode"),
        "engine_python",
    ),
    SEARCH: ("find", "allow", "only", "without", "headroom", "settings"),
    HARDWARE: (
        *("tokens", "samples", "price", "here", "host_memory", "rank", "steps", "timeout", "torch", "source"),
        *("fresh", "offline"),
    ),
    OUTPUT: ("advice", "save", "html", "snapshot", "out", "top", "pareto", "strict", "force"),
}
"""The panels of `--help` in their order, and in each the parameters of commands in theirs."""

_POSITIONS: Final = {
    name: (panel, position) for panel, names in enumerate(PANELS.values()) for position, name in enumerate(names)
}
"""The panel of each parameter, and its position in the panel."""


def _parser(read: Callable[[str], int]) -> Callable[[str], int]:
    """Return a parser for typer whose errors name the option."""

    def parse(text: str) -> int:
        try:
            return read(str(text))
        except UsageError as error:
            raise typer.BadParameter(str(error)) from error

    return parse


def count(name: str, text: str, read: Callable[[str], int] = parse_count) -> Any:
    """Return an option that takes a whole number, which `read` parses: such as 4096 or 4M."""
    return typer.Option(name, help=text, metavar="N", parser=_parser(read))


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
    positioned: list[tuple[tuple[int, int], inspect.Parameter]] = []
    for parameter in parameters:
        position = (-1, 0)
        for option in get_args(parameter.annotation)[1:]:
            if isinstance(option, OptionInfo) and parameter.name in _POSITIONS:
                position = _POSITIONS[parameter.name]
                option.rich_help_panel = titles[position[0]]
        positioned.append((position, parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)))
    return [parameter for _, parameter in sorted(positioned, key=lambda item: item[0])]


def beginning(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that begin with `incomplete`, for the completion of a shell."""
    return [name for name in names if name.startswith(incomplete.lower())]


def _gpu_names(incomplete: str) -> list[str]:
    from tonnage.catalog.devices import device_names

    return beginning(device_names(), incomplete)


def _model_names(incomplete: str) -> list[str]:
    from tonnage.catalog.models import model_names

    return beginning(model_names(), incomplete)


_MODEL: Any = typer.Argument(
    help="The model: a name from `tonnage models`, a Hub id, a folder, a config.json, or package.module:factory "
    "(your own nn.Module).",
    autocompletion=_model_names,
)
Model = Annotated[str, _MODEL]
ModelOrCommand = Annotated[
    list[str],
    typer.Argument(
        help="A model, named as in `tonnage estimate`; or your own training command after two dashes: -- python "
        "train.py ...",
        metavar="MODEL | -- COMMAND...",
        autocompletion=_model_names,
    ),
]
ModelOrNone = Annotated[str | None, _MODEL]
Offline = Annotated[bool, typer.Option("--offline", help="Do not ask the Hugging Face Hub about the model.")]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        autocompletion=_gpu_names,
        help="The GPUs: t4, 8xA100-80GB, or 4x8xH100 for 4 machines of 8. `tonnage devices` lists the names.",
        metavar="NAME",
    ),
]
Here = Annotated[
    bool,
    typer.Option("--here", help="Use the GPUs of this machine, as its driver reports them, instead of --gpu."),
]
Gpus = Annotated[int | None, count("--gpus", "Number of GPUs, if --gpu names only one; above 8 in machines of 8.")]
GpuMemory = Annotated[
    int | None,
    typer.Option(
        "--gpu-memory",
        help="Memory of each GPU: 24GiB. It replaces the catalog's, or describes a GPU that is not in the catalog.",
        metavar="SIZE",
        parser=_parser(parse_bytes),
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        "--host-memory",
        help="Host memory (RAM) of each machine: 256GiB. Default: what machines with this card usually have "
        "(`tonnage devices NAME`); with --here, the memory of this machine.",
        metavar="SIZE",
        parser=_parser(parse_bytes),
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        help="Tokens of the whole training, as 15B: also say how long it takes, in days and GPU-hours.",
        metavar="N",
        parser=_parser(parse_count),
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        help="The same in sequences, such as rows x epochs.",
        metavar="N",
        parser=_parser(parse_count),
    ),
]
Price = Annotated[
    float | None,
    typer.Option("--price", help="Price of an hour of one GPU: also say what the whole training costs.", metavar="N"),
]
ALL_STEPS: Final = 0
"""Value of `--steps all`."""


def _parse_steps(text: str) -> int:
    """Return a number of steps, `ALL_STEPS` for all.  Raises UsageError for none."""
    if text == "all":
        return ALL_STEPS
    steps = parse_count(text)
    if steps < 1:
        raise UsageError(f"{steps} steps cannot be run; give at least 1, or all.")
    return steps


Steps = Annotated[
    int,
    count(
        "--steps", "Optimizer steps of each training loop, or all: then every loop is run to its end.", _parse_steps
    ),
]
TorchVersion = Annotated[
    str | None,
    typer.Option(
        "--torch",
        help="Run this version of PyTorch instead of the installed one: 2.12.0.",
        metavar="VERSION",
    ),
]
Advised = Annotated[
    bool,
    typer.Option(
        "--advice/--no-advice",
        help="Where a step does not fit, or only barely, try changes of the options and show those that fit.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Also write the report as a web page, complete in one file.", metavar="FILE"),
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


def parse_cluster_options(
    gpu: str | None,
    gpus: int | None,
    gpu_memory: int | None,
    here: bool,
    command: Sequence[str] = (),
    *,
    host_memory: int | None = None,
) -> "Cluster":
    """Return the GPUs that the options name.

    With `here`, memory that other processes hold on them is reported on standard error.  Raises UsageError if a
    `command` contains an option such as --gpu and none was given before it: everything after the command's first
    word belongs to the command.
    """
    from tonnage.catalog.devices import parse_cluster
    from tonnage.cluster import HERE

    late = [word for word in command if word.partition("=")[0] in ("--gpu", "--gpu-memory", "--here")]
    if late and gpu is None and gpu_memory is None and not here:
        raise UsageError(
            f"No GPU named: {late[0]} stands behind the command and belongs to it; write it before the command."
        )
    if here and gpu is not None:
        raise UsageError(f"--gpu {gpu} and --here both name the GPUs; give one of the two.")
    cluster = parse_cluster(
        HERE if here else gpu, gpus=gpus, gpu_memory_bytes=gpu_memory, host_memory_bytes=host_memory
    )
    if here:
        from tonnage.catalog.local_gpus import in_use, visible

        for sentence in in_use(visible()):
            print(sentence, file=sys.stderr)
    return cluster


def with_request(command: Callable[..., Any], further: Iterable[inspect.Parameter] = ()) -> Callable[..., Any]:
    """Return the command with every option of Job and Plan, and `further` ones, in the place of its `**options`.

    The command gets the options that were given on the command line, also those given with their default value: such
    an option overrides the value of a plan file.
    """
    signature = inspect.signature(command)
    own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    known = {item.name for item in own}
    lists = {item.name for kind in (Job, Plan) for item, option in options(kind) if option.kind == "names"}

    @functools.wraps(command)
    def called(context: typer.Context, **given: Any) -> Any:
        def is_given(name: str) -> bool:
            source = context.get_parameter_source(name)
            return source is not None and source.name == "COMMANDLINE"

        values = {name: value for name, value in given.items() if name in known or is_given(name)}
        return command(**{name: words(value) if name in lists else value for name, value in values.items()})

    context_parameter = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = _sorted_into_panels([*own, *further, *_job_and_plan_parameters(), context_parameter])
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return called


def _job_and_plan_parameters() -> Iterator[inspect.Parameter]:
    """Yield a parameter of a command for each option of Job and Plan."""
    for kind in (Job, Plan):
        for item, option in options(kind):
            declaration, annotation, default = _declare(spell_option(item.name), option, item.default)
            yield inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[annotation, declaration],
            )


def _declare(name: str, option: Option, default: Any) -> tuple[Any, Any, Any]:
    """Return typer's declaration of an option, the type of its value, and its default."""
    if option.kind == "switch":
        return typer.Option(f"--{name}", help=option.help), bool, default
    if option.kind == "number":
        return (
            count(f"--{name}", option.help, option.parse_number),
            int if default is not None else int | None,
            default,
        )
    if option.kind == "amount":
        declaration = typer.Option(f"--{name}", help=option.help, metavar="NUMBER")
        return declaration, float if default is not None else float | None, default
    if option.kind == "fraction":
        return typer.Option(f"--{name}", help=option.help, metavar="PART"), float, default
    if option.kind == "names":
        declaration = typer.Option(
            f"--{name}",
            help=f"{option.help} Separate several by commas, or repeat the option.",
            metavar="NAMES",
        )
        return declaration, list[str], list(default)

    def complete(incomplete: str) -> list[str]:
        return beginning(option.possible, incomplete)

    is_pattern = len(option.possible) == 1  # such as WxH
    declaration = typer.Option(
        f"--{name}",
        help=option.help if is_pattern else f"{option.help} One of {', '.join(option.possible)}.",
        metavar=option.possible[0] if is_pattern else "WORD",
        autocompletion=complete,
    )
    return declaration, str if default is not None else str | None, default


def words(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the comma-separated words of an option that may be given several times, or not at all."""
    return parse_words(",".join(texts or ()))
