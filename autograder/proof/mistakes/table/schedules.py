"""Typical mistakes in ``schedules``, and the messages that they must get."""

from autograder.proof.mistakes import Mistake

MISTAKES = [
    Mistake(
        "one_f_one_b",
        "one text for all stages",
        r"Expected a tuple with a line of text for each stage",
        {"return tuple(lines)": 'return "\\n".join(lines)'},
    ),
    Mistake(
        "zero_bubble",
        "whole backward pass and its half",
        r"stage 0 needs one F and one B \(or one I and one W\) of microbatch 0, and has 1 x F, 1 x B, 1 x W",
        {'words.append(f"I{microbatch}")': 'words.append(f"B{microbatch}")'},
    ),
    Mistake(
        "execute_schedule",
        "permute inside of a branch",
        r"devices would wait for each other forever.*A collective inside a branch must be reached by every device",
        {'{"dx": dx, "pending"': '{"dx": lax.ppermute(dx, axis_name, behind), "pending"'},
    ),
]
