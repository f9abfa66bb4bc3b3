"""The names of facts."""

VALUES, GRADIENTS, NORM = "values", "gradients", "gradient norm"
SCALE, COMMUNICATION = "initial scale", "communication"
GATHERED, SCATTERED, REDUCED = "all-gather bytes", "reduce-scatter bytes", "all-reduce bytes"
FORWARD, OTHERS, TIME = "collectives forward", "other collectives", "predicted time"
WRONG = (VALUES, GRADIENTS)
