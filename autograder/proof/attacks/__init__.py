"""Attacks on the grader, each a submission, and what grades them all: ``python -m autograder.proof.attacks``.

``<verdict>/<name>/`` holds one attack. The folder's name is the word that the attacked functions must get: pass,
partial, fail, student_error, limit_exceeded, refused or needs_human. In it lies one of two files.

``attack.py`` is a notebook in percent format. ``# %% [shard_params]`` replaces the released cell of that grade id; a
plain ``# %%`` is a new cell before the first released solution cell. Functions that it does not define stay stubs.
Its docstring begins with a paragraph that says what it tries and what ought to happen; header lines follow:

- ``group``: reads, forges, tampers, exhausts or reaches
- ``control``: ``yes``, or ``no: why`` for one that stock nbgrader is not tried on
- ``chapter``: whose notebook it is, ``fsdp`` if left out
- ``functions``: whose verdict the folder names; if left out, those that the file defines
- ``points``: what they earn together, where the verdict is partial
- ``uses``: files in ``kits/`` that become cells before all others
- ``rungs``: the sandboxes that claim to stop it; if left out, all

``submit.py`` is for what is no plain notebook. It has the same docstring, and ``submit(folder, released)``, which fills
``folder``, the student's ``submitted/<name>/fsdp/``; ``released`` is the notebook that students were given.

Whatever an attack finds it says, in an exception or in a name, so that a canary shows up where students can read it.
"""
