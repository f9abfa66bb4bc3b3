"""The display of a judgement: complete, and harmless whatever a student wrote."""

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from autograder.contract.text import binary_units
from autograder.contract.verdict import (
    FAIL,
    PARTIAL,
    PASS,
    STUDENT_ERROR,
    Direction,
    Fact,
    Kind,
    Report,
    Result,
    Unit,
)
from autograder.render import facts_html, facts_table, number, plain

HOSTILE = '<script>alert(1)</script><img src="http://evil.example/x.png" onerror=x>\x1b[31m\u202e'


def fact_in_bytes(name, measured, limit, reference=None, naive=None, passed=False, **details):
    figures = {"reference": reference, "naive": naive, "unit": Unit.BYTES, "case": "data=8", **details}
    return Fact(name, Kind.MEMORY, passed, measured, limit, **figures)


def report():
    facts = (
        Fact("values", Kind.VALUES, True, 2e-7, 1e-4, unit=Unit.RELATIVE, case="data=8"),
        fact_in_bytes("temporaries", 1843200, 1179648, 1024000, 1843200, line="gather:3", message="too much"),
        Fact("overlap", Kind.TIME, None),
    )
    functions = (
        Result("gather", 1, 3, FAIL, facts),
        Result("loss", 0, 5, STUDENT_ERROR, (), "loss:9", "ValueError: no"),
    )
    return Report("fsdp", functions, isolation="bubblewrap", notes=("a note",))


def printed(judgement, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(facts_table(judgement))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_everything_a_fact_says_is_shown():
    words = ["temporaries", "1,843,200", "1,179,648", "bytes", "1,024,000", "data=8", "gather:3", "too much", "a note"]
    for shown in (facts_html(report()), printed(report())):
        assert [word for word in [*words, "not measured", "loss:9", "ValueError: no"] if word not in shown] == []
    assert "bubblewrap" in facts_html(report())


def test_large_numbers_of_bytes_are_readable_and_stay_exact_in_html():
    assert [binary_units(number) for number in (5_436_121_096, 11_534_336, 9_999_999, 8)] == [
        "5.063 GiB",
        "11 MiB",
        "",
        "",
    ]
    between = fact_in_bytes("sent", 20, (11_534_336, 22_020_096), direction=Direction.BETWEEN)
    result = Result("f", 0, 1, FAIL, (fact_in_bytes("peak", 5_436_121_096, 1_466_592_470), between))
    shown = facts_html(result)
    assert "5.063 GiB" in shown and "5,436,121,096" in shown and "5.063 GiB" in printed(result)
    assert "11 MiB to 21 MiB" in shown and "11,534,336 to 22,020,096" in shown
    count = Fact("count", Kind.PROGRAM, False, 5_436_121_096)
    assert "5.063" not in facts_html(Result("f", 0, 1, FAIL, (count,)))
    little = Result("f", 0, 1, FAIL, (fact_in_bytes("peak", 2**26 + 4, 2**26),))
    assert "67,108,868" in printed(little) and "MiB" not in printed(little)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_is_shown_in_any_unit(number):
    for unit in (Unit.COUNT, Unit.BYTES, Unit.FLOPS, Unit.RELATIVE):
        fact = Fact("norm", Kind.GRADIENTS, False, number, 1.5, unit=unit)
        assert f"{number}" in printed(Result("f", 0, 1, FAIL, (fact,))) and binary_units(number) == ""


def test_counts_inconclusive_estimates_and_what_is_no_number_are_shown_as_they_are():
    counted = {"direction": Direction.ALL, "unit": Unit.LEAVES}
    estimate = {"interval": (1.2, 1.4), "unit": Unit.REFERENCE}
    facts = (
        Fact("split dims", Kind.MEMORY, False, 5, 8, **counted),
        Fact("bfloat16 products", Kind.COMPUTE, True, 12, 15, Direction.MOST, Unit.PRODUCTS, "bf16"),
        Fact("measured speed", Kind.TIME, None, 1.3, 1.15, **estimate),
        Fact("gradients", Kind.GRADIENTS, False, "missing", "present"),
    )
    shown = printed(Result("f", 0, 1, FAIL, facts), width=160) + printed(Result("f", 1, 1, PASS, facts[1:3]), width=160)
    words = ["5 of 8", "8 of 8", "(leaves)", "12 of 15", "most", "inconclusive: 1.300 (1.200 to 1.400)", "missing"]
    for text in (shown, re.sub("<.*?>", "", facts_html(Result("f", 0, 1, FAIL, facts)))):
        assert [word for word in words if word not in text] == []


def test_at_80_columns_no_number_and_no_name_is_broken():
    figures, where = (5_436_121_096, 1_466_592_470, 1_275_297_800, 5_436_121_096), "8 devices, width 4096"
    large = fact_in_bytes("live temporaries", *figures, case=where, line="gather:3", message="too much")
    facts = (large, fact_in_bytes("reduce-scatter bytes", 11_984, (11_984, 23_968), case="8 devices"))
    shown = printed(Result("fsdp_loss", 1, 5, FAIL, facts), width=80)
    words = ["live temporaries", "reduce-scatter bytes", "5.063 GiB", "1.366 GiB", "1.188 GiB", "your line gather:3"]
    assert [word for word in words if word not in shown] == []


def test_at_80_columns_the_words_of_a_case_stay_whole():
    figures, where = (689_122_048, 792_490_355, 689_122_048, 1_501_847_592), "8 microbatches, width 2048"
    large = fact_in_bytes("live temporaries", *figures, passed=True, case=where)
    size = Fact("program size", Kind.PROGRAM, True, 311, 311, unit=Unit.OPERATIONS, case="8 microbatches")
    shown = printed(Result("accumulate_gradients", 2, 2, PASS, (large, size)), width=80)
    assert all(word in shown for word in ("microbatches,", "live temporaries", "(operations)", "1.399 GiB"))


def test_a_message_of_a_fact_is_not_repeated():
    fact = Fact(
        "values", Kind.FORM, False, "of the wrong structure", "as specified", line="f:1", message="expected a scalar"
    )
    result = Result("f", 0, 1, FAIL, (fact,), "f:1", "expected a scalar")
    for shown in (facts_html(result), printed(result)):
        assert shown.count("expected a scalar") == 1 and shown.count("f:1") == 1


def test_a_grid_below_a_message_keeps_its_columns_and_is_escaped():
    fact = Fact(
        "values", Kind.VALUES, False, message="Two are wrong. (also: <b>)\n  yours: tick 0 1\n      stage 0 . <"
    )
    result = Result("f", 0, 1, FAIL, (fact,))
    assert re.search(r"<pre[^>]*>  yours: tick 0 1\n      stage 0 \. &lt;</pre>", facts_html(result))
    assert "\n    yours: tick 0 1" in printed(result) and "\n        stage 0 . <" in printed(result)


@pytest.mark.parametrize(("line", "expected"), [("f:1", "your line"), ("course/model.py:70", "the course's line")])
def test_a_line_of_the_course_is_not_called_the_readers(line, expected):
    result = Result("f", 0, 1, FAIL, (Fact("bytes", Kind.MEMORY, False, 2, 1, line=line, message="too many"),))
    assert all(f"{expected} {line}" in re.sub("<.*?>", "", shown) for shown in (facts_html(result), printed(result)))


def test_html_is_escaped_and_asks_for_nothing():
    texts = {name: HOSTILE for name in ("measured", "limit", "of", "reference", "naive", "case", "line", "message")}
    fact = Fact(HOSTILE, Kind.VALUES, False, **texts)  # type: ignore[arg-type]
    shown = facts_html(
        Report("c", (Result(HOSTILE, 0, 1, HOSTILE, (fact,), HOSTILE, HOSTILE, (HOSTILE,)),), notes=(HOSTILE,))
    )
    tags = set(re.findall(r"<(/?\w+)", shown))
    assert tags <= {
        f"{end}{tag}" for end in ("", "/") for tag in "div span b table thead tbody tr th td br details summary".split()
    }
    assert not re.search(r"<[^>]*\b(src|href|on\w+)\s*=", shown)
    assert "\x1b" not in shown and "\u202e" not in shown


def test_terminal_escapes_are_taken_out():
    shown = printed(
        Result(HOSTILE, 0, 1, FAIL, (Fact(HOSTILE, Kind.VALUES, False, HOSTILE, message=HOSTILE),), HOSTILE, HOSTILE)
    )
    assert "\x1b" not in shown and "\u202e" not in shown


def test_numbers_are_short_and_exact_where_whole():
    shown = {2.0: "2", 1 / 3: "0.3333", 1e-9: "1e-09", None: "", float("inf"): "inf", "two": "two"}
    assert {value: number(value) for value in shown} == shown
    assert len(plain("x" * 10**6)) < 5000


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        (Fact("gradients", Kind.GRADIENTS, False, "missing", "present"), "No points for wrong gradients"),
        (Fact("bubble", Kind.TIME, False, 0.5, 0.4, core=True), "At most half of the points without “bubble”"),
        (Fact("bytes", Kind.COMMUNICATION, False, 5, 4), ""),
    ],
)
def test_the_reason_why_an_answer_earns_nothing_or_half_is_shown_first(fact, expected):
    result = Result("f", 0, 3, FAIL, (Fact("values", Kind.VALUES, True), fact))
    for shown in (facts_html(result), printed(result)):
        assert expected in shown
        assert (shown.lower().count("half of the points") > 1) is fact.core


def test_a_stub_is_not_started_and_no_error():
    stub = Result(
        "gather", 0, 3, STUDENT_ERROR, (), "gather:9", "gather is not written yet: it raises it", not_started=True
    )
    for shown in (facts_html(stub), printed(stub)):
        assert "not started" in shown and "error" not in shown and "gather:9" not in shown


def test_a_pass_says_in_how_many_cases_and_large_sizes_are_readable():
    fact = fact_in_bytes("temporaries", 610_515_992, 700_000_000, 646_333_964, passed=True)
    shown = printed(Result("f", 1, 1, PASS, (fact,), cases=("tensor=8", "tensor=8, forward alone")), width=160)
    assert "Temporaries: yours 582.2 MiB, the reference 616.4 MiB" in shown
    sentence = (
        "Passes in all 2 cases; grading draws inputs of its own, and one more case. Here: tensor=8; tensor=8, forward"
    )
    assert sentence in " ".join(shown.split()) and "Passes in its one case;" in printed(
        Result("f", 1, 1, PASS, (fact,), cases=("a",))
    )


def test_points_for_the_first_cases_alone_are_marked_as_such():
    missed = Fact("live temporaries", Kind.MEMORY, False, 2.0, 1.0, message="Look.")
    partial = Result("f", 2, 4, PARTIAL, (Fact("values", Kind.VALUES, True), missed), cases=("a", "b"), cases_left=6)
    sentence = "These points are for the first 2 cases. Once everything passes there, 6 more are judged, and may fail."
    for shown in (facts_html(partial), printed(partial, width=160)):
        assert sentence in " ".join(shown.split())
    for other in (replace(partial, cases_left=0), replace(partial, verdict=FAIL)):
        assert "first 2 cases" not in printed(other, width=160)


def test_a_pass_says_what_the_reference_takes_where_that_is_something_else():
    facts = (fact_in_bytes("temporaries", 900, 1200, 1000, passed=True), fact_in_bytes("sent", 8, 8, 8, passed=True))
    for shown in (facts_html(Result("f", 1, 1, PASS, facts)), printed(Result("f", 1, 1, PASS, facts))):
        assert "Temporaries: yours 900 bytes, the reference 1,000 bytes" in shown and "Sent" not in shown
    assert "the reference 1,000" not in printed(Result("f", 0, 1, FAIL, facts))


def test_in_a_notebook_what_passes_is_folded_where_something_failed():
    right, short = Fact("values", Kind.VALUES, True), Fact("bytes", Kind.COMMUNICATION, False, 2, 1, message="Which?")
    partly = facts_html(Result("f", 1, 2, PARTIAL, (right, short)))
    shown, _, folded = partly.partition("<details")
    assert "Which?" in shown and "values" not in shown
    assert "<summary>1 other fact passes</summary>" in folded and "values" in folded
    assert "<details" not in facts_html(Result("f", 2, 2, PASS, (right,)))


def test_at_80_columns_no_command_is_broken_and_words_longer_than_a_line_are_cut():
    command = "`meshcraft profile context_parallel cp_transformer_step`"
    long = '`meshcraft site sequence_parallel "A heading that is so long that it goes past the end of a line"`'
    message = f"The transfer takes the whole of the step, or nearly: {command} shows where, and {long}; {'x' * 200}"
    failed = Fact("time", Kind.TIME, False, 2, 1, message=f"{message}\n  a row: 1 2\n  a row: 3 4")
    judgement = Report("c", (Result("f", 0, 1, STUDENT_ERROR, (failed,), "f:1", message),), notes=(f"{message} Next.",))
    console = Console(file=io.StringIO(), width=80)
    console.print(facts_table(judgement), crop=False)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    for text in (command, long):
        assert sum(text in line for line in lines) == 3
    assert all(len(line) <= 80 or line.strip(" ;") == long for line in lines)
    assert lines.count("    a row: 1 2") == 1


def test_in_a_terminal_what_passes_is_one_line_and_a_command_stays_on_its_own():
    failed = Fact("live temporaries", Kind.MEMORY, False, 2, 1, message="Which one?")
    facts = (
        Fact("values", Kind.VALUES, True),
        Fact("bytes", Kind.COMMUNICATION, True),
        failed,
        Fact("time", Kind.TIME, None),
    )
    command = f'meshcraft site sequence_parallel "{"A block that saves parts, " * 4}"'
    judgement = Report("c", (Result("f", 1, 2, PARTIAL, facts),), notes=(f"Read more about f: `{command}`",))
    console = Console(file=io.StringIO(), width=80)
    console.print(facts_table(judgement), crop=False)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 other facts pass; not measured: time" in shown and "values" not in shown
    assert f"Read more about f:\n  {command}\n" in shown
