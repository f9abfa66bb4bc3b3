"""What people see of a judgement: complete, and harmless whatever a student wrote."""

import io
import re

import pytest
from rich.console import Console

from autograder.contract.verdict import FAIL, PASS, STUDENT_ERROR, Fact, Report, Result
from autograder.render import facts_html, facts_table, number, plain, size

HOSTILE = '<script>alert(1)</script><img src="http://evil.example/x.png" onerror=x>\x1b[31m\u202e'


def report():
    facts = (
        Fact("values", True, 2e-7, 1e-4, case="data=8"),
        Fact("temporaries", False, 1843200, 1179648, "bytes", 1024000, 1843200, "data=8", "gather:3", "too much"),
        Fact("overlap", None),
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
    sizes = {
        "5,436,121,096": "5.063 GiB",
        "11,534,336 to 22,020,096": "11 MiB to 21 MiB",
        "9,999,999": "",
        "8 of 8": "",
    }
    assert {text: size(text) for text in sizes} == sizes
    result = Result("f", 0, 1, FAIL, (Fact("peak", False, "5,436,121,096", "1,466,592,470", "bytes"),))
    shown = facts_html(result)
    assert "5.063 GiB" in shown and "5,436,121,096" in shown and "5.063 GiB" in printed(result)
    assert "5.063" not in facts_html(Result("f", 0, 1, FAIL, (Fact("count", False, "5,436,121,096"),)))


def test_at_80_columns_no_number_and_no_name_is_broken():
    figures = "5,436,121,096", "1,466,592,470", "bytes", "1,275,297,800", "5,436,121,096"
    large = Fact("live temporaries", False, *figures, "8 devices, width 4096", "gather:3", "too much")
    facts = (large, Fact("reduce-scatter bytes", True, "11,984", "11,984 to 23,968", "bytes", case="8 devices"))
    shown = printed(Result("fsdp_loss", 1, 5, FAIL, facts), width=80)
    words = ["live temporaries", "reduce-scatter bytes", "5.063 GiB", "1.366 GiB", "1.188 GiB", "your line gather:3"]
    assert [word for word in words if word not in shown] == []


def test_at_80_columns_the_words_of_a_case_stay_whole():
    figures = "689,122,048", "792,490,355", "bytes", "689,122,048", "1,501,847,592"
    large = Fact("live temporaries", True, *figures, "8 microbatches, width 2048")
    size = Fact("program size", True, "311", "311", "operations", case="8 microbatches")
    shown = printed(Result("accumulate_gradients", 2, 2, PASS, (large, size)), width=80)
    assert all(word in shown for word in ("microbatches,", "live temporaries", "(operations)", "1.399 GiB"))


def test_what_a_fact_says_is_not_said_twice():
    fact = Fact("values", False, "of another form", "as specified", line="f:1", message="expected a scalar")
    result = Result("f", 0, 1, FAIL, (fact,), "f:1", "expected a scalar")
    for shown in (facts_html(result), printed(result)):
        assert shown.count("expected a scalar") == 1 and shown.count("f:1") == 1


@pytest.mark.parametrize(("line", "said"), [("f:1", "your line"), ("course/model.py:70", "the course's line")])
def test_a_line_of_the_course_is_not_called_the_readers(line, said):
    result = Result("f", 0, 1, FAIL, (Fact("bytes", False, 2, 1, line=line, message="too many"),))
    assert all(f"{said} {line}" in re.sub("<.*?>", "", shown) for shown in (facts_html(result), printed(result)))


def test_html_is_escaped_and_asks_for_nothing():
    fact = Fact(HOSTILE, False, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    shown = facts_html(
        Report("c", (Result(HOSTILE, 0, 1, HOSTILE, (fact,), HOSTILE, HOSTILE, (HOSTILE,)),), notes=(HOSTILE,))
    )
    tags = set(re.findall(r"<(/?\w+)", shown))
    assert tags <= {f"{end}{tag}" for end in ("", "/") for tag in "div span b table thead tbody tr th td br".split()}
    assert not re.search(r"<[^>]*\b(src|href|on\w+)\s*=", shown)
    assert "\x1b" not in shown and "\u202e" not in shown


def test_terminal_escapes_are_taken_out():
    shown = printed(Result(HOSTILE, 0, 1, FAIL, (Fact(HOSTILE, False, HOSTILE, message=HOSTILE),), HOSTILE, HOSTILE))
    assert "\x1b" not in shown and "\u202e" not in shown


def test_numbers_are_short_and_exact_where_whole():
    shown = {2.0: "2", 1 / 3: "0.3333", 1e-9: "1e-09", None: "", float("inf"): "inf", "two": "two"}
    assert {value: number(value) for value in shown} == shown
    assert len(plain("x" * 10**6)) < 5000
