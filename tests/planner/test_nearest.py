"""Where nothing fits: what refuses the combinations, and which changes would help."""

import itertools
from dataclasses import replace

import pytest

from solutions import FormulaRunner, question, without_host_limit
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, GhostUnavailable
from tonnage.planner import nearest
from tonnage.planner.candidates import list_candidates
from tonnage.planner.pricing import price_candidate
from tonnage.planner.probe import Need, need_of
from tonnage.planner.solution import Remedy
from tonnage.planner.solve import search


def test_refusal_of_every_combination_is_reported():
    said = nearest.explain_impossible(question("llama-3.1-8b", "t4", attention="flash"))
    assert said == "attention=flash: it needs compute capability 8.0, and t4 has 7.5; choose auto."
    assert nearest.explain_impossible(question("llama-3.1-8b", "a100-80gb", attention="flash")) is None


def test_refusals_of_offload_are_not_reported_for_all():
    said = nearest.explain_impossible(question("llama-3.1-8b", "8xt4", seq_len=1024, tp=8))
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
def test_smallest_candidates_have_extreme_micro_batches(asked, monkeypatch):
    asked, every = question(**asked), list_candidates
    found = nearest.list_smallest(asked)
    monkeypatch.setattr(nearest, "list_candidates", lambda question, ends, **place: every(question, **place))
    assert len({one.job.micro_batch for one in every(asked)}) > 1 or asked.only_micro_batch
    assert found == nearest.list_smallest(asked) != []


def test_cards_without_kernels_are_no_remedy():
    class WithoutKernels(ProbesByGpus):
        def probe(self, candidates, cluster):
            if cluster.device.id == "b200":
                raise GhostUnavailable("torch has no kernels for this card.")
            return super().probe(candidates, cluster)

    runner = WithoutKernels(lambda gpus: 1)
    assert nearest._may_fit(question("llama-3.1-8b", "h200"), runner)
    assert not nearest._may_fit(question("llama-3.1-8b", "b200"), runner)


def test_pairs_of_changes_are_tried_if_no_single_one_helps(monkeypatch):
    asked = []

    def try_variant(words, changed, runner):
        asked.append(words)
        if changed.job.method != "qlora" or changed.cluster.device.capacity_bytes < 2**36:
            return None
        return Remedy(what=words, command="", process_bytes=1, step_seconds=None, tokens_per_second_per_gpu=None)

    monkeypatch.setattr(nearest, "_may_fit", lambda changed, runner: True)
    monkeypatch.setattr(nearest, "_try_variant", try_variant)
    found = list(nearest._list_remedies(question("llama-3.1-70b", "t4"), FormulaRunner()))
    assert [remedy.what for remedy in found] == ["--gpu a100-80gb --method qlora"]
    assert "--gpu a100-80gb" in asked
    assert "--gpu 2xa100-80gb" in asked  # not "--gpu a100-80gb --gpu 2xa100-80gb"


def test_more_gpus_without_a_name_are_spelled_by_their_memory():
    asked = replace(question("llama-3.1-8b", "t4"), cluster=parse_cluster(gpu_memory_bytes=6 * 2**30))
    assert next(words for words, _ in nearest._add_gpus(asked)) == "--gpu-memory 6GiB --gpus 2"


def test_whole_machines_are_doubled():
    said = [words for words, _ in nearest._add_gpus(question("llama-3.1-8b", "6xt4"))]
    assert said[:2] == ["--gpu 2x6xt4", "--gpu 4x6xt4"]


class ProbesByGpus:
    """Stands in for a TrialRunner: a rank's need depends on the number of GPUs; records what it is asked."""

    def __init__(self, bytes_of):
        self.bytes_of, self.asked = bytes_of, []

    def probe(self, candidates, cluster):
        self.asked.append(cluster.gpus)
        needed = self.bytes_of(cluster.gpus)
        return [Need(process_bytes=needed, by_category={}, uncached_bytes=needed, whole=True) for _ in candidates]


def test_gpus_are_added_from_the_first_number_that_may_fit():
    runner = ProbesByGpus(lambda gpus: 300 * 2**30 // gpus)
    asked = question("llama-3.1-8b", "h100-80gb")
    assert next(words for words, _ in nearest._add_enough_gpus(asked, runner)) == "--gpu 4xh100-80gb"
    assert len(runner.asked) <= 4  # of eight


def test_more_gpus_are_no_remedy_if_the_most_are_too_few():
    runner = ProbesByGpus(lambda gpus: 100 * 2**30)
    assert list(nearest._add_enough_gpus(question("llama-3.1-8b", "h100-80gb"), runner)) == []


def test_candidates_above_the_bound_are_not_probed():
    runner = ProbesByGpus(lambda gpus: 0)
    assert not nearest._may_fit(question("llama-3.1-405b", "t4", without=("param-offload",)), runner)
    assert runner.asked == []


def test_smallest_candidates_keep_activations_differently():
    """With offloaded long sequences the working layer needs most, and a recomputed one has all of it on the card."""
    asked = without_host_limit(question("llama-3.1-8b", "rtx-4090", method="lora", seq_len=32768))
    ways = [(one.plan.checkpointing, one.plan.activation_offload) for one in nearest.list_smallest(asked)]
    assert ways == [("none", "cpu"), ("full", "cpu"), ("selective", "cpu"), ("full", "none")]


def test_smallest_candidates_divide_the_working_layer():
    """With everything on the host the bound is 0, but a whole sequence on one rank needs more than the card."""
    least, *_ = nearest.list_smallest(question("llama-3.1-8b", "8xrtx-4090", seq_len=131072))
    assert least.plan.tp * least.plan.cp == 8


def test_failures_are_not_reported_as_too_large():
    class Failing(FormulaRunner):
        def run_whole(self, candidates, cluster, budget_bytes=None):
            return [CannotEstimate("The step failed.") for _ in candidates]

        def probe(self, candidates, cluster):
            return [CannotEstimate("The step failed.") for _ in candidates]

    found = search(question("llama-3.1-70b", "8xa100-40gb"), Failing(), top=1)
    assert found.status == "unsupported"
    assert found.refused[0].why == "The step failed."


class Small(FormulaRunner):
    """Runs need little above the bound, and probes show half of that."""

    def _answer(self, candidate, cluster):
        return self._answer_above(candidate, cluster, 0.01)

    def probe(self, candidates, cluster):
        self.probes += candidates
        return [need_of(self._answer_above(one, cluster, 0.005)) for one in candidates]

    def _answer_above(self, candidate, cluster, part):
        one = price_candidate(candidate, cluster)
        need = int(one.bound_bytes + part * one.extra_bytes)
        made = super()._answer(candidate, cluster)
        held = dict.fromkeys(made.peak.by_category, 0) | {"activation": need}
        peak = replace(made.peak, process_bytes=need, by_category=held)
        return replace(made, fits=need <= cluster.device.capacity_bytes, peak=peak)


def with_memory(needed_bytes):
    """Return a question whose smallest plan needs this part of the usable card."""
    asked = question("llama-3.2-1b", "l4", micro_batch=8, seq_len=8192, without=("micro-batch",))
    least = min(need_of(Small()._answer(one, asked.cluster)).process_bytes for one in nearest.list_smallest(asked))
    device = asked.cluster.device.with_capacity(int(least / needed_bytes / (1 - asked.headroom)))
    return replace(asked, cluster=replace(asked.cluster, device=device))


def test_smallest_candidates_are_run_before_nothing_fits():
    assert search(with_memory(0.99), Small(), top=1, explain=False).status == "found"


def test_missing_bytes_are_those_of_a_whole_run():
    found = search(with_memory(1.05), Small(), top=1, explain=False)
    assert found.status == "too_large"
    assert found.nearest.missing_bytes > 0


def test_qlora_remedies_quantize_further():
    asked = question("llama-3.1-8b", "t4", method="qlora")
    found = {words: (one.plan.quant, one.plan.unquantized_dtype) for words, one in nearest._quantize_further(asked)}
    assert found == {"--quant nf4-double": ("nf4-double", "fp32"), "--unquantized-dtype compute": ("nf4", "compute")}
    said = question("llama-3.1-8b", "t4", method="qlora", quant="nf4-double")
    assert [words for words, _ in nearest._quantize_further(said)] == ["--unquantized-dtype compute"]
    for method in ("full", "lora"):
        assert list(nearest._quantize_further(question("llama-3.1-8b", "t4", method=method))) == []


def test_the_search_for_a_remedy_is_bounded(monkeypatch):
    """Of endless changes that do not help, only those of the first seconds are tried."""
    tried = []
    monkeypatch.setattr(nearest, "_may_fit", lambda changed, runner: tried.append(changed))
    monkeypatch.setattr(nearest, "_MOST_SECONDS", 0.01)
    assert nearest._find_first((("--gpu l4", number) for number in itertools.count()), FormulaRunner()) is None
    assert tried
