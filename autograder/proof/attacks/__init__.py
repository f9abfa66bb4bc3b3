"""Attacks on the grader, each a submission, and what grades them all: ``python -m autograder.proof.attacks``.

An attack that is a notebook is a section of a file in ``hostile-cells/``, which is only ever text to us::

    # %% attack reads_the_gradebook {verdict = "student_error", group = "reads", control = true, uses = ["search"]}
    # Looks for the gradebook and the ledger: what it tries and what ought to happen, which the site shows.
    def shard_params(params, axis_name, min_size):
        ...

A function of the chapter replaces that function's released cell, everything else is a new cell before the first of
them, and functions that it does not define stay stubs. The header is TOML; ``# %% defaults``, with TOML in comments,
says what holds for the attacks below it:

- ``verdict``: what the functions must get: pass, partial, fail, student_error, limit_exceeded, refused or needs_human
- ``group``: reads, forges, tampers, exhausts or reaches
- ``control``: ``true``, or why stock nbgrader is not tried on it
- ``chapter``: whose notebook it is, ``fsdp`` if left out
- ``functions``: which must get the verdict; if left out, those that it defines, or else all of the chapter
- ``points``: what they earn together, where the verdict is partial
- ``backends``: the sandboxes that claim to stop it; if left out, all
- ``uses``: names of ``# %% helper`` sections, of any file, that become cells before it
  ``imports`` comes before all attacks
- ``then``: one that comes after it, by which attacks that differ in a name or two share the rest

What is no plain notebook is a function in ``submissions.py``, which writes what the student hands in.

Whatever an attack finds it says, in an exception or in a name, so that a canary shows up where students can read it.
"""
