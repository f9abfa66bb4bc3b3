"""Writes a pickle to the result channel that would run a command where it is read. Nothing unpickles.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: forge
"""

# %%
import pickle


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/pwned $HOME/pwned",)


class Say:
    if request():
        say_raw(pickle.dumps(Evil()))
