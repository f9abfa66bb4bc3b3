"""``python -m course.program.compiled``: install XLA's GPU compiler where the compiled lens looks for it."""

import sys

from course.program.compiled.plugin import main

sys.exit(main())
