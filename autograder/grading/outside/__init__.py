"""The grader outside the sandbox: from intake to points, for one submission."""
