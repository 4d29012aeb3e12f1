"""`tonnage serve-check`: the page, the document, and folders that cannot be loaded."""

import json

import pytest
from lines import is_one_line

from tonnage.serving import checking

MEASURED = {
    **{"device": "NVIDIA X", "generated": 8, "versions": {"transformers": "5", "torch": "2"}},
    **{"weights_bytes": 12, "footprint_bytes": 12, "allocated_bytes": 512, "kv_cache_bytes": 2 * 2 * 128 * 15},
    **{"peak_allocated_bytes": 1024, "peak_reserved_bytes": 2048},
}
CONFIG = {"model_type": "llama", "hidden_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.fixture
def folder(tmp_path):
    import struct

    header = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [6], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 1, "vocab_size": 8}))
    return tmp_path


def test_the_page_and_the_document(tonnage, folder, monkeypatch):
    monkeypatch.setattr(checking, "_load", lambda *given: MEASURED)
    lines = tonnage("serve-check", str(folder)).out.splitlines()
    assert lines[0].endswith("16-bit weights, on NVIDIA X (transformers 5, torch 2): 8 tokens generated")
    assert lines[2].split() == ["weights,", "with", "their", "scales", "12", "B", "12", "B", "+0.00", "%"]
    assert lines[-1].split() == ["most", "reserved", "-", "2.0", "KiB"]
    document = json.loads(tonnage("serve-check", str(folder), "--json").out)
    assert document["figures"][2]["error"] == 12 / 512 - 1


def test_folders_that_cannot_be_loaded_are_one_line(tonnage, folder, tmp_path):
    def refused(*words):
        ended = tonnage("serve-check", *words)
        assert is_one_line(ended.err)
        assert ended.out == ""
        return ended.code

    assert refused(str(tmp_path / "none")) == 2
    assert refused(str(folder), "--quantization", "awq-int4") == 2
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-3])
    assert refused(str(folder)) == 3
    (folder / "model.safetensors").unlink()
    assert refused(str(folder)) == 3
    (folder / "config.json").unlink()
    assert refused(str(folder)) == 3
