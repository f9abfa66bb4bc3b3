"""The only place where answer code is written: one module per chapter."""
