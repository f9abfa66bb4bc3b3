"""The commands of `meshcraft`: learner's, instructor's, and what they share."""
