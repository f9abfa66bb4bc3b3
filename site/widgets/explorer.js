// The schedule explorer: a form, and what the schedules of schedules.js look like and cost.
"use strict";

(function () {
  const { NAMES, ROUTES, LETTERS, LOOPED, TWO_PARTS, Undefined, range, build, run, measure, written, inFlight } = window.meshcraftSchedules;

  // ---- Words.

  // Halves to the even digit, as Python rounds them.
  const rounded = (value, places) => value.toLocaleString("en",
    { minimumFractionDigits: places, maximumFractionDigits: places, roundingMode: "halfEven" });

  function digits(value) {
    if (!value) return "0";
    const places = Math.min(12, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)))));
    const said = rounded(value, places);
    return said.includes(".") ? said.replace(/0+$/, "").replace(/\.$/, "") : said;
  }

  const percent = (share) => {
    const known = Math.abs(share) < 1e-9 ? 0 : share;
    return known > 0 && known < 0.001 ? "< 0.1%" : `${digits(Number(rounded(100 * known, 1)))}%`;
  };

  const spread = (values) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return low === high ? digits(high) : `${digits(low)} to ${digits(high)}`;
  };

  // ---- The picture, drawn as course.render.schedule_svg draws it.

  const FILLS = { F: ["#0072b2", "#3a93cf"], B: ["#d55e00", "#b04c00"], W: ["#00966d", "#007a58"] };
  FILLS.I = FILLS.B;
  const INK = { "#0072b2": "#fff", "#3a93cf": "#111", "#d55e00": "#111", "#b04c00": "#fff", "#00966d": "#111" };
  INK["#007a58"] = "#fff";
  const PATTERN = { B: "b", I: "b", W: "d" };
  const WORDS = { F: "forward", B: "backward", I: "backward, input's gradient", W: "weights' gradient" };
  const [LEFT, RIGHT, LEAST, MOST, CELL, GAP, LETTER] = [76, 20, 572, 2400, 24, 5, 6.1];
  const MAX_CELLS = 5000;
  const DEFS = "<defs>" +
    '<pattern id="explorer-hatch-i" width="8" height="8" patternUnits="userSpaceOnUse">' +
    '<path d="M-2,6L2,10M0,0L8,8M6,-2L10,2" stroke="currentColor" stroke-width="0.7" fill="none"/></pattern>' +
    '<pattern id="explorer-hatch-b" width="6" height="6" patternUnits="userSpaceOnUse">' +
    '<path d="M-1,1L1,-1M0,6L6,0M5,7L7,5" stroke="#111" stroke-opacity="0.4" fill="none"/></pattern>' +
    '<pattern id="explorer-hatch-d" width="5" height="5" patternUnits="userSpaceOnUse">' +
    '<circle cx="1.5" cy="1.5" r="0.9" fill="#111" fill-opacity="0.5"/></pattern></defs>';

  const px = (value) => value.toFixed(1);

  function words(said, x, y, anchor, more) {
    return `<text x="${px(x)}" y="${px(y)}" text-anchor="${anchor}" ${more || 'fill="currentColor"'}>${said}</text>`;
  }

  function box(x, y, width, height, fill, title) {
    const inside = title ? `<title>${title}</title>` : "";
    const passive = title ? "" : ' pointer-events="none"';
    return `<rect x="${px(x)}" y="${px(y)}" width="${px(Math.max(width, 0.6))}" height="${height}" fill="${fill}"` +
      `${passive}>${inside}</rect>`;
  }

  function cell(span, stage, R, y, scale) {
    const [kind, m, r] = span.action;
    const fill = FILLS[kind][r % 2];
    const [x, width] = [LEFT + span.start * scale, (span.end - span.start) * scale - 1];
    const title = `stage ${stage}, microbatch ${m}, repeat ${r}, ${WORDS[kind]}: ${digits(span.start)} to ${digits(span.end)}`;
    const labels = R > 1 ? [`${m}${LETTERS[r]}`, `${m}`] : [`${m}`];
    const label = labels.find((said) => said.length * LETTER + 2 <= width);
    const halo = PATTERN[kind] ? ` stroke="${fill}" stroke-width="3" paint-order="stroke"` : "";
    const ink = `fill="${INK[fill]}" pointer-events="none"${halo}`;
    return box(x, y, width, CELL, fill, title) +
      (PATTERN[kind] ? box(x, y, width, CELL, `url(#explorer-hatch-${PATTERN[kind]})`) : "") +
      (label ? words(label, x + width / 2, y + CELL / 2 + 4, "middle", ink) : "");
  }

  function row(timed, stage, y, scale) {
    const parts = [words(`stage ${stage}`, LEFT - 8, y + CELL / 2 + 4, "end")];
    let free = 0;
    const bubble = (until) => {
      if (until - free > 1e-3 * timed.end) {
        parts.push(box(LEFT + free * scale, y, (until - free) * scale, CELL, "url(#explorer-hatch-i)", "bubble: nothing computed"));
      }
    };
    for (const span of timed.spans[stage]) {
      bubble(span.start);
      free = span.end;
      if (span.end > span.start) parts.push(cell(span, stage, timed.schedule.R, y, scale));
    }
    bubble(timed.end);
    const sent = timed.messages.filter((message) => message.source === stage && message.end > message.start);
    const targets = [...new Set(sent.map((message) => message.target))].sort((a, b) => (a < stage) - (b < stage));
    for (const { target, action: [kind, m, r], start, end } of sent) {
      const title = `to stage ${target}: microbatch ${m}, repeat ${r}, ${WORDS[kind]}`;
      const line = y + CELL + 1 + 4 * targets.indexOf(target);
      parts.push(box(LEFT + start * scale, line, (end - start) * scale - 0.5, 3, FILLS[kind][0], title));
    }
    return parts.join("");
  }

  function axis(timed, scale, top, bottom) {
    const most = Math.max(6, Math.floor((timed.end * scale) / 95));
    const power = 10 ** Math.floor(Math.log10(timed.end / most));
    const step = [1, 2, 5, 10, 20].map((n) => n * power).find((n) => n * (most - 1) >= timed.end * (1 - 1e-9));
    return range(Math.floor((timed.end / step) * (1 + 1e-9)) + 1).map((i) => {
      const x = LEFT + i * step * scale;
      return `<path d="M${px(x)},${top}V${px(bottom + 3)}" stroke="currentColor" stroke-opacity="0.18"/>` +
        words(digits(i * step), x, bottom + 15, "middle");
    }).join("");
  }

  function legend(timed, y) {
    const kinds = new Set(timed.spans.flat().map((span) => span.action[0]));
    const parts = [];
    let x = LEFT;
    const entry = (fills, over, said) => {
      fills.forEach((fill, i) => parts.push(box(x + (i * 14) / fills.length, y, 14 / fills.length, 12, fill)));
      if (over) parts.push(box(x, y, 14, 12, over));
      parts.push(words(said, x + 19, y + 10, "start"));
      x += 32 + said.length * 6.3;
    };
    const shades = timed.schedule.R > 1 ? 2 : 1;
    for (const kind of ["F", "B", "I", "W"]) {
      const over = PATTERN[kind] && `url(#explorer-hatch-${PATTERN[kind]})`;
      if (kinds.has(kind)) entry(FILLS[kind].slice(0, shades), over, WORDS[kind]);
    }
    entry(["url(#explorer-hatch-i)"], "", "bubble");
    const letters = timed.schedule.R > 1 ? ", the letter the repeat" : "";
    const lines = timed.costs.c && timed.schedule.S > 1 ? "; thin lines: messages" : "";
    parts.push(words(`the number is the microbatch${letters}${lines}`, LEFT, y + 29, "start"));
    return parts.join("");
  }

  const readable = (timed) => timed.spans.flat().length <= MAX_CELLS;

  // The width of pictures on one time scale: that at which the shortest action of any has room for its number.
  function commonScale(pictures) {
    const end = Math.max(...pictures.map((timed) => timed.end));
    const least = Math.max(...pictures.map((timed) => {
      const lengths = timed.spans.flat().map((span) => span.end - span.start).filter((length) => length > 0);
      return (LETTER * (String(timed.schedule.microbatches - 1).length + (timed.schedule.R > 1 ? 1 : 0)) + 6) / Math.min(...lengths);
    }));
    const width = Math.min(MOST, Math.max(LEAST, least * end));
    return { width, scale: width / end };
  }

  const svg = (width, height, label, content) =>
    `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="${label}" viewBox="0 0 ${px(width)} ${px(height)}" ` +
    `style="display:block;width:100%;min-width:${px(width)}px;max-width:${px(1.25 * width)}px" font-size="11" ` +
    `font-family="system-ui,sans-serif">${content}</svg>`;

  function picture(timed, said, { width, scale }) {
    const { S } = timed.schedule;
    const lines = timed.costs.c && S > 1 ? 8 : 0;
    const step = CELL + GAP + lines;
    const bottom = 4 + S * step - GAP;
    const rows = range(S).map((stage) => row(timed, stage, 4 + stage * step, scale)).join("");
    return svg(LEFT + width + RIGHT, bottom + 66, said, `${DEFS}${axis(timed, scale, 4, bottom)}${rows}${legend(timed, bottom + 26)}`);
  }

  // Microbatches in flight on each stage over time, on the time scale of the picture above.
  function memoryCurve(timed, { width, scale }, most) {
    const height = 22;
    const peaks = [];
    const rows = inFlight(timed).map((steps, stage) => {
      const [top, bottom] = [18 + stage * (height + GAP), 18 + stage * (height + GAP) + height];
      const y = (count) => px(bottom - (height * count) / most);
      const peak = Math.max(...steps.map(([, count]) => count));
      peaks.push(digits(peak));
      const line = steps.map(([time, count]) => `H${px(LEFT + Math.min(time, timed.end) * scale)}V${y(count)}`).join("");
      return `<path d="M${LEFT},${bottom}${line}H${px(LEFT + timed.end * scale)}V${bottom}Z" fill="#cc79a7" fill-opacity="0.55" stroke="#cc79a7">` +
        `<title>stage ${stage}: at most ${digits(peak)} in flight</title></path>` +
        words(`stage ${stage}: ${digits(peak)}`, LEFT - 6, bottom - 7, "end");
    }).join("");
    const said = `Microbatches in flight over time; at most, by stage: ${peaks.join(", ")}`;
    return svg(LEFT + width + RIGHT, 22 + timed.schedule.S * (height + GAP), said, words("microbatches in flight, and the most of each stage", LEFT, 11, "start") + rows);
  }

  // ---- The form.

  const FIELDS = [
    ["S", "stages", 1, 16, 1], ["M", "microbatches", 1, 64, 1], ["R", "repeats", 1, 8, 1],
    ["f", "forward", 0.1, 100, "any"], ["b", "backward: inputs' gradients", 0, 100, "any"],
    ["w", "backward: weights' gradients", 0, 100, "any"], ["c", "sending one message", 0, 100, "any"],
  ];
  const BY_HAND = "F0 F1 F2 B0 B1 B2\nF0 F1 B0 F2 B1 B2\nF0 B0 F1 B1 F2 B2";
  const START = { schedule: "1f1b", S: 4, M: 8, R: 1, f: 1, b: 1, w: 1, c: 0, other: "", route: "round", lines: BY_HAND };

  function problem(state) {
    if (!(state.schedule in NAMES)) return `there is no schedule called ${JSON.stringify(state.schedule)}`;
    if (state.other && (!(state.other in NAMES) || state.other === "by_hand")) return `there is no schedule called ${JSON.stringify(state.other)}`;
    if (!(state.route in ROUTES)) return `there is no route called ${JSON.stringify(state.route)}`;
    const fields = FIELDS.filter(([key]) => state.schedule !== "by_hand" || !["S", "M", "R"].includes(key));
    for (const [key, name, least, most, step] of fields) {
      const value = state[key];
      if (!Number.isFinite(value) || value < least || value > most || (step === 1 && !Number.isInteger(value))) {
        return `${name}: give ${step === 1 ? "a whole number" : "a number"} from ${least} to ${most}`;
      }
    }
    return "";
  }

  // What is drawn of a stream that never flushes: what happens before its first stage runs out of microbatches.
  const shown = (state) => (state.schedule === "pipedream" ? state.M + 2 * state.S : 0);

  function beginning(timed) {
    if (timed.schedule.flushes) return timed;
    const end = Math.max(...timed.spans[0].filter(({ action }) => action[0] === "F").map((span) => span.end));
    const cut = (given) => given.filter((one) => one.start < end).map((one) => ({ ...one, end: Math.min(one.end, end) }));
    return { ...timed, spans: timed.spans.map(cut), messages: cut(timed.messages), end };
  }

  function result(state) {
    const costs = { f: state.f, b: state.b, w: state.w, c: state.c };
    if (state.schedule === "by_hand") {
      const drawn = run(written(state.lines, state.route), costs);
      return { found: measure(drawn), drawn };
    }
    const found = measure(run(build(state.schedule, state.S, state.M, state.R), costs));
    return { found, drawn: beginning(run(build(state.schedule, state.S, state.M, state.R, shown(state)), costs)) };
  }

  function readHash(hash) {
    const given = new URLSearchParams(hash.replace(/^#/, ""));
    if (!given.has("schedule")) return null;
    const state = { ...START, schedule: given.get("schedule") };
    for (const key of ["other", "route", "lines"]) if (given.has(key)) state[key] = given.get(key);
    for (const [key] of FIELDS) if (given.has(key)) state[key] = given.get(key) === "" ? NaN : Number(given.get(key));
    return state;
  }

  const writeHash = (state) => {
    const shared = Object.entries(state).filter(([k, v]) => (k === "other" ? v : state.schedule === "by_hand" || !["route", "lines"].includes(k)));
    return `#${new URLSearchParams(shared.map(([k, v]) => [k, String(v)]))}`;
  };

  function form() {
    const options = Object.entries(NAMES).map(([key, name]) => `<option value="${key}">${name}</option>`).join("");
    const routes = Object.entries(ROUTES).map(([key, name]) => `<option value="${key}">${name}</option>`).join("");
    const field = ([key, name, least, most, step]) => `<label for="explorer-${key}"><span>${name}</span>` +
      `<input id="explorer-${key}" name="${key}" type="number" inputmode="decimal" required ` +
      `min="${least}" max="${most}" step="${step}"></label>`;
    return `<form novalidate aria-label="Schedule explorer"><fieldset><legend>Pipeline</legend>` +
      `<label for="explorer-schedule"><span>schedule</span><select id="explorer-schedule" name="schedule">${options}` +
      `</select></label><label for="explorer-other"><span>next to</span><select id="explorer-other" name="other"><option value="">nothing</option>` +
      `${options.replace(/<option value="by_hand">.*?<\/option>/, "")}</select></label>${FIELDS.slice(0, 3).map(field).join("")}</fieldset><fieldset><legend>Time of a microbatch on ` +
      `one device</legend>${FIELDS.slice(3).map(field).join("")}</fieldset>` +
      '<fieldset id="explorer-by-hand"><legend>Your lines, one for each stage</legend>' +
      '<label for="explorer-lines" class="explorer-wide"><span>orders</span><textarea id="explorer-lines" name="lines" ' +
      'rows="6" spellcheck="false" autocomplete="off" aria-describedby="explorer-lines-help"></textarea></label>' +
      `<label for="explorer-route"><span>a microbatch goes</span><select id="explorer-route" name="route">${routes}` +
      '</select></label><p class="explorer-note" id="explorer-lines-help">F3 is the forward pass of microbatch 3, B3 its ' +
      "backward pass, I3 and W3 are the two halves of one, and F3b is its second repeat.</p></fieldset></form>" +
      '<p class="explorer-said" role="status" aria-live="polite" id="explorer-said"></p>' +
      '<p class="explorer-problem" role="alert" id="explorer-problem" hidden></p>' +
      '<div class="explorer-picture" tabindex="0" role="region" aria-label="Picture of the schedule"></div>' +
      '<div class="explorer-table" tabindex="0" role="region" aria-label="The family at these sizes"></div>';
  }

  function sentence(state, found) {
    const repeats = TWO_PARTS.includes(state.schedule) ? ", 2 parts on each device" : state.R > 1 ? `, ${state.R} repeats` : "";
    const sizes = `${state.S} stages, ${state.M} microbatches${repeats}`;
    return `${NAMES[state.schedule]}, ${sizes}: bubble ${percent(found.bubble)}; a step takes ${digits(found.time)}; a ` +
      `device holds activations of ${spread(found.activations)} microbatches and ${spread(found.weights)} ` +
      `${Math.max(...found.weights) > 1 ? "copies" : "copy"} of its weights, and sends ${spread(found.messages)} messages.`;
  }

  // The same sizes for another schedule, which may have one repeat, two, or as many as are chosen.
  const sizedFor = (state, schedule) => ({
    ...state, schedule, R: LOOPED.includes(schedule) || schedule === "by_hand" ? state.R : TWO_PARTS.includes(schedule) ? 2 : 1,
  });

  function family(state) {
    const names = Object.keys(NAMES).filter((name) => name !== "by_hand" || state.schedule === "by_hand");
    const rows = names.map((schedule) => {
      const own = sizedFor(state, schedule);
      const current = schedule === state.schedule ? ' aria-current="true"' : "";
      let cells;
      try {
        const { time, bubble, activations, weights, messages } = result(own).found;
        cells = [own.R, percent(bubble), digits(time), spread(activations), spread(weights), spread(messages)]
          .map((said) => `<td>${said}</td>`).join("");
      } catch (error) {
        if (!(error instanceof Undefined)) throw error;
        cells = `<td colspan="6" class="explorer-undefined">${error.message}</td>`;
      }
      return `<tr${current}><th scope="row">${NAMES[schedule]}</th>${cells}</tr>`;
    });
    const heads = ["schedule", "repeats", "bubble", "time of a step", "activations", "weights", "messages"];
    return `<table aria-label="The family at these sizes"><thead><tr>${
      heads.map((head) => `<th scope="col">${head}</th>`).join("")}</tr></thead><tbody>${rows.join("")}</tbody></table>` +
      '<p class="explorer-note">Activations in microbatches of a device, weights in copies, messages that a device sends; ' +
      "each from the least to the most of any stage.</p>";
  }

  function start(root) {
    root.innerHTML = form();
    const inputs = root.querySelector("form").elements;
    const [said, alert] = ["said", "problem"].map((name) => root.querySelector(`#explorer-${name}`));
    const [drawing, table] = ["picture", "table"].map((name) => root.querySelector(`.explorer-${name}`));

    const read = () => {
      const state = { schedule: inputs.schedule.value, other: inputs.other.value, lines: inputs.lines.value, route: inputs.route.value };
      for (const [key] of FIELDS) state[key] = inputs[key].value === "" ? NaN : Number(inputs[key].value);
      return state;
    };
    const fill = (state) => {
      for (const key of ["schedule", "other", "lines", "route"]) inputs[key].value = state[key];
      for (const [key] of FIELDS) inputs[key].value = Number.isNaN(state[key]) ? "" : state[key];
    };
    const complain = (message, fix) => {
      said.textContent = drawing.innerHTML = table.innerHTML = "";
      drawing.hidden = table.hidden = true;
      alert.hidden = false;
      alert.textContent = `Not defined: ${message}. `;
      for (const [key, value] of Object.entries(fix || {})) {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = `Set ${FIELDS.find(([name]) => name === key)[1]} to ${value}`;
        button.addEventListener("click", () => {
          inputs[key].value = value;
          update(true);
          inputs[key].focus();
        });
        alert.append(button);
      }
    };
    // Of lines written by hand, the sizes are those of the lines.
    const sized = (state) => {
      const byHand = state.schedule === "by_hand";
      root.querySelector("#explorer-by-hand").hidden = !byHand;
      for (const key of ["S", "M", "R"]) inputs[key].disabled = byHand || (key === "R" && TWO_PARTS.includes(state.schedule));
      if (!byHand || problem({ ...state, S: 1, M: 1, R: 1 })) return state;
      const { S, M, R } = written(state.lines, state.route);
      const sizes = { S, M: state.route === "both" ? 2 * M : M, R };
      for (const [key, size] of Object.entries(sizes)) inputs[key].value = size;
      return { ...state, ...sizes };
    };
    const show = (given) => {
      let state;
      try {
        state = sized(given);
      } catch (error) {
        if (!(error instanceof Undefined)) throw error;
        return complain(error.message, error.fix);
      }
      const wrong = problem(state);
      for (const [key, , least, most, step] of FIELDS) {
        const bad = !(state[key] >= least && state[key] <= most) || (step === 1 && !Number.isInteger(state[key]));
        inputs[key].setAttribute("aria-invalid", String(bad));
        if (bad) inputs[key].setAttribute("aria-describedby", "explorer-problem");
        else inputs[key].removeAttribute("aria-describedby");
      }
      if (wrong) return complain(wrong);
      const drawn = [];
      try {
        // Next to each other, a schedule with one repeat has one, whatever the other needs.
        const owns = state.other ? [state.schedule, state.other].map((name) => sizedFor(state, name)) : [state];
        for (const own of owns) drawn.push({ own, ...result(own) });
      } catch (error) {
        if (!(error instanceof Undefined)) throw error;
        return complain(error.message, error.fix);
      }
      alert.hidden = true;
      drawing.hidden = table.hidden = false;
      const sentences = drawn.map(({ own, found }) => sentence(own, found));
      said.textContent = sentences.join(" ");
      const scale = commonScale(drawn.map((one) => one.drawn));
      const most = Math.max(...drawn.flatMap((one) => inFlight(one.drawn).flat().map((step) => step[1])));
      drawing.innerHTML = drawn.every((one) => readable(one.drawn))
        ? drawn.map((one, i) => `${drawn.length > 1 ? `<p><strong>${NAMES[one.own.schedule]}</strong></p>` : ""}` +
          picture(one.drawn, sentences[i], scale) + memoryCurve(one.drawn, scale, most)).join("")
        : "<p>Too many actions to be read in a picture: choose fewer stages, microbatches or repeats.</p>";
      table.innerHTML = family(state);
    };
    const update = (keep) => {
      const state = read();
      show(state);
      if (keep) history.replaceState(null, "", writeHash(state));
    };
    const follow = () => {
      const state = readHash(location.hash);
      if (state) {
        fill(state);
        show(state);
      }
      return Boolean(state);
    };
    root.querySelector("form").addEventListener("input", () => update(true));
    root.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
    window.addEventListener("hashchange", () => follow() && root.scrollIntoView());
    fill(START);
    update(false);
    if (follow()) root.scrollIntoView();
  }

  window.meshcraftExplorer = { digits, percent };
  const root = document.getElementById("schedule-explorer");
  if (root) start(root);
})();
