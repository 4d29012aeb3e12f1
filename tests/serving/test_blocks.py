"""The block simulator beside a slow one that looks at every request in every step, and beside vLLM's scheduler."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from tonnage.catalog.models import find_model  # noqa: E402
from tonnage.errors import UnreadableFile, UsageError  # noqa: E402
from tonnage.serving.blocks import PagedEngine, contiguous, simulate  # noqa: E402
from tonnage.serving.lengths import Lengths, Requests, parse_lengths  # noqa: E402


def slowly(requests, engine):
    """Serve the same requests with a list of blocks held by each, all of which are looked at in every step."""
    size, shared = engine.block_tokens, requests.prefix // engine.block_tokens * engine.block_tokens
    free = engine.blocks - shared // size
    columns = zip(requests.prompts, requests.outputs, requests.arrivals, strict=True)
    waiting = [
        {"known": int(p) - shared, "left": int(o), "arrival": int(t / engine.step_seconds)} for p, o, t in columns
    ]
    running, step = [], 0
    result = {"steps": 0, "peak_running": 0, "preemptions": 0, "recomputed_tokens": 0, "used": 0, "waste": 0}

    def put_back(entry):
        nonlocal free
        free += entry["blocks"]
        result["preemptions"] += 1
        result["recomputed_tokens"] += entry["computed"]
        waiting.insert(0, {"known": entry["known"], "left": entry["left"], "arrival": 0})

    def take(entry, tokens):
        """Give an entry the blocks for so many more tokens; False if there are not enough."""
        nonlocal free
        needed = -(-(entry["computed"] + tokens) // size) - entry["blocks"]
        if needed > free:
            return False
        free -= needed
        entry["blocks"] += needed
        entry["computed"] += tokens
        return True

    while waiting or running:
        if not running and waiting[0]["arrival"] > step:
            step = waiting[0]["arrival"]
        result["steps"] += 1
        budget, preempted, position = engine.batched_tokens, False, 0
        while position < len(running) and budget > 0:
            entry = running[position]
            tokens = min(entry["known"] - entry["computed"], budget)
            while not take(entry, tokens):
                last = running.pop()
                put_back(last)
                preempted = True
                if last is entry:
                    break
            else:
                budget -= tokens
            position += 1
        while budget > 0 and not preempted and waiting and waiting[0]["arrival"] <= step:
            if len(running) >= engine.max_seqs or -(-waiting[0]["known"] // size) > free:
                break
            entry = {**waiting.pop(0), "computed": 0, "blocks": 0}
            tokens = min(entry["known"], budget)
            assert take(entry, tokens)
            budget -= tokens
            running.append(entry)
        result["peak_running"] = max(result["peak_running"], len(running))
        result["used"] += sum(entry["blocks"] for entry in running)
        result["waste"] += sum(entry["blocks"] * size - entry["computed"] for entry in running)
        for entry in list(running):
            if entry["computed"] == entry["known"]:
                entry["known"] += 1
                entry["left"] -= 1
                if not entry["left"]:
                    running.remove(entry)
                    free += entry["blocks"]
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


CASES = (
    # prompts (p50, p95), mean answer, blocks, sequences, tokens of a step, mean steps between arrivals
    (100, 400, 100, 200, 64, 512, 0),
    (100, 400, 100, 400, 64, 512, 0),
    (300, 300, 50, 100, 16, 256, 0),
    (50, 200, 200, 150, 128, 2048, 0),
    (500, 2000, 100, 600, 32, 1024, 3),
    (20, 60, 300, 128, 64, 256, 1),
)


CACHED = (
    # the same with cached prefixes, and the tokens that all prompts share
    (100, 400, 100, 200, 64, 512, 0, 0),
    (100, 400, 100, 200, 64, 512, 0, 50),
    (300, 300, 50, 100, 16, 256, 0, 100),
    (200, 800, 200, 250, 128, 2048, 0, 100),
    (500, 2000, 100, 600, 32, 1024, 3, 333),
    (40, 90, 300, 128, 64, 256, 1, 32),
)


def make_case(number, cases=CASES):
    """Return the requests of a case and the engine that serves them."""
    p50, p95, output, blocks, seqs, batched, gap, *prefix = cases[number]
    shared = prefix[0] if prefix else 0
    requests = Lengths(p50=p50, p95=p95, output=output, prefix=shared).draw(150, most=1500, seed=number)
    gaps = np.random.default_rng(number).integers(0, 2 * gap + 1, 150)
    arrivals = np.cumsum(gaps).astype(float) if gap else np.zeros(150)
    limits = {"blocks": blocks, "block_tokens": 16, "max_seqs": seqs, "batched_tokens": batched}
    engine = PagedEngine(**limits, step_seconds=1.0, caches=cases is CACHED)
    return Requests(prompts=requests.prompts, outputs=requests.outputs, arrivals=arrivals, prefix=shared), engine


SCHEDULED = ((2132, 24, 105), (652, 48, 53), (1620, 5, 25), (4970, 24, 260), (1166, 18, 15), (7323, 42, 484))
"""Steps, most requests together and preemptions of vLLM 0.33.0's scheduler (tests/programs/vllm_scheduler.py)."""


SCHEDULED_CACHED = ((2129, 24, 102), (835, 33, 83), (1173, 7, 22), (3839, 24, 140), (799, 31, 19), (7203, 49, 525))
"""The same of CACHED."""


@pytest.mark.parametrize("number", range(len(CACHED)))
def test_it_finds_what_is_left_of_requests_that_were_put_back_as_vllms_scheduler_did(number):
    requests, engine = make_case(number, CACHED)
    result = simulate(requests, engine)
    assert (result.steps, result.peak_running, result.preemptions) == SCHEDULED_CACHED[number]
    anew = simulate(requests, replace(engine, caches=False))
    assert 0 < result.recomputed_tokens < 0.8 * anew.recomputed_tokens


@pytest.mark.parametrize("number", range(len(CASES)))
def test_it_does_what_vllms_scheduler_did(number):
    result = simulate(*make_case(number))
    assert (result.steps, result.peak_running, result.preemptions) == SCHEDULED[number]


def test_vllms_scheduler_still_does_so(tmp_path):
    """Where vLLM is installed, its scheduler runs again."""
    pytest.importorskip("vllm.version")
    (tmp_path / "config.json").write_text(
        json.dumps({**find_model("smollm2-135m").config(), "torch_dtype": "bfloat16"})
    )
    cases = []
    for number in range(len(CASES) + len(CACHED)):
        is_cached = number >= len(CASES)
        requests, engine = make_case(number - len(CASES) * is_cached, CACHED if is_cached else CASES)
        cases.append(
            {
                **({"prefix": requests.prefix} if engine.caches else {}),
                "prompts": requests.prompts.tolist(),
                "outputs": requests.outputs.tolist(),
                "arrivals": [int(seconds) for seconds in requests.arrivals],
                **{"blocks": engine.blocks + 1, "block_tokens": 16, "max_seqs": engine.max_seqs},
                **{"batched_tokens": engine.batched_tokens, "max_len": 1600},
            }
        )
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    program = Path(__file__).parents[1] / "programs" / "vllm_scheduler.py"
    words = [sys.executable, str(program), str(tmp_path), str(tmp_path / "cases.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(item["steps"], item["peak_running"], item["preemptions"]) for item in found] == [
        *SCHEDULED,
        *SCHEDULED_CACHED,
    ]


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
    short = lengths.draw(1000, most=1000)
    assert (short.prompts + short.outputs).max() <= 1000
    assert short.outputs.min() >= 1
    with pytest.raises(UsageError, match="The median prompt has 800 tokens, and a request at most 800"):
        lengths.draw(1000, most=800)


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


@pytest.mark.parametrize(
    ("text", "tokens", "share"),
    [
        ("p50=1000,p95=4000", 1000, 0.5),
        ("p50=1000,p95=4000", 4000, 0.05),
        ("p50=1000,p95=4000", 10**6, 0.0),
        ("p50=100", 100, 1.0),
        ("p50=100", 101, 0.0),
    ],
)
def test_share_of_long_prompts(text, tokens, share):
    assert parse_lengths(text).share_from(tokens) == pytest.approx(share, abs=1e-6)


def test_share_of_long_prompts_of_a_file(tmp_path):
    (tmp_path / "lengths").write_text("100\n200,5\n300\n400\n")
    assert parse_lengths(str(tmp_path / "lengths")).share_from(300) == 0.5


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("p50=1000,p95=4000", 18_432),
        ("p50=1k,p95=1m", 131_072),
        ("p50=100,output=100000", 4096),
        ("p50=100,output=1", 4096),
        ("p50=200,p95=3000,output=1", 1000),
    ],
)
def test_means_of_requests_that_are_cut_to_the_longest(text, most):
    lengths = parse_lengths(text)
    drawn = lengths.draw(200_000, most=most)
    prompt, output = lengths.means_within(most)
    assert prompt == pytest.approx(drawn.prompts.mean(), rel=0.02)
    assert output == min(lengths.output, most - prompt)


def test_means_of_the_requests_of_a_file_that_are_cut(tmp_path):
    (tmp_path / "lengths").write_text("100,50\n300,500\n")
    assert parse_lengths(str(tmp_path / "lengths")).means_within(201) == (150, (50 + 1) / 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "need at least p50"),
        (" ,", "need at least p50"),
        ("p50=9,p50=9", "state p50 twice"),
        ("p50=9,prefix=9", "prefix is 9, and half of the prompts have at most 9"),
    ],
)
def test_lengths_that_say_nothing_or_too_much(text, words):
    with pytest.raises(UsageError, match=words):
        parse_lengths(text)
