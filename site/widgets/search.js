// Search over all pages. The index is a script, so that it also loads on pages opened from a folder, and is fetched when
// somebody begins to search.
"use strict";

(function () {
  const MOST = 20;
  let index = null;

  function load(base) {
    index = index || new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `${base}/search/index.js`;
      script.onload = () => resolve(window.meshcraftIndex.map(([location, page, section, text]) => {
        const title = `${page} ${section}`.toLowerCase();
        return { location, page, section, text, title, lower: text.toLowerCase() };
      }));
      script.onerror = reject;
      document.head.append(script);
    });
    return index;
  }

  const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

  // Every word must begin a word of a section; a plural also finds the singular.
  const patterns = (query) => query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const stem = word.length > 3 && word.endsWith("s") ? word.slice(0, -1) : word;
    return new RegExp(`(?<![\\p{L}\\p{N}_])${escaped(stem)}`, "gu");
  });

  function score(entry, words) {
    let sum = 0;
    for (const word of words) {
      const inTitle = (entry.title.match(word) || []).length;
      const inText = (entry.lower.match(word) || []).length;
      if (!inTitle && !inText) return 0;
      sum += 12 * inTitle + Math.log2(1 + inText);
    }
    return sum + (entry.section ? 0 : 1);
  }

  function search(entries, query) {
    const words = patterns(query);
    if (!words.length) return [];
    return entries.map((entry) => [score(entry, words), entry]).filter(([sum]) => sum > 0)
      .sort(([a], [b]) => b - a).map(([, entry]) => entry);
  }

  function marked(text, words, node) {
    const spans = words.flatMap((word) => [...text.toLowerCase().matchAll(word)].map((m) => [m.index, m[0].length]));
    let at = 0;
    for (const [start, length] of spans.sort(([a], [b]) => a - b)) {
      if (start < at) continue;
      const mark = document.createElement("mark");
      mark.textContent = text.slice(start, start + length);
      node.append(text.slice(at, start), mark);
      at = start + length;
    }
    node.append(text.slice(at));
    return node;
  }

  function excerpt(entry, words) {
    const found = words.map((word) => entry.lower.search(word)).filter((at) => at >= 0);
    const at = found.length ? Math.max(0, Math.min(...found) - 60) : 0;
    const start = at ? entry.text.indexOf(" ", at) + 1 : 0;
    return `${start ? "… " : ""}${entry.text.slice(start, start + 180)}${entry.text.length > start + 180 ? " …" : ""}`;
  }

  function item(base, entry, words) {
    const link = Object.assign(document.createElement("a"), { href: `${base}/${entry.location}`, className: "md-search-result__link" });
    const head = Object.assign(document.createElement("span"), { className: "found-title" });
    marked(entry.section ? `${entry.page}: ${entry.section}` : entry.page, words, head);
    const text = Object.assign(document.createElement("span"), { className: "found-text" });
    marked(excerpt(entry, words), words, text);
    link.append(head, text);
    const row = document.createElement("li");
    row.append(link);
    return row;
  }

  function start(root) {
    const base = root.dataset.base;
    const [input, list, status] = ["input", "#search-results", "#search-status"].map((s) => root.querySelector(s));
    const toggle = document.getElementById("__search");
    const close = () => { toggle.checked = false; input.blur(); };

    async function show() {
      const query = input.value.trim();
      list.replaceChildren();
      if (!query) { status.textContent = "Type to search all pages"; return; }
      let entries;
      try {
        entries = await load(base);
      } catch {
        status.textContent = "The search index could not be loaded";
        return;
      }
      if (query !== input.value.trim()) return;
      const found = search(entries, query);
      const words = patterns(query);
      list.replaceChildren(...found.slice(0, MOST).map((entry) => item(base, entry, words)));
      const count = found.length === 1 ? "1 section" : `${found.length} sections`;
      status.textContent = found.length > MOST ? `${count}, the best ${MOST} shown` : found.length ? count : "Nothing found";
    }

    input.addEventListener("focus", () => { toggle.checked = true; load(base).catch(() => {}); });
    input.addEventListener("input", show);
    toggle.addEventListener("change", () => toggle.checked && input.focus());
    root.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      const first = list.querySelector("a");
      if (first) first.click();
    });
    list.addEventListener("click", () => { toggle.checked = false; });
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return close();
      if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return undefined;
      const stops = [input, ...list.querySelectorAll("a")];
      const next = stops.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1);
      stops[(next + stops.length) % stops.length].focus();
      return event.preventDefault();
    });
    document.addEventListener("keydown", (event) => {
      const typing = event.target.closest("input, select, textarea, [contenteditable]");
      if (typing || event.ctrlKey || event.metaKey || event.altKey || !["/", "s"].includes(event.key)) return;
      event.preventDefault();
      input.focus();
    });
    document.addEventListener("click", (event) => { if (!root.contains(event.target) && event.target !== toggle && !event.target.closest('label[for="__search"]')) toggle.checked = false; });
  }

  window.meshcraftSearch = { load, search };
  const root = document.getElementById("search");
  if (root) start(root);
})();
