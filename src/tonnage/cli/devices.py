"""`tonnage devices`: the GPUs of the catalog."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.options import Json

if TYPE_CHECKING:
    from tonnage.cluster import Device


def devices(
    name: Annotated[str | None, typer.Argument(help="One GPU, to see all of it with its sources.")] = None,
    json: Json = False,
) -> int:
    """The GPUs that --gpu knows, with what a program sees of their memory; or one of them in full."""
    from dataclasses import asdict

    from tonnage.catalog.devices import device_names, find_device
    from tonnage.cli.answer import emit, print_json

    chosen = [find_device(name)] if name else [find_device(known) for known in device_names()]
    if json:
        print_json(asdict(chosen[0]) if name else [asdict(device) for device in chosen])
    else:
        emit(_one(chosen[0]) if name else _all(chosen))
    return 0


def _all(chosen: "list[Device]") -> str:
    from tonnage.cli.table import table
    from tonnage.units import gib

    rows = [
        (device.id, gib(device.capacity_bytes), _capability(device), _bandwidth(device), device.name)
        for device in chosen
    ]
    return table(("--gpu", "memory", "capability", "bandwidth", "name"), rows, numbers=(1, 2, 3))


def _one(device: "Device") -> str:
    from dataclasses import fields

    from tonnage.cli.table import table

    rows = []
    for item in fields(device):
        label = item.name.removesuffix("_bytes").replace("_bytes_per_second", "").replace("_", " ")
        for line in _shown(item.name, getattr(device, item.name)):
            rows.append((label, line))
            label = ""
    return table((), rows)


def _shown(name: str, value: Any) -> list[str]:
    """A field's value for reading, as lines; none where it is not known."""
    from dataclasses import asdict, is_dataclass

    from tonnage.units import size

    if value is None:
        return []
    if name.endswith("_bytes_per_second"):
        return [_gigabytes_per_second(value)]
    if name.endswith("_bytes"):
        return [size(value)]
    if is_dataclass(value) and not isinstance(value, type):
        known = {dtype: flops for dtype, flops in asdict(value).items() if flops is not None}
        return [", ".join(f"{dtype} {flops / 1e12:,.1f} T" for dtype, flops in known.items())] if known else []
    if name == "capability":
        return [".".join(str(part) for part in value)]
    if name == "aliases":
        return [", ".join(value)] if value else []
    return [str(part) for part in value] if isinstance(value, tuple) else [str(value)]


def _gigabytes_per_second(value: float) -> str:
    return f"{value / 1e9:,.0f} GB/s"


def _capability(device: "Device") -> str:
    return f"{device.capability[0]}.{device.capability[1]}"


def _bandwidth(device: "Device") -> str:
    known = device.bandwidth_bytes_per_second
    return "-" if known is None else _gigabytes_per_second(known)
