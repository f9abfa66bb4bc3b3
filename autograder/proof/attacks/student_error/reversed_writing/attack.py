"""Right-to-left overrides and invisible characters that make a message and a line read as something else; each is
made visible.

group: reaches
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    verdict = "fail\u202e ssap\u2066\u200b\ufeff"  # ‮ ssap ⁦
    raise ValueError(verdict)
