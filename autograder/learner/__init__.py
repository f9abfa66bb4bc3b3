"""What a learner sees besides the verdict: profiles, the compiled schedule, real devices, training."""
