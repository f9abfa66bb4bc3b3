// Pipeline schedules: builds, times and measures them, as course/schedules does in Python. Tests compare the two, number
// by number. Plain JavaScript: no dependency, no request, also from a folder.
"use strict";

(function () {
  const LETTERS = "abcdefghijklmnopqrstuvwxyz";
  const NAMES = {
    gpipe: "GPipe", pipedream: "PipeDream", "1f1b": "1F1B", interleaved: "interleaved 1F1B",
    breadth_first: "breadth-first", zero_bubble: "ZB-H1",
    zb_h2: "ZB-H2", zb_v: "ZB-V", dualpipe: "DualPipe", by_hand: "by hand",
  };
  const LOOPED = ["interleaved", "breadth_first"]; // the repeats can be chosen
  const TWO_PARTS = ["zb_v", "dualpipe"]; // there are always two
  // How a microbatch goes through the stages: see course/schedules/orders.py.
  const ROUTES = { round: "round and round", v: "there and back", both: "in both directions" };

  // ---- Orders: what each stage does. An action is [kind, microbatch, repeat].

  class Undefined extends Error {
    constructor(message, fix) {
      super(message);
      this.fix = fix;
    }
  }

  function requireSizes(S, M, R) {
    for (const [name, size, key] of [["stages", S, "S"], ["microbatches", M, "M"], ["repeats", R, "R"]]) {
      if (size < 1) throw new Undefined(`a pipeline has at least 1 of its ${name}, not ${size}`, { [key]: 1 });
    }
    if (R > LETTERS.length) {
      throw new Undefined(`at most ${LETTERS.length} repeats can be named by a letter, not ${R}`, { R: LETTERS.length });
    }
  }

  function requireOneRepeat(name, S, M, R) {
    requireSizes(S, M, R);
    if (R !== 1) {
      throw new Undefined(`${name} has one part of the model on each device, not ${R}: interleaved 1F1B and ` +
        "breadth-first are the schedules with repeats", { R: 1 });
    }
  }

  const range = (count, from = 0) => Array.from({ length: Math.max(0, count) }, (_, i) => from + i);

  function alternating(inFlight, M) {
    const first = Math.min(inFlight, M);
    const order = range(first).map((m) => ["F", m, 0]);
    for (const m of range(M)) {
      order.push(["B", m, 0]);
      if (first + m < M) order.push(["F", first + m, 0]);
    }
    return order;
  }

  function interleavedOrder(stage, S, M, R) {
    const turns = M * R;
    const turn = (kind, number) => {
      const place = number % (S * R);
      const repeat = Math.floor(place / S);
      return [kind, Math.floor(number / (S * R)) * S + (place % S), kind === "F" ? repeat : R - 1 - repeat];
    };
    const first = Math.min(2 * (S - stage - 1) + (R - 1) * S, turns);
    const order = range(first).map((n) => turn("F", n));
    for (const n of range(turns - first)) order.push(turn("F", first + n), turn("B", n));
    for (const n of range(first, turns - first)) order.push(turn("B", n));
    return order;
  }

  function zeroBubbleOrder(stage, S, M) {
    const first = Math.min(S - stage, M);
    const order = range(first).map((m) => ["F", m, 0]);
    for (const m of range(M)) {
      order.push(["I", m, 0]);
      if (m >= stage) order.push(["W", m - stage, 0]);
      if (first + m < M) order.push(["F", first + m, 0]);
    }
    const last = Math.max(0, M - stage);
    for (const m of range(M - last, last)) order.push(["W", m, 0]);
    return order;
  }

  // The orders that result if each stage does in each tick the first action that it prefers and can do.
  function played(shape, M, prefers) {
    const { S, R } = shape;
    const done = new Map();
    const at = (stage, action) => done.get([stage, ...action].join());
    const counts = range(S).map(() => Object.fromEntries(["F", "I", "W"].map((kind) => [kind, range(R).map(() => 0)])));
    const orders = range(S).map(() => []);
    const total = 3 * M * R;
    const can = (stage, [kind, m, r], tick) => {
      const needed = kind === "F" ? [] : [[stage, [kind === "I" ? "F" : "I", m, r]]];
      const source = kind === "W" ? null : neighbour(shape, stage, r, kind === "F" ? -1 : 1);
      if (source) needed.push([source[0], [kind, m, source[1]]]);
      return needed.every(([where, action]) => at(where, action) < tick);
    };
    for (let tick = 0; orders.some((order) => order.length < total); tick += 1) {
      orders.forEach((order, stage) => {
        const count = counts[stage];
        const action = prefers(stage, count).map(([kind, r]) => [kind, count[kind][r], r])
          .find((one) => one[1] < M && can(stage, one, tick));
        if (!action) return;
        order.push(action);
        count[action[0]][action[2]] += 1;
        done.set([stage, ...action].join(), tick);
      });
    }
    return orders;
  }

  function zeroBubble2(S, M) {
    return played({ S, R: 1 }, M, (stage, { F: [f], I: [i], W: [w] }) => [
      ["I", 0], ...(f - i < 2 * (S - stage) - 1 && f - w < 2 * S - 1 ? [["F", 0]] : []), ["W", 0],
    ]);
  }

  function zeroBubbleV(S, M) {
    return played({ S, R: 2, route: "v" }, M, (stage, { F, W }) => {
      const inFlight = F[0] + F[1] - W[0] - W[1];
      // A place is left for every microbatch that is still to come back through the second part.
      return [
        ["I", 0], ["I", 1], ...(inFlight < 2 * S ? [["F", 1]] : []), ...(inFlight + F[0] - F[1] < 2 * S ? [["F", 0]] : []),
        ["W", 0], ["W", 1],
      ];
    });
  }

  // DualPipe's order of a stage: `near` is the direction that enters at its own end, and `count` microbatches enter there.
  function bothWays(stage, S, count) {
    const fromEnd = Math.min(stage, S - 1 - stage);
    const [near, far] = stage < S / 2 ? [0, 1] : [1, 0];
    const inner = S / 2 - fromEnd - 1;
    const made = { F: [0, 0], B: [0, 0] };
    const [order, waiting] = [[], []];
    const act = (kind, direction) => {
      const numbers = made[kind === "F" ? "F" : "B"];
      order.push([kind, numbers[direction], direction]);
      if (kind === "I") waiting.push(["W", numbers[direction], direction]);
      numbers[direction] += 1;
    };
    const times = (repeats, ...steps) => range(repeats).forEach(() => steps.forEach(([kind, direction]) =>
      (kind === "W" ? order.push(waiting.shift()) : act(kind, direction))));
    times(2 * inner, ["F", near]);
    times(fromEnd + 1, ["F", near], ["F", far]);
    times(inner, ["I", far], ["W"], ["F", far]);
    times(count - S + fromEnd + 1, ["F", near], ["B", far], ["F", far], ["B", near]);
    times(inner, ["B", far], ["F", far], ["B", near]);
    let split = false;
    for (const number of range(fromEnd + 1)) {
      for (const [parity, direction] of [[1, far], [0, near]]) {
        split ||= number === Math.floor((fromEnd + 1) / 2) && fromEnd % 2 === parity;
        act(split ? "I" : "B", direction);
      }
    }
    times(inner, ["W"], ["I", near]);
    return [...order, ...waiting];
  }

  function build(name, S, M, R, stream) {
    const each = (make) => range(S).map(make);
    const made = { name, S, M, R, flushes: true, microbatches: M };
    if (name === "interleaved") {
      requireSizes(S, M, R);
      if (R === 1) {
        throw new Undefined("interleaved 1F1B needs at least 2 repeats, not 1: with one it would be 1F1B", { R: 2 });
      }
      if (M % S) {
        throw new Undefined(`interleaved 1F1B sends microbatches round in groups of ${S}, one for each stage, and ` +
          `${M} is not a multiple of it`, { M: Math.ceil(M / S) * S });
      }
      return { ...made, orders: each((stage) => interleavedOrder(stage, S, M, R)) };
    }
    if (name === "breadth_first") {
      requireSizes(S, M, R);
      const forward = range(R).flatMap((r) => range(M).map((m) => ["F", m, r]));
      const order = [...forward, ...forward.map(([, m, r]) => ["B", m, r]).reverse()];
      return { ...made, orders: each(() => order) };
    }
    if (TWO_PARTS.includes(name)) {
      requireSizes(S, M, 2);
      if (name === "zb_v") return { ...made, R: 2, route: "v", orders: zeroBubbleV(S, M) };
      if (S % 2 || M % 2 || M < 2 * S) {
        throw new Undefined("DualPipe takes an even number of stages, and an even number of microbatches that is at least " +
          `twice as large, not ${S} and ${M}`, S % 2 ? { S: S + 1 } : { M: Math.max(2 * S, M + (M % 2)) });
      }
      const half = { M: M / 2, microbatches: M / 2, R: 2, route: "both" };
      return { ...made, ...half, orders: each((stage) => bothWays(stage, S, M / 2)) };
    }
    requireOneRepeat(NAMES[name], S, M, R);
    if (name === "zb_h2") return { ...made, orders: zeroBubble2(S, M) };
    if (name === "gpipe") {
      const order = [...range(M).map((m) => ["F", m, 0]), ...range(M).map((m) => ["B", m, 0]).reverse()];
      return { ...made, orders: each(() => order) };
    }
    if (name === "1f1b") return { ...made, orders: each((stage) => alternating(S - stage, M)) };
    if (name === "pipedream") {
      const length = stream || Math.max(3 * M, 10 * S);
      const orders = each((stage) => alternating(S - stage, length));
      return { ...made, flushes: false, microbatches: length, orders };
    }
    return { ...made, orders: each((stage) => zeroBubbleOrder(stage, S, M)) };
  }

  // A schedule from its lines, such as "F0 F1 B0 B1", one for each stage.
  function written(text, route) {
    const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
    const orders = lines.map((line) => line.split(/\s+/).map((word) => {
      const found = /^([FBIW])(\d{1,6})([a-z]?)$/.exec(word);
      if (!found) {
        throw new Undefined(`"${word.slice(0, 20)}" is no action; write F3, B3, I3 or W3, and F3b for the second repeat ` +
          "of microbatch 3");
      }
      return [found[1], Number(found[2]), found[3] ? LETTERS.indexOf(found[3]) : 0];
    }));
    const every = orders.flat();
    if (!every.length) throw new Undefined("a schedule needs at least one action, as in F0 B0");
    const [M, R] = [1, 2].map((key) => 1 + every.reduce((most, action) => Math.max(most, action[key]), 0));
    if (orders.length > 64 || every.length > 5000 || M * R > 5000) {
      throw new Undefined("these lines have more actions than can be shown");
    }
    orders.forEach((order, stage) => requireComplete(stage, order, M, R));
    return { name: "by_hand", S: orders.length, M, R, flushes: true, microbatches: M, orders, route };
  }

  function requireComplete(stage, order, M, R) {
    const counts = new Map();
    for (const action of order) counts.set(action.join(), (counts.get(action.join()) || 0) + 1);
    for (const r of range(R)) {
      for (const m of range(M)) {
        const has = ["F", "B", "I", "W"].map((kind) => counts.get([kind, m, r].join()) || 0);
        if (!["1,1,0,0", "1,0,1,1"].includes(has.join())) {
          const found = has.map((count, i) => count && `${count} x ${"FBIW"[i]}`).filter(Boolean).join(", ");
          throw new Undefined(`stage ${stage} needs one F and one B (or one I and one W) of microbatch ` +
            `${m}${R > 1 ? LETTERS[r] : ""}, and has ${found || "nothing"}`);
        }
      }
    }
  }

  // The stage and repeat with the next part of the model (step 1) or the one before (-1).
  function neighbour({ S, R, route }, stage, repeat, step) {
    const turned = repeat % 2 === 1 && route && route !== "round";
    const place = turned ? S - 1 - stage : stage;
    const part = (route === "both" ? 0 : repeat * S) + place + step;
    if (part < 0 || part >= S * (route === "both" ? 1 : R)) return null;
    if (route === "both") return [turned ? S - 1 - part : part, repeat];
    const [round, next] = [Math.floor(part / S), part % S];
    return [route === "v" && round % 2 ? S - 1 - next : next, round];
  }

  const parts = ({ R, route }) => (route === "both" ? 1 : R);

  // ---- Times: an action begins when the one before it has ended and what it needs is there.

  function run(schedule, costs) {
    const { S, orders } = schedule;
    const P = parts(schedule);
    const takes = { F: costs.f / P, B: (costs.b + costs.w) / P, I: costs.b / P, W: costs.w / P };
    const arrived = new Map();
    const linkFree = new Map();
    const spans = orders.map(() => []);
    const messages = [];
    const needs = (stage, [kind, m, r]) => {
      const source = kind === "W" ? null : neighbour(schedule, stage, r, kind === "F" ? -1 : 1);
      return source ? `${kind === "F" ? "F" : "B"} ${m} ${source}` : "";
    };
    const ran = new Set();
    const after = { B: "F", I: "F", W: "I" };
    const missing = (stage, [kind, m, r]) => after[kind] && !ran.has([stage, after[kind], m, r].join());
    const handOn = (stage, action, end) => {
      const [kind, m, r] = action;
      const other = neighbour(schedule, stage, r, kind === "F" ? 1 : -1);
      if (!other) return;
      const key = `${kind === "F" ? "F" : "B"} ${m} ${[stage, r]}`;
      const target = other[0];
      if (target === stage) {
        arrived.set(key, end);
        return;
      }
      const link = stage * S + target;
      const start = Math.max(end, linkFree.get(link) || 0);
      arrived.set(key, start + costs.c);
      linkFree.set(link, start + costs.c);
      messages.push({ source: stage, target, action, start, end: start + costs.c });
    };
    let moved = true;
    while (moved) {
      moved = false;
      orders.forEach((order, stage) => {
        const own = spans[stage];
        while (own.length < order.length) {
          const action = order[own.length];
          const key = needs(stage, action);
          if ((key && !arrived.has(key)) || missing(stage, action)) break;
          const free = own.length ? own[own.length - 1].end : 0;
          const start = key ? Math.max(free, arrived.get(key)) : free;
          const end = start + takes[action[0]];
          own.push({ action, start, end });
          ran.add([stage, ...action].join());
          if (action[0] !== "W") handOn(stage, action, end);
          moved = true;
        }
      });
    }
    const stuck = spans.findIndex((own, stage) => own.length < orders[stage].length);
    if (stuck >= 0) {
      const [kind, m, r] = orders[stuck][spans[stuck].length];
      throw new Undefined("stages would wait forever: stage " +
        `${stuck} waits in ${kind}${m}${schedule.R > 1 ? LETTERS[r] : ""}`);
    }
    return { schedule, costs, spans, messages, end: Math.max(...spans.flat().map((span) => span.end)) };
  }

  // ---- Measures.

  function heldActivations(order) {
    let held = 0;
    let most = 0;
    for (const [kind] of order) {
      held += kind === "F" ? 1 : kind === "I" ? 0 : -1;
      most = Math.max(most, held);
    }
    return most;
  }

  // By stage, [time, microbatches in flight from then on]: each from the start of a forward pass to the end of the last
  // backward part.
  function inFlight({ schedule, spans }) {
    return spans.map((own) => {
      let held = 0;
      const steps = [[0, 0]];
      for (const { action: [kind], start, end } of own) {
        if (kind === "I") continue;
        held += (kind === "F" ? 1 : -1) / parts(schedule);
        const time = kind === "F" ? start : end;
        if (steps[steps.length - 1][0] === time) steps.pop();
        steps.push([time, held]);
      }
      return steps;
    });
  }

  function heldWeights(order) {
    const met = new Map();
    let newest = 0;
    let most = 1;
    for (const [kind, m] of order) {
      if (kind === "F") met.set(m, newest);
      else if (kind === "B") {
        met.delete(m);
        newest += 1;
      }
      most = Math.max(most, new Set([...met.values(), newest]).size);
    }
    return most;
  }

  function period({ schedule: { S, microbatches }, spans }) {
    const ends = spans[0].filter((span) => span.action[0] === "B").map((span) => span.end);
    const last = microbatches - 1 - S;
    return (ends[last] - ends[last - 4 * S]) / (4 * S);
  }

  function measure(timed) {
    const { S, M, R, flushes, microbatches, orders } = timed.schedule;
    const P = parts(timed.schedule);
    const work = timed.spans.flat().reduce((sum, span) => sum + (span.end - span.start), 0);
    const time = flushes ? timed.end : M * period(timed);
    const share = M / microbatches;
    const sent = range(S).map((stage) => timed.messages.filter((message) => message.source === stage).length);
    return {
      time,
      bubble: 1 - (work * share) / (S * time),
      activations: orders.map((order) => heldActivations(order) / P),
      weights: orders.map((order) => (flushes ? R / P : heldWeights(order))),
      messages: sent.map((count) => Math.round(count * share)),
    };
  }

  window.meshcraftSchedules = { NAMES, ROUTES, LETTERS, LOOPED, TWO_PARTS, written, Undefined, range, build, run, measure, inFlight };
})();
