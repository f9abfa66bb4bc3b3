"""Wrong answers for ``column_parallel_dense`` and ``row_parallel_dense``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from autograder.chapters.tensor_parallel.mutants.names import GATHERED, GRADIENTS, OTHERS, SCATTERED, WRONG
from autograder.proof.mutants import mutant
from course.mesh import varying_axes
from solutions.tensor_parallel import column_parallel_dense, row_parallel_dense


def gather_rows(x: Any, axis_name: str) -> Any:
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)


def scatter_rows(y: Any, axis_name: str) -> Any:
    return lax.psum_scatter(y, axis_name, scatter_dimension=y.ndim - 2, tiled=True)


def own_rows(y: Any, axis_name: str) -> Any:
    """This device's rows of what every device has."""
    rows = y.shape[-2] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(y, lax.axis_index(axis_name) * rows, rows, y.ndim - 2)


def biased(params: Any, y: Any) -> Any:
    return y + params["bias"] if "bias" in params else y


def scaled_back(x: Any, factor: float) -> Any:
    """``x``, whose gradient is multiplied on its way back."""
    return factor * x + lax.stop_gradient((1 - factor) * x)


def gathers_the_kernel(params, x, axis_name):
    """Sends weights in place of rows, computes all features of its own rows, and turns the split round at the end."""
    whole = lax.all_gather(params["kernel"], axis_name, axis=1, tiled=True)
    y = lax.all_to_all(x @ whole, axis_name, x.ndim - 1, x.ndim - 2, tiled=True)
    return biased(params, y)


def fills_up_and_adds(params, x, axis_name):
    """Every device puts its rows into zeros, and all of that is added up: twice the bytes."""
    rows = x.shape[-2]
    shape = (*x.shape[:-2], rows * lax.axis_size(axis_name), x.shape[-1])
    start = (*[0] * (x.ndim - 2), lax.axis_index(axis_name) * rows, 0)
    zeros = lax.pcast(jnp.zeros(shape), tuple(varying_axes(x)), to="varying")
    return biased(params, lax.psum(lax.dynamic_update_slice(zeros, x, start), axis_name) @ params["kernel"])


def gathers_for_each_half_of_its_columns(params, x, axis_name):
    halves = jnp.split(params["kernel"], [params["kernel"].shape[1] // 2], axis=1)
    y = jnp.concatenate([column_parallel_dense({"kernel": half}, x, axis_name) for half in halves], -1)
    return biased(params, y)


def puts_batches_before_rows(params, x, axis_name):
    """Joins the parts along the first dim, and reads them as rows."""
    parts = lax.all_gather(x, axis_name, axis=0, tiled=True)
    whole = parts.reshape(*x.shape[:-2], x.shape[-2] * lax.axis_size(axis_name), x.shape[-1])
    return biased(params, whole @ params["kernel"])


def starts_with_its_own_rows(params, x, axis_name):
    """The order in which a ring brings them."""
    whole = gather_rows(x, axis_name)
    turned = jnp.roll(whole, -x.shape[-2] * lax.axis_index(axis_name), axis=-2)
    return biased(params, turned @ params["kernel"])


def forgets_the_bias(params, x, axis_name):
    return column_parallel_dense({"kernel": params["kernel"]}, x, axis_name)


def halves_the_precision(params, x, axis_name):
    whole = gather_rows(x.astype(jnp.bfloat16), axis_name).astype(jnp.float32)
    return biased(params, whole @ params["kernel"])


def averages_the_inputs_gradient(params, x, axis_name):
    return column_parallel_dense(params, scaled_back(x, 1 / lax.axis_size(axis_name)), axis_name)


def sums_the_kernels_gradient(params, x, axis_name):
    """As if the kernel were a copy that all devices hold."""
    kernel = scaled_back(params["kernel"], lax.axis_size(axis_name))
    return column_parallel_dense({**params, "kernel": kernel}, x, axis_name)


def lets_no_gradient_through(params, x, axis_name):
    return column_parallel_dense(params, lax.stop_gradient(x), axis_name)


def adds_the_bias_before_the_sum(params, x, axis_name):
    """Every device adds it, and then all of them are added up."""
    return scatter_rows(biased(params, x @ params["kernel"]), axis_name)


def all_reduces_and_slices(params, x, axis_name):
    """Gives all rows to every device, and keeps its own."""
    y = lax.psum(x @ params["kernel"], axis_name)
    return biased(params, own_rows(y, axis_name))


def gathers_the_features(params, x, axis_name):
    """Gathers the inputs and the kernel, and multiplies its own rows with all of it."""
    features = lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)
    kernel = lax.all_gather(params["kernel"], axis_name, axis=0, tiled=True)
    return biased(params, own_rows(features, axis_name) @ kernel)


def averages(params, x, axis_name):
    return biased(params, scatter_rows(x @ params["kernel"], axis_name) / lax.axis_size(axis_name))


def takes_batches_for_rows(params, x, axis_name):
    """Splits the first of the dims that it has flattened."""
    y = x @ params["kernel"]
    flat = y.reshape(-1, y.shape[-1])
    own = lax.psum_scatter(flat, axis_name, scatter_dimension=0, tiled=True)
    return biased(params, own.reshape(*y.shape[:-2], -1, y.shape[-1]))


def leaves_the_bias_out(params, x, axis_name):
    return row_parallel_dense({"kernel": params["kernel"]}, x, axis_name)


def averages_the_bias(params, x, axis_name):
    """Copies that are equal anyway, once more in every layer."""
    bias = {"bias": lax.pmean(params["bias"], axis_name)} if "bias" in params else {}
    return row_parallel_dense({"kernel": params["kernel"], **bias}, x, axis_name)


def averages_the_features_gradient(params, x, axis_name):
    return row_parallel_dense(params, scaled_back(x, 1 / lax.axis_size(axis_name)), axis_name)


def sums_in_half_precision(params, x, axis_name):
    y = scatter_rows((x @ params["kernel"]).astype(jnp.bfloat16), axis_name)
    return biased(params, y.astype(jnp.float32))


COLUMN, ROW = "column_parallel_dense", "row_parallel_dense"
MUTANTS = (
    mutant(COLUMN, gathers_the_kernel, GATHERED, SCATTERED, OTHERS),
    mutant(COLUMN, fills_up_and_adds, GATHERED, SCATTERED, OTHERS),
    mutant(COLUMN, gathers_for_each_half_of_its_columns, SCATTERED),
    mutant(COLUMN, puts_batches_before_rows, *WRONG),
    mutant(COLUMN, starts_with_its_own_rows, *WRONG),
    mutant(COLUMN, forgets_the_bias, *WRONG),
    mutant(COLUMN, halves_the_precision, *WRONG, GATHERED, SCATTERED),
    mutant(COLUMN, averages_the_inputs_gradient, GRADIENTS),
    mutant(COLUMN, sums_the_kernels_gradient, GRADIENTS),
    mutant(COLUMN, lets_no_gradient_through, GRADIENTS, SCATTERED),
    mutant(ROW, adds_the_bias_before_the_sum, *WRONG),
    mutant(ROW, all_reduces_and_slices, GATHERED, SCATTERED, OTHERS),
    mutant(ROW, gathers_the_features, GATHERED, SCATTERED),
    mutant(ROW, averages, *WRONG),
    mutant(ROW, takes_batches_for_rows, *WRONG),
    mutant(ROW, leaves_the_bias_out, *WRONG),
    mutant(ROW, averages_the_bias, OTHERS),
    mutant(ROW, averages_the_features_gradient, GRADIENTS),
    mutant(ROW, sums_in_half_precision, *WRONG, GATHERED, SCATTERED),
)
