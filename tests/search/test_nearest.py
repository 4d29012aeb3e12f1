"""Where nothing fits: what stands against it, and what would help."""

from dataclasses import replace

import pytest

from solutions import Formula, question
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, GhostUnavailable
from tonnage.planner.solution import Remedy
from tonnage.search import nearest
from tonnage.search.depth import Need, of_run
from tonnage.search.pricing import priced
from tonnage.search.solve import search


def test_what_no_combination_can_do_is_said():
    said = nearest.refusal(question("llama-3.1-8b", "t4", attention="flash"))
    assert said == "attention=flash: it needs compute capability 8.0, and t4 has 7.5; choose auto."
    assert nearest.refusal(question("llama-3.1-8b", "a100-80gb", attention="flash")) is None


def test_what_is_said_is_not_what_offload_alone_cannot_do():
    said = nearest.refusal(question("llama-3.1-8b", "8xt4", seq_len=1024, tp=8))
    assert said == "tp=8: precision fp16-mixed is not built for it; choose precision bf16-mixed."


@pytest.mark.parametrize(
    "asked",
    [
        {"gpu": "4x8xt4", "global_batch_tokens": 2**19},
        {"gpu": "8xh100-80gb", "model": "mixtral-8x7b", "global_batch_tokens": 2**20},
        {"gpu": "a100-40gb", "micro_batch": 4, "grad_accum": 8},
        {"gpu": "8xa100-40gb", "without": ("micro-batch=1",), "global_batch_tokens": 2**19},
        {"gpu": "8xl4", "method": "lora", "global_batch_tokens": 2**18},
    ],
    ids=str,
)
def test_the_smallest_are_those_of_all_micro_batches(asked, monkeypatch):
    asked, every = question(**asked), nearest.space.candidates
    found = nearest.smallest(asked)
    monkeypatch.setattr(nearest.space, "candidates", lambda question, ends, **place: every(question, **place))
    assert len({one.job.micro_batch for one in every(asked)}) > 1 or asked.only_micro_batch
    assert found == nearest.smallest(asked) != []


def test_cards_without_kernels_are_no_remedy():
    class Without(Looks):
        def need(self, candidates, cluster):
            if cluster.device.id == "b200":
                raise GhostUnavailable("torch has no kernels for this card.")
            return super().need(candidates, cluster)

    ghosts = Without(lambda gpus: 1)
    assert nearest._may_fit(question("llama-3.1-8b", "h200"), ghosts)
    assert not nearest._may_fit(question("llama-3.1-8b", "b200"), ghosts)


def test_two_changes_are_tried_where_none_helps_alone(monkeypatch):
    asked = []

    def tried(words, changed, ghosts):
        asked.append(words)
        if changed.job.method != "qlora" or changed.cluster.device.capacity_bytes < 2**36:
            return None
        return Remedy(what=words, process_bytes=1, step_seconds=None, tokens_per_second_per_gpu=None)

    monkeypatch.setattr(nearest, "_may_fit", lambda changed, ghosts: True)
    monkeypatch.setattr(nearest, "_tried", tried)
    found = list(nearest._remedies(question("llama-3.1-70b", "t4"), None))
    assert [remedy.what for remedy in found] == ["--gpu a100-80gb --method qlora"]
    assert "--gpu a100-80gb" in asked
    assert "--gpu 2xa100-80gb" in asked  # not "--gpu a100-80gb --gpu 2xa100-80gb"


def test_more_of_a_card_without_a_name_are_said_in_options_that_there_are():
    asked = replace(question("llama-3.1-8b", "t4"), cluster=parse_cluster(gpu_memory_bytes=6 * 2**30))
    assert next(words for words, _ in nearest._more(asked)) == "--gpu-memory 6GiB --gpus 2"


def test_machines_of_another_size_are_doubled_whole():
    said = [words for words, _ in nearest._more(question("llama-3.1-8b", "6xt4"))]
    assert said[:2] == ["--gpu 2x6xt4", "--gpu 4x6xt4"]


class Looks:
    """Ghosts that know what a rank needs by how many there are, and count how often they are asked."""

    def __init__(self, bytes_of):
        self.bytes_of, self.asked = bytes_of, []

    def need(self, candidates, cluster):
        self.asked.append(cluster.gpus)
        needed = self.bytes_of(cluster.gpus)
        return [Need(process_bytes=needed, by_category={}, least_bytes=needed, whole=True) for _ in candidates]


def test_more_gpus_are_tried_from_the_first_that_may_fit_by_a_look():
    ghosts = Looks(lambda gpus: 300 * 2**30 // gpus)
    asked = question("llama-3.1-8b", "h100-80gb")
    assert next(words for words, _ in nearest._enough(asked, ghosts)) == "--gpu 4xh100-80gb"
    assert len(ghosts.asked) <= 4  # of eight


def test_more_gpus_are_no_remedy_where_most_of_them_are_too_few():
    ghosts = Looks(lambda gpus: 100 * 2**30)
    assert list(nearest._enough(question("llama-3.1-8b", "h100-80gb"), ghosts)) == []


def test_what_needs_more_by_any_count_is_not_looked_at():
    ghosts = Looks(lambda gpus: 0)
    assert not nearest._may_fit(question("llama-3.1-405b", "t4", without=("param-offload",)), ghosts)
    assert ghosts.asked == []


def test_the_smallest_keep_activations_in_different_ways():
    """Of a long sequence that waits on the host a layer at work is most, and what runs again has all of it there."""
    asked = question("llama-3.1-8b", "rtx-4090", method="lora", seq_len=32768)
    ways = [(one.plan.checkpointing, one.plan.activation_offload) for one in nearest.smallest(asked)]
    assert ways == [("none", "cpu"), ("full", "cpu"), ("selective", "cpu"), ("full", "none")]


def test_the_smallest_divide_what_a_layer_needs_at_work():
    """Weights and activations on the host leave no least; a sequence on one rank needs more than the card all the
    same."""
    least, *_ = nearest.smallest(question("llama-3.1-8b", "8xrtx-4090", seq_len=131072))
    assert least.plan.tp * least.plan.cp == 8


def test_what_fails_wherever_it_is_run_is_not_called_too_large():
    class Failing(Formula):
        def fit(self, candidates, cluster, budget_bytes=None):
            return [CannotEstimate("The step failed.") for _ in candidates]

        def need(self, candidates, cluster):
            return [CannotEstimate("The step failed.") for _ in candidates]

    found = search(question("llama-3.1-70b", "8xa100-40gb"), Failing(), top=1)
    assert found.status == "unsupported"
    assert found.refused[0].why == "The step failed."


class Small(Formula):
    """Hardly anything is needed beyond the least, and looks show half of it."""

    def _answer(self, candidate, cluster):
        return self._of(candidate, cluster, 0.01)

    def need(self, candidates, cluster):
        self.looked += candidates
        return [of_run(self._of(one, cluster, 0.005)) for one in candidates]

    def _of(self, candidate, cluster, part):
        one = priced(candidate, cluster)
        need = int(one.least_bytes + part * one.beyond_bytes)
        made = super()._answer(candidate, cluster)
        held = dict.fromkeys(made.peak.by_category, 0) | {"activation": need}
        peak = replace(made.peak, process_bytes=need, by_category=held)
        return replace(made, fits=need <= cluster.device.capacity_bytes, peak=peak)


def with_memory(needed_bytes):
    """A job whose smallest plan needs so many times the part of the card that may be used."""
    asked = question("llama-3.2-1b", "l4", micro_batch=8, seq_len=8192, without=("micro-batch",))
    least = min(of_run(Small()._answer(one, asked.cluster)).process_bytes for one in nearest.smallest(asked))
    device = asked.cluster.device.with_capacity(int(least / needed_bytes / (1 - asked.headroom)))
    return replace(asked, cluster=replace(asked.cluster, device=device))


def test_what_was_expected_not_to_fit_is_looked_at_before_nothing_fits():
    assert search(with_memory(0.99), Small(), top=1, explain=False).status == "found"


def test_what_is_missing_is_what_a_whole_run_says():
    found = search(with_memory(1.002), Small(), top=1, explain=False)
    assert found.status == "too_large"
    assert found.nearest.missing_bytes > 0


def test_quantized_weights_may_be_quantized_further():
    asked = question("llama-3.1-8b", "t4", method="qlora")
    found = {words: (one.plan.quant, one.plan.unquantized_dtype) for words, one in nearest._quantized(asked)}
    assert found == {"--quant nf4-double": ("nf4-double", "fp32"), "--unquantized-dtype compute": ("nf4", "compute")}
    said = question("llama-3.1-8b", "t4", method="qlora", quant="nf4-double")
    assert [words for words, _ in nearest._quantized(said)] == ["--unquantized-dtype compute"]
    for method in ("full", "lora"):
        assert list(nearest._quantized(question("llama-3.1-8b", "t4", method=method))) == []
