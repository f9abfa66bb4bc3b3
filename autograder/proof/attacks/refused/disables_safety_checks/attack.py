"""Switches off jax.export's own safety checks in the artefact.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
from jax import export as jax_export


def unsafe(program):
    checks = (jax_export.DisabledSafetyCheck.platform(), jax_export.DisabledSafetyCheck.custom_call("anything"))
    return with_artefact(program, disabled_safety_checks=checks)


class Forge:
    forge(right_shards, unsafe)
