"""torchtitan's own networks, each with the shapes of a Hugging Face configuration.

Written against torchtitan 0.3.  A network begins as the debug model of its family, which brings the initialisers
(what they draw does not matter, but the buffers that they draw into leave gaps), how it is divided and what its
optimizer does besides; shapes are put in, and layers come from the functions that the family's flavors call.
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
"""The layers' configurations, of the family's module, the shapes and the name of an attention."""

EXCHANGE: Final = "standard"
"""How tokens go to experts of other ranks (`moe_comm_backend`): its default, torch's all-to-all."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a `model_type` is to torchtitan."""

    family: str
    """The module of `torchtitan.models`."""
    layers: Layers
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a configuration that it has no place for, and the value that it takes for granted: the default of
    transformers, so that a field may be missing."""


def refusal(job: Job, plan: Plan) -> Refusal | None:
    """Why there is no network of torchtitan's with the shapes of this configuration."""
    kind = job.model.config.get("model_type")
    network = NETWORKS.get(str(kind))
    if network is None:
        return _refused(plan, f"it trains networks of its own; of {kind or 'this model'} there is none here")
    for name, value in network.fixed.items():
        said = job.model.config.get(name)
        if said is not None and said != value:
            return _refused(plan, f"its {network.family} has no {name} {said}")
    if network.family == "deepseek_v3" and not job.model.config.get("n_shared_experts", 1):
        return _refused(plan, "its deepseek_v3 has experts that all tokens share, and the configuration none")
    return _too_long(job) or _uneven(job, plan)


def _refused(plan: Plan, reason: str) -> Refusal:
    return Refusal(
        technique=f"engine={plan.engine}",
        reason=reason,
        instead=f"choose a model of type {', '.join(NETWORKS)}, or engine hf-trainer",
    )


def _too_long(job: Job) -> Refusal | None:
    positions = job.model.positions
    if positions is None or job.seq_len <= positions:
        return None
    return Refusal(
        technique=f"seq-len={job.seq_len}",
        reason=f"torchtitan stops at the {positions} positions of the configuration",
        instead=f"choose seq-len {positions} or less, or a configuration with more max_position_embeddings",
    )


def _uneven(job: Job, plan: Plan) -> Refusal | None:
    """Of latent attention: torch's flash kernels take values that are as wide as keys."""
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
    """What `model_registry` of its family returns for a model of its own list; `attention` by torchtitan's name."""
    network = NETWORKS[model.config["model_type"]]
    family = import_module(f"torchtitan.models.{network.family}")
    own = family.model_registry("debugmodel", attn_backend=attention)
    shapes = _completed(model.config)
    layers = network.layers(family, shapes, attention)
    return replace(own, flavor=model.name, model=_shaped(own.model, family, shapes, layers), state_dict_adapter=None)


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with what transformers adds where it says nothing."""
    from transformers import AutoConfig

    fields: dict[str, Any] = AutoConfig.for_model(**deepcopy(dict(config))).to_dict()
    return fields


def _shaped(own: Any, family: Any, shapes: Mapping[str, Any], layers: list[Any]) -> Any:
    """Another network of this kind: embedding, final norm and head of these shapes, and these layers."""
    from torchtitan.models.common.param_init import skip_param_init

    dim, words, tied = shapes["hidden_size"], shapes["vocab_size"], bool(shapes["tie_word_embeddings"])
    begun = {"weight": skip_param_init} if tied else family._EMBEDDING_INIT
    return replace(
        own,
        dim=dim,
        vocab_size=words,
        enable_weight_tying=tied,
        tok_embeddings=replace(own.tok_embeddings, num_embeddings=words, embedding_dim=dim, param_init=begun),
        norm=replace(own.norm, normalized_shape=dim),
        lm_head=replace(own.lm_head, in_features=dim, out_features=words),
        layers=layers,
    )


def _llama(family: Any, shapes: Mapping[str, Any], attention: str) -> list[Any]:
    """As `_build_llama3_layers`, which knows no width of a head but dim / heads."""
    from torchtitan.models.common import RMSNorm
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3TransformerBlock

    heads = _heads(shapes)
    norm = RMSNorm.Config(normalized_shape=heads["dim"], param_init=family._NORM_INIT)
    rope = _rope("ComplexRoPE", shapes, heads["head_dim"])

    def layer(number: int) -> Any:
        begun, last = family._LINEAR_INIT, family._depth_init(number)
        return Llama3TransformerBlock.Config(
            attention_norm=norm,
            ffn_norm=norm,
            attention=make_gqa_config(
                **heads,
                wqkv_param_init=begun,
                wo_param_init=last,
                inner_attention=get_attention_config(attention),
                fuse_qkv=True,
                rope=rope,
            ),
            feed_forward=make_ffn_config(
                dim=heads["dim"],
                hidden_dim=shapes["intermediate_size"],
                w1_param_init=begun,
                w2w3_param_init=last,
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
    """Of both generations: the second one's routers score by softmax, the third one's by sigmoid."""
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
    """As its flavors; what makes their layers knows no heads but theirs, so that attention is made again."""
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
    """The width of the model and of a head, and how many heads there are."""
    dim, heads = shapes["hidden_size"], shapes["num_attention_heads"]
    return {
        "dim": dim,
        "n_heads": heads,
        "n_kv_heads": shapes["num_key_value_heads"],
        "head_dim": shapes.get("head_dim") or dim // heads,
    }


SCALINGS: Final = {"llama3": "llama", "yarn": "yarn"}
"""`RoPE.Config.scaling` for transformers' `rope_type`; others change numbers and no shapes."""


def _rope(kind: str, shapes: Mapping[str, Any], dim: int) -> Any:
    """Rotary factors of `dim` elements a head, as this class of torchtitan's keeps them."""
    from torchtitan.models import common

    said = shapes["rope_parameters"]
    scaling = SCALINGS.get(said["rope_type"], "none")
    return getattr(common, kind).Config(
        dim=dim,
        max_seq_len=shapes["max_position_embeddings"],
        theta=said["rope_theta"],
        scaling=scaling,
        **({"rope_factor": said["factor"], "truncate": said.get("truncate", True)} if scaling == "yarn" else {}),
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
"""By `model_type`."""
