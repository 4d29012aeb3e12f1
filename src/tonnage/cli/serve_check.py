"""`tonnage serve-check DIR`: load a model folder for real, and compare its bytes with the predicted ones."""

from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli.options import Json, count

if TYPE_CHECKING:
    from tonnage.serving.checking import FolderCheck


def serve_check(
    folder: Annotated[str, typer.Argument(help="Folder with config.json and safetensors files.", metavar="DIR")],
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quantization",
            help="Format of the weights: int8, nf4 or nf4-double for a folder with 16 bits. Default: as it has them.",
            metavar="WORD",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="cuda, cpu, or auto: the GPU if there is one.", metavar="WORD")
    ] = "auto",
    tokens: Annotated[int, count("--tokens", "Tokens to generate.")] = 8,
    timeout: Annotated[int, count("--timeout", "Stop after this many seconds.")] = 900,
    json: Json = False,
) -> int:
    """Load a model folder with transformers, generate, and report measured bytes beside predicted ones.

    Weights of 16 bits are also quantized while they are loaded, by bitsandbytes: int8, nf4 or nf4-double.

    Example: tonnage serve-check ./llama --quantization nf4
    """
    from tonnage.cli.answer import emit, print_json
    from tonnage.serving.checking import check_folder

    checked = check_folder(
        folder, quantization=quantization, device=device, tokens=tokens, timeout_seconds=float(timeout)
    )
    if json:
        print_json(checked.to_json())
    else:
        emit(_page(checked))
    return 0


def _page(checked: "FolderCheck") -> str:
    from tonnage.cli.table import table
    from tonnage.units import format_size

    versions = ", ".join(f"{name} {version}" for name, version in checked.versions.items())
    weights = "16-bit weights" if checked.quantization == "none" else f"{checked.quantization} weights"
    rows = [
        (
            figure.name,
            "-" if figure.predicted_bytes is None else format_size(figure.predicted_bytes),
            format_size(figure.measured_bytes or 0),
            "" if figure.error is None else f"{100 * figure.error:+.2f} %",
        )
        for figure in checked.figures
    ]
    heading = f"{checked.name}, {weights}, on {checked.device} ({versions}): {checked.generated} tokens generated\n"
    return heading + table(("", "predicted", "measured", "predicted / measured"), rows)
