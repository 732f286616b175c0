// Build the page: overview, sections of charts, controls.

function card(chart) {
  const holder = el("div", { class: "holder" });
  const draw = () => DRAW[chart.kind](holder, chart);
  charts.push({ holder, draw });
  const scale = el("button", { type: "button", "aria-pressed": String(chart.log), title: "logarithmic scale" }, "log");
  scale.addEventListener("click", () => {
    chart.log = !chart.log;
    scale.setAttribute("aria-pressed", String(chart.log));
    draw();
  });
  const lines = chart.kind === "lines";
  const drawn = lines
    ? chart.metrics
        .map(([metric, label], curve) => [metric, label, curve])
        .filter(([metric]) => RUNS.some((run) => run.curves.mean[metric]))
    : [];
  const legend = drawn.map(([, label, curve]) => {
    const { colour, dash } = RUNS.length === 1 ? style(0, curve) : { colour: "var(--soft)", dash: DASHES[curve % DASHES.length] };
    return el("span", {}, swatch(colour, dash), label);
  });
  return el(
    "div",
    { class: "card", "data-chart": chart.title },
    el(
      "div",
      { class: "card-head" },
      el("h3", {}, chart.title, chart.unit ? el("span", { class: "unit" }, `, ${chart.unit}`) : null),
      lines ? scale : null,
    ),
    drawn.length > 1 ? el("div", { class: "legend" }, ...legend) : null,
    holder,
    chart.about ? el("p", { class: "about" }, chart.about) : null,
  );
}

function buildSections() {
  for (const section of DATA.sections) {
    const grid = el("div", { class: section.folded ? "grid small" : "grid" });
    const head = [el("h2", {}, section.title), el("p", { class: "about" }, section.about)];
    if (!section.folded) {
      grid.append(...section.charts.map(card));
      document.getElementById("sections").append(el("section", {}, ...head, grid));
      continue;
    }
    const folded = el("details", { class: "rest" }, el("summary", {}, `${section.charts.length} more charts`), grid);
    folded.addEventListener("toggle", () => {
      if (!folded.open || grid.children.length) return;
      const first = charts.length;
      grid.append(...section.charts.map(card));
      charts.slice(first).forEach((chart) => chart.draw());
    });
    document.getElementById("rest").append(...head, folded);
  }
}

const redraw = () => charts.forEach((chart) => chart.draw());

function facts(run) {
  const { summary } = run;
  const planned = summary.planned === null || summary.planned === undefined ? "" : ` of ${summary.planned}`;
  const pretraining = summary.pretraining ? `, after ${summary.pretraining} of value pretraining` : "";
  const rows = [["steps", `${summary.steps}${planned}${pretraining}${summary.finished ? ", finished" : ", not finished"}`]];
  const names = { "reward/mean": "reward", "accuracy/mean": "accuracy", "response/length_mean": "length" };
  for (const [metric, ends] of Object.entries(summary.ends)) {
    if (ends)
      rows.push([`mean ${names[metric]}`, `${format(ends[0], 3)} \u2192 ${format(ends[1], 3)} (first and last ${summary.window} steps)`]);
  }
  for (const [name, [first, last]] of Object.entries(summary.evaluations)) {
    const before = last[0] === first[0] ? "" : `${format(first[1], 3)} \u2192 `;
    const steps = last[0] === first[0] ? `step ${last[0]}` : `steps ${first[0]} and ${last[0]}`;
    rows.push([name, `${before}${format(last[1], 3)} (95 %: ${format(last[2], 3)} to ${format(last[3], 3)}; ${steps})`]);
  }
  rows.push(["model", summary.model ?? "unknown"], ["advantages", summary.estimator ?? "unknown"], ["folder", run.path]);
  return el("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

const stepOfStage = ([stage, step]) => `${stage === "rl" ? "" : "value pretraining "}step ${step}`;

function findings(run) {
  const { findings: found, failure } = run.diagnosis;
  if (failure) return [el("p", { class: "note" }, `Diagnosis not applied: ${failure}`)];
  if (!found.length) return [el("p", { class: "fine" }, "Diagnosis: no rule held.")];
  return found.map((note) =>
    el(
      "div",
      { class: "finding" },
      el("b", {}, note.rule),
      ` held in ${note.steps} steps, first ${stepOfStage(note.first)}, last ${stepOfStage(note.last)}. ${note.evidence}: ${note.means}. Usual remedy: ${note.remedy}.`,
    ),
  );
}

function settingsTable(run) {
  const rows = run.settings.map(([key, value]) => el("tr", {}, el("td", { class: "mono" }, key), el("td", { class: "mono" }, value)));
  return el("details", {}, el("summary", {}, "all settings"), el("div", { class: "scroll" }, el("table", {}, ...rows)));
}

function buildOverview() {
  const cards = RUNS.map((run, number) => {
    const title = el("h3", {}, el("span", { class: "dot", style: `background:${runColour(number)}` }), run.name);
    const gaps = run.missing.length
      ? [el("h4", {}, "Not on this page"), ...run.missing.map((text) => el("p", { class: "about missing" }, text))]
      : [];
    const columns = [
      el("div", {}, title, facts(run)),
      el("div", {}, el("h4", {}, "Diagnosis"), ...findings(run)),
      el("div", {}, ...gaps, settingsTable(run)),
    ];
    return el("div", { class: "card overview", "data-run": run.name }, ...columns);
  });
  const parts = [el("h2", {}, "Overview"), ...cards];
  if (RUNS.length > 1) {
    const head = el("tr", {}, el("th", {}, "setting"), ...RUNS.map((run) => el("th", {}, run.name)));
    const rows = DATA.differences.map((row) => el("tr", {}, ...row.map((text) => el("td", { class: "mono" }, text))));
    const table = rows.length
      ? el("div", { class: "scroll" }, el("table", { class: "differences" }, head, ...rows))
      : el("p", { class: "soft" }, "Only run.dir.");
    parts.push(el("div", { class: "card", style: "margin-top:14px" }, el("h3", {}, "Settings that differ"), table));
  }
  document.getElementById("overview").replaceChildren(...parts);
}

function showWindow() {
  const [{ run } = { run: RUNS[0] }] = shown();
  document.getElementById("window-value").textContent = windowName(windowOf(run));
}

function buildControls() {
  const chips = RUNS.map((run, number) => {
    const chip = el(
      "button",
      { type: "button", class: "chip", "aria-pressed": "true", title: "show or hide" },
      el("span", { class: "dot", style: `background:${runColour(number)}` }),
      run.name,
    );
    chip.addEventListener("click", () => {
      state.visible[number] = !state.visible[number];
      chip.setAttribute("aria-pressed", String(state.visible[number]));
      redraw();
    });
    return chip;
  });
  document.getElementById("runs").replaceChildren(...(RUNS.length > 1 ? chips : []));
  const smoothing = document.getElementById("smoothing");
  smoothing.addEventListener("input", () => {
    state.smoothing = Number(smoothing.value) && Number(smoothing.value) + 1;
    document.getElementById("smoothing-value").textContent = state.smoothing ? `mean over ~${state.smoothing}` : "off";
    redraw();
  });
  const slider = document.getElementById("window");
  slider.addEventListener("input", () => {
    state.window = Number(slider.value) / 100;
    showWindow();
    redraw();
  });
  showWindow();
  const theme = document.getElementById("theme");
  const use = (name) => {
    document.documentElement.dataset.theme = name;
    theme.textContent = name === "dark" ? "light" : "dark";
  };
  use(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  theme.addEventListener("click", () => use(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}

function start() {
  buildControls();
  buildOverview();
  buildSamples();
  buildSections();
  redraw();
  const longest = Math.max(...RUNS.map((run) => run.curves.x.length));
  const stepsShared = RUNS.some((run) => Object.keys(run.curves.low).length);
  const shared = stepsShared
    ? ` Curves of more than ${DATA.points} steps: each point is the mean of consecutive steps, the band spans their minimum and maximum, so that no spike is lost.`
    : ` Every step is a point (${longest} at most).`;
  document.getElementById("footer").textContent = `Made ${DATA.made} by vapo-mcore report.${shared}`;
  let pending = 0;
  addEventListener("resize", () => {
    clearTimeout(pending);
    pending = setTimeout(redraw, 150);
  });
  addEventListener("load", () =>
    setTimeout(() => {
      const { loadEventEnd, navigationStart } = performance.timing;
      document.documentElement.dataset.loadMilliseconds = String(loadEventEnd - navigationStart);
    }, 0),
  );
}

start();
