"""What ``check`` is made of: judging here and now, what a notebook's kernel knows, and what is added to a verdict."""
