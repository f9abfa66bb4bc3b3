// Collectives step by step: what each device holds after each step of a ring. Tests replay the messages in Python.
"use strict";

(function () {
  const { start, table } = window.meshcraftWidget;
  const KINDS = [["all_gather", "all-gather"], ["reduce_scatter", "reduce-scatter"], ["all_reduce", "all-reduce"], ["all_to_all", "all-to-all"]];
  const range = (count) => Array.from({ length: count }, (_, i) => i);
  const numSteps = (kind, n) => (kind === "all_reduce" ? 2 : 1) * (n - 1);

  // The messages of a step, counted from 1: each device sends one chunk.
  function messages(kind, n, step) {
    const modulo = (value) => ((value % n) + n) % n;
    return range(n).map((source) => {
      if (kind === "all_to_all") return { source, target: modulo(source + step), chunk: modulo(source + step) };
      const adds = kind === "reduce_scatter" || (kind === "all_reduce" && step < n);
      const passed = kind === "all_reduce" && !adds ? step - n + 1 : step;
      return { source, target: modulo(source + 1), chunk: modulo(source - passed + (adds ? 0 : 1)), adds };
    });
  }

  // By device and place: the devices whose data is there, summed. In an all-to-all a place is the chunk for one device until
  // it is sent, and the chunk from one device once it has arrived.
  function holdings(kind, n, step) {
    const held = range(n).map((device) => range(n).map((chunk) =>
      ((kind === "all_gather" || kind === "all_to_all") && chunk !== device ? [] : [device])));
    for (const now of range(step)) {
      const sent = messages(kind, n, now + 1).map((one) => ({ ...one, data: [...held[one.source][one.chunk]] }));
      for (const { source, target, chunk, adds, data } of sent) {
        if (kind === "all_to_all") held[target][source] = [source];
        else held[target][chunk] = adds ? [...data, ...held[target][chunk]] : data;
      }
    }
    return held;
  }

  function show({ kind, n, step }) {
    const [held, steps] = [holdings(kind, n, step), numSteps(kind, n)];
    const sent = step ? messages(kind, n, step) : [];
    const place = (one) => (kind === "all_to_all" ? one.source : one.chunk);
    const gathers = kind === "all_gather" || kind === "all_to_all";
    const waits = (device, other) => kind === "all_to_all" && step < ((other - device + n) % n);
    const cell = (device, other) => {
      const data = held[device][other];
      const arrived = sent.some((one) => one.target === device && place(one) === other);
      const text = kind === "all_to_all" ? `${data.length ? `${other}&#8202;&rarr;&#8202;${device}` : ""}` +
        `${waits(device, other) ? ` <small>(to send: ${device}&#8202;&rarr;&#8202;${other})</small>` : ""}`
        : !data.length ? "" : gathers ? other : data.length === n ? "sum" : `${data.length} of ${n}`;
      const state = arrived ? "arrived" : !data.length ? "empty" : gathers || data.length === n ? "whole" : "part";
      return `<td class="chunk-${state}">${text || "&ndash;"}${arrived ? " &#9666;" : ""}</td>`;
    };
    const name = KINDS.find(([key]) => key === kind)[1];
    const what = kind === "all_to_all" ? "what it held" : "the array";
    const list = sent.map(({ source, target, chunk, adds }) => (kind === "all_to_all" ? `${source} sends its chunk for ${target}`
      : `${source} sends ${adds ? "its sum of " : ""}chunk ${chunk} to ${target}`)).join("; ");
    return {
      status: `${name} on ${n} devices, step ${step} of ${steps}: each device has sent ${step}/${n} of ${what}.`,
      html: table("What each device holds", ["device", ...range(n).map((i) => (kind === "all_to_all" ? `from ${i}` : `chunk ${i}`))],
        range(n).map((device) => [device, ...range(n).map((other) => cell(device, other))])) +
        `<p class="explorer-note">${list ? `In this step: ${list}.` : "Before the first step."} &#9666; marks what has just arrived` +
        `${gathers ? "" : "; &ldquo;2 of 4&rdquo; is a sum of two devices' chunks out of four"}.</p>`,
    };
  }

  window.meshcraftCollectives = { messages, holdings, numSteps };
  start({
    id: "collectives-steps", name: "steps", label: "Collectives step by step", show,
    limits: ({ kind, n }) => (n >= 1 && n <= 8 ? { step: numSteps(kind, n) } : {}),
    groups: [["A collective, step by step", [
      ["kind", "collective", "all_gather", { options: KINDS }], ["n", "devices", 4, { least: 1, most: 8 }],
      ["step", "step", 1, { least: 0, most: 14, buttons: true }],
    ]]],
  });
})();
