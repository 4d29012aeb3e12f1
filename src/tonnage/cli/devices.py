"""`tonnage devices`: the GPUs of the catalog."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.options import Json

if TYPE_CHECKING:
    from tonnage.cluster import Device


def devices(
    name: Annotated[str | None, typer.Argument(help="One GPU, to show all its figures and their sources.")] = None,
    json: Json = False,
) -> int:
    """List the GPUs that --gpu accepts, with the memory that a program can use; or show one GPU in full.

    Example: tonnage devices h100-80gb
    """
    from dataclasses import asdict

    from tonnage.catalog.devices import device_names, find_device
    from tonnage.cli.answer import emit, print_json

    chosen = [find_device(name)] if name else [find_device(known) for known in device_names()]
    if json:
        print_json(asdict(chosen[0]) if name else [asdict(device) for device in chosen])
    else:
        emit(_device_table(chosen[0]) if name else _list_table(chosen))
    return 0


def _list_table(chosen: "list[Device]") -> str:
    from tonnage.cli.table import table
    from tonnage.units import format_gib

    rows = [
        (
            device.id,
            format_gib(device.capacity_bytes),
            _format_capability(device),
            _format_bandwidth(device),
            device.name,
        )
        for device in chosen
    ]
    return table(("--gpu", "memory", "capability", "bandwidth", "name"), rows, numbers=(1, 2, 3))


def _device_table(device: "Device") -> str:
    from dataclasses import fields

    from tonnage.cli.table import table

    rows = []
    for item in fields(device):
        label = item.name.removesuffix("_bytes").replace("_bytes_per_second", "").replace("_", " ")
        for line in _format_lines(item.name, getattr(device, item.name)):
            rows.append((label, line))
            label = ""
    return table((), rows)


def _format_lines(name: str, value: Any) -> list[str]:
    """Return the lines that show a field's value; none where it is not known."""
    from dataclasses import asdict, is_dataclass

    from tonnage.units import format_size

    if value is None:
        return []
    if name.endswith("_bytes_per_second"):
        return [_format_rate(value)]
    if name.endswith("_bytes"):
        return [format_size(value)]
    if is_dataclass(value) and not isinstance(value, type):
        known = {dtype: flops for dtype, flops in asdict(value).items() if flops is not None}
        return [", ".join(f"{dtype} {flops / 1e12:,.1f} T" for dtype, flops in known.items())] if known else []
    if name == "capability":
        return [".".join(str(part) for part in value)]
    if name == "aliases":
        return [", ".join(value)] if value else []
    return [str(part) for part in value] if isinstance(value, tuple) else [str(value)]


def _format_rate(value: float) -> str:
    return f"{value / 1e9:,.0f} GB/s"


def _format_capability(device: "Device") -> str:
    return f"{device.capability[0]}.{device.capability[1]}"


def _format_bandwidth(device: "Device") -> str:
    bandwidth = device.bandwidth_bytes_per_second
    return "-" if bandwidth is None else _format_rate(bandwidth)
