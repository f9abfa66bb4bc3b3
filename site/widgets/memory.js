// The memory calculator: course/budget.py's closed forms, and a form for them. Tested against Python on a grid.
"use strict";

(function () {
  const PLANS = {
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
    const [parameter, gradient, master, moment, element] = PLANS[s.plan];
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

  const FIELDS = [
    ["layers", "layers", 32, 512], ["width", "width", 4096, 65536], ["heads", "heads", 32, 512], ["vocab", "vocabulary", 32768, 1e6],
    ["seq", "tokens in a sequence", 2048, 1e6], ["batch", "sequences in a step", 64, 1e5], ["data", "data", 8, 4096],
    ["tensor", "tensor", 1, 64], ["pipe", "pipe", 1, 64], ["microbatches", "microbatches", 1, 1024],
  ];
  const START = { ...Object.fromEntries(FIELDS.map(([key, , value]) => [key, value])), plan: "mixed", remat: "block", fsdp: true, memory: 80 };
  const gigabytes = (bytes) => (bytes / 1e9).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

  function form() {
    const number = ([key, name, , most]) => `<label for="memory-${key}"><span>${name}</span><input id="memory-${key}" name="${key}" ` +
      `type="number" min="1" max="${most}" step="1" inputmode="numeric" required></label>`;
    const select = (key, name, options) => `<label for="memory-${key}"><span>${name}</span><select id="memory-${key}" name="${key}">` +
      `${options.map(([value, text]) => `<option value="${value}">${text}</option>`).join("")}</select></label>`;
    const same = (names) => names.map((name) => [name, name]);
    return `<form novalidate aria-label="Memory calculator"><fieldset><legend>Model and batch</legend>${FIELDS.slice(0, 6).map(number).join("")}` +
      `</fieldset><fieldset><legend>Mesh</legend>${FIELDS.slice(6).map(number).join("")}</fieldset><fieldset><legend>Choices</legend>` +
      select("plan", "dtypes", same(Object.keys(PLANS))) + select("remat", "remat", same(["none", "attention", "block"])) +
      select("fsdp", "over data", [["true", "FSDP"], ["false", "copies"]]) + select("memory", "device", MACHINES.map(([name, size]) => [size, name])) +
      '</fieldset></form><p role="status" aria-live="polite" id="memory-said"></p><p class="explorer-problem" role="alert" hidden id="memory-problem"></p>' +
      '<div class="explorer-table" role="group" aria-label="Bytes on one device" id="memory-table"></div>';
  }

  function start(root) {
    root.innerHTML = form();
    const inputs = Object.fromEntries([...root.querySelectorAll("input, select")].map((input) => [input.name, input]));
    const [said, alert, table] = ["said", "problem", "table"].map((name) => root.querySelector(`#memory-${name}`));
    const fill = (state) => Object.entries(inputs).forEach(([key, input]) => { input.value = String(state[key]); });
    const read = () => ({
      ...Object.fromEntries(FIELDS.map(([key]) => [key, Number(inputs[key].value)])),
      plan: inputs.plan.value, remat: inputs.remat.value, fsdp: inputs.fsdp.value === "true", memory: Number(inputs.memory.value),
    });

    function show() {
      const state = read();
      const bad = FIELDS.filter(([key, , , most]) => !(Number.isInteger(state[key]) && state[key] >= 1 && state[key] <= most));
      FIELDS.forEach(([key]) => inputs[key].setAttribute("aria-invalid", String(bad.some(([other]) => other === key))));
      const wrong = bad.length ? `${bad[0][1]}: give a whole number from 1 to ${bad[0][3].toLocaleString("en")}` : problem(state);
      alert.hidden = !wrong;
      alert.textContent = wrong;
      table.hidden = said.hidden = Boolean(wrong);
      if (wrong) return;
      const { rows, total } = budget(state);
      const needed = 1.2 * total;
      const devices = state.data * state.tensor * state.pipe;
      said.textContent = `${gigabytes(total)} GB on each of ${devices.toLocaleString("en")} devices, ${gigabytes(needed)} GB with a margin of a fifth: ` +
        (needed <= state.memory * 1e9 ? "fits." : `does not fit in ${state.memory} GB.`);
      const bar = (bytes) => `<div class="memory-bar" style="width:${((100 * bytes) / Math.max(total, state.memory * 1e9)).toFixed(1)}%"></div>`;
      table.innerHTML = `<table><thead><tr><th scope="col">on one device</th><th scope="col">GB</th><th scope="col">share of the device</th></tr></thead><tbody>${
        Object.entries({ ...rows, "in all": total }).filter(([, bytes]) => bytes).map(([name, bytes]) =>
          `<tr><th scope="row">${name}</th><td>${gigabytes(bytes)}</td><td class="memory-cell">${bar(bytes)}</td></tr>`).join("")}</tbody></table>`;
    }

    root.addEventListener("input", () => {
      show();
      history.replaceState(null, "", `#memory?${new URLSearchParams(Object.entries(read()))}`);
    });
    root.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
    const given = new URLSearchParams(location.hash.startsWith("#memory?") ? location.hash.slice(8) : "");
    fill({ ...START, ...Object.fromEntries([...given].filter(([key]) => key in START)) });
    show();
    if (given.size) root.scrollIntoView();
  }

  window.meshcraftMemory = { budget, problem };
  const root = document.getElementById("memory-calculator");
  if (root) start(root);
})();
