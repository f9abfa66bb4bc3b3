"""The contracts of the chapters: the criteria for correctness, memory and speed."""
