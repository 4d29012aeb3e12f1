"""TRL's SFTTrainer: the Trainer with a language-model head that never makes all logits.

TRL 1.16 always computes the loss in slices of tokens, so `--loss chunked` is the only one it has.  SFTConfig
checkpoints by default; here the plan says whether.
"""

from __future__ import annotations

from dataclasses import replace
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques import chunked_loss
from tonnage.techniques.lora import configuration, not_adapted
from tonnage.techniques.technique import Refusal
from tonnage.trainers.engine import ANY, FILES, ROWS, Engine
from tonnage.trainers.hf_trainer import run as hf_trainer

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.model import Batch
    from tonnage.step.world import World
    from tonnage.trainers.common import Rows


def accepts(case: Case) -> Refusal | None:
    """Causal language models alone, what a ghost cannot do, and what stands against the Trainer."""
    return _other_network(case) or _masks_on_the_host(case.plan) or hf_trainer.accepts(case)


def _other_network(case: Case) -> Refusal | None:
    """There is no other loss to be chosen, and tokenised rows hold no images."""
    engine, other = "engine=trl", "choose engine hf-trainer"
    refusal = chunked_loss.accepts(case)
    if refusal is not None:
        return replace(refusal, technique=engine, instead=other)
    if chunked_loss.sees_too(case.job.model.config):
        name = case.job.model.config["architectures"][0]
        return Refusal(technique=engine, reason=f"{name} is not a causal language model", instead=other)
    return None


def _masks_on_the_host(plan: Plan) -> Refusal | None:
    """`activation_offloading` moves the mask of the loss to the host and back, where a computed one is zeros."""
    if plan.activation_offload != "cpu-streamed":
        return None
    return Refusal(
        technique=f"activation-offload={plan.activation_offload}",
        reason="SFTTrainer moves masks that its loss computed as well, and a ghost reads those back as zeros",
        instead="choose activation-offload cpu with checkpointing full, or engine tonnage",
    )


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """As a user with tokenised rows: prepared ones, which SFTTrainer takes as they are."""
    from trl import SFTConfig, SFTTrainer

    from tonnage.step.model import causal_network
    from tonnage.techniques.qlora import prepared
    from tonnage.trainers import common as given
    from tonnage.trainers import resume as earlier_runs
    from tonnage.trainers.hf_trainer import callbacks

    def run(job: Job, world: World, steps: int, folder: str) -> object:
        earlier_runs.check_rank(job, plan, world)
        steps = callbacks.last_step(job, steps)
        given.launch(plan, world)
        step = given.described(job, plan, world)
        module = given.network(step)
        causal_network(module, "SFTTrainer on tokenised rows", "engine hf-trainer")
        if job.method == "qlora" and plan.unquantized_dtype == "fp32":
            module = prepared(module, step)  # by its user: SFTTrainer leaves what is not quantized as it was loaded
        rows = given.Rows(step, module, given.rows_needed(step, steps))
        evaluated = None
        if job.eval_batch is not None:
            evaluated = _dataset(given.evaluated(step, module), job.eval_batch, world.size)
        with given.contexts(step):
            arguments = SFTConfig(
                output_dir=folder,
                max_length=job.seq_len,
                packing=job.packing is not None,
                **({"train_sampling_strategy": "sequential"} if job.lengths else {}),  # the longest come first
                dataset_kwargs={"skip_prepare_dataset": True},
                **hf_trainer.settings(job, plan, world, steps),
            )
            try:
                trainer = SFTTrainer(
                    model=module,
                    args=arguments,
                    train_dataset=_dataset(rows, job.micro_batch, world.size),
                    processing_class=_tokenizer(),
                    peft_config=None if job.method == "full" else configuration(job),
                    eval_dataset=evaluated,
                    **callbacks.besides(step, module, rows, steps),
                )
            except ValueError as error:
                if _of_peft(error):
                    raise not_adapted(job, error) from error
                raise
            callbacks.train(trainer, job, folder)
        return trainer

    return earlier_runs.trained(job, world, steps, run, hf_trainer.parts_or_whole(job, plan))


def _of_peft(error: ValueError) -> bool:
    """Whether it was raised where adapters are made."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("peft.")


def _dataset(rows: Rows, micro_batch: int, ranks: int) -> Any:
    """The rows, the same for each rank, with the columns that preparing them makes: of packed ones also how long
    their documents are."""
    from datasets import Dataset

    from tonnage.step.batches import documents_of

    made: list[Batch] = []
    while len(made) < len(rows):
        made += [rows[index] for index in range(micro_batch)] * ranks
    columns = {name: [row[name][0].tolist() for row in made] for name in made[0]}
    if rows.one.packing is not None:
        columns["seq_lengths"] = [documents_of(len(ids), rows.one.packing) for ids in columns["input_ids"]]
    return Dataset.from_dict(columns)


def _tokenizer() -> Any:
    """One with a padding and an end token, which is all that rows of full length ask of it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")


TRL: Final = Engine(
    name="trl",
    packages=("trl", "datasets", "accelerate"),
    expresses={
        **hf_trainer.EXPRESSES,
        **ROWS,
        **FILES,
        "eval_batch": ANY,
        "generate": ANY,
        "loss": ("chunked",),
        "activation_offload": ("none", "cpu", "cpu-streamed"),
    },
    accepts=accepts,
    unsaid=lambda job: {"loss": "chunked", **({"unquantized_dtype": "compute"} if job.method == "qlora" else {})},
    imports=("transformers.trainer", "trl.trainer.sft_trainer"),
    run=run,
)
