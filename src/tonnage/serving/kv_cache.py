"""The KV cache of an engine that pages it: bytes of a token, blocks of a pool, requests that fit in it.

    layers = read_layers(config, element_bytes=2, tp=1)
    pool = lay_out(layers, block_tokens=16).fill(58 * GIB)
    pool.blocks, pool.concurrency(Request(length=8192, batched_tokens=8192))

Layers keep keys and values of all tokens, of those in a window or chunk, a latent vector in their place (MLA), or a
state of fixed size (Mamba, linear attention).  Layers of several kinds share one pool: they are divided into groups
of equally many layers, each with a block table of its own, and all pages are equally large.  The rules are those of
vLLM's `KVCacheSpec` classes and `get_kv_cache_groups` (0.11 to 0.33); its start-up logs confirm them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil, gcd
from typing import Final, Literal

CacheKind = Literal["full", "window", "chunk", "state"]

BLOCK_TOKENS: Final = 16
"""Tokens of a block: vLLM's default for CUDA."""

_BALANCED: Final = 1.5
"""Layers of the commonest kind / of the rarest up to which groups get as many layers as the commonest kind has (vLLM
0.33; earlier 1.25, which differs for no published network)."""

_STATE_ALIGNMENT: Final = 16
_COPIED_ALIGNMENT: Final = {"delta net": 64}
"""Multiple of tokens to which a block beside states of fixed size is raised, and beside copied states of a kind
(`get_prefill_checkpoint_alignment` of vLLM 0.33)."""


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """Memory that one layer keeps of a request, on one rank."""

    kind: CacheKind
    """`full`: all tokens; `window`: the last ones; `chunk`: those of the last chunk; `state`: of fixed size."""
    token_bytes: int = 0
    """Bytes of one token; 0 for a state."""
    window: int = 0
    """Tokens that a layer with a window or chunks sees at most."""
    state_bytes: int = 0
    """Bytes of the state of one request."""
    state: str = ""
    """Kind of a layer with a state, where it matters: `mamba2`, `delta net`."""
    inner_elements: int = 0
    """Elements of a token that are alive inside a layer with a state, where most are; 0: not known."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Length of a request, and what the engine may schedule at once."""

    length: int
    """Tokens of prompt and answer together."""
    batched_tokens: int
    """Tokens whose blocks may be taken and not yet freed: those of one step, of two where steps overlap."""
    state_blocks: int = 1
    """Blocks for a state of fixed size; 2 where prefixes are cached, for the state at the last whole block."""
    copied_states: tuple[str, ...] = ()
    """Kinds of layers whose state is also copied inside a prompt: one block more."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share a block table."""

    kind: CacheKind
    layers: int
    """Number of layers, without padding."""
    block_tokens: int
    """Tokens of one block."""
    window: int = 0
    state: str = ""
    is_alone: bool = False
    """True if all layers of the network have a state: vLLM caches no prefixes of such a network."""

    def blocks(self, request: Request) -> int:
        """Return the most blocks that one request holds."""
        if self.kind == "state":
            return 1 if self.is_alone else request.state_blocks + (self.state in request.copied_states)
        if self.kind == "full":
            return ceil(request.length / self.block_tokens)
        if self.kind == "chunk":
            return ceil(min(self.window + request.batched_tokens, request.length) / self.block_tokens)
        held = min(self.window - 1 + request.batched_tokens, request.length)
        return ceil(held / self.block_tokens) + 1  # a window need not begin where a block does


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Division of a pool into blocks."""

    groups: tuple[Group, ...]
    """Groups of layers; empty for a network without a cache."""
    block_bytes: int
    """Bytes of one block of the pool, over all layers of a group."""
    page_bytes: int
    """Bytes of a block in one layer (of the largest, where one group has layers of several sizes)."""

    @property
    def block_tokens(self) -> int:
        """Return the tokens of a block of the layers that keep all tokens, or of the first group."""
        ordered = sorted(self.groups, key=lambda group: group.kind != "full")
        return ordered[0].block_tokens if ordered else BLOCK_TOKENS

    def fill(self, pool_bytes: int) -> "Pool":
        """Return a pool of this size."""
        return Pool(layout=self, blocks=max(0, pool_bytes) // self.block_bytes if self.groups else 0)

    def request_blocks(self, request: Request) -> int:
        """Return the blocks that one request takes from the pool."""
        return sum(group.blocks(request) for group in self.groups)

    def request_bytes(self, request: Request) -> int:
        """Return the bytes that an engine wants free for one request: without the padding of groups."""
        if len(self.groups) == 1:
            return self.groups[0].blocks(request) * self.block_bytes
        return sum(group.blocks(request) * group.layers * self.page_bytes for group in self.groups)

    def longest(self, pool_bytes: int, longest: Request) -> int:
        """Return the length of the longest request that the pool holds, at most that of `longest`; 0 if none."""
        low, high = 0, longest.length
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.request_bytes(replace(longest, length=middle)) <= pool_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Blocks for the keys and values of all requests, on one rank."""

    layout: Layout
    blocks: int

    def concurrency(self, request: Request) -> float:
        """Return how many such requests the pool holds at once; infinite for a network without a cache."""
        needed = self.layout.request_blocks(request)
        return self.blocks / needed if needed else float("inf")

    def tokens(self, request: Request, *, by_concurrency: bool = False) -> int:
        """Return the tokens that an engine says the pool holds.

        That is the blocks of each group times their tokens, or `by_concurrency` (newer engines) the requests that fit
        times their length: more, where layers keep a window or a state.
        """
        if not self.layout.groups:
            return 0
        if by_concurrency or self.layout.block_tokens == 0:
            return int(self.concurrency(request) * request.length)
        return self.blocks // len(self.layout.groups) * self.layout.block_tokens

    @cached_property
    def bytes(self) -> int:
        """Return the bytes of all blocks."""
        return self.blocks * self.layout.block_bytes


def lay_out(
    layers: Sequence[LayerCache], block_tokens: int = BLOCK_TOKENS, copied_states: Sequence[str] = ()
) -> Layout:
    """Return the division of a pool among layers, for blocks of so many tokens where all layers keep tokens.

    `copied_states` are kinds of layers whose state is also copied inside a prompt.
    """
    if not layers:
        return Layout(groups=(), block_bytes=0, page_bytes=0)
    kinds = {(layer.kind, layer.window) for layer in layers}
    attention = [layer for layer in layers if layer.kind != "state"]
    states = [layer for layer in layers if layer.kind == "state"]
    if len(kinds) == 1:
        first = layers[0]
        tokens = 0 if states else block_tokens
        pages = [layer.state_bytes or layer.token_bytes * block_tokens for layer in layers]
        group = Group(
            kind=first.kind,
            layers=len(layers),
            block_tokens=tokens,
            window=first.window,
            state=first.state,
            is_alone=bool(states),
        )
        return Layout(groups=(group,), block_bytes=sum(pages), page_bytes=max(pages))
    if states:
        copied = [_COPIED_ALIGNMENT.get(layer.state, 1) for layer in states if layer.state in copied_states]
        block_tokens = _raise_block(block_tokens, max([_STATE_ALIGNMENT, *copied]), states, attention)
    page_bytes = max(layer.token_bytes * block_tokens for layer in attention)
    alike = Counter(
        (
            replace(layer, token_bytes=0, state_bytes=0, inner_elements=0),
            _tokens_of_page(layer, page_bytes, block_tokens),
        )
        for layer in layers
    )
    fewest, most = min(alike.values()), max(alike.values())
    size = most if most < fewest * _BALANCED else fewest
    groups = []
    for (layer, tokens), count in alike.items():
        parts = ceil(count / size)
        for part in range(parts):
            held = len(range(part, count, parts))
            groups.append(
                Group(kind=layer.kind, layers=held, block_tokens=tokens, window=layer.window, state=layer.state)
            )
    return Layout(groups=tuple(groups), block_bytes=size * page_bytes, page_bytes=page_bytes)


def _raise_block(
    block_tokens: int, alignment: int, states: Sequence[LayerCache], attention: Sequence[LayerCache]
) -> int:
    """Return the tokens of a block whose page holds a state, so that all pages are equally large."""
    token_bytes = max(layer.token_bytes for layer in attention)
    least = ceil(max(layer.state_bytes for layer in states) / (alignment * token_bytes))
    return max(block_tokens, alignment * least)


def _tokens_of_page(layer: LayerCache, page_bytes: int, block_tokens: int) -> int:
    """Return the tokens of a layer's block in a page of this size: more, where they divide it evenly."""
    if layer.kind == "state":
        return block_tokens
    own = layer.token_bytes * block_tokens
    return block_tokens * (page_bytes // own) if page_bytes % own == 0 else block_tokens


def split_stages(layers: int, stages: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage, as vLLM divides them: the rest goes to the stages before the last.

    Raises ValueError for more stages than layers.
    """
    if stages > layers:
        raise ValueError(f"{stages} pipeline stages for {layers} layers")
    counts = [layers // stages] * stages
    for index in range(layers % stages):
        counts[-2 - index if stages > 1 else 0] += 1
    ends = [sum(counts[:index]) for index in range(stages + 1)]
    return tuple(range(start, end) for start, end in pairwise(ends))


def heads_on_rank(heads: int, tp: int) -> int:
    """Return the key and value heads that a tensor-parallel rank holds; ranks beyond their number hold copies.

    Raises ValueError where neither number divides the other.
    """
    if heads % tp and tp % heads:
        raise ValueError(f"{heads} key and value heads cannot be divided among {tp} ranks")
    return heads // gcd(heads, tp)
