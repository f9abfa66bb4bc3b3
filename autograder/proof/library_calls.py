"""Calls of the functions of ``library``: templates that are tried in turn, and calls for functions that fit none.

``x`` is a square array of floats between 0 and 1, ``i`` one of integers, ``b`` one of booleans, ``v`` and ``j`` are
rows of floats and integers, and ``n`` is the width.
"""

TEMPLATES = (
    *("{}(x)", "{}(x, x)", "{}(x, x, x)", "{}(x, 1)", "{}(x, 0)", "{}(i)", "{}(i, i)", "{}(b)", "{}(v)", "{}(v, v)"),
    *("{}(x, i)", "{}(x, 1, 2)", "{}(x, 0, 1)", "{}((x, x))", "{}((v, v), 0)", "{}(x, v)", "{}(v, x)", "{}(b, x, x)"),
    *("{}()(key, x.shape)", "{}(0.1)(key, x.shape)", "{}(key, x.shape)", "{}(key, x)", "{}(key, x, x)", "{}(key)"),
    *("{}(n)", "{}(x.shape)", "{}(0.1, x.shape)", "{}(v.at[j].get(), v)", "{}(x, (n, n))", "{}(x, ((0, 1), (0, 1)))"),
    *("{}(0.1).update(x, {}(0.1).init(x), x)[0]", "{}().update(x, {}().init(x), x)[0]", "{}(0.1)(i)"),
    *("{}(0.1, 9)(i)", "{}(0.1, 0.2, 9)(i)", "{}(0.1, 9, 0.5)(i)", "{}(n, n, rngs=nnx.Rngs(0))(x)"),
    *("{}(n, rngs=nnx.Rngs(0))(x)", "{}()(x)", "{}(n, rngs=nnx.Rngs(0))(i)", "{}(x, axis=0)", "{}(0, n)"),
)

_CALLS = """
jnp.apply_along_axis(jnp.sum, 0, x)
jnp.apply_over_axes(jnp.sum, x, [0])
jnp.argwhere(b, size=4)
jnp.astype(x, jnp.bfloat16)
jnp.bincount(j, length=8)
jnp.choose(i % 2, [x, x])
jnp.compress(np.ones(8, bool), x, axis=0)
jnp.cross(x.reshape(-1, 4)[:, :3], x.reshape(-1, 4)[:, 1:])
jnp.dsplit(x[None, :, :], 2)
jnp.einsum("ij,jk->ik", x, x)
jnp.extract(b, x, size=4)
jnp.fill_diagonal(x, 0.0, inplace=False)
jnp.flatnonzero(b, size=4)
jnp.fromfunction(lambda i, j: i * j, (8, 8))
jnp.interp(v, jnp.sort(v + 1), v)
jnp.intersect1d(j, j + 1, size=4)
jnp.linspace(0.0, x.mean(), 5)
jnp.mask_indices(4, jnp.triu)
jnp.nonzero(b, size=4)
jnp.permute_dims(x, (1, 0))
jnp.piecewise(x, [b], [jnp.sin, jnp.cos])
jnp.place(x, b, v, inplace=False)
jnp.polyfit(v, v + 1, 2)
jnp.put(x, j, v, inplace=False)
jnp.put_along_axis(x, i, x, 1, inplace=False)
jnp.ravel_multi_index((j, j + 1), (4, 4), mode="clip")
jnp.roots(v, strip_zeros=False)
jnp.setdiff1d(j, j + 1, size=4)
jnp.setxor1d(j, j + 1, size=4)
jnp.take(x, j, axis=0)
jnp.take_along_axis(x, i, 1)
jnp.trim_zeros(v)
jnp.union1d(j, j + 1, size=4)
jnp.unique(i, size=4)
jnp.unique_all(i, size=4)
jnp.unique_counts(i, size=4)
jnp.unique_inverse(i, size=4)
jnp.unique_values(i, size=4)
jnp.unpackbits(i.astype(jnp.uint8))
jnp.vectorize(jnp.sin)(x)
jnp.where(b, x, -jnp.inf)
jnp.linalg.cross(x.reshape(-1, 4)[:, :3], x.reshape(-1, 4)[:, 1:])
jnp.linalg.matrix_power(x, 3)
jnp.linalg.multi_dot([x, x, x])
jnp.linalg.norm(x)
jax.nn.dot_product_attention(x[None, :, None], x[None, :, None], x[None, :, None], is_causal=True)
jax.nn.one_hot(i, n)
lax.all_gather(x, "data", tiled=True)
lax.all_to_all(x, "data", 0, 1, tiled=True)
lax.argmax(x, 1, jnp.int32)
lax.argmin(x, 1, jnp.int32)
lax.associative_scan(jnp.add, x)
lax.axis_index("data")
lax.axis_size("data")
lax.bitcast_convert_type(x, jnp.int32)
lax.broadcast_in_dim(x, (2, *x.shape), (1, 2))
lax.broadcasted_iota(jnp.int32, x.shape, 1)
lax.concatenate([x, x], 0)
lax.cond(lax.axis_index("data") == 0, jnp.sin, jnp.cos, x)
lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME")
lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], (1, 1), "SAME")
lax.conv_general_dilated_patches(x[None, None], (2, 2), (1, 1), "VALID")
lax.conv_transpose(x[None, :, :, None], x[:3, :3, None, None], (1, 1), "SAME")
lax.conv_with_general_padding(x[None, None], x[None, None, :3, :3], (1, 1), "SAME", None, None)
lax.convert_element_type(x, jnp.bfloat16)
lax.custom_linear_solve(lambda y: 2 * y, x, lambda matvec, y: y / 2, symmetric=True)
lax.custom_root(lambda y: y - x, x, lambda f, y: x, lambda g, y: y)
lax.dot_general(x, x, (((1,), (0,)), ((), ())))
lax.dynamic_slice(x, (j.max(), 0), x.shape)
lax.dynamic_slice_in_dim(x, 0, n // 2)
lax.dynamic_index_in_dim(x.reshape(4, -1), j.max())
lax.dynamic_update_index_in_dim(x.reshape(4, -1), x.reshape(4, -1)[0], j.max(), 0)
lax.dynamic_update_slice(x, x, (j.max(), 0))
lax.dynamic_update_slice_in_dim(x, x, j.max(), 0)
lax.expand_dims(x, (0,))
lax.fft(x.astype(jnp.complex64), "FFT", (n,))
lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y), x)
lax.full(x.shape, 1.0)
lax.imag(x.astype(jnp.complex64))
lax.index_in_dim(x.reshape(4, -1), 1)
lax.map(jnp.sin, x)
lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0)))
lax.pcast(jnp.sin(jnp.arange(8.0)), "data", to="varying")
lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)
lax.pmax(x, "data")
lax.pmean(x, "data")
lax.pmin(x, "data")
lax.ppermute(x, "data", [(0, 1), (1, 0)])
lax.pshuffle(x, "data", [1, 0])
lax.psum(x, "data")
lax.psum_scatter(x, "data", tiled=True)
lax.pswapaxes(x.reshape(2, -1), "data", 0)
lax.ragged_dot(x, jnp.stack([x, x]), jnp.array([4, n - 4]))
lax.real(x.astype(jnp.complex64))
lax.reduce(x, 0.0, lax.add, (0,))
lax.reduce_and(b, (0,))
lax.reduce_max(x, (0,))
lax.reduce_min(x, (0,))
lax.reduce_or(b, (0,))
lax.reduce_precision(x, 8, 7)
lax.reduce_prod(x, (0,))
lax.reduce_sum(x, (0,))
lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")
lax.reduce_xor(i, (0,))
lax.reshape(x, (n * n,))
lax.rev(x, (0,))
lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), x.shape)
lax.rng_uniform(0.0, 1.0, x.shape)
lax.scan(lambda y, _: (jnp.tanh(y), None), x, length=3)
lax.slice(x, (0, 0), (n // 2, n))
lax.slice_in_dim(x, 0, n // 2)
lax.split(x, (n // 2, n // 2))
lax.stack([x, x])
lax.squeeze(x[None], (0,))
lax.switch(lax.axis_index("data"), [jnp.sin, jnp.cos], x)
lax.transpose(x, (1, 0))
lax.unstack(x.reshape(4, -1))
jnp.unstack(x.reshape(4, -1))
lax.while_loop(lambda state: state[0] < 3, lambda state: (state[0] + 1, jnp.tanh(state[1])), (0, x))[1]
special.bessel_jn(v, v=2)
special.sph_harm_y(j % 2, j % 2, v, v, n_max=2)
special.hyp2f1(v, v, v + 1, v / 2)
initializers.delta_orthogonal()(key, (3, 4, 4))
initializers.variance_scaling(1.0, "fan_in", "truncated_normal")(key, x.shape)
jax.random.ball(key, 3)
jax.random.categorical(key, x)
jax.random.choice(key, v)
jax.random.fold_in(key, j.max())
jax.random.generalized_normal(key, 1.5, x.shape)
jax.random.multinomial(key, 8.0, v)
jax.random.orthogonal(key, 4)
jax.random.randint(key, x.shape, 0, 8)
jax.random.split(key, 4)
jax.random.triangular(key, 0.0, 0.5, 1.0, x.shape)
jax.random.truncated_normal(key, -2, 2, x.shape)
optax.apply_if_finite(optax.sgd(0.1), 3).update(x, optax.apply_if_finite(optax.sgd(0.1), 3).init(x), x)[0]
optax.chain(optax.clip(1.0)).update(x, optax.chain(optax.clip(1.0)).init(x), x)[0]
optax.ctc_loss(x[None], 0 * x[None, :, 0], i[:1, :3], 0 * x[:1, :3])
optax.flatten(optax.adam(0.1)).update(x, optax.flatten(optax.adam(0.1)).init(x), x)[0]
optax.inject_hyperparams(optax.adam)(0.1).update(x, optax.inject_hyperparams(optax.adam)(0.1).init(x), x)[0]
optax.masked(optax.adamw(0.1), True).update(x, optax.masked(optax.adamw(0.1), True).init(x), x)[0]
optax.MultiSteps(optax.sgd(0.1), 2).update(x, optax.MultiSteps(optax.sgd(0.1), 2).init(x), x)[0]
optax.partition({"a": optax.sgd(0.1)}, "a").update(x, optax.partition({"a": optax.sgd(0.1)}, "a").init(x), x)[0]
optax.polynomial_schedule(0.1, 0.2, 2, 9)(i)
optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 9)(i)
optax.warmup_exponential_decay_schedule(0.0, 0.1, 2, 9, 0.5)(i)
optax.softmax_cross_entropy_with_integer_labels(x, j)
optax.update_infinity_moment(x, x, 0.9, 1e-8)
optax.update_moment(x, x, 0.9, 1)
optax.update_moment_per_elem_norm(x, x, 0.9, 2)
nnx.Conv(n, n, (3,), rngs=nnx.Rngs(0))(x[None])
nnx.ConvTranspose(n, n, (3,), rngs=nnx.Rngs(0))(x[None])
nnx.Dropout(0.5, rngs=nnx.Rngs(0))(x)
nnx.Einsum("ij,jk->ik", (n, n), rngs=nnx.Rngs(0))(x)
nnx.Embed(n, n, rngs=nnx.Rngs(0))(i)
nnx.GRUCell(n, n, rngs=nnx.Rngs(0))(0 * x, x)
nnx.LSTMCell(n, n, rngs=nnx.Rngs(0))((0 * x, 0 * x), x)
nnx.LoRA(n, 2, n, rngs=nnx.Rngs(0))(x)
nnx.LoRALinear(n, n, lora_rank=2, rngs=nnx.Rngs(0))(x)
nnx.MultiHeadAttention(2, n, decode=False, rngs=nnx.Rngs(0))(x[None])
nnx.OptimizedLSTMCell(n, n, rngs=nnx.Rngs(0))((0 * x, 0 * x), x)
nnx.SimpleCell(n, n, rngs=nnx.Rngs(0))(0 * x, x)
nnx.dot_product_attention(x[None, :, None], x[None, :, None], x[None, :, None])
nnx.avg_pool(x[None, :, :, None], (2, 2), (2, 2))
nnx.max_pool(x[None, :, :, None], (2, 2), (2, 2))
"""

# Functions that read or write files, print or set options, and types and parts of JAX's own machinery.
NOT_FOR_PROGRAMS = {
    *"jnp.save jnp.savez jnp.load jnp.fromfile jnp.from_dlpack jnp.fromstring jnp.frombuffer jnp.fromiter".split(),
    *"jnp.frompyfunc jnp.array_repr jnp.array_str jnp.get_printoptions jnp.set_printoptions jnp.printoptions".split(),
    *"lax.PrecisionLike lax.ConvGeneralDilatedDimensionNumbers lax.DotDimensionNumbers lax.after_all".split(),
    *"lax.create_token lax.precv lax.psend lax.dce_sink lax.padtype_to_pads lax.with_sharding_constraint".split(),
    *"lax.conv_dimension_numbers lax.conv_general_permutations lax.conv_general_shape_tuple lax.composite".split(),
    *"lax.conv_shape_tuple lax.conv_transpose_shape_tuple lax.reduce_window_shape_tuple".split(),
    *"optax.MaskOrFn optax.OptState optax.Params optax.ScalarOrSchedule optax.Schedule optax.Updates".split(),
    *"jax.nn.get_scaled_dot_general_config jax.random.key_dtype jax.random.key_impl nnx.RNNCellBase".split(),
}

CALLS = {call.partition("(")[0]: call for call in _CALLS.strip().splitlines() if call}
