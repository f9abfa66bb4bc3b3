"""Training for real: text, optimizer, strategies, checkpoints, processes and the loop that `meshcraft train` runs."""
