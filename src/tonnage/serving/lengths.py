"""Lengths of requests: a distribution by two percentiles, or a file.

    parse_lengths("p50=800,p95=6000,rate=5,output=256,prefix=500")

`p50` and `p95` are percentiles of the prompt in tokens (lognormal), `output` the mean of the answer (geometric),
`rate` requests a second (Poisson; without it all wait from the start), `prefix` tokens at the beginning that all
requests share.  A file has a request a line: its prompt, or prompt and answer separated by a comma.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tonnage.errors import UnreadableFile, UsageError
from tonnage.units import MIB, parse_count, parse_length

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Z95: Final = 1.6448536269514722
"""Standard deviations of a normal distribution's 95th percentile."""

USUAL_OUTPUT: Final = 256
"""Mean answer in tokens where none is stated."""

_LARGEST_FILE_BYTES: Final = 256 * MIB
_LONGEST: Final = 10**8
_KEYS: Final = ("p50", "p95", "rate", "output", "prefix")


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Distribution of requests."""

    p50: int
    """Median prompt in tokens."""
    p95: int
    """95th percentile of the prompt."""
    output: int = USUAL_OUTPUT
    """Mean answer in tokens."""
    rate: float | None = None
    """Requests a second; None: all wait from the start."""
    prefix: int = 0
    """Tokens that all prompts share."""
    stated: tuple[tuple[int, int], ...] = ()
    """Prompts and answers of a file, which are repeated; empty: drawn from the distribution."""

    @property
    def mean_prompt(self) -> float:
        """Return the mean prompt in tokens."""
        if self.stated:
            return sum(prompt for prompt, _ in self.stated) / len(self.stated)
        return float(self.p50 * math.exp(self._sigma**2 / 2))

    @property
    def mean_output(self) -> float:
        """Return the mean answer in tokens."""
        return sum(out for _, out in self.stated) / len(self.stated) if self.stated else float(self.output)

    @property
    def _sigma(self) -> float:
        return math.log(self.p95 / self.p50) / _Z95

    def means_within(self, most: int) -> tuple[float, float]:
        """Return the mean prompt and answer where a request has at most `most` tokens: longer prompts are cut, and an
        answer has the stated mean where there is room for it."""
        if self.stated:
            prompts = [min(prompt, most - 1) for prompt, _ in self.stated]
            outputs = [min(out, most - prompt) for (_, out), prompt in zip(self.stated, prompts, strict=True)]
            return sum(prompts) / len(prompts), sum(outputs) / len(outputs)
        part = self.share_from(most)
        prompt = float(min(self.p50, most - 1)) if self._sigma == 0 else part * (most - 1) + self._mean_below(most)
        return prompt, min(float(self.output), most - prompt)

    def _mean_below(self, tokens: int) -> float:
        """Return the mean of the prompts of fewer tokens, times their part of all (of a lognormal distribution)."""
        above = math.log(tokens / self.p50) / self._sigma - self._sigma
        return float(self.mean_prompt * 0.5 * math.erfc(-above / math.sqrt(2)))

    def share_from(self, tokens: int) -> float:
        """Return the part of the prompts that have so many tokens or more."""
        if self.stated:
            return sum(prompt >= tokens for prompt, _ in self.stated) / len(self.stated)
        if self._sigma == 0:
            return float(self.p50 >= tokens)
        return 0.5 * math.erfc(math.log(tokens / self.p50) / (self._sigma * math.sqrt(2)))

    def draw(self, count: int, *, most: int, seed: int = 0) -> "Requests":
        """Return so many requests of at most `most` tokens, prompt and answer together: longer ones are cut.

        Raises UsageError if more than half of the prompts are as long.
        """
        import numpy as np

        if self.p50 >= most:
            raise UsageError(
                f"The median prompt has {self.p50:,} tokens, and a request at most {most:,} with its answer; state "
                "shorter lengths, or a larger --max-len if the model allows it."
            )
        generator = np.random.default_rng(seed)
        if self.stated:
            pairs = np.array(self.stated, dtype=np.int64)[np.arange(count) % len(self.stated)]
            prompts, outputs = pairs[:, 0], pairs[:, 1]
        else:
            drawn = self.p50 * np.exp(self._sigma * generator.standard_normal(count))
            prompts = np.rint(drawn).astype(np.int64)
            outputs = generator.geometric(1 / self.output, count).astype(np.int64)
        prompts = np.clip(prompts, min(self.prefix + 1, most - 1), most - 1)
        outputs = np.clip(outputs, 1, most - prompts)
        gaps = np.zeros(count) if self.rate is None else generator.exponential(1 / self.rate, count)
        return Requests(prompts=prompts, outputs=outputs, arrivals=np.cumsum(gaps), prefix=min(self.prefix, most - 2))


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """Requests in the order of their arrival."""

    prompts: "NDArray[np.int64]"
    """Tokens of each prompt."""
    outputs: "NDArray[np.int64]"
    """Tokens of each answer."""
    arrivals: "NDArray[np.float64]"
    """Seconds at which each arrives."""
    prefix: int = 0
    """Tokens at the beginning that all prompts share."""


def parse_lengths(text: str) -> Lengths:
    """Return the lengths that a text or a file states.  Raises UsageError, UnreadableFile."""
    if "=" not in text and text.strip(" ,"):
        return _read_file(Path(text).expanduser())
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in _KEYS:
            raise UsageError(f"Unknown {name!r} in lengths; possible: {', '.join(_KEYS)}, or a file.")
        if name in values:
            raise UsageError(f"lengths state {name} twice; give it once.")
        values[name] = _rate(value) if name == "rate" else parse_length(value, least=0 if name == "prefix" else 1)
    if "p50" not in values:
        raise UsageError("lengths need at least p50, the median prompt: p50=800,p95=6000.")
    p50, p95 = int(values["p50"]), int(values.get("p95", values["p50"]))
    if p95 < p50:
        raise UsageError(f"p95 is {p95:,}, less than p50, which is {p50:,}.")
    if values.get("prefix", 0) >= p50:
        raise UsageError(
            f"prefix is {values['prefix']:,}, and half of the prompts have at most {p50:,} tokens; give fewer."
        )
    return Lengths(
        p50=p50,
        p95=p95,
        output=int(values.get("output", USUAL_OUTPUT)),
        rate=values.get("rate"),
        prefix=int(values.get("prefix", 0)),
    )


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{text!r} is no rate of requests a second, such as 5.") from None
    if not 0 < value < 1e6:
        raise UsageError(f"rate is {text}; it must be above 0 and below a million requests a second.")
    return value


def _read_file(file: Path) -> Lengths:
    try:
        if not file.is_file():
            raise UsageError(f"{str(file)!r} is no file; give lengths as p50=800,p95=6000 or a file of lengths.")
        if file.stat().st_size > _LARGEST_FILE_BYTES:
            raise UnreadableFile(f"{str(file)!r} is larger than {_LARGEST_FILE_BYTES // MIB} MiB.")
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UnreadableFile(f"{str(file)[:200]!r} cannot be read as lengths ({type(error).__name__}).") from None
    pairs = [_read_line(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not pairs:
        raise UnreadableFile(f"{str(file)!r} has no lengths.")
    prompts = sorted(prompt for prompt, _ in pairs)
    return Lengths(p50=prompts[len(prompts) // 2], p95=prompts[int(0.95 * (len(prompts) - 1))], stated=tuple(pairs))


def _read_line(file: Path, number: int, line: str) -> tuple[int, int]:
    try:
        prompt, _, output = line.partition(",")
        pair = parse_count(prompt.strip()), parse_count(output.strip()) if output.strip() else USUAL_OUTPUT
    except UsageError:
        raise UnreadableFile(
            f"{str(file)!r}, line {number}: {line[:40]!r} is no length, such as 800 or 800,256."
        ) from None
    if max(pair) > _LONGEST:
        raise UnreadableFile(f"{str(file)!r}, line {number}: {max(pair):,} tokens are more than any model reads.")
    return pair
