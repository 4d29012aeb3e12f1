"""TRL's SFTTrainer: the Trainer with a language-model head that never has all logits at once.

TRL 1.16 always computes the loss in slices of tokens, so `--loss chunked` is the only one it has.  SFTConfig
checkpoints by default; here the plan decides.
"""

from __future__ import annotations

from dataclasses import replace
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques import chunked_loss
from tonnage.techniques.lora import configuration, not_adapted
from tonnage.techniques.technique import Refusal
from tonnage.trainers.accelerate.plugin import checkpoint_kind
from tonnage.trainers.engine import ANY, FILES, ROWS, Engine
from tonnage.trainers.hf_trainer.run import EXPRESSES, training_arguments
from tonnage.trainers.hf_trainer.run import accepts as trainer_accepts

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.model import Batch
    from tonnage.step.world import World
    from tonnage.trainers.common import Rows


def accepts(case: Case) -> Refusal | None:
    """Return the refusal of networks that write no text, of what a ghost cannot do, or what the Trainer refuses."""
    return (
        _refuse_network(case)
        or _refuse_masks_on_host(case.plan)
        or _refuse_scaled_adapters(case)
        or _refuse_dtype_of_adapters(case)
        or trainer_accepts(case)
    )


def _refuse_network(case: Case) -> Refusal | None:
    """Return the refusal of networks that are not causal language models.

    There is no other loss to be chosen, and tokenised rows hold no images.
    """
    engine, other = "engine=trl", "choose engine hf-trainer"
    refusal = chunked_loss.accepts(case)
    if refusal is not None:
        return replace(refusal, technique=engine, instead=other)
    if chunked_loss.sees_too(case.job.model.config):
        name = case.job.model.config["architectures"][0]
        return Refusal(technique=engine, reason=f"{name} is not a causal language model", instead=other)
    return None


def _refuse_masks_on_host(plan: Plan) -> Refusal | None:
    """Return the refusal of `activation_offloading`.

    It moves the mask of the loss to the host and back, and on a ghost a computed mask comes back as zeros.
    """
    if plan.activation_offload != "cpu-streamed":
        return None
    return Refusal(
        technique=f"activation-offload={plan.activation_offload}",
        reason="SFTTrainer moves masks that its loss computed as well, and a ghost reads those back as zeros",
        instead="choose activation-offload cpu with checkpointing full, or engine tonnage",
    )


def _refuse_scaled_adapters(case: Case) -> Refusal | None:
    """Return the refusal of qlora under fp16-mixed: SFTTrainer casts the adapters of quantized networks to bf16.

    fp16's scaler fails at their gradients ("_amp_foreach_non_finite_check_and_unscale_cuda" has no bf16).
    """
    if case.job.method != "qlora" or case.plan.precision != "fp16-mixed":
        return None
    return Refusal(
        technique="precision=fp16-mixed",
        reason="SFTTrainer casts the adapters of qlora to bf16, whose gradients fp16's scaler cannot unscale",
        instead="choose precision fp32, method lora, or engine hf-trainer",
    )


def _refuse_dtype_of_adapters(case: Case) -> Refusal | None:
    """Return the refusal of a dtype for adapters, which SFTTrainer makes by PEFT's own rules."""
    if case.job.method == "full" or case.plan.weights_dtype is None:
        return None
    return Refusal(
        technique=f"weights-dtype={case.plan.weights_dtype}",
        reason="SFTTrainer makes the adapters itself, in a dtype of its own",
        instead="leave weights-dtype out, or engine hf-trainer",
    )


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """Train as a user with tokenised rows: prepared ones, which SFTTrainer takes as they are."""
    from trl import SFTConfig, SFTTrainer

    from tonnage.step.model import causal_network
    from tonnage.techniques.qlora import prepared
    from tonnage.trainers import common, resume
    from tonnage.trainers.hf_trainer import callbacks

    def run(job: Job, world: World, steps: int, folder: str) -> object:
        resume.check_rank(job, plan, world)
        steps = callbacks.last_step(job, steps)
        common.launch(plan, world)
        step = common.network_step(job, plan, world)
        module = common.build_network(step)
        causal_network(module, "SFTTrainer on tokenised rows", "engine hf-trainer")
        if job.method == "qlora" and plan.unquantized_dtype == "fp32":
            module = prepared(module, step)  # by its user: SFTTrainer leaves what is not quantized as it was loaded
        rows = common.Rows(step, module, common.count_rows(step, steps))
        evaluated = None
        if job.eval_batch is not None:
            evaluated = _dataset(common.evaluation_rows(step, module), job.eval_batch, world.size)
        with common.contexts(step):
            arguments = SFTConfig(
                output_dir=folder,
                max_length=job.seq_len,
                packing=job.packing is not None,
                **({"train_sampling_strategy": "sequential"} if job.lengths else {}),  # the longest come first
                dataset_kwargs={"skip_prepare_dataset": True},
                **training_arguments(job, plan, world, steps),
            )
            try:
                trainer = SFTTrainer(
                    model=module,
                    args=arguments,
                    train_dataset=_dataset(rows, job.micro_batch, world.size),
                    processing_class=_tokenizer(),
                    peft_config=None if job.method == "full" else configuration(job),
                    eval_dataset=evaluated,
                    **callbacks.trainer_options(step, module, rows, steps),
                )
            except ValueError as error:
                if _is_from_peft(error):
                    raise not_adapted(job, error) from error
                raise
            callbacks.train(trainer, job, folder)
        return trainer

    return resume.run_with_files(job, world, steps, run, checkpoint_kind(job, plan))


def _is_from_peft(error: ValueError) -> bool:
    """Return whether it was raised where adapters are made."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("peft.")


def _dataset(rows: Rows, micro_batch: int, ranks: int) -> Any:
    """Return the rows, the same for each rank, with the columns that preparing them makes.

    Packed rows have a column with the lengths of their documents.
    """
    from datasets import Dataset

    from tonnage.step.batches import documents_of

    batches: list[Batch] = []
    while len(batches) < len(rows):
        batches += [rows[index] for index in range(micro_batch)] * ranks
    columns = {name: [row[name][0].tolist() for row in batches] for name in batches[0]}
    if rows.job.packing is not None:
        columns["seq_lengths"] = [documents_of(len(ids), rows.job.packing) for ids in columns["input_ids"]]
    return Dataset.from_dict(columns)


def _tokenizer() -> Any:
    """Return a tokenizer with a padding and an end token, which is all that rows of full length need."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")


TRL_ENGINE: Final = Engine(
    name="trl",
    packages=("trl", "datasets", "accelerate"),
    expresses={
        **EXPRESSES,
        **ROWS,
        **FILES,
        "eval_batch": ANY,
        "generate": ANY,
        "loss": ("chunked",),
        "activation_offload": ("none", "cpu", "cpu-streamed"),
    },
    accepts=accepts,
    own_defaults=lambda job: {
        "loss": "chunked",
        **({"unquantized_dtype": "compute"} if job.method == "qlora" else {}),
    },
    imports=("transformers.trainer", "trl.trainer.sft_trainer"),
    run=run,
)
