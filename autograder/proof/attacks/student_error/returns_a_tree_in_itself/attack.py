"""A result that contains itself, so that whoever walks through it comes to no end.

group: exhausts
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    tree = []
    tree.append(tree)
    return tree, tree
