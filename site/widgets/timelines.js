// Timelines of programs, with mouse, touch or keyboard: select a bar to read what it is and its source line, and zoom.
"use strict";

(function () {
  const BUTTONS = [["previous", "&lsaquo;", "previous bar"], ["next", "&rsaquo;", "next bar"], ["out", "&minus;", "zoom out"], ["in", "+", "zoom in"]];
  const [MOST, FACTOR] = [16, 2];

  function enhance(figure) {
    const [svg, scroll] = [figure.querySelector("svg"), figure.querySelector(".scroll")];
    const bars = [...svg.querySelectorAll(":is(rect, path) > title")].map((title) => title.parentNode);
    if (!scroll || bars.length < 4) return;
    const tools = document.createElement("div");
    tools.className = "timeline-tools";
    tools.setAttribute("role", "group");
    tools.setAttribute("aria-label", "Bars of this picture");
    tools.innerHTML = BUTTONS.map(([name, sign, label]) => `<button type="button" data-does="${name}" aria-label="${label}" title="${label}">${sign}</button>`).join("") +
      '<span aria-live="polite"></span>';
    scroll.after(tools);
    const text = tools.querySelector("span");
    text.textContent = "select a bar to read what it is";
    let selected = -1;
    let zoom = 1;
    const width = () => svg.getBoundingClientRect().width / zoom;

    function reveal() {
      if (selected < 0) return;
      const [bar, frame] = [bars[selected].getBoundingClientRect(), scroll.getBoundingClientRect()];
      scroll.scrollLeft += bar.left + bar.width / 2 - frame.left - frame.width / 2;
    }
    function select(index) {
      if (selected >= 0) bars[selected].classList.remove("selected");
      selected = index;
      bars[selected].classList.add("selected");
      text.textContent = `${selected + 1} of ${bars.length}: ${bars[selected].querySelector("title").textContent}`;
    }
    function zoomTo(next) {
      const base = width();
      zoom = Math.min(MOST, Math.max(1, next));
      [svg.style.minWidth, svg.style.maxWidth] = zoom === 1 ? start : [`${base * zoom}px`, "none"];
      reveal();
    }
    const start = [svg.style.minWidth, svg.style.maxWidth];
    const actions = {
      previous: () => { select(selected > 0 ? selected - 1 : bars.length - 1); reveal(); },
      next: () => { select((selected + 1) % bars.length); reveal(); },
      out: () => zoomTo(zoom / FACTOR),
      in: () => zoomTo(zoom * FACTOR),
    };
    tools.addEventListener("click", ({ target }) => actions[target.dataset.does]?.());
    // A label may be above the bar.
    svg.addEventListener("click", ({ clientX, clientY }) => {
      const index = document.elementsFromPoint(clientX, clientY).map((element) => bars.indexOf(element)).find((found) => found >= 0);
      if (index !== undefined) select(index);
    });
  }

  const isDiagram = (figure) => figure.querySelector(".badge")?.textContent === "diagram";
  window.addEventListener("load", () => [...document.querySelectorAll("figure.drawn")].filter((one) => !isDiagram(one)).forEach(enhance));
})();
