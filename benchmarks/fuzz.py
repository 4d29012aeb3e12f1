"""Strangers' files for every reader: damaged, hostile and huge ones; each has to end in a value or in one line.

    python -m benchmarks.fuzz [--inputs 100000] [--seed 0] [--only READER]

An input is at most 1 MB.  A fault is an exception that is none of tonnage's, a message that a terminal would carry
out, more than 5 seconds of processor time, more than 1 GiB of memory, or an attempt to start a program, to connect or
to import something that the file names.  Prints a line for each reader and each fault, and exits with 1 after faults.
`tests/benchmarks/test_fuzz.py` runs a short form.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import random
import resource
import sys
import tempfile
import time
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tonnage.allocator import snapshot
from tonnage.catalog.configurations import resolve
from tonnage.catalog.models import find_model
from tonnage.errors import TonnageError
from tonnage.estimates import archive
from tonnage.estimates.estimate import Coverage, Estimate, Host, Moment, OutOfMemory, Peak, PhasePeak, StepPeak
from tonnage.planner import plan_file
from tonnage.printable import make_printable
from tonnage.recorder.tonnage_recorder.engines import read_words
from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS, EVENT_COLUMNS
from tonnage.report import html, terminal, viewer
from tonnage.serving import plan_file as serve_file
from tonnage.serving import safetensors
from tonnage.serving.lengths import parse_lengths
from tonnage.trace import trace as traces
from tonnage.trace.trace import Mark, Trace
from tonnage.trainers import reading
from tonnage.units import GIB, MIB

MOST_SECONDS: Final = 5.0
MOST_BYTES: Final = GIB
LARGEST_INPUT: Final = 10**6

_FORBIDDEN: Final = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")
"""Events of Python's audit hook that no reader may cause."""

_MARK: Final = "tonnage_fuzz_code"
"""Module that hostile files name; importing it is a fault."""


class Fault(Exception):
    """A reader did what it must not."""


class _Bomb:
    """Unpickling it imports a module."""

    def __reduce__(self) -> Any:
        return (__import__, (_MARK,))


# --- seeds: a valid file for each reader ----------------------------------------------------------------------


def _estimate() -> Estimate:
    held = {"parameter": 2 * GIB, "activation": GIB, "cached": MIB, "runtime": GIB - MIB}
    peak = Peak(
        allocated_bytes=3 * GIB,
        reserved_bytes=3 * GIB + MIB,
        process_bytes=4 * GIB,
        low_bytes=4 * GIB - 1,
        high_bytes=4 * GIB + 1,
        phase="backward",
        layer="layers.1",
        step=1,
        by_category=held,
    )
    return Estimate(
        source="ghost",
        versions={"torch": "2.13.0"},
        model={"name": "a", "parameters": 10, "trainable_parameters": 5},
        job={"seq_len": 8, "command": ["python", "a.py"]},
        plan={"shard": "none"},
        cluster={"gpu": "t4", "gpus": 1, "capacity_bytes": 3 * GIB},
        fits=False,
        rank=0,
        peak=peak,
        phases=(PhasePeak(name="load", allocated_bytes=1, reserved_bytes=2),),
        host=Host(peak_bytes=5, pinned_bytes=1, by_category={"process": 5}),
        time={"step_seconds": None, "tokens_per_second_per_gpu": None, "mfu": None, "bound_by": None},
        coverage=Coverage(run=("a",), modelled=("b",), assumed=("c",)),
        oom=OutOfMemory(message="out", phase="forward", layer="", step=1, stack=("a:1 b",)),
        curve=(Moment(mark=0, phase="load", allocated_bytes=1, reserved_bytes=2),),
        steps=(StepPeak(step=1, allocated_bytes=1, reserved_bytes=2),),
        ranks=({"rank": 0, "fits": False, "allocated_bytes": 1, "reserved_bytes": 2, "process_bytes": 3},),
        notes=("a note",),
    )


def _trace() -> Trace:
    rows = [
        (3, 0, 2 * MIB, 0, 0),
        *((kind, 512 * n, 512, 0, 1) for n in range(4) for kind in (0, 1, 2)),
        (0, 0, 9, 0, 1),
    ]
    columns = zip(EVENT_COLUMNS, zip(*rows, strict=True), strict=True)
    return Trace(
        source="ghost",
        versions={"torch": "2.13.0"},
        device={"name": "a", "total_bytes": GIB},
        marks=(Mark(0, "load", ""), Mark(0, "forward", "layer")),
        event_columns={name: array("q", column) for name, column in columns},
        log=bytes(128),
    )


def _saved() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "saved")
        archive.save(path, _estimate(), (_trace(),))
        return path.read_bytes()


def _snapshot() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot")
        viewer.write(_trace(), path)
        return path.read_bytes()


def _config() -> bytes:
    known = find_model("qwen2.5-vl-3b") or find_model("gpt2")
    assert known is not None
    return json.dumps(known.config()).encode()


_DS: Final = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}
_YAML: Final = b"base_model: gpt2\nmicro_batch_size: 2\nadapter: lora\nlora_r: 8\nsequence_len: 128\nbf16: true\n"
_PLAN: Final = b'schema_version = 1\nmodel = "gpt2"\ngpu = "t4"\n[job]\nseq_len = 64\n[plan]\nshard = "none"\n'
_SERVE: Final = (
    b'schema_version = 1\ntask = "serve"\nmodel = "gpt2"\ngpu = "t4"\n[serve]\nmax_len = 512\nmax_seqs = 8\n'
)
_LENGTHS: Final = b"800,256\n1200\n6000,128\n4k,1\n"
_ENGINE_LOG: Final = (
    b"GPU KV cache size: 71,920 tokens\nMaximum concurrency for 2,048 tokens per request: 35.12x\n"
    b"Graph capturing finished in 20 secs, took 0.52 GiB\nKV Cache is allocated. K size: 1.10 GB, V size: 1.10 GB\n"
)


def _safetensors() -> bytes:
    layout = {"dtype": "F16", "shape": [2, 8], "data_offsets": [0, 32]}
    other = {"dtype": "F32", "shape": [4], "data_offsets": [32, 48]}
    return _with_length(json.dumps({"__metadata__": {"format": "pt"}, "a": layout, "b": other}).encode()) + bytes(48)


def _with_length(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


# --- readers --------------------------------------------------------------------------------------------------


def _read_saved(path: Path) -> str:
    estimate = archive.load_estimate(path)
    json.dumps(estimate.to_json(), allow_nan=False)
    return terminal.render(estimate, width=100) + html.page(estimate)


def _read_traces(path: Path) -> str:
    for trace in archive.load_traces(path):
        viewer.write(trace, path.with_suffix(".pickle"))
    return ""


def _read_cached(path: Path) -> str:
    return repr(traces.load(path, "rank0/"))


def _read_snapshot(path: Path) -> str:
    snapshot.read(path)
    return ""


def _read_config(path: Path) -> str:
    return " ".join(resolve(path, offline=True).dropped)


def _read_plan(path: Path) -> str:
    return repr(plan_file.read(path).network(None))


def _read_trainer(path: Path) -> str:
    reading.read(path)
    return ""


def _read_safetensors(path: Path) -> str:
    return repr(safetensors.read_header(path))


def _read_serve(path: Path) -> str:
    return repr(serve_file.read(path)) if serve_file.is_serve_file(path) else ""


def _read_lengths(path: Path) -> str:
    return repr(parse_lengths(str(path)).p95)


def _read_engine_log(path: Path) -> str:
    return repr([read_words(line) for line in path.read_text(errors="replace").splitlines()])


READERS: Final[dict[str, tuple[str, Callable[[], bytes], Callable[[Path], str]]]] = {
    "estimate": ("saved.tonnage", _saved, _read_saved),
    "traces": ("saved.tonnage", _saved, _read_traces),
    "cached trace": ("saved.trace", _saved, _read_cached),
    "snapshot": ("snapshot.pickle", _snapshot, _read_snapshot),
    "configuration": ("config.json", _config, _read_config),
    "plan": ("plan.toml", lambda: _PLAN, _read_plan),
    "DeepSpeed": ("ds_config.json", lambda: json.dumps(_DS).encode(), _read_trainer),
    "safetensors": ("model.safetensors", _safetensors, _read_safetensors),
    "serving plan": ("serve.toml", lambda: _SERVE, _read_serve),
    "lengths": ("lengths.csv", lambda: _LENGTHS, _read_lengths),
    "engine log": ("vllm.log", lambda: _ENGINE_LOG, _read_engine_log),
    "axolotl": ("axolotl.yaml", lambda: _YAML, _read_trainer),
}
"""Readers by name: the file's name, a valid file, and what is done with it."""


# --- damage ---------------------------------------------------------------------------------------------------

_HOSTILE: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 2**63, 10**400, 1e308, float("inf"), float("nan"), "", "a" * 70_000, "a " * 40_000),
    *("\x1b]0;owned\x07\x1b[2J", "\u202eabc", "\x00", "../../etc/passwd", f"{_MARK}:make", "org/kernel", "\ud800"),
    *([], {}, [[]], {"": {}}, ["x y"] * 3_000, {str(n): n for n in range(3_000)}, [0] * 50_000),
)


def damage(content: bytes, chance: random.Random) -> bytes:
    """Return a file that was changed: in its structure where it has one, else in its bytes."""
    ways: list[Callable[[bytes, random.Random], bytes]] = [_change_bytes]
    if content[:2] == b"PK":
        ways += [_change_archive] * 3
    elif content[8:9] == b"{":
        ways += [_change_header] * 2
    elif content[:1] in (b"{", b"["):
        ways += [_change_json] * 2
    else:
        ways += [_change_lines]
    return chance.choice(ways)(content, chance)[:LARGEST_INPUT]


def _change_bytes(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        place = chance.randrange(len(changed) + 1)
        match chance.randrange(6):
            case 0:
                changed[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[place : place + chance.choice((1, 4, 100))]
            case 2:
                changed[place:place] = chance.randbytes(chance.choice((1, 4, 50)))
            case 3:
                changed[place:place] = changed[place : place + 200] * chance.choice((1, 3, 300))
            case 4:
                changed[place : place + 8] = chance.choice((b"\xff" * 8, bytes(8), (2**31).to_bytes(8, "little")))
            case _:
                del changed[place:]
    if chance.random() < 0.02:
        changed = bytearray(pickle.dumps([_Bomb()]))
    return bytes(changed)


def _change_lines(content: bytes, chance: random.Random) -> bytes:
    lines = content.decode(errors="replace").splitlines()
    for _ in range(chance.choice((1, 2, 4))):
        place = chance.randrange(len(lines) + 1)
        value = chance.choice(_HOSTILE)
        text = value if isinstance(value, str) else str(value) if isinstance(value, float) else json.dumps(value)
        if chance.random() < 0.5 and place < len(lines):
            separator = "=" if "=" in lines[place] else ":"
            lines[place] = f"{lines[place].partition(separator)[0]}{separator} {text}"
        else:
            most = LARGEST_INPUT // (sum(map(len, lines)) + 1)
            lines[place:place] = [text] if chance.random() < 0.7 else lines * min(chance.choice((2, 300)), most)
    return "\n".join(lines).encode(errors="surrogatepass")


def _change_json(content: bytes, chance: random.Random) -> bytes:
    document = json.loads(content)
    for _ in range(chance.choice((1, 1, 2, 6))):
        document = _change_value(document, chance)
    try:
        text = json.dumps(document)
    except (ValueError, RecursionError):
        return content
    if chance.random() < 0.02:
        text = chance.choice(("[", '{"a":')) * chance.choice((50, 2_000, 100_000)) + text
    return text.encode()


def _change_header(content: bytes, chance: random.Random) -> bytes:
    """Return a file of safetensors with a changed header of the right length."""
    end = 8 + int.from_bytes(content[:8], "little")
    return _with_length(_change_json(content[8:end], chance)) + content[end:]


def _change_value(value: Any, chance: random.Random) -> Any:
    """Return a value in which one place, at any depth, is another."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        name = chance.choice(list(value))
        match chance.randrange(8):
            case 0:
                return {key: item for key, item in value.items() if key != name}
            case 1:
                return {**value, str(chance.choice(_HOSTILE))[:200]: value[name]}
            case 2:
                return {**value, name: chance.choice(_HOSTILE)}
            case _:
                return {**value, name: _change_value(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        place = chance.randrange(len(value))
        if chance.random() < 0.2:
            size = len(json.dumps(value, default=str)) + 1
            return value * min(chance.choice((2, 100, 5_000)), LARGEST_INPUT // size + 1)
        return [*value[:place], _change_value(value[place], chance), *value[place + 1 :]]
    return chance.choice(_HOSTILE)


def _change_archive(content: bytes, chance: random.Random) -> bytes:
    """Return an archive with a changed member, correctly packed."""
    with zipfile.ZipFile(io.BytesIO(content)) as source:
        members = {name: source.read(name) for name in source.namelist()}
    name = chance.choice(list(members))
    if name.endswith(".json"):
        members[name] = _change_json(members[name], chance)
    elif chance.random() < 0.3:
        length = 8 * chance.choice((1, 10_000, 1_000_000, 2_000_000))
        values = (bytes(length), b"\xff" * length, chance.randbytes(800) * (length // 800))
        for column in members if chance.random() < 0.5 else [name]:
            if not column.endswith(".json"):
                members[column] = chance.choice(values)
    elif chance.random() < 0.5:
        numbers = array("q", members[name][: len(members[name]) // 8 * 8])
        for _ in range(min(len(numbers), chance.choice((1, 3)))):
            numbers[chance.randrange(len(numbers))] = chance.choice(
                (-1, 0, 1, 512, 2**40, 2**62, -(2**63), len(ACTIONS))
            )
        members[name] = numbers.tobytes()
    else:
        members[name] = _change_bytes(members[name], chance)
    if chance.random() < 0.05:
        del members[name]
    packed = io.BytesIO()
    method = chance.choice((zipfile.ZIP_DEFLATED,) * 8 + (zipfile.ZIP_STORED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(packed, "w", method) as target:
        for member, data in members.items():
            target.writestr(zipfile.ZipInfo(member), data, method)  # of no time, so that a seed is repeatable
    return packed.getvalue()


# --- running --------------------------------------------------------------------------------------------------


def check(read: Callable[[Path], str], path: Path) -> str:
    """Let a reader read a file; return how it ended: `read`, or the name of tonnage's error.  Raises Fault."""
    began = time.process_time()
    try:
        shown, ended = read(path), "read"
    except TonnageError as error:
        shown, ended = str(error), type(error).__name__
        if "\n" in shown:
            raise Fault("a message of several lines") from error
    except Fault:
        raise
    except BaseException as error:
        raise Fault(f"{type(error).__name__}: {str(error)[:200]}") from error
    seconds = time.process_time() - began
    if seconds > MOST_SECONDS:
        raise Fault(f"{seconds:.1f} s")
    if make_printable(shown, lines=True, colours=True) != shown:
        raise Fault("text that a terminal would carry out")
    return ended


def _watch() -> None:
    """Turn what no reader may do into a Fault, and limit the memory."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FORBIDDEN or (event == "import" and arguments[0] == _MARK):
            raise Fault(f"{event} {arguments!r}")

    sys.addaudithook(hook)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.RLIM_INFINITY))


def run(inputs: int, seed: int, only: str | None = None) -> Iterator[tuple[str, int, Counter[str], list[str]]]:
    """Yield for each reader its name, the number of inputs, how they ended, and the faults."""
    chosen = {name: reader for name, reader in READERS.items() if only in (None, name)}
    with tempfile.TemporaryDirectory() as folder:
        for name, (file, seed_file, read) in chosen.items():
            chance, path = random.Random(f"{seed} {name}"), Path(folder, file)
            valid = seed_file()
            path.write_bytes(valid)
            endings, faults = Counter({check(read, path): 1}), list[str]()
            assert endings["read"], f"the valid file of {name} is refused"
            for number in range(max(inputs // len(chosen), 1)):
                content = damage(valid, chance)
                path.write_bytes(content)
                try:
                    endings[check(read, path)] += 1
                except Fault as fault:
                    faults.append(f"input {number} ({len(content)} bytes): {fault}")
            yield name, sum(endings.values()) + len(faults), endings, faults


def main() -> int:
    """Run the fuzz and return 1 if there were faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=READERS)
    options = parser.parse_args()
    _watch()
    failed = 0
    for name, count, endings, faults in run(options.inputs, options.seed, options.only):
        print(
            f"{name:14} {count:7,} files, {len(faults)} faults; {', '.join(f'{n:,} {k}' for k, n in endings.items())}"
        )
        for fault in faults[:20]:
            print(f"    {fault}")
        failed += len(faults)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
