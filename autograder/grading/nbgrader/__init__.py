"""A class: its folder, its submissions, its ledger, and the bridge to nbgrader's gradebook and feedback."""
