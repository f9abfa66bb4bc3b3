// The memory calculator: course/budget.py's closed forms, and a form for them. Tested against Python on a grid.
"use strict";

(function () {
  const { start, table } = window.meshcraftWidget;
  const PRECISIONS = {
    float32: [4, 4, 0, 4, 4], cast: [4, 4, 0, 4, 2], mixed: [2, 2, 4, 4, 2], mixed32: [2, 4, 4, 4, 2], bfloat16: [2, 2, 0, 2, 2],
  }; // bytes of a parameter, a gradient, the optimizer's copy, each moment, an activation
  const MACHINES = [["24 GB (A5000)", 24], ["80 GB (A100, H100)", 80], ["141 GB (H200)", 141], ["180 GB (B200)", 180], ["16 GB (TPU v5e)", 16]];

  // Leaves of the course's Transformer: elements, whether every layer has one, whether tensor parallelism splits it.
  function leaves({ layers: n, width: d, vocab: v, seq }) {
    const m = 4 * d;
    return [
      [v * d, false, true], [seq * d, false, false], [n * d, true, false], [n * d * 3 * d, true, true], [n * d * d, true, true],
      [n * d, true, false], [n * d * m, true, true], [n * m, true, true], [n * m * d, true, true], [n * d, true, false],
      [d, false, false], [d * v, false, true], [v, false, true],
    ];
  }

  function problem(s) {
    const needs = [
      ["width", s.width, s.heads, "heads"], ["heads", s.heads, s.tensor, "tensor"], ["layers", s.layers, s.pipe, "pipe"],
      ["tokens in a sequence", s.seq, s.tensor, "tensor"], ["sequences", s.batch, s.data * s.microbatches, "data x microbatches"],
    ];
    const wrong = needs.find(([, number, parts]) => number % parts);
    return wrong ? `${wrong[0]} ${wrong[1]} is not divisible by ${wrong[3]} = ${wrong[2]}` : "";
  }

  // Bytes on one device, by name.
  function budget(s) {
    const [parameter, gradient, master, moment, element] = PRECISIONS[s.precision];
    const t = s.tensor;
    let own = 0;
    let layer = 0;
    for (const [elements, layered, split] of leaves(s)) {
      own += Math.ceil(elements / ((split ? t : 1) * (layered ? s.pipe : 1) * (s.fsdp ? s.data : 1)));
      if (layered) layer += Math.floor(Math.floor(elements / s.layers) / (split ? t : 1));
    }
    const b = Math.floor(Math.floor(s.batch / s.data) / s.microbatches);
    const flying = b * (s.pipe > 1 ? s.microbatches : 1);
    const plain = (s.seq * (2 * s.width * 2 * element + 12 * s.width * element)) / t;
    const scores = (s.heads * s.seq * s.seq * 2 * element) / t;
    const kept = { none: plain + scores, attention: plain, block: (element * s.seq * s.width) / t }[s.remat];
    const again = { none: 0, attention: scores, block: plain + scores }[s.remat];
    const rows = {
      parameters: parameter * own,
      gradients: gradient * own,
      "optimizer (Adam)": (master + 2 * moment) * own,
      "one layer gathered": s.fsdp && s.data > 1 ? (element + gradient) * layer : 0,
      activations: flying * (s.layers / s.pipe) * kept,
      "recomputed, one layer": b * again,
    };
    return { rows, total: Object.values(rows).reduce((sum, bytes) => sum + bytes, 0) };
  }

  const whole = (key, name, value, most) => [key, name, value, { least: 1, most }];
  const select = (key, name, value, options) => [key, name, value, { options }];
  const same = (names) => names.map((name) => [name, name]);
  const GROUPS = [
    ["Model and batch", [
      whole("layers", "layers", 32, 512), whole("width", "width", 4096, 65536), whole("heads", "heads", 32, 512),
      whole("vocab", "vocabulary", 32768, 1e6), whole("seq", "tokens in a sequence", 2048, 1e6), whole("batch", "sequences in a step", 64, 1e5),
    ]],
    ["Mesh", [
      whole("data", "data", 8, 4096), whole("tensor", "tensor", 1, 64), whole("pipe", "pipe", 1, 64), whole("microbatches", "microbatches", 1, 1024),
    ]],
    ["Choices", [
      select("precision", "dtypes", "mixed", same(Object.keys(PRECISIONS))), select("remat", "remat", "block", same(["none", "attention", "block"])),
      select("fsdp", "over data", "true", [["true", "FSDP"], ["false", "copies"]]),
      select("memory", "device", 80, MACHINES.map(([name, size]) => [size, name])),
    ]],
  ];
  const gigabytes = (bytes) => (bytes / 1e9).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

  function show(given) {
    const state = { ...given, fsdp: given.fsdp === "true" };
    const wrong = problem(state);
    if (wrong) return { problem: wrong };
    const { rows, total } = budget(state);
    const needed = 1.2 * total;
    const devices = state.data * state.tensor * state.pipe;
    const bar = (bytes) => `<div class="memory-bar" style="width:${((100 * bytes) / Math.max(total, state.memory * 1e9)).toFixed(1)}%"></div>`;
    return {
      status: `${gigabytes(total)} GB on each of ${devices.toLocaleString("en")} devices, ${gigabytes(needed)} GB with a margin of a fifth: ` +
        (needed <= state.memory * 1e9 ? "fits." : `does not fit in ${state.memory} GB.`),
      html: table("Bytes on one device", ["on one device", "GB", "share of the device"], Object.entries({ ...rows, "in all": total })
        .filter(([, bytes]) => bytes).map(([name, bytes]) => [name, `<td>${gigabytes(bytes)}</td>`, `<td class="memory-cell">${bar(bytes)}</td>`])),
    };
  }

  window.meshcraftMemory = { budget, problem };
  start({ id: "memory-calculator", name: "memory", label: "Memory calculator", groups: GROUPS, show });
})();
