"""The names of facts."""

VALUES, GRADIENTS = "values", "gradients"
SPLIT, STATE = "split dims", "state bytes per device"
GATHERED, SCATTERED, OTHERS = "all-gather bytes", "reduce-scatter bytes", "other collectives"
NORM, TEMPORARIES, TIME = "gradient norm", "live temporaries", "predicted time"
AVERAGED, BETWEEN = "all-reduce bytes", "bytes between nodes"
