"""Tells what differs between two records, values apart from wording.

A value differs where a JSON value, a number in a text, an exit code or the content of a file is another one.  Wording
differs where a text has other words with the same numbers.  What is no part of an answer is left out first: names of
temporary folders, seconds that something took, and progress lines, which appear only where something takes long.
"""

import io
import json
import pickle
import re
import struct
import zipfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.oracle.recording import read_facts

Kind = Literal["VALUES", "WORDING"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One place in which two answers differ."""

    kind: Kind
    """Whether a value differs, or the words alone."""
    where: str
    """The document and the place in it: `stdout 0: peak.allocated_bytes`."""
    old: str
    """What the older record has there."""
    new: str
    """What the newer record has there."""

    def __str__(self) -> str:
        return f"{self.where}: {self.old} -> {self.new}"


# ---- comparison of documents ---------------------------------------------------------------------------------------

_NUMBER: Final = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
_ABSENT: Final = object()
_SHOWN: Final = 160
"""Characters of a value that are shown."""
_BEFORE: Final = 40
"""Of them those before the first one that differs."""


def differences(old: Any, new: Any, where: str) -> Iterator[Difference]:
    """Yield where two documents differ: JSON values, texts or bytes."""
    if isinstance(old, str) and isinstance(new, str):
        yield from _of_texts(old, new, where)
    elif isinstance(old, dict) and isinstance(new, dict):
        for name in old | new:
            inside = f"{where}.{name}" if where else name
            yield from differences(old.get(name, _ABSENT), new.get(name, _ABSENT), inside)
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
        yield from _of_lists(old, new, where)
    elif type(old) is not type(new) or old != new:
        yield _difference("VALUES", where, old, new)


def _of_lists(old: Sequence[Any], new: Sequence[Any], where: str) -> Iterator[Difference]:
    if len(old) == len(new):
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{where}[{place}]")
        return
    gone, come = (_without(one, other) for one, other in ((old, new), (new, old)))
    counts = f"{len(old)} items", f"{len(new)} items"
    yield _difference("VALUES", where, f"{counts[0]} {gone}", f"{counts[1]} {come}")


def _without(some: Sequence[Any], others: Sequence[Any]) -> list[str]:
    """Return the items that the others do not have."""
    keys = [Counter(json.dumps(item, sort_keys=True, default=str) for item in items) for items in (some, others)]
    return [*(keys[0] - keys[1]).elements()]


def _of_texts(old: str, new: str, where: str) -> Iterator[Difference]:
    """Yield the lines that differ: other numbers or another word in place of one are values."""
    if old == new:
        return
    if not _is_prose(old) and not _is_prose(new):
        yield _difference("VALUES", where, old, new)
        return
    before, after = old.splitlines(), new.splitlines()
    for tag, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            gone, come = "\n".join(before[a:b]), "\n".join(after[c:d])
            place = where if max(len(before), len(after)) == 1 else f"{where} line {a + 1}"
            kind: Kind = "WORDING" if _same_numbers(gone, come) else "VALUES"
            yield _difference(kind, place, gone, come)


def _is_prose(text: str) -> bool:
    """Return whether a text is more than one word, such as the name of a technique."""
    return len(text.split()) > 1


def _same_numbers(old: str, new: str) -> bool:
    """Return whether two texts have the same numbers, be it in another order or more than once.

    Where the words between them are the same, it is the same numbers at the same places.
    """
    numbers = _NUMBER.findall(old), _NUMBER.findall(new)
    if _NUMBER.sub("", old).split() == _NUMBER.sub("", new).split():
        return numbers[0] == numbers[1]
    return set(numbers[0]) == set(numbers[1])


def _difference(kind: Kind, where: str, old: Any, new: Any) -> Difference:
    """Make a difference whose two sides begin shortly before they part, and are not too long to read."""
    sides = ["nothing" if one is _ABSENT else one if isinstance(one, str) else repr(one) for one in (old, new)]
    common = next((place for place, pair in enumerate(zip(*sides, strict=False)) if pair[0] != pair[1]), 0)
    begin = max(common - _BEFORE, 0) if max(map(len, sides)) > _SHOWN else 0
    shown = (
        f"{'...' if begin else ''}{one[begin:][:_SHOWN]}{'...' if begin + _SHOWN < len(one) else ''}" for one in sides
    )
    return Difference(kind=kind, where=where, old=next(shown), new=next(shown))


# ---- documents of a record -----------------------------------------------------------------------------------------


def documents(folder: Path) -> dict[str, Any]:
    """Return the answer to one question as documents by name, without what is not stable."""
    answer = json.loads((folder / "answer.json").read_text())
    names = {answer["home"]: "HOME", answer["source"]: "SOURCE"}
    found: dict[str, Any] = {}
    for number, command in enumerate(answer["commands"]):
        found[f"command {number}"] = command["command"]
        found[f"exit code {number}"] = command["code"]
        found[f"stdout {number}"] = parsed(_text(folder / f"{number}.out", names))
        found[f"stderr {number}"] = without_progress(_text(folder / f"{number}.err", names))
    files = folder / "files"
    for path in sorted(files.rglob("*")):
        if path.is_file():
            found[f"file {path.relative_to(files)}"] = _of_file(path, names)
    return found


def _text(path: Path, names: Mapping[str, str]) -> str:
    return normalised(path.read_bytes().decode(errors="backslashreplace"), names)


_UNSTABLE: Final = (
    (re.compile(r"[ \t]*\btonnage/[\w/]+\.py:\d+ \w+\n?"), ""),
    (re.compile(r"\.\.\. \d+ frames left out"), "... SOME frames left out"),
    (re.compile(r"/tmp/[\w.-]+"), "/tmp/SOME"),
    (re.compile(r"0x[0-9a-f]{6,}"), "0xADDRESS"),
)
_OF_HOST: Final = re.compile(r"^.*(?:resident|host memory|^\s*host\b).*$", re.MULTILINE)
"""Lines of a report that say how much of the host's memory is resident, which differs from run to run."""
_SIZE: Final = re.compile(r"[\d.,]+ [KMGT]iB")


def normalised(text: str, names: Mapping[str, str]) -> str:
    """Return a text with words in place of folders, temporary names, addresses and resident sizes, and without
    the frames of tonnage's own code in a stack."""
    for path, word in names.items():
        text = text.replace(path, word)
    for pattern, word in _UNSTABLE:
        text = pattern.sub(word, text)
    return _OF_HOST.sub(lambda line: _SIZE.sub("SOME GiB", line[0]), text)


_ADDRESSES: Final = range(2**44, 2**48)
"""Numbers that are addresses; no size is as large."""


def stable(document: Any) -> Any:
    """Return a JSON document whose addresses count from the lowest one, without the host's resident bytes, the
    numbers of processes, and the frames of tonnage's own code in stacks."""
    addresses = [number for number in _numbers(document) if number in _ADDRESSES]
    return _stable(document, min(addresses, default=0))


def _numbers(document: Any) -> Iterator[int]:
    if isinstance(document, dict | list | tuple):
        for each in document.values() if isinstance(document, dict) else document:
            yield from _numbers(each)
    elif isinstance(document, int):
        yield document


def _stable(document: Any, base: int) -> Any:
    if isinstance(document, dict):
        found = {name: _stable(value, base) for name, value in document.items()}
        host, process = found.get("host"), found.get("process")
        if isinstance(host, dict) and host.get("peak_bytes"):
            found["host"] = {**host, "peak_bytes": "SOME"}
        return found | ({"process": "SOME"} if isinstance(process, int) else {})
    if isinstance(document, list | tuple):
        return [
            _stable(each, base) for each in document if not (isinstance(each, str) and each.startswith("SOURCE/"))
        ]
    return document - base if isinstance(document, int) and document in _ADDRESSES else document


def stable_words(content: bytes) -> bytes:
    """Return a column of 64-bit words whose addresses count from the lowest one; other bytes as they are."""
    if len(content) % 8:
        return content
    words = array("Q", content)
    base = min((word for word in words if word in _ADDRESSES), default=0)
    return array("Q", (word - base if word in _ADDRESSES else word for word in words)).tobytes()


_RECORD: Final = struct.Struct("<32sQQ16x")
"""A record of the log: what was done, in which stream, of how many bytes; last two addresses, of any memory."""


def stable_log(content: bytes) -> Any:
    """Return the records of a log with numbers in place of streams and without addresses; other bytes as they are."""
    if len(content) % _RECORD.size:
        return content
    streams: dict[int, int] = {}
    records = _RECORD.iter_unpack(content)
    return [(what, streams.setdefault(stream, len(streams)), size) for what, stream, size in records]


_LOGGED: Final = re.compile(r"\[[IWEF]\d{4} \d\d:")


_FRAME: Final = '  File "'
_OWN_FRAME: Final = f"{_FRAME}SOURCE/"


def without_progress(text: str) -> str:
    """Return standard error without progress: whole sentences and the tracebacks of programs are left, without
    the frames of tonnage's own code.

    A progress line is one that does not end as a sentence does; it is printed only after two seconds.  Lines of
    torch's own log, which have the time, are left out as well.
    """
    kept, inside, ours = [], False, False
    for line in text.splitlines():
        begins = line.startswith("Traceback ")
        ours = inside and line.startswith(" ") and (_OWN_FRAME in line or (ours and not line.startswith(_FRAME)))
        told = line.endswith(".") or line.startswith("error")
        if (inside or begins or told) and not ours and not _LOGGED.search(line):
            kept.append(line)
        inside = begins or (inside and line.startswith(" "))
    return "\n".join(kept)


_DATA: Final = re.compile(r'(<script type="application/json"[^>]*>)(.*?)</script>', re.DOTALL)


def parsed(text: str) -> Any:
    """Return a text's JSON document, else the text; of a page also the documents in it, and one element a line."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return stable(json.loads(text))
        except ValueError:
            pass
    if not text.startswith("<!DOCTYPE"):
        return text
    data = [stable(json.loads(found[2])) for found in _DATA.finditer(text)]
    return {"data": data, "page": _DATA.sub("", text).replace("><", ">\n<")}


def _of_file(path: Path, names: Mapping[str, str]) -> Any:
    content = path.read_bytes()
    if content.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            return {name: _of_member(name, archive.read(name), names) for name in sorted(archive.namelist())}
    if content.startswith(b"\x80"):
        return stable(_Plain(io.BytesIO(content)).load())
    return parsed(_text(path, names))


def _of_member(name: str, content: bytes, names: Mapping[str, str]) -> Any:
    """Return a member of a saved run, without what a Trace says of how long it took."""
    if not name.endswith(".json"):
        return stable_log(content) if name.endswith("log") else stable_words(content)
    document = json.loads(normalised(content.decode(), names))
    if name.endswith("trace.json"):
        document.pop("seconds", None)
    return stable(document)


class _Plain(pickle.Unpickler):
    """Reads pickles of plain values alone, as snapshots are."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


# ---- comparison of records -----------------------------------------------------------------------------------------


def compare(old: Path, new: Path, pattern: str | None = None, *, most: int = 12) -> int:
    """Print what differs between two records; return 1 where a value does, else 0.

    Raises ValueError for a folder that is no record.
    """
    for folder in (old, new):
        print(f"{folder}: {read_facts(folder)['source']}")
    asked = [{path.parent.name for path in each.glob("*/answer.json")} for each in (old, new)]
    names = sorted(name for name in asked[0] & asked[1] if pattern is None or pattern in name)
    if not names:
        raise ValueError("The two records have no question in common.")
    wording: dict[tuple[str, str], list[str]] = defaultdict(list)
    equal = valued = 0
    for name in names:
        found = [*differences(documents(old / name), documents(new / name), "")]
        values = [one for one in found if one.kind == "VALUES"]
        equal, valued = equal + (not found), valued + bool(values)
        for one in found:
            if one.kind == "WORDING":
                wording[one.old, one.new].append(f"{name}, {one.where}")
        if values:
            print(f"\n{name}: {len(values)} VALUES differ", *(f"    {one}" for one in values[:most]), sep="\n")
        if len(values) > most:
            print(f"    ... and {len(values) - most} more")
    _print_wording(wording)
    print(f"\n{len(names)} questions: {equal} answered alike, {valued} with other values, ", end="")
    print(f"{len(names) - equal - valued} with other words alone")
    for alone, folder in ((asked[0] - asked[1], old), (asked[1] - asked[0], new)):
        if alone := {name for name in alone if pattern is None or pattern in name}:
            print(f"{len(alone)} only in {folder}: {', '.join(sorted(alone))}")
    return 1 if valued else 0


def _print_wording(wording: Mapping[tuple[str, str], Sequence[str]]) -> None:
    """Print each change of words once, the most frequent first, with where it is met first."""
    if wording:
        count = sum(len(places) for places in wording.values())
        print(f"\nWORDING: {count} differences, {len(wording)} of them distinct")
    for (old, new), places in sorted(wording.items(), key=lambda item: -len(item[1])):
        print(f"  {len(places)} x, first in {places[0]}")
        for sign, text in (("-", old), ("+", new)):
            print(*(f"    {sign} {line}" for line in text.splitlines()), sep="\n")
