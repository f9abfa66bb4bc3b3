"""Public programs that nobody here wrote, put through the analyses: what is refused, and how far off the figures are.

``python -m course.validation.corpus FOLDER`` takes a folder with a checkout of each repository, named as the repository
is; ``--write`` keeps the table. The programs themselves are not part of this repository.
"""
