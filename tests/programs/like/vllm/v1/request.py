"""A request, which has its answer after as many steps as that has tokens."""

from typing import Any


class Request:
    def __init__(self, request_id: str, prompt_token_ids: list[int], sampling_params: Any) -> None:
        self.request_id, self.text, self.left = request_id, prompt_token_ids, sampling_params.max_tokens
        self.num_preemptions = 0

    def is_finished(self) -> bool:
        return self.left == 0

    def blocks(self) -> int:
        return -(-len(self.text) // 16)
