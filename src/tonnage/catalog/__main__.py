"""`python -m tonnage.catalog [devices|models]`: what the catalog holds, one line each."""

import sys

from tonnage.catalog import find_model, model_names
from tonnage.device import device_names, find_device
from tonnage.errors import UsageError
from tonnage.units import count, gib


def main(arguments: list[str]) -> int:
    """Print devices, models, or both; exit code 2 for anything else."""
    listings = {"devices": _devices, "models": _models}
    try:
        chosen = [listings[argument] for argument in arguments] or list(listings.values())
    except KeyError as error:
        mistake = UsageError(f"Unknown list {error.args[0]!r}; possible: {', '.join(listings)}.")
        print(mistake, file=sys.stderr)
        return mistake.exit_code
    for listing in chosen:
        print("\n".join(listing()))
    return 0


def _devices() -> list[str]:
    found = [find_device(name) for name in device_names()]
    return [f"{device.id:20} {gib(device.capacity_bytes):>11}  {', '.join(device.aliases)}" for device in found]


def _models() -> list[str]:
    found = [model for model in map(find_model, model_names()) if model is not None]
    return [f"{model.id:20} {count(model.parameters):>11}  {model.hub}" for model in found]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
