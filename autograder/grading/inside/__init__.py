"""The confined processes, which hold a student's code or Programs, and their confinement."""
