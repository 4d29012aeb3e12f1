"""The serving object has the keys of the contract."""

from tonnage.serving.answer import Serving


def test_json_has_the_keys_of_the_contract():
    answer = Serving(engine="vllm 0.19.0", starts=False, error="no available memory", max_len=8192)
    assert list(answer.to_json()) == [
        *("engine", "starts", "error", "weights_bytes", "activation_bytes", "graphs_bytes", "outside_torch_bytes"),
        *("kv_cache_bytes", "kv_cache_tokens", "block_tokens", "blocks", "concurrency", "max_len"),
        *("low_tokens", "high_tokens", "compile_cache", "compile_seconds", "compile_peak_bytes", "compiled_here"),
    ]
    assert answer.to_json()["starts"] is False
    assert answer.to_json()["kv_cache_bytes"] is None
