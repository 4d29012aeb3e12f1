"""Networks, clusters and works that the tests of a step's seconds share."""

from tonnage.catalog.devices import find_device
from tonnage.catalog.models import find_model
from tonnage.cluster import Cluster
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.timing.kinds import read_shape
from tonnage.timing.software import software
from tonnage.timing.work import Work

LLAMA = read_shape(find_model("llama-3.1-8b").config())
MIXTRAL = read_shape(find_model("mixtral-8x7b").config())
ONE = Cluster(device=find_device("h200"))
EIGHT = Cluster(device=find_device("h100-80gb"), gpus_per_node=8)
MANY = Cluster(device=find_device("h100-80gb"), gpus_per_node=8, nodes=8)
EAGER = software("eager")
PLAIN = Work(seq_len=4096, weight_bytes=2, gradient_bytes=2, autocast=False)
"""A sequence of 4,096 tokens in bf16 throughout."""


def llama_job(**fields):
    """Return a job of Llama 3.1 8B."""
    model = find_model("llama-3.1-8b")
    return Job(model=ModelRef(name=model.id, kind="config", config=model.config()), **fields)
