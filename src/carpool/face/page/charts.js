// Lines of the last two minutes on a canvas. A series may be stacked on those before it.

const KEPT = 120;

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function sized(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, tall = height ?? canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, tall);
  return [pen, width, tall];
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100000) return Math.round(value / 1000) + "k";
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return value >= 10 ? value.toFixed(0) : value.toFixed(value && value < 1 ? 2 : 1).replace(/\.0+$/, "");
}

export function make(tag, fields = {}, ...inside) {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...inside);
  return made;
}

// A name behind a box in its colour.
export function shaded(name, shade, kind = "") {
  const mark = make("i", { className: kind });
  mark.style.background = colour(shade);
  return make("span", {}, mark, name);
}

export function legend(element, entries) {
  element.replaceChildren(...entries.map(([name, shade]) => shaded(name, shade)));
}

export function line(pen, fromX, fromY, toX, toY) {
  pen.beginPath();
  pen.moveTo(fromX, fromY);
  pen.lineTo(toX, toY);
  pen.stroke();
}

export function box(pen, shade, ...shape) {
  pen.fillStyle = shade;
  pen.beginPath();
  pen.roundRect(...shape);
  pen.fill();
}

export function disc(pen, shade, x, y, radius) {
  pen.fillStyle = shade;
  pen.beginPath();
  pen.arc(x, y, radius, 0, Math.PI * 2);
  pen.fill();
}

// A round number that is not below `value`: 1, 2 or 5 times a power of ten.
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value * 0.999) * power;
}

export class Chart {
  constructor(canvas) {
    this.canvas = canvas;
    this.series = [];   // { name, shade, stacked, dashed }
    this.rows = [];     // one value a series, each second
  }

  push(row) {
    this.rows.push(row);
    if (this.rows.length > KEPT) this.rows.shift();
    this.draw();
  }

  draw() {
    const [pen, width, height] = sized(this.canvas);
    const left = 42, right = 6, top = 8, bottom = 16;
    const across = (place) => left + (width - left - right) * (place + KEPT - this.rows.length) / (KEPT - 1);
    const stackedRows = this.rows.map((row) => {
      let sum = 0;
      return row.map((value, n) => (this.series[n]?.stacked ? (sum += value ?? 0) : value));
    });
    const most = Math.max(1, ...stackedRows.flat().filter((value) => value !== null && value !== undefined));
    const end = round(most * 1.05);
    const up = (value) => height - bottom - (height - top - bottom) * value / end;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const share of [0, 0.5, 1]) {
      pen.strokeStyle = colour("--line");
      line(pen, left, up(end * share), width - right, up(end * share));
      pen.fillStyle = colour("--muted");
      pen.fillText(number(end * share), left - 6, up(end * share));
    }
    pen.textAlign = "left";
    pen.fillText("2 min ago", left, height - 5);
    pen.textAlign = "right";
    pen.fillText("now", width - right, height - 5);
    if (!this.rows.length) return;
    for (let n = this.series.length - 1; n >= 0; n--) {
      const { shade, stacked, dashed } = this.series[n];
      pen.strokeStyle = pen.fillStyle = colour(shade);
      pen.lineWidth = 2;
      pen.lineJoin = "round";
      pen.setLineDash(dashed ? [4, 4] : []);
      pen.beginPath();
      let drawing = false;
      stackedRows.forEach((row, place) => {
        const value = row[n];
        if (value === null || value === undefined) { drawing = false; return; }
        if (drawing) pen.lineTo(across(place), up(value)); else pen.moveTo(across(place), up(value));
        drawing = true;
      });
      pen.stroke();
      if (stacked) {
        pen.lineTo(across(this.rows.length - 1), up(0));
        pen.lineTo(across(0), up(0));
        pen.globalAlpha = 0.18;
        pen.fill();
        pen.globalAlpha = 1;
      }
      pen.setLineDash([]);
      pen.lineWidth = 1;
    }
  }
}
