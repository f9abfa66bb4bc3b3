"""Timeline: how long a step would take on a machine, simulated operation by operation.

The rules, all of them; ``kernels`` has those of a single kernel:

- A device computes in program order. A kernel starts when the one before it has ended and what it reads is there.
- A collective starts when its operands are ready on every device of its group and the streams of all of them are
  free: one stream for each set of mesh axes. It takes the time of a ring on the slowest link that it uses.
- On a stream the collective that is ready first goes first; program order is tried too, and the better one counts.
- Time and memory are of one order: a collective that is issued early needs its result's bytes early (``memory``).
- Transfers that share a device's link share its bandwidth equally.
- A trip of a loop ends when its kernels and its collectives have ended. Only who reads the loop's results waits for
  the last trip's collectives, so what stands outside of the loop may run beside it.
- A loop or branch begins when what it reads is there, and nothing after it computes before.
- Devices that behave alike, exactly, are simulated once.
"""

from course.program.simulator.result import Bar, DeviceTime, Piece, Timeline, bubble, timeline, timelines

__all__ = ["Bar", "DeviceTime", "Piece", "Timeline", "bubble", "timeline", "timelines"]
