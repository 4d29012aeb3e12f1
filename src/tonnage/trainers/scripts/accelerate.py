"""Trains with a loop of its own under accelerate: accelerate.yaml sets sharding and precision, job.json the rest.

    accelerate launch --config_file accelerate.yaml train.py --data FILE

rows.py describes FILE; without --data a few steps run on made-up rows.
"""

from typing import Any

import job
import rows
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from loop import checkpointed, in_slices, optimizer
from torch.utils.data import DataLoader


def main() -> None:
    options = job.options()
    settings = job.read()
    micro_batches = GradientAccumulationPlugin(settings.grad_accum or 1, sync_each_batch=settings.sync_each_batch)
    accelerator = Accelerator(gradient_accumulation_plugin=micro_batches)
    network = in_slices(
        settings, checkpointed(settings, job.adapted(settings, job.network(settings, options.random_weights)))
    )
    dataset = rows.dataset(
        settings,
        options.data,
        options.steps * (settings.micro_batch or 1) * (settings.grad_accum or 1) * accelerator.num_processes,
    )
    loader = DataLoader(
        dataset, settings.micro_batch, shuffle=True, drop_last=True, pin_memory=True, collate_fn=dataset.batch
    )
    update = optimizer(settings, [parameter for parameter in network.parameters() if parameter.requires_grad])
    # Nothing else may refer to a parameter, so that those that FSDP2 replaces are freed as soon as they are divided.
    prepared: tuple[Any, Any, Any] = accelerator.prepare(network, update, loader)
    del network
    model, update, batches = prepared
    with job.attention(settings):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)[0])
                if settings.clip_grad_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), settings.clip_grad_norm)
                update.step()
                update.zero_grad()
    if options.data:
        weights = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            "output", is_main_process=accelerator.is_main_process, state_dict=weights
        )


if __name__ == "__main__":
    main()
