"""Timeline: the time of a step on a machine, simulated operation by operation.

The complete rules; ``kernels`` has those of a single kernel:

- A device computes in program order. A kernel starts when the previous one has ended and its operands are ready.
- A collective starts when its operands are ready on every device of its group and the streams of all of them are
  free: one stream for each set of mesh axes. It takes the time of a ring on the slowest link that it uses.
- On a stream the collective that is ready first goes first; program order is tried too, and the better one counts.
- Time and memory assume the same order: a collective that is issued early needs its result's bytes early (``memory``).
- Transfers that share a device's link share its bandwidth equally.
- A trip of a loop ends when its kernels and its collectives have ended. Only readers of the loop's results wait for
  the last trip's collectives, so operations outside the loop may overlap with them.
- A loop or branch begins when its operands are ready, and nothing after it computes before that.
- Devices that behave exactly alike are simulated once.
"""

from course.program.simulator.result import Bar, DeviceTime, Piece, Timeline, bubble, timeline, timelines

__all__ = ["Bar", "DeviceTime", "Piece", "Timeline", "bubble", "timeline", "timelines"]
