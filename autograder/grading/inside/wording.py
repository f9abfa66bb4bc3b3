"""Rephrase errors of Python and JAX for learners: the texts here replace the originals."""

from __future__ import annotations

import builtins
import difflib
import re
from types import FrameType
from typing import Any

_WHEN = "is not known while the function is traced: one program is made for all devices and all values"
_VARIES = re.compile(r"JitTracer\(([^()]*)\)|Traced<([^>]*)>(?:with<[^>]*>)?|\w*Tracer<([^>]*)>")
# A text about the axes that a value varies over, {V:data}; in other texts, this annotation is only noise.
_ABOUT_AXES = re.compile(r"[Vv]arying|manual axis|manual axes|pcast|\bvma\b|[Vv]aries")
# Error text, prefixed with its type, and its replacement; the pattern's groups fill it in.
SENTENCES: tuple[tuple[str, str], ...] = (
    (
        r"TracerBoolConversionError",
        f"`if`, `while`, `and`, `assert` and the like need True or False, and this value {_WHEN}. Choose between two "
        "values with jnp.where(condition, a, b)",
    ),
    (
        r"TracerIntegerConversionError",
        f"a list's index, `range` and a number of steps must be Python numbers, and this index {_WHEN}. A traced "
        "index can select an element of an array, jnp.asarray(list)[i]; lax.fori_loop counts to a traced number",
    ),
    (
        r"TracerArrayConversionError",
        "numpy computes with concrete numbers, and those in this array are not known while the function is traced: use "
        "the function of the same name in jnp instead of numpy's",
    ),
    (
        r"ConcretizationTypeError[\s\S]*?problem arose with the `(int|float|complex|bool)` function",
        rf"\1(...) needs a Python number, and this value {_WHEN}. Leave it out: arithmetic, jnp.where and "
        r"lax.dynamic_slice_in_dim take traced values, and x.astype(...) changes a dtype",
    ),
    (
        r"ConcretizationTypeError[\s\S]*?(?:arange|shape)",
        f"the size of an array must be a Python number, and this value {_WHEN}. Take the largest size that is needed "
        "and select what counts with jnp.where",
    ),
    (
        r"(?:ConcretizationTypeError|NonConcreteBooleanIndexError)",
        f"this needs a Python number, and the value {_WHEN}. Leave out int(), float() and the like: arithmetic, "
        "jnp.where and lax.dynamic_slice_in_dim take traced values",
    ),
    (
        r"Slice entries must be static|slice indices must have static",
        f"a slice [a:b] needs Python numbers, and this start {_WHEN}. lax.dynamic_slice_in_dim(x, start, length) "
        "cuts from a traced start, and lax.dynamic_update_slice_in_dim(x, part, start, 0) writes there",
    ),
    (
        r"perm was not hashable",
        "the pairs of a ppermute must be Python numbers, the same list on every device, and these contain a traced "
        "value. All devices run one program: name every device's transfer, [(source, target), ...] for all of "
        "range(lax.axis_size(axis_name)), in a Python loop if the pairs differ from step to step",
    ),
    (
        r"ppermute sources and destinations must be unique",
        "in these pairs a device sends twice or receives twice: in one ppermute each may send once and receive once",
    ),
    (
        r"no_such_device: (\d+) of (\d+)",
        r"a pair of this ppermute names device \1, and the axis has \2 devices here, numbered from 0. Their number "
        "differs from case to case: use lax.axis_size(axis_name)",
    ),
    (
        r"no_such_device: (.*)",
        r"a pair of this ppermute names a device that is not there: \1. To go round a ring, take the index % size",
    ),
    (
        r"all_to_all split_axis \((\d+)\) has to be divisible by the size of the named axis (.+?) \((\d+)\)",
        r"lax.all_to_all cuts its dim split_axis, here of size \1, into one part for each device on axis \2, here \3. "
        r"Which dim has a part for every device, and which do the arriving parts make longer?",
    ),
    (
        r"reduce_scatter operand scatter dimension size (\d+) must match shard count (\d+)",
        r"without tiled=True, lax.psum_scatter removes its scatter_dimension, which must then have the size of the "
        r"axis, \2, and here has \1. With tiled=True each device keeps \1/\2 of that dim: is that wanted?",
    ),
    (
        r"reduce_scatter operand scatter dimension size (\d+) must be divisible by shard_?\s?count (\d+)",
        r"lax.psum_scatter cuts its scatter_dimension, here of size \1, into \2 equal parts, one for each device: is "
        r"it the dim that the devices share?",
    ),
    (
        r"all_to_all requires the size of the mapped axis axis_name to equal x\.shape\[split_axis\]",
        "without tiled=True, lax.all_to_all removes its split_axis, which must then have the size of the axis. With "
        "tiled=True it keeps that dim, with one part for each device",
    ),
    (
        r"scatter_dimension.*non-negative|all_gather_dim.*non-negative|_dim(?:ension)?.*non-negative",
        "scatter_dimension and the like are counted from 0 and may not be negative: x.ndim - 2 is the last dim but one",
    ),
    (
        r"[Uu]nbound axis name:? (\w)\b",
        r"there is no axis '\1' in this mesh: is a name given where a tuple of names is expected? A string is split "
        r"into its letters; (axis_name,) is a tuple of one",
    ),
    (
        r"[Uu]nbound axis name:? (\w+)|unbound axis: (\w+)",
        r"there is no axis '\1\2' in this mesh. Which axes it has depends on the case: take names of axes from the "
        r"arguments (axis_name and the like, or the entries of specs), and do not hard-code any",
    ),
    (
        r"nested_axes: (.*)",
        r"a collective takes the name of an axis, or a tuple of names, and this is \1, with a tuple inside. An entry "
        "of a spec may itself be a tuple of names: put all names into one",
    ),
    (
        r"argument to VJP function: got (\w+\[[^\]]*\])(\{[^}]*\})?, but expected \1(\{V:[^}]*\})",
        r"the gradient given to this function of jax.vjp is \1\2, and the result was \1\3: V names the axes that it "
        "varies over. vary_alike(gradient, result)[0] (course.mesh) makes it vary alike; jax.value_and_grad does not "
        "need this",
    ),
    (
        r"carry input and (?:carry )?output must have (?:equal types|the same type structure)[\s\S]*? has type "
        r"(\w+\[[^\]]*\])(\{[^}]*\})? but[\s\S]*?has type \1(\{V:[^}]*\})",
        r"a loop's carry must keep its type, and this one begins as \1\2 and becomes \1\3: V names the axes that it "
        "varies over. The value written into it differs from device to device, so begin with vary_alike(first, x)[0] "
        "(course.mesh), where x is that value: the carry then varies like x on every mesh",
    ),
    (
        r"carry input and (?:carry )?output must have (?:equal types|the same type structure)[\s\S]*? has type "
        r"(\w+\[[^\]]*\](?:\{[^}]*\})?) but[\s\S]*?has type (\w+\[[^\]]*\](?:\{[^}]*\})?)",
        r"a loop's carry must keep its type, and this one begins as \1 and becomes \2. Give the first one the shape "
        r"and dtype that the body returns",
    ),
    (
        r"carry input and (?:carry )?output must have the same pytree[\s\S]*? is an? (?:<class ')?([\w.]+)(?:'>)?"
        r"[\s\S]*?carry output is an? (?:<class ')?NoneType",
        "the loop's body returns None as its carry: is its `return` missing?",
    ),
    (
        r"carry input and (?:carry )?output must have the same pytree[\s\S]*?PyTreeDef\(\*\)\s[\s\S]*?"
        r"PyTreeDef\(None\)",
        "an array comes into the loop's body as its carry and None goes out: is its `return` missing? The body of "
        "lax.scan returns (carry, what is stacked), in this order",
    ),
    (
        r"carry input and (?:carry )?output must have the same pytree[\s\S]*?PyTreeDef\((.*)\)\s[\s\S]*?"
        r"PyTreeDef\((.*)\)\s",
        r"a loop's body must return its carry in the form in which it was given: \1 comes in and \2 goes out (* is an "
        "array)",
    ),
    (
        r"carry input and (?:carry )?output must have the same pytree",
        "a loop's body must return its carry in the form in which it was given: the same number of parts, in the same "
        "tuples or dicts",
    ),
    (
        r"Scan body function must return a pair|scan body function output must be a pair|scan.*must be a pair",
        "the body of lax.scan must return two things, the new carry and what is stacked (None for nothing): "
        "`return carry, None`",
    ),
    (
        r"(?:'float' object cannot be interpreted as an integer|Shapes must be 1D sequences[^\n]*\d\.\d)",
        "a size or an index must be a whole number, and this one is a float: `/` always gives a float, `//` a whole "
        "number",
    ),
    (
        r"Shapes must be 1D sequences of concrete values of integer type",
        f"a shape consists of Python numbers, and a value in this one {_WHEN}. jax.checkpoint, jax.jit and the like "
        "trace every argument: take numbers from around the function, or name them in static_argnums",
    ),
    (
        r"(?:\w+ )?got incompatible shapes for broadcasting: (.*)\.",
        r"arrays of the shapes \1 cannot be combined element by element. Which dim is missing, or too long? A sum or a "
        r"maximum keeps its dim with keepdims=True, and x[..., None] adds one",
    ),
    (
        r"Incompatible shapes for broadcasting: shapes=\[(.*)\]",
        r"arrays of the shapes \1 cannot be combined element by element. Which dim is missing, or too long? A sum or a "
        r"maximum keeps its dim with keepdims=True, and x[..., None] adds one",
    ),
    (
        r"dot_general requires contracting dimensions to have the same shape, got \((\d+),\) and \((\d+),\)",
        r"in this matmul the dims that are summed over have the shapes \1 and \2, and must be equal. Which "
        r"operand is the wrong one, or transposed?",
    ),
    (
        r"Input dtypes \((.*?)\) have no available implicit dtype promotion",
        r"arrays of the dtypes \1 are not combined silently here: convert one of them to the other's dtype with "
        "x.astype(...)",
    ),
    (
        r"cannot reshape array of shape (\(.*?\)) \(size (\d+)\) into shape (\(.*?\)) \(size (\d+)\)",
        r"an array of shape \1 has \2 elements and cannot be reshaped to \3, which has \4",
    ),
    (
        r"_IndexUpdateRef|_IndexUpdateHelper",
        "x.at[i] alone is not an array: x.at[i].set(value) and x.at[i].add(value) return a new one, and x.at[i].get() "
        "returns what is there, with a mode for indices beyond the end",
    ),
    (
        r"JAX arrays are immutable",
        "an array is immutable and cannot be assigned into: x = x.at[i].set(value) gives a new one with that "
        "element replaced, and lax.dynamic_update_slice_in_dim one with a part replaced",
    ),
    (
        r"UnexpectedTracerError|Too many leaves for PyTreeDef|No constant handler for type.*Tracer",
        "a value of a loop's or a transformed function's body is used outside of it, where it does not exist: what "
        "leaves a loop's body must be in its carry, or in what lax.scan stacks",
    ),
    (
        r"Gradient only defined for scalar-output functions. Output had shape: (\(.*?\))",
        r"only a scalar has a gradient, and this function returns an array of shape \1: is a mean or sum missing?",
    ),
    (
        r"Custom VJP bwd rule must produce an output with the same container",
        "the backward rule of this jax.custom_vjp must return a tuple with one entry for each argument of the "
        "function, each a tree like that argument; for a single argument, (gradient,)",
    ),
    (
        r"Expected cotangent type (\w+\[[^\]]*\])(?:\{[^}]*\})? but got (\w+\[[^\]]*\])",
        r"a gradient arrives as \2 where \1 is needed. Most likely, it is that of a lax.all_to_all whose split_axis "
        "and concat_axis differ: in this version of JAX it has a gradient only with tiled=True. Use reshape before and "
        "after it to split and merge the dims",
    ),
    (
        r"ModuleNotFoundError: No module named ('[\w.]+')",
        r"No module named \1: a notebook is judged with the packages of the course and without other files. Copy what "
        "the function needs into a cell",
    ),
    (
        r"(?:FileNotFoundError|PermissionError): \[Errno \d+\] [\w ]+: ('.*?'|b'.*?')",
        r"the file \1 cannot be read: a notebook is judged without other files. Compute in a cell what the function "
        "needs",
    ),
    (
        r"^(?:URLError|gaierror|Connection\w*Error)",
        "a notebook is judged without a network: compute in a cell what the function needs",
    ),
    (r"RecursionError", "the function calls itself without end: what should stop the recursion?"),
    (
        r"Custom VJP bwd rule must produce[\s\S]*? of type (\w+\[[^\]]*\])(\{[^}]*\})? corresponding[\s\S]*? of type "
        r"\1(\{[^}]*\})",
        r"the backward rule of this jax.custom_vjp returns \1\2 where the argument is \1\3: it must vary over the same "
        "axes (V). If the argument varies over fewer, make all arguments vary alike before they enter: "
        "vary_alike(x, kernel). If the gradient does, like the result of lax.psum, as_varying(gradient, axis) makes it "
        "varying again",
    ),
    (
        r"(cond|switch) branches must have equal output types[\s\S]*?has type (\w+\[[^\]]*\])(\{[^}]*\})? but[\s\S]*?"
        r"has type \2(\{[^}]*\})?,",
        r"the branches of a lax.\1 must return values of the same type, and one gives \2\3, another \2\4: V names "
        r"the axes that a value varies over. vary_alike(x, other)[0] (from course.mesh) makes a "
        r"constant vary like another branch's result",
    ),
    (r"pcast.*varying.*already|already varying", "this value already varies over the axis: leave out lax.pcast here"),
    (
        r"Custom node type mismatch|pytree structure|Dict key mismatch|different (?:pytree )?structure",
        "two trees that are mapped together differ in structure: one has leaves or keys that the other lacks",
    ),
)


def worded(error: BaseException, original: str) -> str:
    """Reword an error for the learner; ``original`` is its type and text."""
    kind = type(error).__name__
    for pattern, sentence in SENTENCES:
        if match := re.search(pattern, original):
            filled = re.sub(r"\\(\d)", lambda group: match[int(group[1])] or "", sentence)
            return f"{filled} ({kind})"
    return f"{_readable(original)}{_similar(error)}"


def _readable(text: str) -> str:
    """Strip file names, JAX-internal names for functions, and colours from a text."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.split(r"\n\s*(?:This value became a tracer|The error occurred while tracing|See https|-{8})", text)[0]
    text = re.split(r"The error occurred while tracing|\{ ?lambda ?;|loc\(|see current operation", text)[0]
    text = _VARIES.sub(lambda match: f"a traced {next(filter(None, match.groups()), 'value')}", text)
    text = re.sub(r"<function (?:[\w.<>]*\.)?(\w+) at 0x[0-9a-f]+>", r"the function \1", text)
    if not _ABOUT_AXES.search(text):
        text = re.sub(r"(\w+\[[\d,]*\])\{V:[\w,]+\}", r"\1", text)
    text = re.sub(r"(?:/[\w.+@\-]+){2,}/([\w.+\-]+)", r"\1", text).replace("meshcraft-cell:", "")
    return text.strip()


def _similar(error: BaseException) -> str:
    """Suggest the name that was probably meant, or where a missing name could come from."""
    if isinstance(error, AttributeError) and isinstance(error.name, str) and error.obj is not None:
        return _guess(error.name, dir(error.obj))
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        return _guess(error.args[0], _keys(error, error.args[0]))
    if isinstance(error, NameError) and isinstance(error.name, str) and error.name:
        own, known = _frames(error)[-1:], {}
        for frame in _frames(error):  # an enclosing function is in the same file, further up the stack
            if frame.f_code.co_filename == own[0].f_code.co_filename:
                known |= {**vars(builtins), **frame.f_globals, **frame.f_locals}
        guess = _guess(error.name, known)
        return guess or ". Is an import, or a line that sets it, missing?"
    return ""


def _guess(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, [candidate for candidate in known if isinstance(candidate, str)], 1, 0.7)
    return f". Did you mean {near[0]!r}?" if near else ""


def _keys(error: BaseException, missing: str) -> list[str]:
    """The keys of the dicts in the frame where a key is missing."""
    dicts = [value for frame in _frames(error)[-1:] for value in frame.f_locals.values() if isinstance(value, dict)]
    return [key for mapping in dicts if missing not in mapping for key in mapping]


def _frames(error: BaseException) -> list[FrameType]:
    """The frames from outermost to innermost."""
    at, frames = error.__traceback__, []
    while at is not None:
        frames.append(at.tb_frame)
        at = at.tb_next
    return frames
