"""The names of facts."""

VALUES, GRADIENTS, NORM = "values", "gradients", "gradient norm"
GATHERED, SCATTERED, REDUCED = "all-gather bytes", "reduce-scatter bytes", "all-reduce bytes"
OTHERS, SENT, ACTIVATIONS = "other collectives", "bytes sent", "activation bytes"
TIME, EXPOSED, LARGEST = "predicted time", "exposed communication", "largest temporary"
WRONG = (VALUES, GRADIENTS, NORM)
