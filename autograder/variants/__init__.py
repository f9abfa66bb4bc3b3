"""Right answers in another style, which every contract must accept."""
