"""Explanations of wrong results: patterns in values, in scale, in bytes, and parts that another device has."""
