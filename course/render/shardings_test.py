"""Pictures of shardings: every device is at the position that JAX gives it, and impossible ones are refused."""

import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh, make_mesh
from course.render import Holdings, holdings_svg, holdings_table, who_holds
from course.render.holdings import layout
from course.render.svg import AXES, MATMUL

SVG = "{http://www.w3.org/2000/svg}"
MESH = {"data": 4, "tensor": 2}
SPECS = [
    ((8, 16), P("data", None), MESH),
    ((8, 16), P(None, "tensor"), MESH),
    ((8, 16), P(("tensor", "data")), MESH),
    ((16,), P(("data", "tensor")), MESH),
    ((16,), P(), MESH),
    ((), P(), MESH),
    ((8, 16), P("data"), {"data": 1}),
    ((12, 8, 16), P("tensor", None, "data"), MESH),
    ((4, 8, 16), P("pipe", ("tensor", "data")), {"pipe": 2, "data": 2, "tensor": 2}),
]


def spans(text, shape):
    """``0:4, :`` as pairs of numbers."""
    parts = re.findall(r"[^,\s]+", text)
    assert len(parts) == len(shape)
    pairs = zip(parts, shape, strict=True)
    return tuple((0, size) if part == ":" else tuple(map(int, part.split(":"))) for part, size in pairs)


def in_jax(shape, spec, axes):
    """The index ranges of each device, according to JAX."""
    indices = NamedSharding(make_mesh(axes), spec).devices_indices_map(shape)
    return {
        device.id: tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))
        for device, index in indices.items()
    }


@pytest.mark.parametrize(("shape", "spec", "axes"), SPECS)
def test_every_device_holds_the_block_of_jax_in_the_picture_and_in_the_table(shape, spec, axes):
    expected = in_jax(shape, spec, axes)
    root = ElementTree.fromstring(holdings_svg(shape, spec, make_mesh(axes)))
    titles = [rect.findtext(f"{SVG}title", "") for rect in root.iter(f"{SVG}rect")]
    blocks = [re.fullmatch(r"\[(.*)\]: devices? ([\d, ]+)", title) for title in titles]
    drawn = {int(d): spans(m[1], shape) for m in blocks if m for d in m[2].split(",")}
    in_mesh = {int(m[1]): spans(m[2], shape) for s in titles if (m := re.fullmatch(r"device (\d+) holds \[(.*)\]", s))}
    assert drawn == in_mesh == expected
    rows = [re.findall(r"(\d+) .*\[(.*)\]", line)[0] for line in holdings_table(shape, spec, axes).splitlines()[1:]]
    assert {int(device): spans(block, shape) for device, block in rows} == expected


def test_a_block_and_its_holders_in_the_mesh_have_one_colour_and_other_blocks_another():
    root = ElementTree.fromstring(holdings_svg((8, 16), P("data", None), MESH))
    colours = {}
    for rect in root.iter(f"{SVG}rect"):
        block = re.findall(r"\[(.*)\]", rect.findtext(f"{SVG}title", ""))[0]
        colours.setdefault(block, set()).add((rect.get("fill"), rect.get("fill-opacity")))
    assert len(colours) == 4 and all(len(tints) == 1 for tints in colours.values())
    assert len(set.union(*colours.values())) == 4
    assert {fill for fill, _ in set.union(*colours.values())} <= {MATMUL, *AXES}


def test_the_numbers_of_all_holders_are_written_in_their_block():
    root = ElementTree.fromstring(holdings_svg((8, 16), P(None, "tensor"), MESH))
    written = [e.text for e in root.iter(f"{SVG}text") if e.get("pointer-events") == "none"]
    assert written[:8] == ["0", "2", "4", "6", "1", "3", "5", "7"] and written[8:] == [str(i) for i in range(8)]
    assert ">64 devices<" in holdings_svg((8,), P(), {"data": 64})


def test_a_concrete_array_shows_its_holders_in_a_notebook_and_in_a_terminal():
    array = jax.device_put(jnp.zeros((8, 16)), NamedSharding(make_mesh(MESH), P("data", None)))
    shown = who_holds(array, title="weights", labels=("d_in", "d_out"))
    picture = shown._repr_html_()
    assert ">weights<" in picture and ">d_in 8 ↓<" in picture and ">data 4 ↓<" in picture and ">tensor 2 →<" in picture
    lines = str(shown).splitlines()
    assert lines[:3] == ["weights", "device  data  tensor  holds", "0       0     0       [0:2, :]"]
    assert lines[-1] == "Each device holds a block of shape [2, 16], 1/4 of it; each block is held twice."


def test_the_spec_is_written_only_on_request():
    for spec in (P("data", None), P(None, ("tensor", "data"))):
        plain = Holdings((8, 16), spec, MESH)
        assert "P(" not in plain._repr_html_() + str(plain)
        with_spec = Holdings((8, 16), spec, MESH, show_spec=True)
        assert "P(" in with_spec._repr_html_() and repr(spec).replace("PartitionSpec", "P") in str(with_spec)


def test_devices_have_the_numbers_that_the_mesh_gives_them():
    back = make_mesh({"data": 2}, jax.devices()[6:])
    assert layout((4,), P("data"), back).holders == {(0,): (6,), (1,): (7,)}
    assert layout((4,), P("data"), abstract_mesh({"data": 2})).holders == {(0,): (0,), (1,): (1,)}


def test_leading_dims_are_folded_into_the_rows_with_a_note():
    picture = holdings_svg((4, 8, 16), P("data", "tensor"), MESH, labels=("layers", "d_in", "d_out"))
    assert ">layers 4 × d_in 8 ↓<" in picture and ">1:2, 4:8<" in picture
    plain = re.sub(r"<[^>]*>", " ", picture.replace("</text><text", " <"))
    assert "rows are those of layers and d_in together" in plain


@pytest.mark.parametrize(
    ("shape", "spec", "mesh", "message"),
    [
        ((9, 16), P("data"), MESH, "dim 0 of shape [9, 16] has 9 elements, and data 4 cannot divide it into 4 equal"),
        ((4, 12), P(None, ("data", "tensor")), MESH, "data 4 times tensor 2 cannot divide it into 8 equal blocks"),
        ((8, 16), P("date"), MESH, "names the axis 'date', and the mesh has data, tensor: use one of these"),
        ((8, 16), ("data", "data"), MESH, "uses the axis 'data' twice, for dims 0 and 1"),
        ((8, 16), (("data", "data"),), MESH, "uses the axis 'data' twice, for dim 0:"),
        ((8,), P("data", None), MESH, "has 2 entries and shape [8] has 1 dims"),
        ((8,), "data", MESH, "write P('data')"),
        ((8,), P(P.UNCONSTRAINED), MESH, "None, an axis or a tuple of axes"),
        ((8,), P("data"), 8, 'sizes of its axes as in {"data": 4}'),
        ((64,), P("data"), {"data": 64}, "at most 16 along each dim"),
    ],
)
def test_impossible_shardings_are_refused_with_the_input_and_a_remedy(shape, spec, mesh, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        holdings_svg(shape, spec, mesh)


def test_labels_are_one_per_dim_and_an_array_without_a_mesh_is_refused():
    with pytest.raises(ValueError, match=r"1 labels were given for shape \[8, 16\]: give one for each dim, or none"):
        holdings_svg((8, 16), P(), MESH, labels=("d_in",))
    for wrong in (jnp.zeros(4), 3):
        with pytest.raises(ValueError, match=r"only an array with a NamedSharding .* first, with jax\.device"):
            who_holds(wrong)


def test_a_picture_is_self_contained_and_readable_at_the_width_of_a_phone():
    for shape, spec, axes in SPECS:
        picture = holdings_svg(shape, spec, axes, title="a <b> & c")
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img" and root.findtext(f"{SVG}desc") and "<b>" not in picture
        assert not re.search(r"<script|<style|href|url\(|https?://(?!www\.w3\.org/2000/svg)", picture)
        sizes = r"min-width:([\d.]+)", r"viewBox=\"0 0 ([\d.]+)"
        least, width = (float(re.findall(size, picture)[0]) for size in sizes)
        assert least <= 340 and 11 * least / width >= 8
        right = [float(r.get("x", "")) + float(r.get("width", "")) for r in root.iter(f"{SVG}rect")]
        assert max(right) <= width
    assert 'width="' in holdings_svg((8,), P(), MESH, file=True)[:400]


def test_a_note_replaces_the_text_about_blocks():
    holdings = Holdings((16, 8), P("data"), {"data": 4, "tensor": 2}, note="Devices in a block hold summands of it.")
    for output in (holdings._repr_html_(), repr(holdings)):
        assert "Devices in a block hold summands of it." in output
        assert "held twice" not in output
