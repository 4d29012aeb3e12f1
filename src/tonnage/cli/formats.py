"""`tonnage formats`: number formats, computed from their bits."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.options import Json

if TYPE_CHECKING:
    from tonnage.catalog.formats import Format


def formats(
    name: Annotated[str | None, typer.Argument(help="One format, to see all of it.")] = None,
    json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/reference/formats.md instead.")
    ] = False,
) -> int:
    """Number formats: bits, range, smallest step, which GPUs compute in them, and when a loss must be scaled."""
    from tonnage.catalog.formats import FORMATS, find_format
    from tonnage.cli.answer import emit, print_json
    from tonnage.errors import UsageError

    if markdown and (name or json):
        other = name or "--json"
        raise UsageError(f"--markdown prints the page of all formats, and {other} asks for another; leave one out.")
    chosen = (find_format(name),) if name else FORMATS
    if json:
        print_json(_document(chosen[0]) if name else [_document(found) for found in chosen])
    elif markdown:
        emit(_page(chosen))
    else:
        emit(_one(chosen[0]) if name else _all(chosen))
    return 0


def _document(chosen: "Format") -> dict[str, Any]:
    """Everything known of a format; numbers as they are, None where there is no such number."""
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
        _bits(chosen),
        f"{float(chosen.bits_per_value):.4g} bits",
        _number(chosen.largest),
        _number(chosen.smallest_normal) if chosen.is_float else "-",
        _number(chosen.smallest_step),
        _number(chosen.epsilon),
        _devices(chosen),
    )


def _all(chosen: "tuple[Format, ...]") -> str:
    from tonnage.cli.table import table

    return table(_HEADINGS, [_row(found) for found in chosen], numbers=range(2, 7))


def _one(chosen: "Format") -> str:
    from tonnage.cli.table import table

    rows = [(name.replace("_", " "), _shown(value)) for name, value in _document(chosen).items() if value]
    return table((), rows)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_scale(item) if isinstance(item, dict) else _shown(item) for item in value)
    return _number(value) if isinstance(value, float) else str(value)


def _scale(scale: dict[str, Any]) -> str:
    return f"{scale['bits']} bits for {scale['block']} values ({scale['kind']})"


def _bits(chosen: "Format") -> str:
    if not chosen.is_float:
        return f"{chosen.storage_bits}, {len(chosen.codes)} values"
    return f"1 + {chosen.exponent_bits} + {chosen.mantissa_bits}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _devices(chosen: "Format") -> str:
    """How many of the catalog's GPUs, and from which compute capability on."""
    from tonnage.catalog.devices import device_names

    found = chosen.devices()
    if not chosen.computes_as:
        return "none: unpacked first"
    least = min(device.capability for device in found)
    return f"{len(found)} of {len(device_names())} GPUs, from capability {least[0]}.{least[1]}"


_INTRODUCTION = """\
# Number formats

Computed from how the bits are divided (`tonnage.catalog.formats`), not typed: `tonnage formats --markdown` writes
this page. Bits are sign + exponent + mantissa; *a value* counts the scales that blocks share. *Computes on*: GPUs of
the catalog for which a dense speed of matrices in the format is published (`tonnage formats NAME` lists them).

"""

_NOTES = """\

**When a loss must be scaled.** A gradient below half the smallest step becomes zero. For fp16 that is 3e-08,
where gradients of large networks lie, so that the loss is multiplied before backward and gradients are divided after
(`--precision fp16-mixed`); bf16 and tf32 have the exponents of fp32 and need none. fp8 and smaller are scaled by
tensor or by block.

**What scales cost.** nf4 with blocks of 64 is 4.5 bits a value, with double quantization 4.127: of 7 billion
parameters 0.3 GiB. Int8 here is without scales; who quantizes adds one for each row or block.

**tf32 saves no memory.** It is fp32 in memory, rounded on its way into the multiplier.
"""


def _page(chosen: "tuple[Format, ...]") -> str:
    return _INTRODUCTION + _markdown(_HEADINGS, [_row(found) for found in chosen]) + _details(chosen) + _NOTES


def _details(chosen: "tuple[Format, ...]") -> str:
    rows: list[tuple[str, ...]] = [
        (found.name, found.loss_scaling, "; ".join(map(_scale, _document(found)["scales"])) or "-", found.standard)
        for found in chosen
    ]
    return "\n" + _markdown(("format", "loss scaling", "shared scales", "defined by"), rows)


def _markdown(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
