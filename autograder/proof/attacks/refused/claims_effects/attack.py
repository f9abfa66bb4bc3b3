"""Says in the artefact that it has an ordered effect, of a kind that only its own process knows.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
import dataclasses

from jax._src import effects


@dataclasses.dataclass(frozen=True)
class Secretly(effects.Effect):
    pass


class Forge:
    effects.lowerable_effects.add_type(Secretly)
    forge(right_shards, lambda program: with_artefact(program, ordered_effects=(Secretly(),)))
