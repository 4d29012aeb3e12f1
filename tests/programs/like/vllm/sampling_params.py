"""How a request is answered."""

import dataclasses


@dataclasses.dataclass
class SamplingParams:
    max_tokens: int
    ignore_eos: bool
    detokenize: bool
