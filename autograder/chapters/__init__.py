"""The contracts of the chapters: what correct, small and fast mean."""
