"""``python -m course.program.compiled``: install XLA's GPU compiler where the compiled analysis looks for it."""

import sys

from course.program.compiled.plugin import main

sys.exit(main())
