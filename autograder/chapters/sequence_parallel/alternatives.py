"""Alternative implementations for ``sequence_parallel``: each must pass every fact."""

from __future__ import annotations

ALTERNATIVES = {}
