"""Public programs from other authors, run through the analyses: the refusals, and the errors of the figures.

``python -m course.validation.corpus FOLDER`` takes a folder with a checkout of each repository, named after the
repository; ``--write`` saves the table. The programs themselves are not part of this repository.
"""
