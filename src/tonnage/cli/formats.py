"""`tonnage formats`: number formats, computed from their bits."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.options import Json

if TYPE_CHECKING:
    from tonnage.catalog.formats import Format


def formats(
    name: Annotated[str | None, typer.Argument(help="One format, to show all its figures.")] = None,
    json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/reference/formats.md instead.")
    ] = False,
) -> int:
    """List number formats: bits, range, smallest step, GPUs that compute in them, and need of loss scaling.

    Example: tonnage formats bf16
    """
    from tonnage.catalog.formats import FORMATS, find_format
    from tonnage.cli.answer import emit, print_json
    from tonnage.errors import UsageError

    if markdown and (name or json):
        other = name or "--json"
        raise UsageError(f"--markdown prints the page of all formats, and {other} another output; leave one out.")
    chosen = (find_format(name),) if name else FORMATS
    if json:
        print_json(_document(chosen[0]) if name else [_document(each) for each in chosen])
    elif markdown:
        emit(_page(chosen))
    else:
        emit(_format_table(chosen[0]) if name else _list_table(chosen))
    return 0


def _document(chosen: "Format") -> dict[str, Any]:
    """Return all facts about a format as JSON values; None where it has no such number."""
    return {
        "name": chosen.name,
        "standard": chosen.standard,
        "storage_bits": chosen.storage_bits,
        "bits_per_value": float(chosen.bits_per_value),
        "exponent_bits": chosen.exponent_bits,
        "mantissa_bits": chosen.mantissa_bits,
        "largest": chosen.largest,
        "smallest_normal": chosen.smallest_normal if chosen.is_float else None,
        "smallest_step": chosen.smallest_step,
        "epsilon": chosen.epsilon,
        "binades": chosen.binades,
        "values": list(chosen.codes) or None,
        "scales": [{"block": scale.block, "bits": scale.bits, "kind": scale.kind} for scale in chosen.scales],
        "loss_scaling": chosen.loss_scaling,
        "devices": [device.id for device in chosen.devices()],
    }


_HEADINGS = ("format", "bits", "a value", "largest", "smallest normal", "smallest step", "epsilon", "computes on")


def _row(chosen: "Format") -> tuple[str, ...]:
    return (
        chosen.name,
        _show_bits(chosen),
        f"{float(chosen.bits_per_value):.4g} bits",
        _show_number(chosen.largest),
        _show_number(chosen.smallest_normal) if chosen.is_float else "-",
        _show_number(chosen.smallest_step),
        _show_number(chosen.epsilon),
        _count_devices(chosen),
    )


def _list_table(chosen: "tuple[Format, ...]") -> str:
    from tonnage.cli.table import table

    return table(_HEADINGS, [_row(each) for each in chosen], numbers=range(2, 7))


def _format_table(chosen: "Format") -> str:
    from tonnage.cli.table import table

    rows = [(name.replace("_", " "), _show_value(value)) for name, value in _document(chosen).items() if value]
    return table((), rows)


def _show_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_show_scale(item) if isinstance(item, dict) else _show_value(item) for item in value)
    return _show_number(value) if isinstance(value, float) else str(value)


def _show_scale(scale: dict[str, Any]) -> str:
    return f"{scale['bits']} bits for {scale['block']} values ({scale['kind']})"


def _show_bits(chosen: "Format") -> str:
    if not chosen.is_float:
        return f"{chosen.storage_bits}, {len(chosen.codes)} values"
    return f"1 + {chosen.exponent_bits} + {chosen.mantissa_bits}"


def _show_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _count_devices(chosen: "Format") -> str:
    """Return the number of the catalog's GPUs that compute in a format, and the lowest compute capability."""
    from tonnage.catalog.devices import device_names

    devices = chosen.devices()
    if not chosen.computes_as:
        return "none: unpacked first"
    least = min(device.capability for device in devices)
    return f"{len(devices)} of {len(device_names())} GPUs, from capability {least[0]}.{least[1]}"


_INTRODUCTION = """\
# Number formats

`tonnage formats --markdown` generates this page; the figures are computed from the bits of each format
(`tonnage.catalog.formats`). Bits are sign + exponent + mantissa; *a value* includes its share of a block's scales.
*Computes on*: GPUs of the catalog with a published dense speed of matrices in the format (`tonnage formats NAME`
lists them).

"""

_NOTES = """\

**When a loss must be scaled.** A gradient below half the smallest step becomes zero. For fp16 that limit is 3e-08,
and gradients of large networks reach it. The loss is therefore multiplied before backward, and the gradients are
divided afterwards (`--precision fp16-mixed`). bf16 and tf32 have the exponents of fp32 and need no scaling. fp8 and
smaller formats are scaled by tensor or by block.

**What scales cost.** nf4 with blocks of 64 takes 4.5 bits a value, and 4.127 with double quantization, which saves
0.3 GiB for 7 billion parameters. Int8 is listed without scales; quantization adds one for each row or block.

**tf32 saves no memory.** It is stored as fp32 and rounded in the multiplier.
"""


def _page(chosen: "tuple[Format, ...]") -> str:
    return _INTRODUCTION + _markdown(_HEADINGS, [_row(each) for each in chosen]) + _details(chosen) + _NOTES


def _details(chosen: "tuple[Format, ...]") -> str:
    rows: list[tuple[str, ...]] = [
        (each.name, each.loss_scaling, "; ".join(map(_show_scale, _document(each)["scales"])) or "-", each.standard)
        for each in chosen
    ]
    return "\n" + _markdown(("format", "loss scaling", "shared scales", "defined by"), rows)


def _markdown(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
