"""The names of facts."""

VALUES, GRADIENTS, NORM = "values", "gradients", "gradient norm"
BUBBLE, PERMUTED, OTHERS = "bubble", "permute bytes", "other collectives"
EXPOSED, TIME, TEMPORARIES, OVER_DATA = "exposed over data", "predicted time", "live temporaries", "bytes over data"
WRONG = (VALUES, GRADIENTS, NORM)
