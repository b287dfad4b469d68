// Every slot of every endpoint as a car. Batches come once a second and are shown a little later, as they were.
//
// Times of batches are on the clock of their process. `offset` says how that clock differs from the page's: the smallest
// difference that was seen, since whatever comes late comes later.

import { box, colour, disc, line, sized } from "./charts.js";

const BEHIND_S = 1.4;        // what is shown was so long ago
const BEHIND_S_MAX = 12;     // in slow motion: then it jumps to the present
const BOARDING_S = 0.09;
const LEAVING_S = 0.28;
const KEPT_S = 30;
const CARS_MAX = 256;
const FRAME_S = 1 / 31;

export class Cars {
  constructor(canvas, note) {
    this.canvas = canvas;
    this.note = note;
    this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
    this.speed = 1;
    this.paused = false;
    this.moved = 0;           // batches that got into a car so far
    this.failures = 0;
    this.reset();
    this.drawn = 0;
    const frame = () => { this.frame(); requestAnimationFrame(frame); };
    requestAnimationFrame(frame);
  }

  reset() {
    this.offsets = new Map();  // by process
    this.batches = new Map();  // by id and attempt
    this.cars = [];            // in order, one a slot
    this.byEndpoint = new Map();
    this.shown = null;         // the time that is shown, on the page's clock
  }

  tell(event) {
    const now = performance.now() / 1000;
    for (const process of event.processes) {
      const before = this.offsets.get(process.name);
      const found = now - process.at;
      this.offsets.set(process.name, before === undefined || Math.abs(found - before) > 5 ? found : Math.min(before + 0.002, found));
    }
    this.place(event);
    for (const [place, row] of event.batches) {
      const [id, model, endpoint, size, sent, ended, result, reason, attempt, tiers] = row;
      const offset = this.offsets.get(event.processes[place].name);
      const key = id + ":" + attempt;
      const known = this.batches.get(key);
      if (known) {
        known.ended = ended ? ended + offset : 0;
        known.result = result;
      } else {
        this.batches.set(key, { model, endpoint, size, sent: sent + offset, ended: ended ? ended + offset : 0, result, reason, attempt, tiers, car: null, seen: now });
      }
    }
    for (const [key, batch] of this.batches) {
      if (batch.ended ? now - batch.ended > KEPT_S : now - batch.seen > 600) this.batches.delete(key);
    }
  }

  // One car a slot; cars that stay keep who is in them.
  place(event) {
    const before = this.byEndpoint;
    this.byEndpoint = new Map();
    this.cars = [];
    let slots = 0;
    for (const [model, state] of Object.entries(event.fleet.models)) {
      for (const endpoint of state.endpoints) {
        slots += endpoint.slots;
        const key = model + " " + endpoint.endpoint;
        const cars = this.byEndpoint.get(key) ?? [];
        const old = before.get(key) ?? [];
        for (let n = 0; n < endpoint.slots && this.cars.length < CARS_MAX; n++) {
          const car = old[cars.length] ?? { batch: null, last: null };
          Object.assign(car, { name: shortName(endpoint.endpoint), number: endpoint.slots > 1 ? n + 1 : 0, state: endpoint.state, seats: event.max_batch[model] ?? 64 });
          cars.push(car);
          this.cars.push(car);
        }
        this.byEndpoint.set(key, cars);
      }
    }
    const left = slots - this.cars.length;
    this.note.textContent = left > 0 ? `and ${left} more slots` : "";
  }

  frame() {
    const now = performance.now() / 1000;
    if (document.hidden || now - this.drawn < FRAME_S) return;
    const passed = Math.min(now - this.drawn, 0.5);
    this.drawn = now;
    if (!this.paused) {
      if (this.shown === null || now - this.shown > BEHIND_S_MAX) this.shown = now - BEHIND_S;
      else this.shown = Math.min(this.shown + passed * this.speed, now - BEHIND_S);
      this.board();
    }
    this.draw();
  }

  board() {
    const time = this.shown;
    for (const batch of this.batches.values()) {
      if (batch.car || batch.sent > time || (batch.ended && batch.ended + LEAVING_S < time)) continue;
      const cars = this.byEndpoint.get(batch.model + " " + batch.endpoint);
      if (!cars) continue;
      // One that is empty, else one whose riders leave.
      const car = cars.find((each) => !each.batch) ?? cars.find((each) => each.batch.ended && each.batch.ended <= batch.sent + 0.01) ?? null;
      if (!car) continue;
      batch.car = car;
      car.batch = batch;
      this.moved++;
      if (batch.attempt > 1) this.failures++;
    }
    for (const car of this.cars) {
      if (car.batch && car.batch.ended && car.batch.ended + LEAVING_S < time) { car.last = car.batch; car.batch = null; }
    }
  }

  draw() {
    const count = this.cars.length;
    const width = this.canvas.clientWidth;
    const wish = Math.min(width / 2, count <= 12 ? 190 : count <= 40 ? 150 : count <= 96 ? 118 : 88);
    const columns = Math.max(1, Math.floor(width / wish));
    const cell = width / columns;
    const tall = Math.round(Math.min(cell, 200) * 0.62);
    const rows = Math.max(1, Math.ceil(count / columns));
    const height = rows * tall;
    this.canvas.style.height = height + "px";
    const [pen] = sized(this.canvas, height);
    const look = { road: colour("--road"), car: colour("--car"), glass: colour("--glass"), seat: colour("--seat"), text: colour("--text"),
      muted: colour("--muted"), bad: colour("--bad"), good: colour("--good"), tiers: [0, 1, 2, 3, 4].map((n) => colour("--tier-" + n)) };
    this.cars.forEach((car, n) => drawCar(pen, car, (n % columns) * cell, Math.floor(n / columns) * tall, cell, tall, this.shown ?? 0, look, this.still.matches));
  }

  // For those who cannot see the picture.
  summary() {
    const busy = this.cars.filter((car) => car.batch).length;
    const full = this.cars.filter((car) => car.batch && car.batch.size >= car.seats).length;
    const failed = this.cars.filter((car) => car.batch && car.batch.result && car.batch.result !== "ok").length;
    return `${this.cars.length} slots, ${busy} busy, ${full} with full batches, ${failed} failed`;
  }
}

export function shortName(endpoint) {
  return endpoint.replace(/^\w+:\/\//, "").replace(/\/.*$/, "").replace(/^127\.0\.0\.1/, "") || endpoint;
}

function drawCar(pen, car, x, y, cell, tall, time, look, still) {
  const gap = cell * 0.06;
  const width = cell - 2 * gap, bodyTop = y + tall * 0.08, bodyHeight = tall * 0.54;
  const left = x + gap, wheel = bodyHeight * 0.13, ground = bodyTop + bodyHeight + wheel * 1.3;
  const batch = car.batch;
  const riding = batch && batch.sent <= time && (!batch.ended || time < batch.ended);
  const over = batch && batch.ended && time >= batch.ended;
  const failed = over && batch.result !== "ok";
  const offline = car.state === "offline";

  // The road; its marks pass by while the car drives.
  pen.strokeStyle = look.road;
  pen.lineWidth = 2;
  pen.setLineDash([8, 8]);
  pen.lineDashOffset = riding && !still ? (time * 90) % 16 : 0;
  line(pen, left, ground + 1, left + width, ground + 1);
  pen.setLineDash([]);

  pen.globalAlpha = offline ? 0.35 : 1;
  // The body: a bus, so that all seats can be seen.
  const sway = riding && !still ? Math.sin(time * 40 + x) * 0.4 : 0;
  const top = bodyTop + sway;
  const body = [left, top, width, bodyHeight, [0.16, 0.34, 0.12, 0.12].map((share) => bodyHeight * share)];
  box(pen, failed || offline ? look.bad : look.car, ...body);
  // Inside: seats in four rows, from the front to the back.
  const inset = bodyHeight * 0.1;
  const roomLeft = left + inset, roomTop = top + inset, roomWidth = width - 2 * inset - bodyHeight * 0.12, roomHeight = bodyHeight - 2 * inset;
  box(pen, look.glass, roomLeft, roomTop, roomWidth, roomHeight, 4);
  const drawn = Math.min(car.seats, 64);
  const deep = drawn >= 32 ? 4 : drawn >= 8 ? 2 : 1;
  const long = Math.ceil(drawn / deep);
  const stepX = roomWidth / long, stepY = roomHeight / deep;
  const size = Math.max(1.5, Math.min(stepX, stepY) * 0.72);
  let taken = batch ? Math.min(drawn, Math.ceil(batch.size * drawn / car.seats)) : 0;
  let boarded = taken, fade = 1;
  if (batch && !still) {
    boarded = Math.round(taken * Math.min(1, (time - batch.sent) / BOARDING_S));
    if (over) fade = Math.max(0, 1 - (time - batch.ended) / LEAVING_S);
  }
  const shades = batch ? seatShades(batch, taken, look) : [];
  for (let n = 0; n < drawn; n++) {
    const column = Math.floor(n / deep), row = n % deep;
    const cx = roomLeft + stepX * (column + 0.5), cy = roomTop + stepY * (row + 0.5);
    box(pen, look.seat, cx - size / 2, cy - size / 2, size, size, size * 0.3);
    if (n < boarded) {
      pen.globalAlpha = (offline ? 0.35 : 1) * fade;
      const lift = over && !still ? (1 - fade) * stepY * 1.6 : 0;
      box(pen, failed ? look.bad : shades[n], cx - size / 2, cy - size / 2 - lift, size, size, size * 0.45);
      pen.globalAlpha = offline ? 0.35 : 1;
    }
  }
  // Wheels, and a lamp that says how the last ride ended.
  for (const share of [0.2, 0.8]) {
    const cx = left + width * share, cy = top + bodyHeight + wheel * 0.3;
    disc(pen, look.muted, cx, cy, wheel);
    if (riding && !still) {
      pen.strokeStyle = look.glass;
      pen.lineWidth = 1;
      const spokeX = Math.cos(time * 9) * wheel * 0.7, spokeY = Math.sin(time * 9) * wheel * 0.7;
      line(pen, cx - spokeX, cy - spokeY, cx + spokeX, cy + spokeY);
    }
  }
  if (over && !failed) {
    pen.globalAlpha = fade;
    pen.strokeStyle = look.good;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.roundRect(...body);
    pen.stroke();
  }
  pen.globalAlpha = 1;

  // Its name, and how many ride.
  const font = Math.max(9, Math.min(12, cell / 12));
  pen.font = `${font}px system-ui, sans-serif`;
  pen.textBaseline = "alphabetic";
  pen.textAlign = "left";
  pen.fillStyle = look.muted;
  const name = car.name.length > 16 ? "…" + car.name.slice(-15) : car.name;
  pen.fillText(car.number ? `${name} ·${car.number}` : name, left, y + tall * 0.93);
  pen.textAlign = "right";
  if (offline) {
    pen.fillStyle = look.bad;
    pen.fillText("offline", left + width, y + tall * 0.93);
  } else if (batch || car.last) {
    const shown = batch ?? car.last;
    const isBad = shown.result && shown.result !== "ok";
    pen.fillStyle = isBad ? look.bad : batch ? look.text : look.muted;
    pen.fillText(isBad ? `failed · ${shown.size}` : `${shown.size}/${car.seats}`, left + width, y + tall * 0.93);
  }
}

// Those of the highest tier sit in front.
function seatShades(batch, taken, look) {
  const shades = [];
  const total = batch.tiers.reduce((sum, count) => sum + count, 0) || 1;
  batch.tiers.forEach((count, tier) => {
    const seats = Math.round(count * taken / total);
    for (let n = 0; n < seats; n++) shades.push(look.tiers[tier % look.tiers.length]);
  });
  const last = batch.tiers.findLastIndex((count) => count > 0);
  while (shades.length < taken) shades.push(look.tiers[Math.max(0, last) % look.tiers.length]);
  return shades;
}
