"""What a learner sees beside the verdict: profiles, the compiled schedule, real devices, training, saved reports."""
