// What the widgets share: a form whose state is in the address, a sentence that gives the result, and what is wrong.
"use strict";

(function () {
  const escape = (text) => String(text).replace(/[&<>"]/g, (mark) => `&#${mark.charCodeAt(0)};`);
  const spoken = (value) => (typeof value === "number" ? value.toLocaleString("en") : value);
  const table = (label, heads, rows) => `<table aria-label="${label}"><thead><tr>${heads.map((head) => `<th scope="col">${head}</th>`).join("")}` +
    `</tr></thead><tbody>${rows.map(([head, ...cells]) => `<tr><th scope="row">${head}</th>${cells.join("")}</tr>`).join("")}</tbody></table>`;

  // A field is [key, label, start, kind]. A kind has `options`, `text`, `powers` (a slider over powers of two), or `least`
  // and `most` of a whole number; with `buttons`, a button on either side of the number too.
  function control(name, [key, , , kind]) {
    const same = `id="${name}-${key}" name="${key}"`;
    if (kind.options) {
      return `<select ${same}>${kind.options.map(([value, text]) => `<option value="${value}">${text}</option>`).join("")}</select>`;
    }
    if (kind.text) return `<input ${same} class="widget-text" type="text" spellcheck="false" autocomplete="off" autocapitalize="off">`;
    const [least, most] = kind.powers || [kind.least, kind.most];
    const limits = `min="${least}" max="${most}" step="1"`;
    if (kind.powers) return `<input ${same} type="range" ${limits}><output for="${name}-${key}"></output>`;
    return `<input ${same} type="number" ${limits} inputmode="numeric" required>`;
  }

  function form(name, title, groups) {
    const field = (one) => {
      const [key, text, , kind] = one;
      const button = (by, sign, word) => `<button type="button" data-key="${key}" data-by="${by}" aria-label="${word} ${text}">${sign}</button>`;
      const label = `<label for="${name}-${key}"><span>${text}</span>${control(name, one)}</label>`;
      return kind.buttons ? `<div class="widget-stepper">${button(-1, "&minus;", "previous")}${label}${button(1, "+", "next")}</div>` : label;
    };
    return `<form novalidate aria-label="${title}">${groups.map(([legend, fields]) =>
      `<fieldset><legend>${legend}</legend>${fields.map(field).join("")}</fieldset>`).join("")}</form>` +
      '<p role="status" aria-live="polite"></p><p class="explorer-problem" role="alert" hidden></p>' +
      `<div class="explorer-table" role="region" tabindex="0" aria-label="${title}: result"></div>`;
  }

  // `show` gets the state and returns { problem } or { status, html }; `limits` gives the most of a field in this state.
  function start({ id, name, label, groups, show, limits = () => ({}) }) {
    const root = document.getElementById(id);
    if (!root) return;
    root.innerHTML = form(name, label, groups);
    const fields = groups.flatMap(([, own]) => own);
    const inputs = Object.fromEntries([...root.querySelectorAll("input, select")].map((input) => [input.name, input]));
    const [status, alert, result] = ["[role=status]", "[role=alert]", ".explorer-table"].map((selector) => root.querySelector(selector));

    const read = () => Object.fromEntries(fields.map(([key, , first, kind]) => {
      const { value } = inputs[key];
      return [key, kind.powers ? 2 ** Number(value) : typeof first === "number" ? Number(value || NaN) : value];
    }));
    const fill = (state) => fields.forEach(([key, , , kind]) => {
      inputs[key].value = String(kind.powers ? Math.round(Math.log2(state[key])) : state[key]);
    });
    const invalid = (state) => fields.find(([key, , , { least, most }]) =>
      least !== undefined && !(Number.isInteger(state[key]) && state[key] >= least && state[key] <= most));

    function update() {
      let state = read();
      for (const [key, most] of Object.entries(limits(state))) {
        inputs[key].max = inputs[key].type === "range" ? Math.log2(most) : most;
        if (state[key] > most) inputs[key].value = inputs[key].max;
      }
      state = read();
      const bad = invalid(state);
      for (const [key, , , kind] of fields) {
        if (kind.powers) {
          inputs[key].nextElementSibling.value = spoken(state[key]);
          inputs[key].setAttribute("aria-valuetext", spoken(state[key]));
        } else if (!kind.options) inputs[key].setAttribute("aria-invalid", String(Boolean(bad) && bad[0] === key));
      }
      const { problem, status: sentence, html } = bad
        ? { problem: `${bad[1]}: give a whole number from ${bad[3].least} to ${spoken(bad[3].most)}` } : show(state);
      alert.hidden = !problem;
      alert.textContent = problem || "";
      result.hidden = status.hidden = Boolean(problem);
      if (problem) return;
      status.textContent = sentence;
      result.innerHTML = html;
    }
    function changed() {
      update();
      history.replaceState(null, "", `#${name}?${new URLSearchParams(Object.entries(read()))}`);
    }
    function follow() {
      if (!location.hash.startsWith(`#${name}?`)) return;
      const given = [...new URLSearchParams(location.hash.slice(name.length + 2))];
      fill({ ...first, ...Object.fromEntries(given.filter(([key]) => key in first)) });
      update();
      root.scrollIntoView();
    }

    root.addEventListener("input", changed);
    root.addEventListener("click", ({ target: { dataset: { key, by } } }) => {
      if (!key) return;
      const input = inputs[key];
      input.value = String(Math.min(Number(input.max), Math.max(Number(input.min), Number(input.value) + Number(by))));
      changed();
    });
    root.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
    window.addEventListener("hashchange", follow);
    const first = Object.fromEntries(fields.map(([key, , value]) => [key, value]));
    fill(first);
    update();
    follow();
  }

  window.meshcraftWidget = { start, table, escape };
})();
