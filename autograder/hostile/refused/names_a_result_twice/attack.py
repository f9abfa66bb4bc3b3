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
    from autograder import contract

    asked = request()
    if asked is None or asked["task"] != "shard_params":
        return
    agreed = contract.load(asked["chapter"]).task("shard_params")
    found = {}
    for case in [contract.Case(**case) for case in asked["cases"]]:
        wrapped = agreed.wrap(right_shards, case)

        def more(function=wrapped.function, **inputs):
            values = function(**inputs)["values"]
            return {"values": values, "valuez": values["scale"]}

        def specs(of=wrapped.out_specs):
            return {"values": of()["values"], "valuez": P()}

        program = export(more, wrapped.inputs, wrapped.in_specs, mesh=case.mesh, out_specs=specs, roles=wrapped.roles)
        outputs = [dataclasses.replace(leaf, name=leaf.name.replace("valuez", "values/scale")) for leaf in program.outputs]
        found[case.name] = with_header(program, outputs=tuple(outputs))
    say({"cases": list(found), "line": ""}, list(found.values()))


class Forge:
    doubled()
