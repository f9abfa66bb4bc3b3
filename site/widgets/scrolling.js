// Whatever scrolls sideways can be reached by keyboard: wide pictures, tables, formulas and code.
"use strict";

(function () {
  const NAMES = [
    [".scroll", "Picture"], [".md-typeset__scrollwrap", "Table"], ['math[display="block"]', "Formula"],
    [".md-typeset pre > code", "Code"], [".checked div", "Table"], [".checked pre", "Code"],
  ];

  function mark(element, name) {
    const wide = element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 1;
    if (wide) {
      element.setAttribute("tabindex", "0");
      if (!element.hasAttribute("aria-label")) element.setAttribute("aria-label", `${name}, scrolls sideways`);
      if (name !== "Formula") element.setAttribute("role", "group");
    } else if (element.getAttribute("tabindex") === "0") {
      element.removeAttribute("tabindex");
      element.removeAttribute("role");
    }
  }

  function all() {
    for (const [selector, name] of NAMES) {
      for (const element of document.querySelectorAll(selector)) mark(element, name);
    }
  }

  // After the theme's own scripts have wrapped tables and code.
  window.addEventListener("load", () => {
    all();
    document.querySelectorAll(".md-code__nav").forEach((nav, i) => nav.setAttribute("aria-label", `Code ${i + 1}`));
    document.querySelectorAll('input[type="checkbox"][disabled]').forEach((box) => box.setAttribute("aria-label", "to do"));
    new ResizeObserver(all).observe(document.body);
  });
})();
