"""An exception that is none of Python's ordinary ones, whose text and whose class's name raise as well.

group: exhausts
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    class Kind(type):
        @property
        def __name__(cls):
            raise SystemExit(0)

    class Nameless(BaseException, metaclass=Kind):
        def __str__(self):
            return str(self)

    raise Nameless
