"""Arguments, of which a length may be beyond the model's."""

import dataclasses
import types
from typing import Any


@dataclasses.dataclass
class EngineArgs:
    model: str
    max_model_len: int = 1024
    load_format: str = "auto"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False

    def create_engine_config(self) -> Any:
        if self.max_model_len > 4096:
            raise ValueError(f"max_model_len ({self.max_model_len}) is greater than the model's (4096).")
        return types.SimpleNamespace(
            model=self.model,
            load_format=self.load_format,
            skip_tokenizer_init=self.skip_tokenizer_init,
            cache_config=types.SimpleNamespace(num_gpu_blocks=None, block_size=16),
            model_config=types.SimpleNamespace(max_model_len=self.max_model_len, enforce_eager=True),
        )
