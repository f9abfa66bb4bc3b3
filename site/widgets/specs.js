// A mesh, a shape and a PartitionSpec: what each device holds. Tests compare it with JAX's NamedSharding.
"use strict";

(function () {
  const { start, table, escape } = window.meshcraftWidget;
  const DTYPES = [["float32", 4], ["bfloat16", 2], ["float8", 1]];
  const product = (numbers) => numbers.reduce((all, one) => all * one, 1);

  class Invalid extends Error {}

  function parseMesh(text) {
    const axes = text.split(",").map((part) => part.trim()).filter(Boolean).map((part) => {
      const match = /^([a-z_]\w*)\s*=\s*([1-9]\d{0,2})$/i.exec(part);
      if (!match) throw new Invalid(`mesh: write axes such as data=4, tensor=2, not "${part}"`);
      return [match[1], Number(match[2])];
    });
    const mesh = new Map(axes);
    if (!axes.length || mesh.size < axes.length) throw new Invalid("mesh: give at least one axis, and each axis once");
    if (product([...mesh.values()]) > 64) throw new Invalid("mesh: at most 64 devices can be shown");
    return mesh;
  }

  function parseShape(text) {
    const sizes = text.replace(/[()\s]/g, "").split(",").filter(Boolean);
    if (!sizes.length || sizes.length > 4 || sizes.some((size) => !/^[1-9]\d{0,6}$/.test(size))) {
      throw new Invalid("shape: give one to four sizes, such as 16, 8");
    }
    return sizes.map(Number);
  }

  // P("data", None, ("data", "tensor")) as [["data"], [], ["data", "tensor"]].
  function parseSpec(text) {
    const inside = /^\s*(?:P|PartitionSpec)?\s*\((.*)\)\s*$/.exec(text);
    const entries = [];
    let rest = inside ? inside[1].trim() : "";
    while (rest) {
      const match = /^(None|"\w+"|'\w+'|\((?:\s*["']\w+["']\s*,?)*\s*\))\s*(?:,\s*|$)/.exec(rest);
      if (!match) break;
      entries.push(match[1] === "None" ? [] : match[1].match(/\w+/g) || []);
      rest = rest.slice(match[0].length);
    }
    if (!inside || rest) throw new Invalid('spec: write it as in JAX, such as P("data", None) or P(("data", "tensor"))');
    return entries;
  }

  // Local shape, copies, and by device its coordinates and the [start, stop] of each dim.
  function shard(mesh, shape, spec) {
    if (spec.length > shape.length) throw new Invalid(`spec: ${spec.length} entries for an array of ${shape.length} dims`);
    const used = spec.flat();
    const unknown = used.find((axis) => !mesh.has(axis));
    if (unknown) throw new Invalid(`spec: the mesh has no axis "${unknown}"`);
    const twice = used.find((axis, i) => used.indexOf(axis) < i);
    if (twice) throw new Invalid(`spec: axis "${twice}" occurs twice, and an axis can split one dim`);
    const entries = shape.map((_, dim) => spec[dim] || []);
    const parts = entries.map((axes) => product(axes.map((axis) => mesh.get(axis))));
    const uneven = shape.findIndex((size, dim) => size % parts[dim]);
    if (uneven >= 0) throw new Invalid(`dim ${uneven} has size ${shape[uneven]}, which is not divisible by ${parts[uneven]}`);
    const local = shape.map((size, dim) => size / parts[dim]);
    const axes = [...mesh.keys()];
    const count = product([...mesh.values()]);
    const devices = Array.from({ length: count }, (_, device) => {
      let rest = device;
      const at = new Map([...axes].reverse().map((axis) => {
        const coordinate = rest % mesh.get(axis);
        rest = (rest - coordinate) / mesh.get(axis);
        return [axis, coordinate];
      }));
      const block = entries.map((own) => own.reduce((number, axis) => number * mesh.get(axis) + at.get(axis), 0));
      return { at, block, slices: block.map((number, dim) => [number * local[dim], (number + 1) * local[dim]]) };
    });
    return { local, parts, copies: count / product(parts), devices };
  }

  const tuple = (numbers) => `(${numbers.join(", ")}${numbers.length === 1 ? "," : ""})`;
  const hue = (block, parts) => `hsla(${Math.round((360 * block.reduce((n, own, dim) => n * parts[dim] + own, 0)) / product(parts))},70%,50%,0.25)`;

  // The array as a grid of blocks, each with its devices; an array of more than two dims has the list alone.
  function picture({ parts, devices, local }) {
    if (parts.length > 2) return "";
    const [rows, columns] = parts.length === 2 ? parts : [1, parts[0]];
    const range = (length) => Array.from({ length }, (_, i) => i);
    const interval = (i, size) => `${i * size}:${(i + 1) * size}`;
    const [height, width] = parts.length === 2 ? local : [0, local[0]];
    const cell = (row, column) => {
      const block = parts.length === 2 ? [row, column] : [column];
      const owners = devices.map((_, i) => i).filter((i) => String(devices[i].block) === String(block));
      return `<td style="background:${hue(block, parts)}">${owners.join(", ")}</td>`;
    };
    return table("The array's blocks and the devices that hold them", [parts.length === 2 ? "rows" : "block", ...range(columns).map((i) => interval(i, width))],
      range(rows).map((row) => [height ? interval(row, height) : "devices", ...range(columns).map((column) => cell(row, column))]));
  }

  function show(state) {
    try {
      const [mesh, shape] = [parseMesh(state.mesh), parseShape(state.shape)];
      const found = shard(mesh, shape, parseSpec(state.spec));
      const [bytes, count] = [product(found.local) * state.dtype, found.devices.length];
      const number = (value) => value.toLocaleString("en");
      const list = table("Device by device", ["device", ...[...mesh.keys()].map(escape), "holds"], found.devices.map(({ at, block, slices }, i) =>
        [i, ...[...at.keys()].reverse().map((axis) => `<td>${at.get(axis)}</td>`),
          `<td style="background:${hue(block, found.parts)}">[${slices.map(([low, high]) => `${low}:${high}`).join(", ")}]</td>`]));
      return {
        status: `Local shape ${tuple(found.local)}, ${number(bytes)} bytes on each of ${count} devices. ${number(product(found.parts))} ` +
          `${product(found.parts) === 1 ? "block" : "blocks"}, ${found.copies === 1 ? "one device" : `${found.copies} devices`} with each; ` +
          `${number(bytes * count)} bytes on the whole mesh.`,
        html: `${picture(found)}<details${found.parts.length > 2 ? " open" : ""}><summary>Device by device</summary>${list}</details>`,
      };
    } catch (error) {
      if (!(error instanceof Invalid)) throw error;
      return { problem: error.message };
    }
  }

  window.meshcraftSpecs = { parseMesh, parseShape, parseSpec, shard };
  start({
    id: "spec-playground", name: "spec", label: "PartitionSpec playground", show,
    groups: [["Mesh, array and spec", [
      ["mesh", "mesh", "data=4, tensor=2", { text: true }], ["shape", "shape", "16, 8", { text: true }],
      ["spec", "spec", 'P("data", "tensor")', { text: true }],
      ["dtype", "dtype", 4, { options: DTYPES.map(([name, size]) => [size, name]) }],
    ]]],
  });
})();
