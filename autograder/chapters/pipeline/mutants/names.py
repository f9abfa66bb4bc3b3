"""The names of facts."""

VALUES, GRADIENTS, NORM = "values", "gradients", "gradient norm"
UNEVEN_BATCH, UNEVEN_LAYERS, COMMUNICATION = "uneven batch", "uneven layers", "communication"
BUBBLE, PERMUTED, LOSS, REDUCED = "bubble", "permute bytes", "loss bytes", "all-reduce bytes"
OTHERS, TEMPORARIES = "other collectives", "live temporaries"
WRONG = (VALUES, GRADIENTS, NORM)
