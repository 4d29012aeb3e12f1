"""Settings of an inference engine, with the engine's own defaults where a user states none."""

from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypedDict

from tonnage.catalog.overheads import overheads
from tonnage.cluster import CPU, Cluster, Device
from tonnage.errors import CannotEstimate, UsageError
from tonnage.options import check_number, check_switch, is_number, spell_option
from tonnage.serving import sglang
from tonnage.serving.facts import ENGINES, Engine, needs_bf16, parse_engine, vllm_facts
from tonnage.serving.kv_cache import BLOCK_TOKENS
from tonnage.serving.network import ServedNetwork
from tonnage.serving.quantization import NONE, Quantization, made_by_transformers
from tonnage.units import GIB

KV_DTYPES: Final = {"auto": 2.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}
"""Bytes of an element of keys and values; `auto`: where neither the checkpoint nor the card says otherwise."""

_BIG_CARD_BYTES: Final = 70 * GIB
"""From this memory on (but for A100s) vLLM serves 1,024 sequences and 8,192 tokens a step, below 256 and 2,048
(`get_batch_defaults` of vllm/engine/arg_utils.py, 0.11 to 0.33)."""

BF16_CAPABILITY: Final = (8, 0)
"""Capability from which on cards compute in bf16."""

_USUAL_MAX_LEN: Final = 4096
"""Longest request of a network whose configuration states none."""


ADAPTER_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of vLLM's adapters (MaxLoRARanks of 0.33); the third is its default."""

DRAFTS_WITHOUT_NETWORK: Final = ("ngram", "mtp")
"""Words of `--draft` that name no model: repeated tokens of the request, and the network's own further layers."""

ENCODER_MODES: Final = ("weights", "data")
"""Words of `--mm-encoder-tp-mode`: tensor-parallel ranks divide the matrices of image encoders, or the images."""

_WORDS: Final = ("kv_dtype", "quantization", "engine", "draft", "mm_encoder_tp_mode")
_SWITCHES: Final = ("eager", "warm", "no_prefix_caching", "sleep_mode")
_PARTS: Final = ("gpu_memory_utilization", "acceptance")
"""Settings that are no numbers."""


class EngineOptions(TypedDict, total=False):
    """The settings of an engine as typed keywords."""

    max_len: int | None
    max_seqs: int | None
    max_batched_tokens: int | None
    gpu_memory_utilization: float | None
    kv_dtype: str
    quantization: str | None
    tp: int
    pp: int
    dp: int
    ep: int
    engine: str
    block_tokens: int
    eager: bool
    warm: bool
    max_loras: int | None
    max_lora_rank: int | None
    draft: str | None
    draft_tokens: int | None
    acceptance: float | None
    no_prefix_caching: bool
    sleep_mode: bool
    mm_encoder_tp_mode: str | None


class ServeOptions(EngineOptions, total=False):
    """The options of a question about serving as typed keywords."""

    lengths: str | None
    concurrency: int | None


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings as a user states them; None: the engine's default."""

    max_len: int | None = None
    """Longest request, prompt and answer together."""
    max_seqs: int | None = None
    """Requests that run together at most."""
    max_batched_tokens: int | None = None
    """Tokens of one step at most."""
    gpu_memory_utilization: float | None = None
    """Part of the card that the engine takes (SGLang: `--mem-fraction-static`)."""
    kv_dtype: str = "auto"
    """Dtype of keys and values: one of KV_DTYPES."""
    quantization: str | None = None
    """Format of the weights; None: as published."""
    tp: int = 1
    """Ranks that share each matrix."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Replicas."""
    ep: int = 1
    """Ranks that have whole experts: 1, or all of them."""
    engine: str = "vllm"
    """Engine, also with `@VERSION`."""
    block_tokens: int = BLOCK_TOKENS
    """Tokens of a block of the pool."""
    eager: bool = False
    """True if nothing is compiled and no CUDA graphs are captured."""
    warm: bool = False
    """True if the engine's cache has the compiled network already, from an earlier start."""
    max_loras: int | None = None
    """LoRA adapters that run together; None: none, or 1 where a rank is stated."""
    max_lora_rank: int | None = None
    """Largest rank of an adapter: one of ADAPTER_RANKS."""
    draft: str | None = None
    """Source of drafted tokens: one of DRAFTS_WITHOUT_NETWORK, or a model; None: none."""
    draft_tokens: int | None = None
    """Tokens that are drafted in a step."""
    acceptance: float | None = None
    """Probability with which a drafted token is accepted."""
    no_prefix_caching: bool = False
    """True if nothing is kept of requests that ended."""
    sleep_mode: bool = False
    """True if the engine can be put to sleep."""
    mm_encoder_tp_mode: str | None = None
    """One of ENCODER_MODES, for tensor-parallel ranks; None: the engine's default."""

    def changed(self, **changes: Any) -> "ServeSettings":
        """Return a copy with other values."""
        return replace(self, **changes)

    def stated(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, by name."""
        return {
            item.name: getattr(self, item.name) for item in fields(self) if getattr(self, item.name) != item.default
        }


@dataclass(frozen=True, kw_only=True)
class FullSettings:
    """Settings with every value, for one network on one cluster."""

    stated: ServeSettings
    engine: Engine
    device: Device
    max_len: int
    max_seqs: int
    max_batched_tokens: int
    utilization: float
    kv_element_bytes: float
    element_bytes: int
    """Bytes of an element of unquantized weights and of what is computed."""
    quantization: Quantization
    first_bytes: int
    """Memory of a GPU before the engine's first look at it: CUDA context, and NCCL's buffers of several ranks."""

    @property
    def has_fp8_cache(self) -> bool:
        """Return True if keys and values are 8-bit floats."""
        return self.kv_element_bytes < KV_DTYPES["auto"]

    @property
    def ranks(self) -> int:
        """Return the GPUs of one replica."""
        return self.stated.tp * self.stated.pp

    @property
    def compiles(self) -> bool:
        """Return True if the engine compiles the network when it starts."""
        return self.engine.name == "vllm" and not (self.stated.eager or self.stated.warm)

    @property
    def expert_ranks(self) -> int:
        """Return the ranks that divide experts."""
        return self.stated.tp * self.stated.dp


def complete(settings: ServeSettings, network: ServedNetwork, cluster: Cluster) -> FullSettings:
    """Return the settings with the engine's defaults.  Raises UsageError for values that cannot be."""
    _check_types(settings)
    engine = parse_engine(settings.engine)
    assert engine.name in ENGINES
    device = cluster.device
    if device.id == CPU:
        raise CannotEstimate("Serving is estimated for GPUs; name one with --gpu.")
    utilization = settings.gpu_memory_utilization
    if settings.kv_dtype not in KV_DTYPES:
        raise UsageError(f"Unknown kv-dtype {settings.kv_dtype!r}; possible: {', '.join(KV_DTYPES)}.")
    if settings.mm_encoder_tp_mode not in (None, *ENCODER_MODES):
        possible = ", ".join(ENCODER_MODES)
        raise UsageError(f"Unknown mm-encoder-tp-mode {settings.mm_encoder_tp_mode!r}; possible: {possible}.")
    if engine.name == "transformers" and KV_DTYPES[settings.kv_dtype] < KV_DTYPES["auto"]:
        raise UsageError("transformers pages keys and values in the network's own dtype; leave --kv-dtype out.")
    _check_ranks(settings, cluster)
    max_len = _longest(settings, network)
    is_big = device.capacity_bytes >= _BIG_CARD_BYTES and not device.id.startswith("a100")
    seqs, tokens = (1024, 8192) if is_big else (256, 2048)
    if engine.name == "vllm" and device.capacity_bytes >= 160 * GIB and engine.version >= (0, 28):
        tokens = 16_384
    if engine.name == "sglang":
        seqs, tokens = sglang.facts()["sequences"], sglang.chunk_tokens(device)
    elif engine.name == "transformers":
        seqs, tokens = 1024, 8192  # the fallbacks of its ContinuousBatchingConfig
    if utilization is None:
        utilization = _usual_utilization(engine, device, settings, network)
    max_seqs = settings.max_seqs or seqs
    least = 0 if engine.name == "sglang" else max_seqs  # its steps are of a prompt or of answers
    max_batched = settings.max_batched_tokens or min(max(tokens, least), max_seqs * max_len)
    if max_batched < least:
        raise UsageError(
            f"max-batched-tokens {max_batched} is less than max-seqs {max_seqs}: each running request decodes a "
            "token in each step; raise it, or lower max-seqs."
        )
    element_bytes = _element_bytes(engine, network, device)
    kv_bytes = KV_DTYPES[settings.kv_dtype]
    if settings.kv_dtype == "auto" and engine.name == "vllm":
        kv_bytes = KV_DTYPES["fp8"] if network.has_fp8_cache else float(element_bytes)
    quantization = network.load_as(settings.quantization)
    if engine.name == "transformers" and network.published.bits == NONE.bits:
        quantization = made_by_transformers(quantization, engine.version)
    return FullSettings(
        stated=settings,
        engine=engine,
        device=device,
        max_len=max_len,
        max_seqs=max_seqs,
        max_batched_tokens=max_batched,
        utilization=utilization,
        kv_element_bytes=kv_bytes,
        element_bytes=element_bytes,
        quantization=quantization,
        first_bytes=_first_bytes(settings, network, cluster),
    )


def _element_bytes(engine: Engine, network: ServedNetwork, device: Device) -> int:
    """Return the bytes of an element of what is computed: 4 where neither bf16 nor fp16 can be."""
    kind = str(network.config.get("model_type"))
    return 4 if engine.name == "vllm" and device.capability < BF16_CAPABILITY and needs_bf16(kind) else 2


def _first_bytes(settings: ServeSettings, network: ServedNetwork, cluster: Cluster) -> int:
    """Return the memory of a GPU with a context and communicators: of its ranks, of stages, and with experts of
    replicas, and of all ranks that share experts, also if each has a part of all (`initialize_model_parallel`)."""
    sizes = [settings.tp, settings.pp]
    if network.shape is not None and network.shape.experts:
        sizes += [settings.dp, settings.tp * settings.dp]
    sizes = [size for size in sizes if size > 1]
    return overheads(cluster.device, sizes, gpus_per_node=cluster.gpus_per_node).bytes


def _check_types(settings: ServeSettings) -> None:
    """Raise UsageError for a value of another type than that of its field."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.name in _WORDS and not isinstance(value, str | None):
            raise UsageError(f"{spell_option(item.name)} is {value!r}; it must be a word.")
        if item.name in _SWITCHES:
            check_switch(item.name, value)
        if item.name in _PARTS and value is not None and not (is_number(value) and 0 < value <= 1):
            raise UsageError(f"{spell_option(item.name)} is {value!r}; it must be above 0 and at most 1.")
        if item.name not in (*_WORDS, *_SWITCHES, *_PARTS) and value is not None:
            check_number(item.name, value)


def _longest(settings: ServeSettings, network: ServedNetwork) -> int:
    """Return the longest request.  Raises UsageError for one beyond what the configuration states."""
    most = network.max_positions
    if settings.max_len is None:
        return most or _USUAL_MAX_LEN
    if most is not None and settings.max_len > max(most, network.most_positions):
        raise UsageError(
            f"max-len {settings.max_len:,} is longer than {network.name} allows: its configuration states {most:,} "
            f"positions; give at most {most:,}."
        )
    return settings.max_len


def _check_ranks(settings: ServeSettings, cluster: Cluster) -> None:
    """Raise UsageError for degrees that are not those of the GPUs."""
    needed = settings.tp * settings.pp * settings.dp
    if needed > cluster.gpus:
        product = f"tp {settings.tp} x pp {settings.pp} x dp {settings.dp}"
        raise UsageError(f"{product} needs {needed} GPUs, and there are {cluster.gpus}; name more with --gpu.")
    ranks = settings.tp * settings.dp
    if settings.ep not in (1, ranks):
        possible = "ep 1, or more ranks" if ranks == 1 else f"ep 1 or {ranks}"
        raise UsageError(
            f"ep is {settings.ep}; engines divide whole experts among all tp x dp = {ranks} ranks or among none: "
            f"give {possible}."
        )


def _usual_utilization(engine: Engine, device: Device, settings: ServeSettings, network: ServedNetwork) -> float:
    """Return the part of the card that an engine takes by default."""
    if engine.name == "vllm":
        return vllm_facts(engine.version).utilization
    if engine.name == "transformers":
        return 0.9  # max_memory_percent of ContinuousBatchingConfig
    return sglang.usual_part(
        device,
        network,
        tokens=settings.max_batched_tokens,
        sequences=settings.max_seqs,
        tp=settings.tp,
        pp=settings.pp,
        eager=settings.eager,
    )


def spell_flags(settings: ServeSettings) -> list[str]:
    """Return the stated settings as words of `tonnage estimate --task serve`."""
    words = []
    for name, value in settings.stated().items():
        words += [f"--{spell_option(name)}"] if value is True else [f"--{spell_option(name)}", f"{value}"]
    return words
