"""Attaches a second artefact as the program's derivative, which a header does not show.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
from jax import export as jax_export


def with_derivative(program):
    exported = jax_export.deserialize(bytearray(program.artefact))
    return with_artefact(program, _get_vjp=lambda _: exported)


class Forge:
    original = jax_export.Exported.serialize
    jax_export.Exported.serialize = lambda self, original=original: original(self, vjp_order=self._get_vjp is not None)
    forge(right_shards, with_derivative)
