// The live page: reads /internal/live and shows it. Nothing is kept; nothing is asked of any other host.

import { Cars, shortName } from "./cars.js";
import { Chart, colour, legend, make, number, shaded } from "./charts.js";
import { Demo } from "./demo.js";

const SLOW_KEPT_S = 60, SLOW_SHOWN = 8;
const SILENT_S = 5;

const $ = (id) => document.getElementById(id);
const put = (id, text) => { const element = $(id); if (element.textContent !== text) element.textContent = text; };

// Looks

const darkWished = window.matchMedia("(prefers-color-scheme: dark)");
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const redraw of redraws) redraw();
}
const redraws = [];
function theme() { return localStorage.getItem("carpool-theme") ?? (darkWished.matches ? "dark" : "light"); }
darkWished.addEventListener("change", () => setTheme(theme()));
setTheme(theme());

const cars = new Cars($("cars"), $("cars-note"));
const charts = { rate: new Chart($("c-rate")), latency: new Chart($("c-latency")), queue: new Chart($("c-queue")) };
const demo = new Demo($("demo"));
redraws.push(() => Object.values(charts).forEach((chart) => chart.draw()), () => last && legends(last), () => last && demo.draw());
window.addEventListener("resize", () => Object.values(charts).forEach((chart) => chart.draw()));
setInterval(() => $("cars").setAttribute("aria-label", cars.summary()), 3000);

// The stream

let source = null, last = null, heardAt = 0, tiersKnown = "", slow = [], lettersSeen = -1;

function connect() {
  source?.close();
  source = new EventSource("/internal/live");
  source.onopen = () => { cars.reset(); heardAt = performance.now(); };
  source.onmessage = (message) => { heardAt = performance.now(); show(JSON.parse(message.data)); };
  source.onerror = () => {
    status("not connected", "bad");
    if (source.readyState === EventSource.CLOSED) { source = null; setTimeout(findOut, 1000); }
  };
}

// Why there is no stream: a login may be wanted, or nobody is there.
async function findOut() {
  try {
    const answer = await fetch("/internal/health", { cache: "no-store" });
    if (answer.status === 401) { $("login").open || $("login").showModal(); return; }
  } catch { /* it is gone: try again */ }
  if (!source) connect();
}

setInterval(() => {
  if (source && performance.now() - heardAt > SILENT_S * 1000) status("no news", "warn");
}, 1000);

function status(text, kind) {
  put("status", text);
  $("status").className = "pill " + kind;
}

function show(event) {
  last = event;
  const { health, tiers } = event;
  const kind = { healthy: "good", degraded: "warn", draining: "warn" }[health.status] ?? "bad";
  status(health.status, kind);
  put("where", where(event));
  $("problem").hidden = !health.problem;
  put("problem", health.problem ?? "");
  const names = tiers.map((tier) => tier.name).join();
  if (names !== tiersKnown) { tiersKnown = names; legends(event); }
  demo.tell(event);
  cars.tell(event);
  tables(event);
  if (!event.seconds) return;
  const sum = (field) => tiers.reduce((total, tier) => total + tier[field], 0);
  for (const field of ["offered", "admitted", "shed", "answered"]) put(field, number(sum(field)));
  put("p50", number(event.p50_ms));
  put("p99", number(event.p99_ms));
  put("waiting", number(health.queue_depth));
  put("busy", number(health.gpu_utilization * 100));
  put("fill", filled(event));
  $("shed").closest(".tile").classList.toggle("alarm", sum("shed") > 0);
  charts.rate.push([...tiers.map((tier) => tier.answered), sum("offered"), sum("shed")]);
  charts.latency.push([event.p50_ms, event.p99_ms]);
  charts.queue.push(tiers.map((tier) => tier.waiting));
}

function where(event) {
  const { gateways, batchers } = event.health;
  if (gateways === undefined) return `${event.viewers} looking`;
  return `${gateways} gateways, ${batchers} batchers, ${event.processes.length} in this picture, ${event.viewers} looking`;
}

function filled(event) {
  let riders = 0, seats = 0;
  for (const [, batch] of event.batches) {
    if (!batch[5]) continue;
    riders += batch[3];
    seats += event.max_batch[batch[1]] ?? 64;
  }
  return seats ? number(100 * riders / seats) : "–";
}

function legends(event) {
  const shades = event.tiers.map((tier, n) => [tier.name, "--tier-" + (n % 5)]);
  legend($("legend"), [...shades, ["empty seat", "--seat"], ["failed", "--bad"]]);
  charts.rate.series = [...event.tiers.map((tier, n) => ({ shade: "--tier-" + (n % 5), stacked: true })), { shade: "--text", dashed: true }, { shade: "--bad" }];
  legend($("k-rate"), [["offered", "--text"], ["shed", "--bad"]]);
  charts.latency.series = [{ shade: "--tier-1" }, { shade: "--tier-3" }];
  legend($("k-latency"), [["p50", "--tier-1"], ["p99", "--tier-3"]]);
  charts.queue.series = event.tiers.map((tier, n) => ({ shade: "--tier-" + (n % 5), stacked: true }));
  legend($("k-queue"), shades);
  legend($("k-slow"), [["in the queue", "--tier-2"], ["before the call", "--bad"], ["the call", "--tier-1"], ["else", "--muted"]]);
}

// Tables

const cell = (inside, kind = "") => make("td", { className: kind }, inside);
const pill = (text, kind) => make("span", { className: "pill " + kind }, text);
const dotted = (name, shade) => shaded(name, shade, "dot");

function rows(id, all, empty) {
  const nothing = make("td", { className: "empty", colSpan: 9 }, empty);
  $(id).tBodies[0].replaceChildren(...(all.length ? all : [[nothing]]).map((cells) => make("tr", {}, ...cells)));
}

const STATES = { healthy: "good", ok: "good", degraded: "warn", draining: "warn", offline: "bad" };

function tables(event) {
  rows("tiers", event.tiers.map((tier, n) => [
    cell(dotted(tier.name, "--tier-" + (n % 5))), ...["offered", "admitted", "shed", "answered", "failed"].map((field) => cell(number(tier[field]))),
    cell(number(tier.p50_ms)), cell(number(tier.p99_ms)), cell(number(tier.waiting)),
  ]), "");
  const { ok = 0, ...failed } = event.requests;
  const rest = Object.entries(failed).map(([code, count]) => `, ${count.toLocaleString("en")} ${code}`).join("");
  const refused = Object.entries(event.problems).map(([code, count]) => `${count.toLocaleString("en")} ${code}`).join(", ");
  put("totals", `${ok.toLocaleString("en")} ok${rest}${refused ? `; answers that were errors: ${refused}` : ""}`);
  $("totals").dataset.ok = ok;
  rows("lanes", event.lanes.map((lane) => [cell(lane[0]), cell(lane[1] || "no parameters"), cell(number(lane[2]))]), "nobody waits");
  const endpoints = Object.entries(event.fleet.models).flatMap(([model, state]) => state.endpoints);
  put("endpoints-count", `${endpoints.filter((each) => each.state === "healthy").length} of ${endpoints.length} healthy`);
  rows("endpoints", endpoints.map((each) => [
    cell(shortName(each.endpoint), "id"), cell(pill(each.breaker === "closed" ? each.state : `${each.state}, ${each.breaker}`, STATES[each.state] ?? "")),
    cell(`${each.in_flight}/${each.limit}`), cell(`${Math.round(each.utilization * 100)} %`),
    cell(number(each.call_p50_ms)), cell(number(each.call_p99_ms)),
  ]), "none");
  put("scale", wanted(event.scale));
  slowRequests(event);
  const members = [...(event.fleet.gateways ?? []).map((each) => ["gateway", each]), ...(event.fleet.batchers ?? []).map((each) => ["batcher", each])];
  $("fleet-panel").hidden = !members.length;
  rows("fleet", members.map(([kind, each]) => [cell(each.name, "id"), cell(kind), cell(pill(each.status, STATES[each.status] ?? "")), cell(number(each.in_flight)), cell(`${Math.round(each.current_utilization * 100)} %`)]), "");
  if (event.dead_letters !== lettersSeen) { lettersSeen = event.dead_letters; letters(); }
}

// How many there should be, and why.
function wanted({ models, gateways, batchers }) {
  const parts = [...Object.entries(models).map(([model, each]) => [`GPUs of ${model}`, each]), ["gateways", gateways], ["batchers", batchers]];
  return parts.filter(([, each]) => each).map(([name, each]) => `${each.wanted} ${name} wanted, ${each.there ?? "it is not known how many"} there: ${each.why}.`).join(" ");
}

// All that is known of one request.
const story = (id) => make("a", { href: "/internal/requests/" + encodeURIComponent(id), target: "_blank", rel: "noopener" }, id);

function slowRequests(event) {
  slow.push(...event.slow.map((each) => ({ ...each, at: event.at })));
  slow = slow.filter((each) => event.at - each.at < SLOW_KEPT_S).sort((a, b) => b.total_ms - a.total_ms).slice(0, SLOW_SHOWN);
  const longest = Math.max(1, ...slow.map((each) => each.total_ms));
  const isBatcher = event.processes[0]?.role === "batcher"; // only gateways can be asked for a request
  rows("slow", slow.map((each) => {
    const bar = make("div", { className: "bar" });
    const rest = Math.max(0, each.total_ms - each.queue_ms - each.retry_ms - each.call_ms);
    for (const [part, shade, meaning] of [[each.queue_ms, "--tier-2", "in the queue"], [each.retry_ms, "--bad", "before the call"], [each.call_ms, "--tier-1", "the call"], [rest, "--muted", "else"]]) {
      const piece = make("i", { title: `${meaning}: ${number(part)} ms` });
      piece.style.width = (100 * part / longest) + "%";
      piece.style.background = colour(shade);
      bar.append(piece);
    }
    const tier = last.tiers[each.tier];
    return [cell(isBatcher ? each.id : story(each.id), "id"), cell(dotted(tier?.name ?? "", "--tier-" + (each.tier % 5))), cell(number(each.total_ms)), cell(bar),
      cell(each.batch_size ? `${each.batch_size} together` : "–"), cell(each.endpoint ? shortName(each.endpoint) + (each.attempts > 1 ? `, attempt ${each.attempts}` : "") : "–", "id"),
      cell(pill(each.result, each.result === "ok" ? "good" : "bad"))];
  }), "none yet");
}

// Dead letters

async function letters() {
  let page;
  try {
    const answer = await fetch("/internal/dead-letters?limit=50", { cache: "no-store" });
    if (!answer.ok) return;
    page = await answer.json();
  } catch { return; }
  put("letters-count", page.total ? `${page.total} in all` : "");
  $("replay-all").disabled = $("drop-all").disabled = !page.total;
  rows("letters", page.dead_letters.map((letter) => {
    const path = `/internal/dead-letters/${letter.id}`;
    const ways = make("span", {}, button("Replay", () => post("POST", path + "/replay")), sure(button("Drop", () => post("DELETE", path), "danger")));
    return [cell(letter.id), cell(new Date(letter.buried_at).toLocaleTimeString()), cell(letter.model), cell(pill(letter.cause, "bad")), cell(letter.sends), cell(ways)];
  }), "none");
}

function button(text, work, kind = "") {
  return clicked(make("button", { type: "button", className: kind }, text), work);
}

function clicked(made, work) {
  made.work = work;
  made.addEventListener("click", () => made.work());
  return made;
}

// What cannot be undone wants a second click.
function sure(made) {
  const work = made.work, text = made.textContent;
  let asked = 0;
  made.work = () => {
    if (performance.now() - asked < 4000) { made.textContent = text; asked = 0; work(); return; }
    asked = performance.now();
    made.textContent = "Sure?";
    setTimeout(() => { made.textContent = text; }, 4000);
  };
  return made;
}

async function post(method, path) {
  const answer = await fetch(path, { method });
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    $("problem").hidden = false;
    put("problem", told.detail ?? `${answer.status}`);
  }
  await letters();
}

clicked($("replay-all"), () => post("POST", "/internal/dead-letters/replay"));
sure(clicked($("drop-all"), () => post("DELETE", "/internal/dead-letters?all=true")));

// Login

$("login-form").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const answer = await fetch("/internal/login", { method: "POST", body: $("token").value });
  $("login-problem").hidden = answer.ok;
  if (answer.ok) {
    $("token").value = "";
    $("login").close();
    localStorage.setItem("carpool-login", "yes");
    $("logout").hidden = false;
    connect();
  } else {
    put("login-problem", answer.status === 401 ? "This is not a service token."
      : answer.status === 429 ? `Too many wrong tokens came. Try again in ${answer.headers.get("Retry-After")} s.` : `It did not work: ${answer.status}`);
  }
});
$("login").addEventListener("cancel", (cancelled) => cancelled.preventDefault());
$("logout").addEventListener("click", async () => { localStorage.removeItem("carpool-login"); await fetch("/internal/login", { method: "DELETE" }); location.reload(); });
$("logout").hidden = !localStorage.getItem("carpool-login");

// Keys and buttons

function pause() {
  cars.paused = !cars.paused;
  $("pause").setAttribute("aria-pressed", cars.paused);
  put("pause", cars.paused ? "Go on" : "Pause");
}
function otherTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("carpool-theme", next);
  setTheme(next);
}
function setSpeed(value) { $("speed").value = value; cars.speed = Number(value); }
$("pause").addEventListener("click", pause);
$("theme").addEventListener("click", otherTheme);
$("speed").addEventListener("change", () => setSpeed($("speed").value));
document.addEventListener("keydown", (pressed) => {
  if (pressed.ctrlKey || pressed.metaKey || pressed.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(pressed.target.tagName)) return;
  if (pressed.key === "p") pause();
  if (pressed.key === "t") otherTheme();
  if (pressed.key === "s") setSpeed(["1", "0.25", "0.1"][(["1", "0.25", "0.1"].indexOf($("speed").value) + 1) % 3]);
});

// For tests: what the picture shows, without looking at pixels.
window.carpool = { cars, get last() { return last; } };

legend($("legend"), []);
findOut();
