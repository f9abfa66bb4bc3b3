"""``choose_mesh`` of ``transformer_3d``: unseen models are legal, secrets are kept, and invalid choices are refused."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from autograder.chapters.transformer_3d.alternatives import ALTERNATIVES
from autograder.chapters.transformer_3d.choose_mesh import CHOOSE_MESH, best, choice_facts
from autograder.chapters.transformer_3d.mutants import MUTANTS
from autograder.chapters.transformer_3d.wrapping.choice import MOST, questions
from autograder.contract import value_facts, value_tasks, wrapping
from autograder.contract.task import TaskEvidence
from autograder.contract.value_tasks import Refusal
from autograder.contract.wrapping import Mismatch
from course.mesh import make_mesh

TASK = CHOOSE_MESH


def evidence(case, values, secret=False) -> Any:
    return SimpleNamespace(case=case, line="", secret=secret, measured={"values": values})


def facts(function, cases, secret=False):
    all_evidence = []
    for case in cases:
        with patch.object(wrapping, "abstract_mesh", make_mesh):
            values = np.asarray(TASK.wrap(function, case).function(nothing=np.zeros((), np.uint8))["values"])
        assert len(values) == MOST
        all_evidence.append(evidence(case, values, secret))
    return choice_facts(TaskEvidence(all_evidence, None, {}))


def failed(judged):
    return {fact.name for fact in judged if fact.passed is False}


@pytest.mark.parametrize("function", ALTERNATIVES["choose_mesh"], ids=lambda function: function.__name__)
def test_alternative_implementations_pass_on_unseen_cases(function):
    unseen = [TASK.unseen(np.random.default_rng(seed)) for seed in range(3)]
    assert failed(facts(function, unseen)) == set()


def test_the_oracle_s_own_choices_pass():
    for case in TASK.cases:
        answers = value_facts.decode(TASK.oracle({}, case)["values"])
        assert len(answers) == len(questions(case))
        judged = choice_facts(TaskEvidence([evidence(case, TASK.oracle({}, case)["values"])], None, {}))
        assert failed(judged) == set()


def test_cases_ask_for_all_that_can_be_chosen():
    known = [best(*question, case.sizes.machine) for case in TASK.cases for question in questions(case)]
    chosen = [result[1] for result in known if result]
    assert {choice.remat for choice in chosen} == {"none", "block"} and {choice.fsdp for choice in chosen} == {
        False,
        True,
    }
    for axis in ("data", "pipe", "tensor", "microbatches"):
        assert len({getattr(choice, axis) for choice in chosen}) > 1, axis
    assert None in known


@pytest.mark.long
def test_messages_of_the_official_grade_reveal_nothing_drawn():
    secret = [TASK.unseen(np.random.default_rng(7))]
    for mutant in (one for one in MUTANTS if one.task == "choose_mesh"):
        for fact in facts(mutant.function, secret, secret=True):
            assert not any(char.isdigit() for char in fact.message), fact.message


@pytest.mark.parametrize("answer", [(1, 2), "data", {"data": 8}, (8, 1, 1, 1, 1, None, True, 3)])
def test_an_invalid_choice_is_refused(answer):
    with pytest.raises(Mismatch, match="expected"):
        facts(lambda *_: answer, TASK.cases[:1])


def test_a_forged_answer_passes_nothing():
    for values in (
        np.zeros(MOST, np.uint8),
        value_tasks.encode((1, 2, 3), MOST),
        value_tasks.encode((Refusal("x"),) * 9, MOST),
    ):
        judged = choice_facts(TaskEvidence([evidence(TASK.cases[0], values)], None, {}))
        assert {"every choice can be placed", "predicted MFU"} <= failed(judged)


def raises_always(*_):
    raise ValueError("nothing fits")


def test_where_nothing_is_placed_nothing_fits_and_nothing_is_fast():
    failed_names = failed(facts(raises_always, TASK.cases[:1]))
    assert failed_names == {"every choice can be placed", "memory fits", "predicted MFU"}
