"""Tools for learners besides the verdict: profiles, the compiled schedule, real devices, training."""
