"""torchtitan's own networks, each with the shapes of a Hugging Face configuration.

Written against torchtitan 0.3.  A network begins as the debug model of its family.  That brings the initialisers (the
values they draw do not matter, but the buffers that they draw into leave gaps), how the network is divided, and what
its optimizer does besides.  The shapes are put in, and the layers come from the functions that the family's flavors
call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques.technique import Refusal

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.model import ModelRef
    from tonnage.plans import Plan

Layers = Callable[[Any, Mapping[str, Any], str], list[Any]]
"""Makes the layers' configurations from the family's module, the shapes and the name of an attention."""

EXCHANGE: Final = "standard"
"""How tokens go to experts of other ranks (`moe_comm_backend`): torchtitan's default, torch's all-to-all."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """torchtitan's network for a `model_type`."""

    family: str
    """The module of `torchtitan.models`."""
    layers: Layers
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a configuration that torchtitan has no setting for, each with the value that it assumes: the default
    of transformers, so that a field may be missing."""


def refusal(job: Job, plan: Plan) -> Refusal | None:
    """Return why torchtitan has no network with the shapes of this configuration."""
    kind = job.model.config.get("model_type")
    network = NETWORKS.get(str(kind))
    if network is None:
        return _refuse(plan, f"it trains networks of its own; of {kind or 'this model'} there is none here")
    for name, assumed in network.fixed.items():
        value = job.model.config.get(name)
        if value is not None and value != assumed:
            return _refuse(plan, f"its {network.family} has no {name} {value}")
    if network.family == "deepseek_v3" and not job.model.config.get("n_shared_experts", 1):
        return _refuse(plan, "its deepseek_v3 has experts that all tokens share, and the configuration none")
    return _refuse_length(job) or _refuse_widths(job, plan)


def _refuse(plan: Plan, reason: str) -> Refusal:
    return Refusal(
        technique=f"engine={plan.engine}",
        reason=reason,
        instead=f"choose a model of type {', '.join(NETWORKS)}, or engine hf-trainer",
    )


def _refuse_length(job: Job) -> Refusal | None:
    """Return the refusal of sequences that are longer than the configuration's positions."""
    positions = job.model.positions
    if positions is None or job.seq_len <= positions:
        return None
    return Refusal(
        technique=f"seq-len={job.seq_len}",
        reason=f"torchtitan stops at the {positions} positions of the configuration",
        instead=f"choose seq-len {positions} or less, or a configuration with more max_position_embeddings",
    )


def _refuse_widths(job: Job, plan: Plan) -> Refusal | None:
    """Return the refusal of latent attention by torch's flash kernels, whose values must be as wide as keys."""
    config = job.model.config
    keys = config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)
    if plan.attention != "flash" or keys == config.get("v_head_dim", 0):
        return None
    return Refusal(
        technique=f"attention={plan.attention}",
        reason=f"keys have {keys} elements a head, values {config.get('v_head_dim')}, and its varlen attention "
        "takes no others than equal ones",
        instead="choose attention flex",
    )


def spec(model: ModelRef, attention: str) -> Any:
    """Return what the family's `model_registry` returns for a model of its list; `attention` is torchtitan's name."""
    network = NETWORKS[model.config["model_type"]]
    family = import_module(f"torchtitan.models.{network.family}")
    debug = family.model_registry("debugmodel", attn_backend=attention)
    shapes = _with_defaults(model.config)
    layers = network.layers(family, shapes, attention)
    network_config = _reshape(debug.model, family, shapes, layers)
    return replace(debug, flavor=model.name, model=network_config, state_dict_adapter=None)


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with transformers' defaults for the fields that it leaves out."""
    from transformers import AutoConfig

    fields: dict[str, Any] = AutoConfig.for_model(**deepcopy(dict(config))).to_dict()
    return fields


def _reshape(debug: Any, family: Any, shapes: Mapping[str, Any], layers: list[Any]) -> Any:
    """Return a network like the debug model with embedding, final norm and head of these shapes, and these layers."""
    from torchtitan.models.common.param_init import skip_param_init

    dim, words, tied = shapes["hidden_size"], shapes["vocab_size"], bool(shapes["tie_word_embeddings"])
    embedding_init = {"weight": skip_param_init} if tied else family._EMBEDDING_INIT
    return replace(
        debug,
        dim=dim,
        vocab_size=words,
        enable_weight_tying=tied,
        tok_embeddings=replace(
            debug.tok_embeddings, num_embeddings=words, embedding_dim=dim, param_init=embedding_init
        ),
        norm=replace(debug.norm, normalized_shape=dim),
        lm_head=replace(debug.lm_head, in_features=dim, out_features=words),
        layers=layers,
    )


def _llama(family: Any, shapes: Mapping[str, Any], attention: str) -> list[Any]:
    """Return layers as `_build_llama3_layers` makes them, which knows no width of a head but dim / heads."""
    from torchtitan.models.common import RMSNorm
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3TransformerBlock

    heads = _heads(shapes)
    norm = RMSNorm.Config(normalized_shape=heads["dim"], param_init=family._NORM_INIT)
    rope = _rope("ComplexRoPE", shapes, heads["head_dim"])

    def layer(number: int) -> Any:
        init, depth_init = family._LINEAR_INIT, family._depth_init(number)
        return Llama3TransformerBlock.Config(
            attention_norm=norm,
            ffn_norm=norm,
            attention=make_gqa_config(
                **heads,
                wqkv_param_init=init,
                wo_param_init=depth_init,
                inner_attention=get_attention_config(attention),
                fuse_qkv=True,
                rope=rope,
            ),
            feed_forward=make_ffn_config(
                dim=heads["dim"],
                hidden_dim=shapes["intermediate_size"],
                w1_param_init=init,
                w2w3_param_init=depth_init,
            ),
        )

    return [layer(number) for number in range(shapes["num_hidden_layers"])]


def _qwen3(family: Any, shapes: Mapping[str, Any], attention: str) -> list[Any]:
    heads = _heads(shapes)
    layers: list[Any] = family._build_qwen3_layers(
        n_layers=shapes["num_hidden_layers"],
        **heads,
        hidden_dim=shapes["intermediate_size"],
        attn_backend=attention,
        rope=_rope("CosSinRoPE", shapes, heads["head_dim"]),
    )
    return layers


def _qwen3_moe(family: Any, shapes: Mapping[str, Any], attention: str) -> list[Any]:
    heads = _heads(shapes)
    layers: list[Any] = family._build_qwen3_moe_layers(
        n_layers=shapes["num_hidden_layers"],
        **heads,
        moe_hidden_dim=shapes["moe_intermediate_size"],
        num_experts=shapes["num_local_experts"],
        top_k=shapes["num_experts_per_tok"],
        attn_backend=attention,
        moe_comm_backend=EXCHANGE,
        rope=_rope("CosSinRoPE", shapes, heads["head_dim"]),
    )
    for layer in layers:
        layer.moe.router.route_norm = bool(shapes["norm_topk_prob"])
    return layers


def _deepseek(family: Any, shapes: Mapping[str, Any], attention: str) -> list[Any]:
    """Return layers of DeepSeek-V2, whose routers score by softmax, or of V3, whose routers score by sigmoid."""
    grouped = (shapes["n_group"] or 1) > 1
    layers: list[Any] = family._build_dsv3_layers(
        n_layers=shapes["num_hidden_layers"],
        n_dense_layers=shapes["first_k_dense_replace"],
        dim=shapes["hidden_size"],
        n_heads=shapes["num_attention_heads"],
        q_lora_rank=shapes["q_lora_rank"] or 0,
        **{name: shapes[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
        mscale=1.0,
        dense_hidden_dim=shapes["intermediate_size"],
        moe_hidden_dim=shapes["moe_intermediate_size"],
        num_experts=shapes["n_routed_experts"],
        num_shared_experts=shapes["n_shared_experts"],
        router_top_k=shapes["num_experts_per_tok"],
        router_score_func="sigmoid" if shapes["model_type"] == "deepseek_v3" else "softmax",
        router_num_expert_groups=shapes["n_group"] if grouped else None,
        router_num_limited_groups=shapes["topk_group"] if grouped else None,
        router_route_scale=shapes["routed_scaling_factor"],
        router_route_norm=bool(shapes["norm_topk_prob"]),
        attn_backend=attention,
        moe_comm_backend=EXCHANGE,
        non_blocking_capacity_factor=None,
        rope=_rope("ComplexRoPE", shapes, shapes["qk_rope_head_dim"]),
    )
    return layers


def _gpt_oss(family: Any, shapes: Mapping[str, Any], attention: str) -> list[Any]:
    """Return layers as those of its flavors.

    The function that makes them knows no heads but theirs, so that attention is made again.
    """
    heads = _heads(shapes)
    rope = _rope("CosSinRoPE", shapes, heads["head_dim"])
    layers: list[Any] = family._build_gptoss_layers(
        dim=heads["dim"],
        n_layers=shapes["num_hidden_layers"],
        hidden_dim=shapes["intermediate_size"],
        num_experts=shapes["num_local_experts"],
        top_k=shapes["num_experts_per_tok"],
        load_balance_coeff=1e-3,  # of all its flavors
        attn_backend=attention,
        moe_comm_backend=EXCHANGE,
        rope=rope,
    )
    for number, (layer, kind) in enumerate(zip(layers, shapes["layer_types"], strict=True)):
        layer.attention = family._make_gptoss_attn_config(
            **heads,
            layer_id=number,
            attn_backend=attention,
            sliding_window_size=shapes["sliding_window"] if kind == "sliding_attention" else None,
            rope=rope,
        )
    return layers


def _heads(shapes: Mapping[str, Any]) -> dict[str, int]:
    """Return the width of the model and of a head, and the numbers of heads."""
    dim, heads = shapes["hidden_size"], shapes["num_attention_heads"]
    return {
        "dim": dim,
        "n_heads": heads,
        "n_kv_heads": shapes["num_key_value_heads"],
        "head_dim": shapes.get("head_dim") or dim // heads,
    }


SCALINGS: Final = {"llama3": "llama", "yarn": "yarn"}
"""`RoPE.Config.scaling` for transformers' `rope_type`; other types change values and no shapes."""


def _rope(kind: str, shapes: Mapping[str, Any], dim: int) -> Any:
    """Return rotary factors of `dim` elements a head, as torchtitan's class `kind` keeps them."""
    from torchtitan.models import common

    rope = shapes["rope_parameters"]
    scaling = SCALINGS.get(rope["rope_type"], "none")
    return getattr(common, kind).Config(
        dim=dim,
        max_seq_len=shapes["max_position_embeddings"],
        theta=rope["rope_theta"],
        scaling=scaling,
        **({"rope_factor": rope["factor"], "truncate": rope.get("truncate", True)} if scaling == "yarn" else {}),
    )


NETWORKS: Final[Mapping[str, Network]] = {
    "llama": Network(family="llama3", layers=_llama, fixed={"attention_bias": False, "mlp_bias": False}),
    "qwen3": Network(family="qwen3", layers=_qwen3, fixed={"attention_bias": False, "use_sliding_window": False}),
    "qwen3_moe": Network(
        family="qwen3",
        layers=_qwen3_moe,
        fixed={
            **{"attention_bias": False, "use_sliding_window": False},
            **{"decoder_sparse_step": 1, "mlp_only_layers": []},
        },
    ),
    "deepseek_v2": Network(
        family="deepseek_v3", layers=_deepseek, fixed={"attention_bias": False, "moe_layer_freq": 1}
    ),
    "deepseek_v3": Network(
        family="deepseek_v3", layers=_deepseek, fixed={"attention_bias": False, "moe_layer_freq": 1}
    ),
    "gpt_oss": Network(family="gpt_oss", layers=_gpt_oss, fixed={"attention_bias": True}),
}
"""torchtitan's network for each `model_type`."""
