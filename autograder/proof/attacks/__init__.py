"""Attacks on the grader, each a submission, and the suite that grades them: ``python -m autograder.proof.attacks``.

An attack that is a notebook is a section of a file in ``hostile-cells/``, which is never imported, only read as text::

    # %% attack reads_the_gradebook {verdict = "student_error", group = "reads", control = true, uses = ["search"]}
    # # Looks for the gradebook and the ledger: what it tries and what ought to happen, which the site shows.
    def shard_params(params, axis_name, min_size):
        ...

A function of the chapter replaces that function's released cell, everything else is a new cell before the first of
them, and functions that it does not define stay stubs. The header is TOML; ``# %% defaults``, with TOML in comments,
gives the values for the attacks below it:

- ``verdict``: each function's verdict: pass, partial, fail, student_error, limit_exceeded, refused or needs_human
- ``group``: reads, forges, tampers, exhausts or reaches
- ``control``: ``true``, or why stock nbgrader is not tried on it
- ``chapter``: the chapter of the notebook; by default ``fsdp``
- ``functions``: the ones that must get the verdict; by default those that it defines, or else all of the chapter
- ``points``: their total points, if the verdict is partial
- ``backends``: the sandboxes that claim to stop it; by default all
- ``uses``: names of ``# %% helper`` sections, of any file, that become cells before it;
  ``imports`` comes before all attacks
- ``then``: a helper section that comes after it, which lets attacks that differ in a name or two share the rest

An attack that is not a plain notebook is a function in ``submissions.py``, which writes the student's submission.

An attack puts whatever it finds in an exception or in a name, so that a canary shows up where students can read it.
"""
