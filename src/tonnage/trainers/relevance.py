"""Which settings of a trainer's file may be left unread without a word.

A key without a reader is named in the report, unless its value says nothing, or memory and seconds of a training step
do not depend on the key.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

_WITHOUT_EFFECT: Final = re.compile(
    # the course of the training
    "learning_rate|lr|weight_decay|warmup|scheduler|seed|num_train_epochs|num_epochs|max_steps|do_train|"
    "lora_alpha|betas|eps|adam_|adamw_mode|adam_w_mode|label_smoothing|loss_scale|initial_scale_power|hysteresis|"
    "consecutive_hysteresis|min_loss_scale|ignore_data_skip|zero_allow_untested_optimizer|"
    # rows, as long as their lengths are given
    "dataset|datasets|data_path|data_files|data_dir|data_seed|test_dataset|preprocessing|template|special_tokens|"
    "remove_unused|length_column|train_sampling|include_|even_batches|use_seedable_sampler|dataloader_|"
    # what is saved, evaluated and logged, and when
    "output_dir|logging|logger|log_|save|load_best|metric_for_best|greater_is_better|"
    "eval_steps|eval_strategy|eval_delay|eval_on|eval_table|eval_do|eval_max|evals_per|evaluation_strategy|do_eval|"
    "do_predict|val_set|wandb|report_to|run_name|project|trackio|hub_|push_to_hub|plot_loss|overwrite|disable_tqdm|"
    "steps_per_print|wall_clock_breakdown|skip_memory_metrics|debug|"
    # how processes find one another
    "machine_rank|main_process|main_training|rdzv|same_network|local_rank|ddp_timeout|ddp_backend|log_on_each|"
    "compute_environment|average_tokens|tpu_|downcast_bf16|past_index"
)
"""Beginnings of keys, whole or of their last part, that change neither memory nor seconds of a step."""

_SECTIONS: Final = re.compile(
    "(scheduler|wandb|tensorboard|csv_monitor|comet|flops_profiler|datasets|test_datasets|special_tokens)[.]"
)
"""Sections in which no key does."""

_EVALUATION: Final = re.compile("per_device_eval_batch_size|eval_batch_size|eval_accumulation_steps")
"""Keys that have a meaning if the trainer evaluates."""

_ON_BY_DEFAULT: Final = frozenset(
    {
        *("contiguous_gradients", "allgather_partitions", "reduce_scatter", "overlap_comm"),
        *("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
        *("stage3_param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"),
        *("param_persistence_threshold", "gradient_as_bucket_view", "limit_all_gathers"),
    }
)
"""Keys that say something when they are off or 0."""

_OFF_WORDS: Final = ("no", "none", "off", "disabled", "nothing")
"""Words that switch a setting off."""


def is_irrelevant(key: str, value: Any, flat: Mapping[str, Any]) -> bool:
    """Return whether a setting is absent, automatic, off as by default, or about something else than a step.

    `flat` is the whole file by dotted names.
    """
    last = key.rpartition(".")[2]
    if value in (None, "auto", "") or value == {} or value == []:
        return True
    if _SECTIONS.match(key) or _WITHOUT_EFFECT.match(key) or _WITHOUT_EFFECT.match(last):
        return True
    if _EVALUATION.match(last):
        return not _evaluates(flat)
    if isinstance(value, str) and value.lower() in _OFF_WORDS:
        return True
    return value in (False, 0) and not _is_on_by_default(last, flat)


def _evaluates(flat: Mapping[str, Any]) -> bool:
    """Return whether the trainer evaluates between steps."""
    strategies = (flat.get(name) for name in ("eval_strategy", "evaluation_strategy"))
    sizes = (flat.get(name) for name in ("val_set_size", "val_size", "evals_per_epoch"))
    return any(value not in (None, "no", False) for value in strategies) or any(sizes)


def _is_on_by_default(name: str, flat: Mapping[str, Any]) -> bool:
    """Return whether a key says something when it is off; DeepSpeed overlaps by default in its stage 3 alone."""
    if name == "overlap_comm":
        return flat.get("zero_optimization.stage") == 3
    return name in _ON_BY_DEFAULT
