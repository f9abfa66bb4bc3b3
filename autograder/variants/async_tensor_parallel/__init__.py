"""Right answers for ``async_tensor_parallel`` in another style: each must pass every fact."""

VARIANTS = {}
