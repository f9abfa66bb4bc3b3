"""The short form of the fuzzer: numbers determine mutations, the grader withstands some, and failures are detected."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from autograder.contract.verdict import NEEDS_HUMAN, PARTIAL, PASS, Result
from autograder.grading.inside import wire
from autograder.proof.attacks import campaign
from autograder.proof.attacks.fuzz import ANSWERS, Fuzzer, Outcome, answers, judged, message_of
from autograder.proof.attacks.mutate import LAYERS, join, split

# Small answers, which compile in a moment; `make fuzz` takes all of them.
SMALL = tuple(answer for answer in ANSWERS if answer[0] == "shard_params")
MUTATIONS = 150

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def fuzzer():
    with Fuzzer(1, answers(SMALL)) as instance:
        yield instance


def test_bases_earn_what_they_deserve(fuzzer):
    assert [base.points for base in fuzzer.bases] == [2.0, 2.0, 1.5, 0.0]
    assert all(base.figures["run"]["resident"] > 0 for base in fuzzer.bases)


@pytest.fixture(scope="module")
def outcomes(fuzzer):
    return [fuzzer.run(number) for number in range(MUTATIONS)]


def test_mutations_crash_no_grader_and_earn_no_point(outcomes):
    assert [(o.number, o.failure) for o in outcomes if o.failure] == []
    assert {o.layer for o in outcomes} == set(LAYERS)
    assert sum(o.stage in ("compiler", "run", "judged") for o in outcomes) >= 20
    assert {o.verdict for o in outcomes} >= {"pass", "partial", "refused"}


def test_number_alone_says_what_a_mutation_is(fuzzer, outcomes):
    for layer, number in {o.layer: o.number for o in outcomes}.items():
        base, _, _, message = fuzzer.mutation(number)
        assert fuzzer.mutation(number)[3] == message != message_of(base.programs), layer


def test_header_can_be_taken_apart_and_put_together(fuzzer):
    for program in fuzzer.bases[0].programs.values():
        assert join(*split(program)) == program


def test_half_a_character_is_replaced_before_anything_keeps_it():
    text = json.dumps({"header": {"message": "\ud800 and \U0001f600"}, "blobs": []}).encode()
    header, _ = wire.read(io.BytesIO(len(text).to_bytes(4, "big") + text))
    assert header == {"message": "? and \U0001f600"}


def result(points, verdict=PASS, message=""):
    return Result("shard_params", points, 2.0, verdict, message=message)


def test_points_that_nobody_earned_are_failures(fuzzer):
    right, wrong = fuzzer.bases[0], fuzzer.bases[2]
    assert judged(wrong, result(1.8, PARTIAL), {}, 1.0)[0] == "earns 1.8, and the answer 1.5"
    assert judged(wrong, result(1.5, PARTIAL), {}, 1.0) == ("", "")
    cheaper = {
        name: {**figures, "flops": -1.0, "resident": figures["resident"] - 1} for name, figures in right.figures.items()
    }
    assert "run resident" in judged(right, result(2.0), cheaper, 1.0)[1]
    large = replace(right, figures={"run": {"resident": 9.0}, "analyse": {"seconds": 2.0}})
    less = {"run": {"resident": 9.0}, "analyse": {"seconds": 1.0}}
    assert judged(large, result(2.0), less, 1.0)[0] == "keeps all points with analyse seconds 1 < 2"
    assert judged(large, result(1.9, PARTIAL), less, 1.0) == ("", "")


def test_faults_and_hangs_are_failures(fuzzer):
    fault = result(0.0, NEEDS_HUMAN, "the grader itself failed: KeyError: 7")
    died = result(0.0, NEEDS_HUMAN, "the process ended without an answer 3 times: Segmentation fault")
    assert judged(fuzzer.bases[0], fault, {}, 1.0)[0].endswith("KeyError: 7")
    assert judged(fuzzer.bases[0], died, {}, 1.0) == ("", "")
    assert judged(fuzzer.bases[0], result(2.0), fuzzer.bases[0].figures, 9999.0)[0] == "it took 9999 s"


def test_campaign_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    judged_numbers = []

    class Threads(ThreadPoolExecutor):
        def __init__(self, workers, mp_context):
            super().__init__(workers)

    def chunk(seed, numbers):
        judged_numbers.extend(numbers)
        return [Outcome(n, "base", "wire", "wire", "refused", "wire", 0.0, "", 0.1) for n in numbers]

    monkeypatch.setattr(campaign, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(campaign, "_chunk", chunk)
    log = tmp_path / "build" / "log.jsonl"
    campaign.campaign(1, range(70), 1, log)
    log.write_text(log.read_text() + '{"number": 70, "ba')
    judged_numbers.clear()
    resumed = campaign.campaign(1, range(80), 2, log)
    assert judged_numbers == list(range(70, 80)) and [o.number for o in resumed] == list(range(80))
    assert campaign.summary(resumed)["stages"]["wire"] == {"wire": 80}
