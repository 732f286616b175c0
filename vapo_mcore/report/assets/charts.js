// Draw the charts of metrics: curves, evaluations, distributions, phases.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const state = { visible: RUNS.map(() => true), smoothing: 0, window: 1 };
const charts = []; // {holder, draw}

const shown = () => RUNS.map((run, number) => ({ run, number })).filter(({ number }) => state.visible[number]);

/** Return colour and dash of a curve. With one run, curves differ in colour; with several, runs differ in colour and curves in dash. */
function style(run, curve) {
  return RUNS.length === 1 ? { colour: runColour(curve), dash: "" } : { colour: runColour(run), dash: DASHES[curve % DASHES.length] };
}

const nothing = (why = "not recorded") => el("div", { class: "none" }, shown().length ? why : "no run is selected: choose one above");

function nearest(places, x) {
  let best = 0;
  places.forEach((place, k) => {
    if (Math.abs(place - x) < Math.abs(places[best] - x)) best = k;
  });
  return best;
}

const stepName = (x) => (x < 0 ? `value pretraining, ${-x} before RL` : `step ${x}`);

// ---------------------------------------------------------------------------------------------------------------- curves

function curvesOf(chart) {
  const found = [];
  for (const { run, number } of shown()) {
    chart.metrics.forEach(([metric, label], curve) => {
      const values = run.curves.mean[metric];
      if (!values) return;
      const name = [RUNS.length > 1 ? run.name : "", chart.metrics.length > 1 || RUNS.length === 1 ? label : ""].filter(Boolean).join(", ");
      found.push({ run, metric, label, name, values, ...style(number, curve), low: run.curves.low[metric], high: run.curves.high[metric] });
    });
  }
  return found;
}

function drawLines(holder, chart) {
  const found = curvesOf(chart);
  const log = chart.log;
  const usable = (value) => value !== null && (!log || value > 0);
  const numbers = found.flatMap((curve) => [...curve.values, ...(curve.low ?? []), ...(curve.high ?? [])]).filter(usable);
  if (!numbers.length) {
    const why = found.length ? "no number above 0: choose the linear scale" : "not recorded";
    return holder.replaceChildren(nothing(why));
  }
  const places = shown().flatMap(({ run }) => [run.curves.first[0], run.curves.last.at(-1)]);
  const xs = [places.reduce((a, b) => Math.min(a, b)), places.reduce((a, b) => Math.max(a, b))];
  const ys = domain(
    numbers.reduce((a, b) => Math.min(a, b)),
    numbers.reduce((a, b) => Math.max(a, b)),
    log,
  );
  const plot = frame(holder, xs[0] === xs[1] ? [xs[0] - 1, xs[1] + 1] : xs, ys, {
    log,
    xLabel: xs[0] < 0 ? "step (below 0: value pretraining)" : "step",
  });
  if (xs[0] < 0 && xs[1] >= 0) {
    plot.root.append(
      svg("rect", {
        class: "pretraining",
        x: plot.left,
        y: plot.top,
        width: plot.x(0) - plot.left,
        height: plot.bottom - plot.top,
        fill: "var(--shade)",
      }),
    );
    plot.root.append(...plot.root.querySelectorAll(".gridline"));
  }
  for (const curve of found) {
    const at = (value, k) => (usable(value) ? [plot.x(curve.run.curves.x[k]), plot.y(value)] : null);
    if (curve.low) {
      const [lows, highs] = [curve.low.map(at), curve.high.map(at)];
      const whole = lows.map((low, k) => (highs[k] === null ? null : low));
      plot.root.append(svg("path", { class: "band", d: bandPath(whole, highs), fill: curve.colour, opacity: 0.16 }));
    }
    const raw = curve.values.map(at);
    const points = smoothed(curve.values, state.smoothing).map(at);
    if (state.smoothing) plot.root.append(svg("path", { class: "raw", d: path(raw), stroke: curve.colour, fill: "none", opacity: 0.3 }));
    plot.root.append(
      svg("path", {
        class: "curve",
        "data-metric": curve.metric,
        d: path(points),
        stroke: curve.colour,
        "stroke-width": 1.8,
        "stroke-dasharray": curve.dash,
        fill: "none",
        "stroke-linejoin": "round",
      }),
    );
    for (const [cx, cy] of lonely(points)) plot.root.append(svg("circle", { cx, cy, r: 3, fill: curve.colour }));
  }
  const rule = svg("line", { class: "axis", y1: plot.top, y2: plot.bottom, visibility: "hidden" });
  plot.root.append(rule);
  plot.root.addEventListener("pointermove", (event) => {
    const inside = event.clientX - plot.root.getBoundingClientRect().left;
    const x = xs[0] + ((inside - plot.left) / (plot.right - plot.left)) * (xs[1] - xs[0]);
    let title = "";
    const lines = found.map((curve) => {
      const { x: all, first, last } = curve.run.curves;
      const k = nearest(all, x);
      title = first[k] === last[k] ? stepName(first[k]) : `${stepName(first[k])} to ${last[k]} (mean, smallest to largest)`;
      for (const end of ["x1", "x2"]) rule.setAttribute(end, plot.x(all[k]));
      const range =
        curve.low && curve.values[k] !== null && first[k] !== last[k] ? `  (${format(curve.low[k])} to ${format(curve.high[k])})` : "";
      return [curve.name, format(curve.values[k]) + range, curve.colour];
    });
    rule.setAttribute("visibility", "visible");
    showTip(event, title, lines);
  });
  plot.root.addEventListener("pointerleave", () => {
    rule.setAttribute("visibility", "hidden");
    hideTip();
  });
  const hidden = log ? found.flatMap((curve) => curve.values).filter((value) => value !== null && value <= 0).length : 0;
  const undefinedSteps = found.filter((curve) => curve.run.curves.undefined[curve.metric]);
  const notes = undefinedSteps.map((curve) => `${curve.name}: undefined in ${curve.run.curves.undefined[curve.metric]} steps`);
  if (hidden) notes.push(`${hidden} ${hidden > 1 ? "points" : "point"} at or below 0 not on the logarithmic scale`);
  holder.replaceChildren(plot.root, ...notes.map((note) => el("div", { class: "note" }, note)));
}

// ----------------------------------------------------------------------------------------------------------- evaluations

function drawEvaluations(holder) {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.evaluations)))];
  const found = shown().flatMap(({ run, number }) =>
    names
      .filter((name) => run.evaluations[name])
      .map((name) => ({
        name: RUNS.length > 1 ? `${run.name}, ${name}` : name,
        points: run.evaluations[name],
        ...style(number, names.indexOf(name)),
      })),
  );
  if (!found.length) return holder.replaceChildren(nothing("no evaluation recorded"));
  const all = found.flatMap((curve) => curve.points);
  const steps = all.map((point) => point.step);
  const xs = [Math.min(...steps), Math.max(...steps)];
  const ys = domain(Math.min(...all.map((point) => point.low)), Math.max(...all.map((point) => point.high)), false);
  const plot = frame(holder, xs[0] === xs[1] ? [xs[0] - 1, xs[1] + 1] : xs, ys, { xLabel: "step" });
  for (const curve of found) {
    const at = (key) => curve.points.map((point) => [plot.x(point.step), plot.y(point[key])]);
    plot.root.append(svg("path", { class: "band", d: bandPath(at("low"), at("high")), fill: curve.colour, opacity: 0.16 }));
    plot.root.append(
      svg("path", {
        class: "curve",
        d: path(at("accuracy")),
        stroke: curve.colour,
        "stroke-width": 1.8,
        "stroke-dasharray": curve.dash,
        fill: "none",
      }),
    );
    curve.points.forEach((point, k) => {
      const [cx, cy] = at("accuracy")[k];
      const bar = svg("path", { d: path([at("low")[k], at("high")[k]]), stroke: curve.colour, opacity: 0.7 });
      const dot = svg("circle", { class: "point", cx, cy, r: 4, fill: curve.colour });
      const text = `${format(point.accuracy, 4)}  (${format(point.low, 3)} to ${format(point.high, 3)})`;
      dot.addEventListener("pointermove", (event) => showTip(event, stepName(point.step), [[curve.name, text, curve.colour]]));
      dot.addEventListener("pointerleave", hideTip);
      plot.root.append(bar, dot);
    });
  }
  const legend =
    found.length > 1
      ? [el("div", { class: "legend" }, ...found.map((curve) => el("span", {}, swatch(curve.colour, curve.dash), curve.name)))]
      : [];
  holder.replaceChildren(plot.root, ...legend);
}

// --------------------------------------------------------------------------------------------------------- distributions

const windowOf = (run) => run.windows[Math.round(state.window * (run.windows.length - 1))];

function windowName(window) {
  const steps = window.first === window.last ? `step ${window.first}` : `steps ${window.first} to ${window.last}`;
  return window.stage === "rl" ? steps : `value pretraining, ${steps}`;
}

/** Edges of a run's bins on the x axis, and what the axis says. */
function binsOf(run, metric, count) {
  const share = (k) => k / count;
  if (metric === "gae/lambda_histogram")
    return { edges: share, name: (k) => `lambda ${format(share(k))} to ${format(share(k + 1))}`, xLabel: "lambda" };
  if (metric === "groups/accuracy_histogram") {
    const text = (k) => (k === 0 ? "none right" : k === count - 1 ? "all right" : `${(k - 1) * 10} to ${k * 10} % right`);
    const labels = [
      [0.5 / count, "none"],
      [count / 2 / count, "half"],
      [1 - 0.5 / count, "all"],
    ];
    return { edges: share, name: text, xLabel: "right responses of a prompt", labels };
  }
  if (metric === "position") {
    return {
      edges: (k) => 100 * share(k),
      name: (k) => `${format(100 * share(k))} to ${format(100 * share(k + 1))} % of the response`,
      xLabel: "part of the response, %",
    };
  }
  if (metric === "horizon/segments_histogram" || metric === "horizon/staleness_histogram") {
    const [what, first] = metric === "horizon/segments_histogram" ? ["segments", 1] : ["steps old", 0];
    const text = (k) => `${k === count - 1 ? "at least " : ""}${k + first} ${what}`;
    const labels = [0, (count >> 1) - 1, count - 1].map((k) => [(k + 0.5) / count, `${k + first}${k === count - 1 ? "+" : ""}`]);
    return { edges: share, name: text, xLabel: what, labels };
  }
  if (metric === "prediction" || metric === "cut") {
    return {
      edges: (k) => 100 * share(k),
      name: (k) => `values at ${format(100 * share(k))} to ${format(100 * share(k + 1))} % of the rewards' range`,
      xLabel: "predicted value, % of the rewards' range",
    };
  }
  const longest = run.longest ?? count;
  const edge = (k) => (k * longest) / count;
  const name = (k) => (run.longest ? `${Math.floor(edge(k)) + 1} to ${Math.floor(edge(k + 1))} tokens` : `length bin ${k + 1} of ${count}`);
  return { edges: edge, name, xLabel: run.longest ? "response length, tokens" : "length bin" };
}

function drawHistogram(holder, chart) {
  const metric = chart.metrics[0][0];
  const found = shown().filter(({ run }) => run.windows.some((window) => window.histograms[metric]));
  if (!found.length) return holder.replaceChildren(nothing());
  const shares = (window) => {
    const counts = window?.histograms[metric];
    const total = counts?.reduce((a, b) => a + b, 0);
    return total ? counts.map((count) => count / total) : null;
  };
  const sets = found.map(({ run, number }) => {
    const recorded = run.windows.filter((window) => window.histograms[metric]);
    const now = windowOf(run);
    return {
      run,
      number,
      now,
      shares: shares(now),
      counts: now.histograms[metric],
      before: shares(recorded[0]),
      beforeName: windowName(recorded[0]),
    };
  });
  const outlineColour = (set) => (sets.length > 1 ? runColour(set.number) : "var(--soft)");
  const counts = sets.map((set) => set.before.length);
  const bins = sets.map(({ run }, order) => binsOf(run, metric, counts[order]));
  const top = Math.max(...sets.flatMap((set) => [...(set.shares ?? [0]), ...(set.before ?? [0])]));
  const right = Math.max(...bins.map((bin, order) => bin.edges(counts[order])));
  const plot = frame(holder, [0, right], [0, top * 1.06 || 1], {
    xLabel: bins[0].xLabel,
    labels: bins[0].labels ?? (right <= 1 ? [0, 0.25, 0.5, 0.75, 1].map((x) => [x, String(x)]) : null),
  });
  sets.forEach((set, order) => {
    const { edges, name } = bins[order];
    for (let k = 0; k < counts[order]; k++) {
      const [a, b] = [plot.x(edges(k)), plot.x(edges(k + 1))];
      const width = (b - a - 2) / sets.length;
      const hover = (event) => {
        const lines = sets.map((other) => [
          RUNS.length > 1 ? `${other.run.name}, ${windowName(other.now)}` : windowName(other.now),
          other.shares ? `${format(100 * other.shares[k], 3)} %  (${other.counts[k]})` : "none",
          runColour(other.number),
        ]);
        showTip(event, name(k), [
          ...lines,
          ...sets.map((other) => [
            `${RUNS.length > 1 ? other.run.name + ", " : ""}${other.beforeName}`,
            other.before ? `${format(100 * other.before[k], 3)} %` : "none",
          ]),
        ]);
      };
      const height = plot.bottom - plot.y(set.shares?.[k] ?? 0);
      plot.root.append(
        svg("rect", {
          class: "bar-now",
          x: a + 1 + order * width,
          y: plot.bottom - height,
          width: Math.max(1, width - 0.5),
          height,
          fill: runColour(set.number),
          opacity: 0.85,
        }),
      );
      plot.root.append(
        svg("rect", {
          x: a,
          y: plot.top,
          width: b - a,
          height: plot.bottom - plot.top,
          fill: "transparent",
          onpointermove: hover,
          onpointerleave: hideTip,
        }),
      );
    }
    if (set.before) {
      const outline = set.before.flatMap((share, k) => [
        [plot.x(edges(k)), plot.y(share)],
        [plot.x(edges(k + 1)), plot.y(share)],
      ]);
      plot.root.append(
        svg("path", {
          class: "before",
          d: path(outline),
          stroke: outlineColour(set),
          "stroke-width": 1.3,
          "stroke-dasharray": "3 2",
          fill: "none",
          "pointer-events": "none",
        }),
      );
    }
  });
  holder.replaceChildren(
    plot.root,
    windowLegend(
      sets,
      (set) => [el("span", { class: "dot", style: `background:${runColour(set.number)}` })],
      (set) => swatch(outlineColour(set), "3 2"),
    ),
  );
}

/** Create the legend of the step windows; `now` and `before` create the swatches of a set. */
function windowLegend(sets, now, before) {
  const lines = sets.flatMap((set) => {
    const name = RUNS.length > 1 ? `${set.run.name}: ` : "";
    return [el("span", {}, ...now(set), `${name}${windowName(set.now)}`), el("span", {}, before(set), set.beforeName)];
  });
  return el("div", { class: "legend" }, ...lines);
}

const middleOf = (bins, k) => (bins.edges(k) + bins.edges(k + 1)) / 2;

function drawProfile(holder, chart) {
  const by = chart.by;
  const found = shown().filter(({ run }) => run.windows.some((window) => window.profiles[by]));
  if (!found.length) return holder.replaceChildren(nothing());
  const sets = found.map(({ run, number }) => {
    const recorded = run.windows.filter((window) => window.profiles[by]);
    return {
      run,
      number,
      now: windowOf(run),
      before: recorded[0],
      beforeName: windowName(recorded[0]),
      bins: binsOf(run, by, recorded[0].profiles[by].tokens.length),
    };
  });
  const numbers = sets
    .flatMap(({ now, before }) =>
      [now, before].flatMap((window) => (window.profiles[by] ? [...window.profiles[by].values, ...window.profiles[by].returns] : [])),
    )
    .filter((value) => value !== null);
  const count = (set) => set.before.profiles[by].tokens.length;
  const right = Math.max(...sets.map((set) => set.bins.edges(count(set))));
  const plot = frame(holder, [0, right], domain(Math.min(...numbers), Math.max(...numbers), false), { xLabel: sets[0].bins.xLabel });
  for (const set of sets) {
    const at = (window, what) =>
      (window.profiles[by]?.[what] ?? []).map((value, k) => (value === null ? null : [plot.x(middleOf(set.bins, k)), plot.y(value)]));
    const colour = runColour(set.number);
    plot.root.append(
      svg("path", { class: "before", d: path(at(set.before, "values")), stroke: colour, opacity: 0.3, "stroke-width": 1.5, fill: "none" }),
    );
    for (const [what, dash] of [
      ["values", ""],
      ["returns", "5 4"],
    ]) {
      const points = at(set.now, what);
      plot.root.append(
        svg("path", {
          class: "curve",
          "data-profile": `${what}_by_${by}`,
          d: path(points),
          stroke: colour,
          "stroke-width": 1.9,
          "stroke-dasharray": dash,
          fill: "none",
        }),
      );
      for (const [cx, cy] of points.filter(Boolean))
        plot.root.append(svg("circle", { cx, cy, r: what === "values" ? 2.4 : 1.6, fill: colour }));
    }
  }
  plot.root.addEventListener("pointermove", (event) => {
    const inside = event.clientX - plot.root.getBoundingClientRect().left;
    const x = ((inside - plot.left) / (plot.right - plot.left)) * right;
    let title = "";
    const lines = sets.flatMap((set) => {
      const k = Math.min(count(set) - 1, Math.max(0, Math.floor((x / set.bins.edges(count(set))) * count(set))));
      const profile = set.now.profiles[by];
      title = set.bins.name(k);
      const name = RUNS.length > 1 ? `${set.run.name}, ` : "";
      if (!profile) return [[`${name}${windowName(set.now)}`, "not recorded", runColour(set.number)]];
      return [
        [`${name}value`, format(profile.values[k]), runColour(set.number)],
        [`${name}return`, format(profile.returns[k]), runColour(set.number)],
        [`${name}tokens`, format(profile.tokens[k])],
      ];
    });
    showTip(event, title, lines);
  });
  plot.root.addEventListener("pointerleave", hideTip);
  holder.replaceChildren(
    plot.root,
    windowLegend(
      sets,
      (set) => [swatch(runColour(set.number), ""), "values ", swatch(runColour(set.number), "5 4"), "returns, "],
      (set) => fill(swatch(runColour(set.number), ""), { opacity: 0.3 }, []),
    ),
  );
}

// ------------------------------------------------------------------------------------------------------------------ phases

function drawPhases(holder) {
  const phases = [...new Set(RUNS.flatMap((run) => Object.keys(run.phases)))];
  const visible = shown().filter(({ run }) => Object.keys(run.phases).length);
  if (!visible.length) return holder.replaceChildren(nothing());
  const size = (phase) => Math.max(...visible.map(({ run }) => run.phases[phase] ?? 0));
  const used = phases.filter((phase) => size(phase) > 0).toSorted((one, other) => size(other) - size(one));
  const top = Math.max(...used.map(size));
  const rows = used.map((phase) => {
    const bars = visible.map(({ run, number }) => {
      const seconds = run.phases[phase] ?? 0;
      const total = Object.values(run.phases).reduce((a, b) => a + b, 0);
      const bar = el("div", {
        class: "phase-bar",
        style: `height:${visible.length > 1 ? 7 : 12}px;width:calc((100% - ${visible.length > 1 ? 64 : 0}px) * ${seconds / top});min-width:1px;background:${runColour(number)};border-radius:2px;margin:1px 0`,
      });
      bar.addEventListener("pointermove", (event) =>
        showTip(event, phase, [[run.name, `${format(seconds, 4)} s, ${format((100 * seconds) / total, 3)} %`, runColour(number)]]),
      );
      bar.addEventListener("pointerleave", hideTip);
      return bar;
    });
    const seconds = visible.map(({ run }) => (run.phases[phase] === undefined ? "-" : `${format(run.phases[phase], 3)} s`));
    const name = el("td", {}, phase.replaceAll("_", " "));
    if (visible.length === 1) return el("tr", {}, name, el("td", { style: "width:55%" }, ...bars), el("td", {}, ...seconds));
    const lines = bars.map((bar, k) => el("div", { class: "phase-line" }, bar, seconds[k])); // one line per run
    return el("tr", {}, name, el("td", { style: "width:75%" }, ...lines));
  });
  holder.replaceChildren(el("table", { class: "phases" }, ...rows));
}

const DRAW = { lines: drawLines, evaluations: drawEvaluations, histogram: drawHistogram, profile: drawProfile, phases: drawPhases };
