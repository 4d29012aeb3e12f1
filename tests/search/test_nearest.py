"""Where nothing fits: what stands against it, and what would help."""

from solutions import question
from tonnage.search import nearest
from tonnage.solution import Remedy


def test_what_no_combination_can_do_is_said():
    said = nearest.refusal(question("llama-3.1-8b", "t4", attention="flash"))
    assert said == "attention=flash: it needs compute capability 8.0, and t4 has 7.5; choose auto."
    assert nearest.refusal(question("llama-3.1-8b", "a100-80gb", attention="flash")) is None


def test_two_changes_are_tried_where_none_helps_alone(monkeypatch):
    asked = []

    def tried(words, changed, ghosts):
        asked.append(words)
        if changed.job.method != "qlora" or changed.cluster.device.capacity_bytes < 2**36:
            return None
        return Remedy(what=words, process_bytes=1, step_seconds=None, tokens_per_second_per_gpu=None)

    monkeypatch.setattr(nearest, "_tried", tried)
    found = list(nearest._remedies(question("llama-3.1-70b", "t4"), None))
    assert [remedy.what for remedy in found] == ["--gpu a100-80gb --method qlora"]
    assert "--gpu a100-80gb" in asked
    assert "--gpu 2xa100-80gb" in asked  # not "--gpu a100-80gb --gpu 2xa100-80gb"
