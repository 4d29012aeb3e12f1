"""Inference engines: facts about their memory as they start, their KV cache, and when they are ready.

    {"engine": "vllm 0.33.0", "ready": true, "kv_cache_tokens": 466432, "last_words": "Starting vLLM server ..."}

Each process of an engine (server, core, workers) writes its facts into `PID.serving` in the folder of the run.  They
come from the engine's objects where these have bytes, and else from its own words in its log.  An error with which a
part of the engine does not start is noted before the engine wraps it into others.
"""

import functools
import inspect
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from . import load, outcome
from .imports import after_import
from .tensors import tensors_in

FACTS = ".serving"
"""Ending of the file with the facts of a process."""

SERVED = "served"
"""Name of a file that exists once a server of the command takes requests."""

_PACKAGES = ("vllm", "sglang")
"""Packages whose log is listened to."""

_STARTED = (
    ("vllm.v1.engine.core", "EngineCore"),
    ("sglang.srt.managers.scheduler", "Scheduler"),
)
"""Classes whose constructor starts the engine: when it returns, the engine is ready."""

_PARTS = (
    ("vllm.engine.arg_utils", "EngineArgs", ("create_engine_config",)),
    ("vllm.v1.worker.gpu_worker", "Worker", ("init_device", "load_model", "determine_available_memory")),
    ("vllm.v1.worker.gpu_worker", "Worker", ("initialize_from_config", "compile_or_warm_up_model")),
    ("sglang.srt.server_args", "ServerArgs", ("__post_init__", "resolve_once")),
)
"""Methods in other processes, or before that constructor, whose errors are why an engine does not start."""

_ARGUMENTS = {
    "vllm": (
        *("max_model_len", "gpu_memory_utilization", "kv_cache_dtype", "quantization", "tensor_parallel_size"),
        *("max_num_seqs", "max_num_batched_tokens"),
    ),
    "sglang": (
        *("context_length", "mem_fraction_static", "kv_cache_dtype", "quantization", "tp_size"),
        *("max_running_requests", "chunked_prefill_size"),
    ),
}
"""Arguments that decide whether an engine starts."""

_MOST_WORDS = 400
"""Characters of a line of the log that are kept."""

_GIB = 1 << 30
_NUMBER = r"(\d[\d,]{0,30}(?:\.\d{1,30})?)"
_ANYTHING = ".{0,400}?"  # bounded, or a long line of a stranger's log would take minutes

_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (rf"KV cache size: {_NUMBER} tokens", ("kv_cache_tokens",)),
    (rf"Maximum concurrency for {_NUMBER} tokens per request: {_NUMBER}x", ("max_len", "concurrency")),
    (rf"Graph capturing finished in {_ANYTHING} took {_NUMBER} GiB", ("graphs_gib",)),
    (rf"torch\.compile{_ANYTHING} t(?:ook|akes) {_NUMBER} s in total", ("compile_seconds",)),
    (rf"\bmax_total_num_tokens={_NUMBER}", ("kv_cache_tokens",)),
    (rf"\bcontext_len={_NUMBER}", ("max_len",)),
    (rf"\bmax_running_requests={_NUMBER}", ("running_requests",)),
    (rf"Load weight end{_ANYTHING} mem usage={_NUMBER} GB", ("weights_gib",)),
    (rf"Capture target prefill CUDA graph end{_ANYTHING} mem usage={_NUMBER} GB", ("prefill_graphs_gib",)),
    (rf"Capture target decode CUDA graph end{_ANYTHING} mem usage={_NUMBER} GB", ("decode_graphs_gib",)),
    (rf"K size: {_NUMBER} GB, V size: {_NUMBER} GB", ("keys_gib", "values_gib")),
)
"""What engines say in their log, and the facts that it states; SGLang's GB are GiB."""

_COMPILED = {
    "cold": re.compile(r"\bCompiling a graph for "),
    "warm": re.compile(r"\bDirectly load (?:the compiled graph|AOT compilation)\b"),
}
"""What vLLM says of a graph that it compiles, and of one that it finds in its cache."""

_COMPILED_INTO = re.compile(r"(?<!\S)(\S{0,4000}?torch_compile_cache/\S{0,400}?rank_\d+_\d+)")
"""Folder of vLLM's cache with what one rank compiled, in a line of its log."""

_COMPILING = "tonnage.json"
"""Name of the file in that folder with what compiling took."""


class Engines:
    """The engine of one process; `folder` gets its facts, and `ended` the outcome if it does not start.

    `assumed` returns the assumptions of this process, which may leave no trace.
    """

    def __init__(
        self, watch: Any, folder: str, ended: dict[str, Any], assumed: Callable[[], list[str]] = lambda: []
    ) -> None:
        self.facts: dict[str, Any] = {}
        self._watch, self._folder, self._ended, self._assumed = watch, folder, ended, assumed
        self._kind = "one"
        self._places: dict[int, set[int]] = {}

    def listen(self) -> None:
        """Note facts from now on, whoever imports an engine and whenever."""
        self._hear_log()
        for module, name in _STARTED:
            after_import(module, functools.partial(self._hear_start, name))
        for module, name, methods in _PARTS:
            after_import(module, functools.partial(self._hear_parts, name, methods))
        after_import("vllm.engine.arg_utils", self._hear_arguments)
        after_import("sglang.srt.server_args", self._hear_server_arguments)
        after_import("vllm.v1.worker.gpu_worker", self._hear_worker)
        after_import("vllm.device_allocator.cumem", self._hear_sleep)
        after_import("uvicorn.server", self._hear_server)
        after_import("transformers.cache_utils", self._hear_caches)
        after_import("transformers.generation.utils", self._hear_generate)
        after_import("transformers.generation.continuous_batching.cache", self._hear_paged_cache)

    def note(self, **facts: Any) -> None:
        """Add facts, and write all of them."""
        self.facts |= {**facts, "assumed": self._assumed()}
        path = os.path.join(self._folder, f"{os.getpid()}{FACTS}")
        with suppress(OSError):  # tonnage has given up and removed the folder
            with open(f"{path}.partial", "w") as file:
                json.dump(self.facts, file)
            os.replace(f"{path}.partial", path)

    def note_error(self, engine: str, error: BaseException) -> None:
        """Note why the engine does not start; the first error of a process counts."""
        if "error" in self.facts:
            return
        described = outcome.describe(error)
        kind, words = described["error"], described["message"]
        self.note(engine=name_engine(engine), at=time.time(), kind=kind, error=words)
        self._ended.update(outcome.of_exception(error, self._watch))

    # ---- what all engines have ---------------------------------------------------------------------------------

    def _hear_log(self) -> None:
        loggers: Any = logging.Logger
        handle = loggers.handle

        @functools.wraps(handle)
        def heard(logger: logging.Logger, record: logging.LogRecord) -> None:
            package = logger.name.partition(".")[0]
            if package in _PACKAGES:
                with suppress(Exception):  # a message that does not go with its arguments is the program's affair
                    self._note_words(package, record.getMessage())
            handle(logger, record)

        loggers.handle = heard

    def _note_words(self, package: str, message: str) -> None:
        told = read_words(message)
        if told.get("compile_cache") == "cold":
            told["compiled_bytes"] = int(self._watch.torch.cuda.max_memory_allocated())
        elif self.facts.get("compile_cache") == "cold":
            told.pop("compile_cache", None)  # a part of the network was not found
        self.note(
            engine=name_engine(package),
            at=time.time(),
            last_words=" ".join(message.split())[:_MOST_WORDS],
            **told,
        )

    def _hear_start(self, name: str, module: ModuleType) -> None:
        kind, engine = getattr(module, name), module.__name__.partition(".")[0]
        original = kind.__init__

        @functools.wraps(original)
        def start(core: Any, *args: Any, **kwargs: Any) -> None:
            with self._failing(engine):
                original(core, *args, **kwargs)
            self.note(engine=name_engine(engine), ready=True, **_of_vllm_config(getattr(core, "vllm_config", None)))
            self._note_pool(core)
            wanted = load.read() if engine == "vllm" else None
            if wanted is not None:
                self._serve(load.Load(core, wanted, kind.add_request))

        kind.__init__ = start

    def _serve(self, requests: load.Load) -> None:
        """Have the engine serve requests, and note how far it came."""
        try:
            requests.serve()
        except Exception as error:
            self._ended.update(outcome.of_exception(error, self._watch))
            raise
        finally:
            self.note(load=requests.facts())

    def _hear_parts(self, name: str, methods: Iterable[str], module: ModuleType) -> None:
        kind, engine = getattr(module, name), module.__name__.partition(".")[0]
        for method in methods:
            original = getattr(kind, method, None)
            if original is not None:
                setattr(kind, method, self._failing(engine)(original))

    @contextmanager
    def _failing(self, engine: str) -> Iterator[None]:
        """Note an error that ends this part of an engine."""
        try:
            yield
        except Exception as error:
            self.note_error(engine, error)
            raise
        self.note(engine=name_engine(engine))

    def _hear_server(self, module: ModuleType) -> None:
        startup = module.Server.startup

        @functools.wraps(startup)
        async def start(server: Any, *args: Any, **kwargs: Any) -> None:
            await startup(server, *args, **kwargs)
            if server.started and any(package in sys.modules for package in _PACKAGES):
                with suppress(OSError), open(os.path.join(self._folder, SERVED), "w"):
                    pass

        module.Server.startup = start

    # ---- vLLM --------------------------------------------------------------------------------------------------

    def _hear_arguments(self, module: ModuleType) -> None:
        create = module.EngineArgs.create_engine_config

        @functools.wraps(create)
        def create_engine_config(arguments: Any, *args: Any, **kwargs: Any) -> Any:
            self.note(arguments=_stated(arguments, "vllm"))
            return create(arguments, *args, **kwargs)

        module.EngineArgs.create_engine_config = create_engine_config

    def _hear_worker(self, module: ModuleType) -> None:
        kind = module.Worker
        profiling, load, initialize = module.memory_profiling, kind.load_model, kind.initialize_from_config
        determine = kind.determine_available_memory

        @contextmanager
        def profile(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with profiling(*args, **kwargs) as result:
                before_bytes = int(self._watch.torch.cuda.max_memory_allocated())
                yield result
                self._grow(result.before_create)
            self.note(activation_bytes=int(result.torch_peak_increase))
            self._note_compiling(before_bytes)

        @functools.wraps(load)
        def load_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
            result = load(worker, *args, **kwargs)
            with suppress(AttributeError):
                self.note(rank=int(worker.rank), weights_bytes=int(worker.model_runner.model_memory_usage))
            return result

        @functools.wraps(initialize)
        def initialize_from_config(worker: Any, *args: Any, **kwargs: Any) -> Any:
            result = initialize(worker, *args, **kwargs)
            caches = getattr(worker.model_runner, "kv_caches", ())
            self.note(kv_cache_bytes=self._claim(caches))
            return result

        @functools.wraps(determine)
        def determine_available_memory(worker: Any, *args: Any, **kwargs: Any) -> Any:
            parallel = worker.parallel_config
            degrees = (("ranks", parallel.tensor_parallel_size), ("stages", parallel.pipeline_parallel_size))
            self._kind = next((kind for kind, degree in degrees if degree > 1), "one")
            return determine(worker, *args, **kwargs)

        warm_up = getattr(kind, "compile_or_warm_up_model", None)
        if warm_up is not None:
            kind.compile_or_warm_up_model = self._measuring_graphs(warm_up)
        vars(module)["memory_profiling"] = profile
        kind.determine_available_memory = determine_available_memory
        kind.load_model, kind.initialize_from_config = load_model, initialize_from_config

    def _note_compiling(self, before_bytes: int) -> None:
        """Note the peak while the network was compiled: in this start, or in the one whose work it found."""
        path = os.path.join(self.facts.get("compiled_into", ""), _COMPILING)
        names = ("compile_peak_bytes", "compile_seconds")
        with suppress(OSError, ValueError):
            if "compiled_bytes" in self.facts:
                self.note(compile_peak_bytes=self.facts["compiled_bytes"] - before_bytes)
                with open(path, "w") as file:
                    json.dump({name: self.facts.get(name) for name in names}, file)
            elif "compile_cache" in self.facts:
                self.facts.pop("compile_seconds", None)  # those of loading
                with open(path) as file:
                    kept = json.load(file)
                self.note(**{name: kept[name] for name in names if name in kept})

    def _hear_sleep(self, module: ModuleType) -> None:
        """Claim the memory that sleep mode gives back to the card, and takes again, as asleep and awake."""
        for name, state in (("unmap_and_release", "asleep"), ("create_and_map", "awake")):
            setattr(module, name, self._claiming(getattr(module, name), state))

    def _claiming(self, change: Callable[[tuple[int, ...]], None], state: str) -> Callable[[tuple[int, ...]], None]:
        watch = self._watch

        @functools.wraps(change)
        def changed(handle: tuple[int, ...]) -> None:
            change(handle)
            _, phase, module = watch.marks[-1]
            watch.mark(phase, module)
            _, _, address, *_ = handle
            watch.claims.append((len(watch.marks) - 1, address, state))

        return changed

    def _measuring_graphs(self, warm_up: Callable[..., Any]) -> Callable[..., Any]:
        """Return a worker's method that captures graphs, with a note of the memory outside torch that they take."""

        @functools.wraps(warm_up)
        def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
            before = self._outside_bytes()
            result = warm_up(*args, **kwargs)
            self.note(graphs_outside_bytes=max(0, self._outside_bytes() - before))
            return result

        return compile_or_warm_up_model

    def _outside_bytes(self) -> int:
        """Return this process's memory outside torch's allocator; 0 where it is not known."""
        native, cuda = self._watch.native, self._watch.torch.cuda
        return 0 if native is None else int(native.device_used(cuda.current_device()) - cuda.memory_reserved())

    def _grow(self, before: Any) -> None:
        """Let memory outside torch's allocator have grown until the engine knows its needs, as on a real card.

        A card loads kernels when they are first launched; the ghost's have no size.  NCCL's buffers are there.
        TONNAGE_GROWTH, a JSON object, has the bytes of one GPU, of tensor-parallel ranks and of stages, by version.
        """
        table = json.loads(os.environ.get("TONNAGE_GROWTH", "{}")).get(self._kind, ())
        version = _numbers(getattr(sys.modules["vllm"], "__version__", "0"))
        known = [entry for entry in table if tuple(entry["since"]) <= version] or table[:1]
        native = self._watch.native
        if known and native is not None:
            added_bytes = known[-1]["bytes"] - self._grown_bytes(before)
            if native.take_outside(added_bytes):
                bounds = {name: known[-1][name] for name in ("low_bytes", "bytes", "high_bytes", "source")}
                self.note(growth={**bounds, "added_bytes": added_bytes})

    def _grown_bytes(self, before: Any) -> int:
        """Return the growth of this process's memory outside torch's allocator since vLLM's first look at the card.

        It is 0 where weights lie in memory that torch's allocator does not know (vLLM's sleep mode).
        """
        cuda = self._watch.torch.cuda
        reserved_bytes = cuda.memory_reserved()
        if reserved_bytes < self.facts.get("weights_bytes", 0):
            return 0
        return int(self._outside_bytes() - before.non_torch_memory)

    # ---- SGLang ------------------------------------------------------------------------------------------------

    def _hear_server_arguments(self, module: ModuleType) -> None:
        kind = module.ServerArgs
        for name in ("__post_init__", "resolve_once"):
            complete = getattr(kind, name, None)
            if complete is not None:
                setattr(kind, name, self._noting_arguments(complete))

    def _noting_arguments(self, complete: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(complete)
        def completed(arguments: Any) -> Any:
            if "arguments" not in self.facts:
                self.note(arguments=_stated(arguments, "sglang"))
            return complete(arguments)

        return completed

    def _note_pool(self, core: Any) -> None:
        """Claim the KV cache of SGLang's scheduler, and note its bytes and pages; another engine's core has none.

        A network with layers that keep windows has several pools in one; states of fixed size lie beside it.
        """
        runner = getattr(getattr(core, "tp_worker", None), "model_runner", None)
        pool = getattr(runner, "token_to_kv_pool", None)
        if pool is None:
            return
        parts = [vars(part) for part in (pool, *vars(pool).values()) if _package(part) == _package(pool)]
        held = self._claim(tensors_in(parts, self._watch.torch.Tensor))
        states = getattr(getattr(getattr(runner, "req_to_token_pool", None), "mamba_pool", None), "mamba_cache", None)
        if states is not None:
            self._claim(tensors_in(vars(states), self._watch.torch.Tensor))
        page, tokens = getattr(pool, "page_size", None), getattr(pool, "size", None)
        pages = tokens // page if page and tokens else None
        known, longest = (self.facts.get(name) for name in ("kv_cache_tokens", "max_len"))
        running = self.facts.pop("running_requests", float("inf"))
        graphs = [self.facts.pop(f"{phase}_graphs_bytes", 0) for phase in ("prefill", "decode")]
        self.note(
            kv_cache_bytes=held,
            block_tokens=page,
            blocks=pages,
            graphs_bytes=sum(graphs),
            **({"concurrency": min(known / longest, running)} if known and longest else {}),
        )

    # ---- transformers ------------------------------------------------------------------------------------------

    def _hear_caches(self, module: ModuleType) -> None:
        kind = module.Cache
        for name in ("update", "update_conv_state", "update_recurrent_state"):
            original = kind.__dict__.get(name)
            if original is not None:
                setattr(kind, name, self._following(original))

    def _following(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of a Cache that claims the layer's tensors after each update without gradients."""
        torch, position = self._watch.torch, list(inspect.signature(original).parameters).index("layer_idx")

        @functools.wraps(original)
        def update(cache: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(cache, *args, **kwargs)
            if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
                with torch._C.DisableTorchFunction():  # modes that follow what a program does need not see this
                    self._follow(cache, kwargs["layer_idx"] if "layer_idx" in kwargs else args[position - 1])
            return result

        return update

    def _follow(self, cache: Any, index: int) -> None:
        """Claim the tensors of a layer's cache that are new; after the last layer, note the cache if it is the
        largest yet.
        """
        layers = getattr(cache, "layers", ())
        if index >= len(layers):
            return
        fresh = self._tensors(layers[index])
        places = {t.data_ptr() for t in fresh}
        known, self._places[index] = self._places.get(index, set()), places
        self._claim([t for t in fresh if t.data_ptr() not in known])
        if index == len(layers) - 1:
            held = [t for layer in layers for t in self._tensors(layer)]
            count = sum({t.data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
            if count > self.facts.get("kv_cache_bytes", 0):
                self.facts |= {"kv_cache_bytes": count, **_shape(layers)}

    def _tensors(self, layer: Any) -> list[Any]:
        """Return keys, values and states of a layer's cache on the GPU; its counters have one dimension or none."""
        return [t for t in tensors_in(vars(layer), self._watch.torch.Tensor) if t.is_cuda and t.ndim > 1]

    def _hear_generate(self, module: ModuleType) -> None:
        kind = module.GenerationMixin
        generate = kind.generate

        @functools.wraps(generate)
        def generated(mixin: Any, *args: Any, **kwargs: Any) -> Any:
            answer = generate(mixin, *args, **kwargs)
            if "kv_cache_bytes" in self.facts:
                self.note(engine=name_engine("transformers"), ready=True)
            return answer

        kind.generate = generated

    def _hear_paged_cache(self, module: ModuleType) -> None:
        kind = module.PagedAttentionCache
        original = kind.__init__

        @functools.wraps(original)
        def make(cache: Any, *args: Any, **kwargs: Any) -> None:
            with self._failing("transformers"):
                original(cache, *args, **kwargs)
            held = list({t.data_ptr(): t for t in tensors_in(vars(cache), self._watch.torch.Tensor)}.values())
            block_tokens = _first(cache, "block_size", "page_size") or _tokens_of_page(cache)
            tokens = None if block_tokens is None else cache.num_blocks * block_tokens
            self._claim(held)
            self.note(
                engine=name_engine("transformers"),
                ready=True,
                kv_cache_bytes=sum(t.untyped_storage().nbytes() for t in held),
                blocks=cache.num_blocks,
                block_tokens=block_tokens,
                kv_cache_tokens=tokens,
            )

        kind.__init__ = make

    def _claim(self, caches: Any) -> int:
        """Claim the memory of tensors, however nested, as KV cache; return its bytes."""
        torch, watch = self._watch.torch, self._watch
        held = {
            storage.data_ptr(): (tensor, storage.nbytes())
            for tensor in tensors_in(list(caches), torch.Tensor)
            if (storage := tensor.untyped_storage()).nbytes()
        }
        if held:
            _, phase, module = watch.marks[-1]
            watch.mark(phase, module)  # a claim is of blocks that existed when a mark began
        for tensor, _ in held.values():
            watch.claim(tensor, "kv_cache")
        return sum(count for _, count in held.values())


def _package(thing: Any) -> str:
    """Return the package of an object's class."""
    return type(thing).__module__.partition(".")[0]


def _stated(arguments: Any, engine: str) -> dict[str, Any]:
    """Return the arguments of an engine that decide whether it starts, as plain values."""
    values = {name: getattr(arguments, name, None) for name in _ARGUMENTS[engine]}
    return {name: value if isinstance(value, int | float | None) else str(value) for name, value in values.items()}


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def name_engine(package: str) -> str:
    """Return an engine's name with its version, if it is known: `vllm 0.33.0`."""
    version = getattr(sys.modules.get(package), "__version__", None)
    return f"{package} {version}" if version else package


def read_words(message: str) -> dict[str, Any]:
    """Return the facts that a line of an engine's log states: tokens, concurrency, graphs, what is compiled."""
    facts: dict[str, float] = {}
    for pattern, names in _WORDS:
        match = re.search(pattern, message)
        if match is not None:
            facts |= zip(names, (float(text.replace(",", "")) for text in match.groups()), strict=True)
    seconds = facts.pop("compile_seconds", None)
    keys, values = (facts.pop(name, None) for name in ("keys_gib", "values_gib"))
    sizes = {name: facts.pop(name) for name in list(facts) if name.endswith("_gib")}
    told: dict[str, Any] = {name: value if name == "concurrency" else int(value) for name, value in facts.items()}
    told |= {name.replace("_gib", "_bytes"): round(size * _GIB) for name, size in sizes.items()}
    if keys is not None and values is not None:
        told["kv_cache_bytes"] = round((keys + values) * _GIB)
    if seconds is not None:
        told["compile_seconds"] = seconds
    kind = next((kind for kind, pattern in _COMPILED.items() if pattern.search(message)), None)
    if kind is not None:
        told["compile_cache"] = kind
    folder = _COMPILED_INTO.search(message)
    return told if folder is None else {**told, "compiled_into": folder[1]}


def _of_vllm_config(config: Any) -> dict[str, Any]:
    """Return what vLLM decided: blocks, tokens of one, the maximal length, whether it runs without graphs."""
    if config is None:
        return {}
    cache, model = config.cache_config, config.model_config
    return {
        "blocks": cache.num_gpu_blocks,
        "block_tokens": cache.block_size,
        "max_len": model.max_model_len,
        **({"graphs_bytes": 0} if model.enforce_eager else {}),
    }


def _shape(layers: Any) -> dict[str, Any]:
    """Return sequences, their length and tokens of a cache, by the keys of its longest layer."""
    keys = (getattr(layer, "keys", None) for layer in layers)
    shapes = [k.shape for k in keys if k is not None and getattr(k, "ndim", 0) == 4]
    if not shapes:
        return {}
    sequences, length = max((int(shape[0]), int(shape[2])) for shape in shapes)
    return {"concurrency": float(sequences), "max_len": length, "kv_cache_tokens": sequences * length}


def _first(owner: Any, *names: str) -> int | None:
    """Return the first of these attributes that exists."""
    return next((int(value) for name in names if (value := getattr(owner, name, None)) is not None), None)


def _tokens_of_page(cache: Any) -> int | None:
    """Return the tokens of a page, which the allocators of a newer cache know."""
    allocators = getattr(cache, "cache_allocators", None)
    return next((int(a.tokens_per_page) for a in allocators.values()), None) if allocators else None
