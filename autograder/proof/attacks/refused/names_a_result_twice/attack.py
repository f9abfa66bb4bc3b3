"""Gives one result twice under the same name, so that counts of results and results by name disagree.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: honest forge
"""

# %%
import dataclasses

from course.program import export


def twice(params, axis_name, min_size):
    return right_shards(params, axis_name, min_size)


def doubled():
    """The task's own wrapper with one more result, which then gets the name of another."""
    from autograder.contract import wrapping

    asked = request()
    if asked is None or asked["task"] != "shard_params":
        return
    agreed = wrapping.wrappings(asked["chapter"])["shard_params"]
    found = {}
    for case in [wrapping.Case(**case) for case in asked["cases"]]:
        wrapped = agreed.wrap(right_shards, case)

        def more(function=wrapped.function, **inputs):
            values = function(**inputs)["values"]
            return {"values": values, "valuez": values[min(values)]}

        def specs(of=wrapped.out_specs):
            return {"values": of()["values"], "valuez": of()["values"][min(of()["values"])]}

        program = export(more, wrapped.inputs, wrapped.in_specs, mesh=case.mesh, out_specs=specs, roles=wrapped.roles)
        outputs = [dataclasses.replace(leaf, name=leaf.name.replace("valuez", program.outputs[0].name)) for leaf in program.outputs]
        found[case.name] = with_header(program, outputs=tuple(outputs))
    say({"cases": list(found), "line": ""}, list(found.values()))


class Forge:
    doubled()
