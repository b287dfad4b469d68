// The demo's control panel; there is none elsewhere. What it asks for goes to /internal/demo.

import { box, colour, disc, line, make, number, sized } from "./charts.js";

const HTML = `
<div class="head"><h2 id="demo-title">Try it</h2><span class="muted">the GPUs are simulated; everything else is real</span></div>
<div class="demo-grid">
  <div class="knobs">
    <label><span>Load: <output id="d-rate" for="d-load">0</output> requests a second, of all tiers</span>
      <input id="d-load" type="range" min="0" max="100" step="1" value="0"></label>
    <div class="row"><span class="muted">Batching</span><span id="d-policies" class="row" role="group" aria-label="Batching policy"></span></div>
    <div class="row">
      <button id="d-flood" type="button" aria-pressed="false">Flood from the free tier</button>
      <button id="d-kill" type="button">Kill a GPU</button>
      <button id="d-revive" type="button" disabled>Bring it back</button>
      <button id="d-poison" type="button">Poison an input</button>
    </div>
    <p id="d-say" class="muted note" role="status">Move the slider, and look at the cars.</p>
  </div>
  <div class="versus">
    <div><h3>One by one</h3><canvas id="d-one" role="img" aria-label="Four requests, one call after the other"></canvas>
      <dl><dt>p99</dt><dd id="d-one-p99">–</dd><dt>GPUs needed</dt><dd id="d-one-gpus">–</dd></dl></div>
    <div><h3>Carpool</h3><canvas id="d-many" role="img" aria-label="The same four requests in one call"></canvas>
      <dl><dt>p99</dt><dd id="d-many-p99">–</dd><dt>GPUs needed</dt><dd id="d-many-gpus">–</dd></dl></div>
  </div>
</div>
<p id="d-about" class="muted note"></p>`;

const SAYS = {
  adaptive: "Adaptive: sends at once while GPUs idle, and waits for company when they are scarce.",
  fixed: "Fixed: waits until 64 are there, or 50 ms have passed, also when GPUs idle.",
  pid: "PID: a controller that holds the seats at 80 % filled.",
};

const $ = (id) => document.getElementById(id);

export class Demo {
  constructor(panel) {
    this.panel = panel;
    this.state = null;
    this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
  }

  tell(event) {
    this.panel.hidden = !event.demo;
    if (!event.demo) return;
    if (!this.state) this.build(event.demo);
    this.state = event.demo;
    this.show();
  }

  build(state) {
    this.panel.innerHTML = HTML;
    const load = $("d-load");
    // The lower half of the slider is for small loads: its square is what counts.
    this.rate = () => Math.round(this.state.rate_max * (load.value / 100) ** 2);
    load.addEventListener("input", () => { this.dragging = performance.now(); $("d-rate").textContent = number(this.rate()); });
    load.addEventListener("change", () => this.ask({ rate: this.rate() }, `Load: ${number(this.rate())} a second. The same arrivals are now computed one by one, too.`));
    $("d-policies").append(...state.policies.map((name) => {
      const made = make("button", { type: "button" }, name);
      made.addEventListener("click", () => this.ask({ policy: name }, SAYS[name]));
      return made;
    }));
    $("d-flood").addEventListener("click", () => this.ask({ flood: !this.state.flood },
      this.state.flood ? "The flood is over." : `${number(this.state.flood_rate)} a second more from the free tier: it is shed, the others keep their latency.`));
    $("d-kill").addEventListener("click", () => {
      const alive = [...Array(this.state.gpus).keys()].filter((gpu) => !this.state.dead.includes(gpu));
      const gpu = alive[Math.floor(Math.random() * alive.length)];
      this.ask({ kill: gpu }, `GPU ${gpu + 1} is gone. Its batch is sent again elsewhere; soon nobody calls it any more.`);
    });
    $("d-revive").addEventListener("click", () => this.ask({ revive: this.state.dead[0] }, "It is back, and is tried again in a moment."));
    $("d-poison").addEventListener("click", () => this.ask({ poison: true }, "One input makes its whole batch fail. Halves of it are sent until that one is found: it becomes a dead letter, the others are answered."));
    const frame = () => { this.draw(); requestAnimationFrame(frame); };
    requestAnimationFrame(frame);
  }

  async ask(wish, say) {
    const answer = await fetch("/internal/demo", { method: "POST", body: JSON.stringify(wish) });
    const told = await answer.json();
    $("d-say").textContent = answer.ok ? say : told.detail;
    if (answer.ok) { this.state = told; this.show(); }
  }

  show() {
    const { rate, rate_max, policy, flood, dead, gpus, comparison, latency_ms } = this.state;
    if (!this.dragging || performance.now() - this.dragging > 3000) {
      $("d-load").value = Math.round(100 * Math.sqrt(rate / rate_max));
      $("d-rate").textContent = number(rate);
    }
    for (const made of $("d-policies").children) made.setAttribute("aria-pressed", made.textContent === policy);
    $("d-flood").setAttribute("aria-pressed", flood);
    $("d-kill").disabled = dead.length >= gpus;
    $("d-revive").disabled = !dead.length;
    const side = (name, found) => {
      $(`d-${name}-p99`).textContent = !found ? "–" : found.p99_ms === null ? "∞ they cannot keep up" : `${number(found.p99_ms)} ms`;
      $(`d-${name}-gpus`).textContent = found?.gpus_needed ? number(found.gpus_needed) : "–";
    };
    side("one", comparison?.one_by_one);
    side("many", comparison?.carpool);
    $("d-about").textContent = comparison
      ? `At ${number(comparison.rate)} requests a second and ${number(latency_ms)} ms a call: p99 with the ${comparison.gpus} GPUs of this demo; GPUs needed for a p99 under ${number(comparison.p99_ms_max)} ms. Computed on the same arrivals.`
      : rate ? "computing …" : `${gpus} GPUs, ${number(latency_ms)} ms a call, whether with one input or with 64.`;
  }

  // Four requests come together. One by one a GPU takes them in turn; in one car they ride together.
  draw() {
    if (!this.state || this.panel.hidden || document.hidden) return;
    const ride = 1.4, all = 4 * ride + 1.2;
    const time = this.still.matches ? ride * 0.99 : (performance.now() / 1000) % all;
    for (const [id, together] of [["d-one", false], ["d-many", true]]) {
      const [pen, width, height] = sized($(id));
      const shades = ["--tier-0", "--tier-1", "--tier-2", "--tier-3"].map(colour);
      const wait = 44, road = width - wait - 56, y = height * 0.6;
      pen.strokeStyle = colour("--road");
      pen.lineWidth = 2;
      pen.setLineDash([6, 6]);
      line(pen, wait, y + 13, wait + road, y + 13);
      pen.setLineDash([]);
      const dot = (x, top, n) => disc(pen, shades[n], x, top, 5);
      const turn = together ? 0 : Math.floor(time / ride);
      const share = together ? time / ride : (time % ride) / ride;
      const riders = together ? [0, 1, 2, 3] : [turn];
      const driving = time < (together ? ride : 4 * ride);
      const x = wait + 4 + (driving ? share : 0) * (road - 66);
      box(pen, colour("--car"), x, y - 12, 62, 20, [5, 9, 4, 4]);
      for (const wheel of [14, 48]) disc(pen, colour("--muted"), x + wheel, y + 9, 4.5);
      for (let seat = 0; seat < 4; seat++) disc(pen, colour("--glass"), x + 10 + seat * 13, y - 3, 5.5);
      for (let n = 0; n < 4; n++) {
        const arrived = together ? time >= ride : n < turn || !driving;
        if (arrived) dot(width - 42 + (n % 2) * 14, y - 10 + Math.floor(n / 2) * 14, n);
        else if (driving && riders.includes(n)) dot(x + 10 + (together ? n : 0) * 13, y - 3, n);
        else dot(10 + (n % 2) * 14, y - 10 + Math.floor(n / 2) * 14, n);
      }
      pen.fillStyle = colour("--muted");
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "right";
      const calls = together ? 1 : Math.min(4, turn + (driving ? 1 : 0));
      pen.fillText(`${calls} call${calls > 1 ? "s" : ""}`, width - 2, 12);
    }
  }
}
