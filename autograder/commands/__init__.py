"""The commands of `meshcraft`: for learners, for instructors, and their shared code."""
