"""The page of a chapter in a course folder."""

from autograder.commands.own_page import write_page

TEXT = r"""
# Means

## The idea

The mean is $\frac{1}{n}\sum_i x_i$ over `$HOME`, for a*b of *all*:

$$
\bar{x} = \frac{x_1 + x_2}{2}
$$

It costs \$5, and $\frac$ is none.
"""


def test_formulas_are_mathml_and_one_that_cannot_be_read_is_named_and_shown_as_typed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    (problem,) = write_page(page, tmp_path, "means")
    html = (tmp_path / "means.html").read_text()
    assert html.count("<math") == 2 and html.count("<mfrac>") == 2 and html.count('display="block"><mrow>') == 1
    assert r"<code>\frac</code>" in html and "$HOME" in html and "costs $5" in html and "<em>all</em>" in html
    assert problem.startswith(rf"{page}: the formula '\\frac' cannot be read as LaTeX (") and "$$" not in html
    assert 'href="means.html"' in (tmp_path / "index.html").read_text() and '<h2 id="The-idea">' in html
