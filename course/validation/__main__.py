"""``python -m course.validation``: the validation report."""

import sys

from course.validation.report import main

sys.exit(main())
