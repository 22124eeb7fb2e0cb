"use strict";
// Draws the figures, in the colours of the scheme and in the layout of the width at hand.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 600px)");
  const touch = matchMedia("(pointer: coarse)");
  const hidden = {}; // by chart: groups switched off in its legend

  // "@name" and "@name/opacity" stand for the style sheet's custom properties, in colours only.
  const token = /^@([a-z0-9-]+)(?:\/([\d.]+))?$/;
  function colours(value, inColour, style) {
    if (typeof value === "string") {
      const found = inColour && token.exec(value);
      if (!found) return value;
      const hex = style.getPropertyValue("--" + found[1]).trim();
      if (found[2] === undefined) return hex;
      const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
      return `rgba(${r},${g},${b},${found[2]})`;
    }
    if (Array.isArray(value)) return inColour ? value.map((v) => colours(v, true, style)) : value.map(
      (v) => (v !== null && typeof v === "object" ? colours(v, false, style) : v));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(
      ([key, inner]) => [key, colours(inner, /color/.test(key), style)]));
  }

  function put(layout, path, value) {
    const keys = path.split(".");
    const last = keys.pop();
    let place = layout;
    for (const key of keys) place = place[key] ??= {};
    place[last] = value;
  }

  function draw(id) {
    const style = getComputedStyle(document.documentElement);
    const { data, layout } = colours({ data: figures[id].data, layout: figures[id].layout }, false, style);
    layout.font.family = getComputedStyle(document.body).fontFamily;
    if (narrow.matches) for (const [path, value] of Object.entries(figures[id].narrow)) put(layout, path, value);
    if (touch.matches || narrow.matches) layout.dragmode = false; // a finger on a chart scrolls the page
    for (const trace of data) if (hidden[id]?.has(trace.legendgroup)) trace.visible = false;
    const place = document.getElementById(id);
    place.style.minHeight = layout.height + "px";
    return Plotly.react(place, data, layout, { displayModeBar: false, responsive: true, doubleClick: "reset" });
  }

  function drawAll() {
    return Promise.all(Object.keys(figures).map(draw)).then(() => {
      document.documentElement.dataset.drawn = dark.matches ? "dark" : "light";
    });
  }

  for (const button of document.querySelectorAll(".keys button")) {
    button.addEventListener("click", () => {
      const id = button.closest("figure").querySelector(".plot").id;
      const off = (hidden[id] ??= new Set());
      const group = button.dataset.group;
      off.has(group) ? off.delete(group) : off.add(group);
      button.setAttribute("aria-pressed", String(!off.has(group)));
      draw(id);
    });
  }

  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  drawAll();
})();
