"""Named wrong answers, each of which a fact must reject."""
