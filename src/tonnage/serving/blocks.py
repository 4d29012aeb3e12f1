"""A scheduler with a paged KV cache, step by step, beside contiguous slots: who runs together, who is put back.

    engine = PagedEngine(blocks=29_750, block_tokens=16, max_seqs=1024, batched_tokens=8192, step_seconds=0.02)
    simulate(requests, engine).preemptions

The rules are those of vLLM's scheduler (0.33, first come first served; a test compares the two).  In each step every
running request writes one token; one whose last block is full takes another.  If none is free, the request that was
admitted last gives its blocks back and waits at the front of the queue, to be computed again; where blocks keep what
was computed, from those that nobody took meanwhile.  Unless that happened,
requests are admitted in their order, as far as blocks for all their tokens, sequences and the tokens of a step allow;
a prompt longer than what is left of the step goes on in the next one (chunked prefill).  Blocks are free again in the
step after the last token.

A million requests take seconds, because a running request is looked at only when it is admitted, ends or is put back:
blocks that are taken in between follow from counts of requests by the step, modulo the block, in which they take one.
"""

from collections import deque
from dataclasses import dataclass

from tonnage.errors import UsageError
from tonnage.serving.lengths import Requests


@dataclass(frozen=True, kw_only=True)
class PagedEngine:
    """Limits of an engine's scheduler."""

    blocks: int
    """Blocks of the pool."""
    block_tokens: int
    """Tokens of a block."""
    max_seqs: int
    """Requests that run together at most."""
    batched_tokens: int
    """Tokens of one step at most."""
    step_seconds: float
    """Seconds of a step."""
    caches: bool = False
    """True if free blocks keep what was computed until they are taken (prefix caching): a request that was put back
    goes on from those that are left."""


class _FreeBlocks:
    """Free blocks in the order in which they are taken: those that were freed first.

    Of a request that was put back the last blocks are taken first, so that its beginning stays longest.
    """

    def __init__(self, count: int) -> None:
        self._parts: deque[list[int]] = deque([[count]])
        self._kept: dict[int, list[int]] = {}

    def take(self, count: int) -> None:
        """Take so many blocks, of which there are as many."""
        parts = self._parts
        while count:
            first = parts[0]
            if first[0] > count:
                first[0] -= count
                return
            count -= first[0]
            first[0] = 0
            parts.popleft()

    def add(self, tokens: int, size: int, owner: int | None = None) -> None:
        """Free the blocks of so many tokens, of a request that may come back as their `owner`.

        A block that is not full is taken first: nobody can ask for its content.
        """
        whole, rest = divmod(tokens, size)
        if rest:
            self._parts.appendleft([1])
        if whole:
            part = [whole]
            self._parts.append(part)
            if owner is not None:
                self._kept[owner] = part

    def take_back(self, owner: int) -> int:
        """Take what is left of the first blocks of a request that comes back; return how many they are."""
        part = self._kept.pop(owner, [0])
        left, part[0] = part[0], 0
        return left


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Course of a simulation."""

    requests: int
    """Requests that ended."""
    steps: int
    """Steps in which something was computed."""
    peak_running: int
    """Most requests that ran together."""
    mean_running: float
    """Mean of the requests that ran together, over steps."""
    preemptions: int
    """Times that a request was put back."""
    recomputed_tokens: int
    """Tokens that were computed again for it."""
    peak_blocks: int
    """Most blocks in use."""
    mean_used: float
    """Mean part of the pool that was in use, over steps."""
    mean_waste: float
    """Mean part of the blocks in use that held no token, over steps."""
    generated_tokens: int
    """Tokens of all answers."""


def simulate(requests: Requests, engine: PagedEngine) -> Simulation:
    """Return the course of serving these requests.  Raises UsageError for one that the whole pool cannot hold."""
    size, shared_blocks = engine.block_tokens, requests.prefix // engine.block_tokens
    shared = shared_blocks * size  # only whole blocks are shared
    bases = [int(prompt) - shared for prompt in requests.prompts]
    outputs = [int(output) for output in requests.outputs]
    arrivals = [int(seconds / engine.step_seconds) for seconds in requests.arrivals]
    pool = engine.blocks - shared_blocks
    count = len(bases)
    largest = max((-(-(base + output - 1) // size) for base, output in zip(bases, outputs, strict=True)), default=0)
    if largest > pool:
        raise UsageError(f"A request takes {largest:,} blocks and the pool has {pool:,}; shorten the requests.")
    free, queue = pool, _FreeBlocks(pool)
    growth = [0] * size  # decoding requests by the step, modulo the block, in which they take a block
    started, ends = [0] * count, [0] * count
    done = [0] * count  # tokens of the answer that were generated before the request was put back
    ending: dict[int, list[int]] = {}
    order: list[int] = []  # decoding requests as admitted; those that ended are dropped when they are met
    put_back: deque[int] = deque()
    step, following, decoding = 0, 0, 0
    filling, filled = -1, 0  # the request whose prompt is partly computed, and how many of its tokens are
    uncomputed = shared if engine.caches else 0
    steps = peak_running = preemptions = recomputed = held_tokens = 0
    sum_running = sum_used = sum_wasted = 0
    least_free = free
    while following < count or put_back or decoding or filling >= 0:
        if not decoding and filling < 0 and not put_back and arrivals[following] > step:
            step = arrivals[following]  # nothing to do until then
        steps += 1
        phase, was_put_back = step % size, False
        while growth[phase] > free:
            was_put_back = True
            preemptions += 1
            if filling >= 0:  # it was admitted last
                free += -(-filled // size)
                queue.add(filled, size, filling)
                held_tokens -= filled
                recomputed += filled
                put_back.appendleft(filling)
                filling = -1
                continue
            index = order.pop()
            while ends[index] < step:
                index = order.pop()
            tokens = bases[index] + done[index] + step - 1 - started[index]
            free += -(-tokens // size)
            queue.add(tokens, size, index)
            growth[(started[index] + 1 - bases[index] - done[index]) % size] -= 1
            decoding -= 1
            held_tokens -= tokens
            done[index] += step - started[index]
            recomputed += tokens
            ends[index] = -1  # its entry in `ending` is out of date
            put_back.appendleft(index)
        free -= growth[phase]
        queue.take(growth[phase])
        held_tokens += decoding
        budget = engine.batched_tokens - decoding
        if filling >= 0 and uncomputed:
            taken = min(budget, uncomputed)
            budget, uncomputed = budget - taken, uncomputed - taken
        while budget > 0:
            if filling < 0:
                if was_put_back or decoding >= engine.max_seqs:
                    break
                if put_back:
                    index = put_back[0]
                elif following < count and arrivals[following] <= step:
                    index = following
                else:
                    break
                if -(-(bases[index] + done[index]) // size) > free:
                    break
                if put_back:
                    put_back.popleft()
                else:
                    following += 1
                filling, filled = index, 0
                if uncomputed:  # the first request computes the prefix of all
                    taken = min(budget, uncomputed)
                    budget, uncomputed = budget - taken, uncomputed - taken
                    if not budget:
                        break
                if engine.caches and (left := queue.take_back(index)):
                    filled = left * size
                    free -= left
                    held_tokens += filled
                    recomputed -= filled
            tokens = bases[filling] + done[filling]
            taken = min(budget, tokens - filled)
            needed = -(-(filled + taken) // size) - -(-filled // size)
            if needed > free:  # the blocks that it was admitted for went to others
                free += -(-filled // size)
                queue.add(filled, size, filling)
                held_tokens -= filled
                recomputed += filled
                preemptions += 1
                put_back.appendleft(filling)
                filling, was_put_back = -1, True
                break
            free -= needed
            queue.take(needed)
            budget -= taken
            filled += taken
            held_tokens += taken
            if filled < tokens:
                break
            index, filling = filling, -1
            started[index] = step
            ends[index] = step + outputs[index] - done[index] - 1
            ending.setdefault(ends[index], []).append(index)
            growth[(step + 1 - tokens) % size] += 1
            decoding += 1
            order.append(index)
        running = decoding + (filling >= 0)
        if running > peak_running:
            peak_running = running
        if free < least_free:
            least_free = free
        used = pool - free
        sum_running += running
        sum_used += used
        sum_wasted += used * size - held_tokens
        for index in ending.pop(step, ()):
            if ends[index] != step:
                continue
            tokens = bases[index] + done[index] + step - started[index]
            free += -(-tokens // size)
            queue.add(tokens, size)
            growth[(started[index] + 1 - bases[index] - done[index]) % size] -= 1
            decoding -= 1
            held_tokens -= tokens
        step += 1
    return Simulation(
        requests=count,
        steps=steps,
        peak_running=peak_running,
        mean_running=sum_running / steps if steps else 0.0,
        preemptions=preemptions,
        recomputed_tokens=recomputed,
        peak_blocks=pool - least_free + shared_blocks,
        mean_used=(sum_used / steps + shared_blocks) / engine.blocks if steps else 0.0,
        mean_waste=sum_wasted / (sum_used * size) if sum_used else 0.0,
        generated_tokens=sum(outputs),
    )


@dataclass(frozen=True, kw_only=True)
class Contiguous:
    """Serving with a slot of the maximal length for each request."""

    slots: int
    """Requests that run together at most."""
    mean_waste: float
    """Mean part of a slot that holds no token, over a request's time in it."""


def contiguous(requests: Requests, *, pool_tokens: int, max_len: int) -> Contiguous:
    """Return what slots of `max_len` tokens hold of the same requests: each keeps its slot for the whole answer."""
    steps = requests.outputs.sum()
    held = ((requests.prompts + (requests.outputs - 1) / 2) * requests.outputs).sum()
    return Contiguous(slots=pool_tokens // max_len, mean_waste=float(1 - held / (steps * max_len)) if steps else 0.0)
