// A matmul on a roofline, and whether sending hides behind it. Figures are those of course/machines.toml.
"use strict";

(function () {
  const { start, table } = window.meshcraftWidget;
  const MACHINES = window.meshcraftMachines;
  const BYTES = 2; // bfloat16

  // Seconds of a product of rows x width by width x features, as course.machine.Machine.matmul_seconds has them.
  function matmul({ flops, memory }, rows, width, features) {
    const [work, bytes] = [2 * rows * width * features, BYTES * (rows * width + width * features + rows * features)];
    return { intensity: work / bytes, rate: Math.min(flops, (work / bytes) * memory), seconds: Math.max(work / flops, bytes / memory) };
  }

  const transfer = ([latency, rate], bytes) => latency + bytes / rate;

  function times({ machine, n, tokens, width, features }) {
    const one = MACHINES[machine];
    const product = matmul(one, tokens, width, features);
    const gathered = (whole) => transfer(one.gather[n], ((n - 1) / n) * whole);
    const send = transfer(one.permute[n], BYTES * tokens * width);
    return {
      ...product,
      ridge: one.flops / one.memory,
      weights: gathered(BYTES * width * features),
      whole: gathered(BYTES * n * tokens * width) + matmul(one, n * tokens, width, features).seconds,
      ring: product.seconds + (n - 1) * Math.max(product.seconds, send),
      send,
    };
  }

  const digits = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
  const micro = (seconds) => `${digits(1e6 * seconds)} &micro;s`;

  function picture({ flops, memory }, found, label) {
    const [width, height, least, most] = [520, 220, 0, 4.5];
    const x = (intensity) => 46 + ((Math.min(most, Math.max(least, Math.log10(intensity))) - least) / (most - least)) * (width - 66);
    const top = Math.log10(flops);
    const y = (rate) => 24 + ((top - Math.log10(rate)) / 4) * (height - 60);
    const text = (content, left, down, anchor) => `<text x="${left.toFixed(1)}" y="${down.toFixed(1)}" text-anchor="${anchor}" fill="currentColor">${content}</text>`;
    const low = Math.max(1, flops / 1e4 / memory);
    const ticks = [1, 10, 100, 1000, 10000].map((tick) => `<path d="M${x(tick).toFixed(1)},24V${height - 36}" stroke="currentColor" stroke-opacity="0.15"/>` +
      text(tick.toLocaleString("en"), x(tick), height - 22, "middle")).join("");
    return `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="${label}" viewBox="0 0 ${width} ${height}" ` +
      `style="display:block;width:100%;max-width:40em" font-size="12" font-family="system-ui,sans-serif">${ticks}` +
      `<path d="M${x(low).toFixed(1)},${y(low * memory).toFixed(1)}L${x(found.ridge).toFixed(1)},${y(flops).toFixed(1)}H${width - 20}" ` +
      'stroke="#0072b2" stroke-width="3" fill="none"/>' +
      `<path d="M${x(found.intensity).toFixed(1)},${y(found.rate).toFixed(1)}V${height - 36}" stroke="#d55e00" stroke-dasharray="4 3"/>` +
      `<circle cx="${x(found.intensity).toFixed(1)}" cy="${y(found.rate).toFixed(1)}" r="6" fill="#d55e00"/>` +
      text(`${digits(flops / 1e12)} TFLOP/s`, width - 20, 15, "end") + text("FLOPs a byte of memory", width / 2, height - 5, "middle") + "</svg>";
  }

  function show(state) {
    const found = times(state);
    const { n, tokens, width, features } = state;
    const memoryBound = found.intensity < found.ridge;
    const status = `The product does ${digits(found.intensity)} FLOPs for each byte of memory, and ${digits(found.ridge)} are needed to be bound by ` +
      `arithmetic: it reaches ${digits(found.rate / 1e12)} TFLOP/s, bound by ${memoryBound ? "memory" : "arithmetic"}.`;
    const gain = found.whole / found.ring;
    const row = (name, seconds, result) => [name, `<td>${micro(seconds)}</td>`, `<td class="explorer-undefined">${result}</td>`];
    const size = (rows) => `${rows.toLocaleString("en")} &times; ${width.toLocaleString("en")} &times; ${features.toLocaleString("en")}`;
    return {
      status,
      html: picture(MACHINES[state.machine], found, status) + table("Times", ["what", "time", "result"], [
        row(`product, ${size(tokens)}`, found.seconds, memoryBound ? "bound by memory" : "bound by arithmetic"),
        row(`FSDP: all-gather of its weights from ${n} devices`, found.weights, found.weights <= found.seconds ? "hides behind the product"
          : `longer than the product by ${micro(found.weights - found.seconds)}`),
        row(`tensor parallelism: all-gather of the tokens of ${n} devices, then ${size(n * tokens)}`, found.whole, ""),
        row(`the same in a ring: ${n} products, ${n - 1} transfers of ${micro(found.send)}`, found.ring,
          gain > 1 ? `the ring pays: ${digits(gain)} times as fast` : `the ring doesn't pay: ${digits(1 / gain)} times as long`),
      ]),
    };
  }

  window.meshcraftRoofline = { times };
  const names = Object.keys(MACHINES);
  const slider = (key, label, first, least, most) => [key, label, first, { powers: [least, most] }];
  start({
    id: "roofline", name: "roofline", label: "Roofline and rings", show,
    limits: ({ machine }) => ({ n: Math.max(...Object.keys(MACHINES[machine].gather).map(Number)) }),
    groups: [["A product on one device, in bfloat16", [
      ["machine", "machine", "8xH100", { options: names.map((name) => [name, name]) }],
      slider("n", "devices", 8, 1, 6), slider("tokens", "tokens on each device", 2048, 0, 16),
      slider("width", "width", 4096, 6, 15), slider("features", "features on each device", 4096, 6, 17),
    ]]],
  });
})();
