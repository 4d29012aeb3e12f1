"""What a recorded step was asked to do, and on which card; needs no torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tonnage.catalog.devices import find_device
from tonnage.cluster import Cluster
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan


def asked(record: dict[str, Any]) -> tuple[Job, Plan]:
    """The Job and the Plan of a line of `measure.py`; options that later versions have keep their defaults."""
    job = dict(record["job"])
    model = ModelRef(**job.pop("model"))
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in job.items()}
    plan = {item.name: record["plan"][item.name] for item in fields(Plan) if item.name in record["plan"]}
    return Job(model=model, **plain), Plan(**plan)


def card(record: dict[str, Any]) -> Cluster:
    """The one card that it ran on, by the name that its driver gave."""
    return Cluster(device=find_device(record["versions"]["gpu"]))
