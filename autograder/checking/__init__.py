"""The parts of ``check``: judging on this machine, the notebook kernel's state, and additions to a verdict."""
