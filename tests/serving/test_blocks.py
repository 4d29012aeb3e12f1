"""The block simulator beside a slow one that looks at every request in every step."""

import random

import pytest

np = pytest.importorskip("numpy")

from tonnage.errors import UnreadableFile, UsageError  # noqa: E402
from tonnage.serving.blocks import PagedEngine, contiguous, simulate  # noqa: E402
from tonnage.serving.lengths import Lengths, Requests, parse_lengths  # noqa: E402


def slowly(requests, engine):
    """Serve the same requests with a list of blocks held by each, checked in every step."""
    size, shared = engine.block_tokens, requests.prefix // engine.block_tokens * engine.block_tokens
    free = engine.blocks - shared // size
    waiting = [
        [int(p) - shared, 0, int(o), int(t / engine.step_seconds)]
        for p, o, t in zip(requests.prompts, requests.outputs, requests.arrivals, strict=True)
    ]
    running, filling, step = [], None, 0  # entries: tokens held, generated, outputs, blocks, base
    result = {"steps": 0, "peak_running": 0, "preemptions": 0, "recomputed_tokens": 0, "used": 0, "waste": 0}
    while waiting or running or filling:
        if not running and filling is None and waiting[0][3] > step:
            step = waiting[0][3]
        result["steps"] += 1
        preempted = False
        while sum(entry["tokens"] == entry["blocks"] * size for entry in running) > free:
            entry = running.pop()
            free += entry["blocks"]
            entry_base = entry["base"]
            waiting.insert(0, [entry_base, entry["generated"], entry["outputs"], 0])
            result["recomputed_tokens"] += entry_base + entry["generated"]
            result["preemptions"] += 1
            preempted = True
        for entry in running:
            if entry["tokens"] == entry["blocks"] * size:
                entry["blocks"] += 1
                free -= 1
            entry["tokens"] += 1
            entry["generated"] += 1
        for entry in [entry for entry in running if entry["generated"] == entry["outputs"]]:
            running.remove(entry)
            free += entry["blocks"]
        budget = engine.batched_tokens - len(running)
        while budget > 0 and not preempted:
            if filling is None:
                if len(running) >= engine.max_seqs or not waiting or waiting[0][3] > step:
                    break
                base, generated, outputs, _ = waiting[0]
                blocks = -(-(base + generated) // size)
                if blocks > free:
                    break
                waiting.pop(0)
                free -= blocks
                filling = {
                    "base": base,
                    "generated": generated,
                    "outputs": outputs,
                    "blocks": blocks,
                    "tokens": base + generated,
                    "left": base + generated,
                }
            taken = min(budget, filling["left"])
            budget -= taken
            filling["left"] -= taken
            if filling["left"]:
                break
            entry, filling = filling, None
            entry["generated"] += 1
            if entry["generated"] == entry["outputs"]:
                free += entry["blocks"]
            else:
                running.append(entry)
        result["peak_running"] = max(result["peak_running"], len(running))
        held = [*running, *([filling] if filling else [])]
        result["used"] += sum(entry["blocks"] for entry in held)
        result["waste"] += sum(entry["blocks"] * size - entry["tokens"] for entry in held)
        assert free >= 0
        step += 1
    return result


@pytest.mark.parametrize("seed", range(40))
def test_it_equals_the_slow_one(seed):
    chance = random.Random(seed)
    count = chance.randint(1, 60)
    prefix = chance.choice([0, 0, 5, 20])
    requests = Requests(
        prompts=np.array([prefix + chance.randint(1, 60) for _ in range(count)]),
        outputs=np.array([chance.randint(1, 50) for _ in range(count)]),
        arrivals=np.cumsum([chance.choice([0, 0, 1, 7, 60]) for _ in range(count)]).astype(float),
        prefix=prefix,
    )
    engine = PagedEngine(
        blocks=chance.randint(40, 120),
        block_tokens=chance.choice([1, 4, 16]) if prefix else chance.choice([4, 16]),
        max_seqs=chance.randint(1, 20),
        batched_tokens=chance.randint(20, 80),
        step_seconds=1.0,
    )
    if engine.block_tokens == 1:
        engine = PagedEngine(**{**vars(engine), "blocks": 400})
    fast, slow = simulate(requests, engine), slowly(requests, engine)
    assert {name: getattr(fast, name) for name in ("steps", "peak_running", "preemptions", "recomputed_tokens")} == {
        name: slow[name] for name in ("steps", "peak_running", "preemptions", "recomputed_tokens")
    }
    assert fast.mean_waste == pytest.approx(slow["waste"] / (slow["used"] * engine.block_tokens))


def test_some_of_them_were_put_back():
    requests = Lengths(p50=100, p95=400, output=100).draw(500, most=2000)
    engine = PagedEngine(blocks=200, block_tokens=16, max_seqs=64, batched_tokens=512, step_seconds=0.01)
    result = simulate(requests, engine)
    assert result.preemptions > 50
    assert result.peak_blocks <= 200
    assert 0.8 < result.mean_used <= 1


def test_slots_of_the_maximal_length_waste_what_requests_do_not_fill():
    requests = Requests(prompts=np.full(10, 512), outputs=np.full(10, 1), arrivals=np.zeros(10))
    slots = contiguous(requests, pool_tokens=8192 * 7 + 1, max_len=8192)
    assert slots.slots == 7
    assert slots.mean_waste == 1 - 512 / 8192


def test_a_shared_prefix_is_held_once():
    lengths = Lengths(p50=2000, p95=3000, prefix=1000, output=50)
    requests = lengths.draw(300, most=8192)
    alone = Requests(prompts=requests.prompts, outputs=requests.outputs, arrivals=requests.arrivals)
    engine = PagedEngine(blocks=4000, block_tokens=16, max_seqs=1000, batched_tokens=8192, step_seconds=0.01)
    assert simulate(requests, engine).peak_running > 1.5 * simulate(alone, engine).peak_running


def test_a_request_that_the_pool_cannot_hold_is_refused():
    requests = Requests(prompts=np.array([1000]), outputs=np.array([100]), arrivals=np.zeros(1))
    engine = PagedEngine(blocks=10, block_tokens=16, max_seqs=4, batched_tokens=64, step_seconds=1)
    with pytest.raises(UsageError, match="A request takes 69 blocks and the pool has 10"):
        simulate(requests, engine)


def test_lengths_have_the_percentiles_that_were_stated():
    lengths = parse_lengths("p50=800,p95=6000,rate=5,output=200")
    requests = lengths.draw(100_000, most=10**6)
    assert np.percentile(requests.prompts, 50) == pytest.approx(800, rel=0.02)
    assert np.percentile(requests.prompts, 95) == pytest.approx(6000, rel=0.03)
    assert requests.prompts.mean() == pytest.approx(lengths.mean_prompt, rel=0.05)
    assert requests.outputs.mean() == pytest.approx(200, rel=0.02)
    assert 100_000 / requests.arrivals[-1] == pytest.approx(5, rel=0.02)
    short = lengths.draw(1000, most=500)
    assert (short.prompts + short.outputs).max() <= 500
    assert short.outputs.min() >= 1


def test_lengths_of_a_file(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("100\n200,50\n\n300, 7\n")
    lengths = parse_lengths(str(file))
    assert lengths.stated == ((100, 256), (200, 50), (300, 7))
    assert (lengths.p50, lengths.mean_prompt) == (200, 200)
    assert lengths.draw(4, most=1000).prompts.tolist() == [100, 200, 300, 100]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("p95=5", UsageError, "at least p50"),
        ("p50=800,p95=100", UsageError, "less than p50"),
        ("p50=800,p99=100", UsageError, "Unknown 'p99'"),
        ("p50=many", UsageError, "'many' is not"),
        ("p50=8,rate=fast", UsageError, "'fast' is no rate"),
        ("p50=8,rate=nan", UsageError, "rate is nan"),
        ("nowhere.txt", UsageError, "is no file"),
    ],
)
def test_bad_lengths_are_one_line(text, error, words):
    with pytest.raises(error, match=words):
        parse_lengths(text)


@pytest.mark.parametrize("content", [b"", b"12\nabc\n", b"\xff\xfe\x00", b"99999999999\n", b"0\n"])
def test_bad_files_are_one_line(tmp_path, content):
    file = tmp_path / "lengths.txt"
    file.write_bytes(content)
    with pytest.raises(UnreadableFile):
        parse_lengths(str(file))
