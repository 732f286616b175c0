// Sample browser: shows responses with per-token training values as colours.

const KINDS = {
  best: "Highest reward, newest first.",
  worst: "Lowest reward, newest first.",
  longest: "Longest responses.",
  latest: "Latest responses.",
  changed: "Same problem in the first and the last evaluation, with different verdicts.",
};
const QUANTITIES = {
  advantage: "advantage used by the policy loss",
  value: "value",
  return: "return, the critic's target",
  error: "value - return",
  logprob: "log-prob",
};
const HOVERED = { logprob: "log-prob", rollout_logprob: "log-prob when sampled", value: "value", return: "return", advantage: "advantage" };
const picked = { run: 0, kind: "best", entry: 0, quantity: "advantage" };

function numbersOf(tokens, quantity) {
  if (quantity === "error")
    return tokens.value && tokens.return ? tokens.value.map((value, k) => (value === null ? null : value - tokens.return[k])) : null;
  if (quantity === "logprob") return tokens.logprob ?? tokens.rollout_logprob ?? null;
  return tokens[quantity] ?? null;
}

/** Return the background of a token: blue below 0, red above; the largest absolute value of the response has full colour. */
function tint(value, largest) {
  const strength = largest ? Math.min(1, Math.abs(value) / largest) : 0;
  return `rgba(var(--${value < 0 ? "blue" : "red"}), ${(0.78 * strength).toFixed(3)})`;
}

function tokenSpans(record, quantity) {
  const { tokens } = record;
  const numbers = numbersOf(tokens, quantity);
  const largest = numbers ? numbers.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0) : 0;
  const spans = tokens.text.map((text, k) => {
    const value = numbers?.[k] ?? null;
    const inside = tokens.rollout_logprob ? tokens.rollout_logprob[k] !== null : true;
    const span = el("span", {
      class: inside ? "token" : "token outside",
      style: value === null ? null : `background:${tint(value, largest)}`,
    });
    text.split("\n").forEach((line, number) => {
      if (number) span.append(el("span", { class: "break" }, "\u21b5"), "\n");
      span.append(line);
    });
    const position = record.left_out && k >= record.left_out[0] ? k + record.left_out[1] : k;
    span.addEventListener("pointermove", (event) => {
      const lines = Object.entries(HOVERED)
        .filter(([name]) => tokens[name])
        .map(([name, label]) => [label, inside ? format(tokens[name][k]) : "carries no loss"]);
      showTip(event, `token ${position + 1}: ${JSON.stringify(text)}`, lines);
    });
    span.addEventListener("pointerleave", hideTip);
    return span;
  });
  if (record.left_out)
    spans.splice(record.left_out[0], 0, el("span", { class: "cut" }, ` [... ${record.left_out[1]} tokens not shown ...] `));
  return { spans, largest, present: numbers !== null };
}

function plainText(record) {
  if (record.response === null) {
    const answer = record.answer === undefined || record.answer === null ? "" : `, its answer was ${record.answer}`;
    return [el("span", { class: "cut" }, `text not kept${answer} (an evaluation keeps the texts of run.samples_per_step responses)`)];
  }
  if (!record.left_out) return [record.response];
  const [from, count] = record.left_out;
  return [
    record.response.slice(0, from),
    el("span", { class: "cut" }, ` [... ${count} characters not shown ...] `),
    record.response.slice(from),
  ];
}

const verdict = (record) => (record.error ? "no verdict" : record.correct ? "right" : "wrong");

function stepOf(record) {
  return `${{ rl: "", value_pretraining: "value pretraining ", evaluation: "evaluation after " }[record.stage] ?? ""}step ${record.step}`;
}

function metaOf(record) {
  const parts = [stepOf(record), verdict(record)];
  if (record.reward !== undefined) parts.push(`reward ${format(record.reward, 4)}`);
  parts.push(
    `${record.response_length} tokens`,
    record.finish_reason === "length" ? "truncated by the length limit" : `ended: ${record.finish_reason}`,
  );
  if (record.segments) parts.push(`sampled in ${record.segments.length} steps, the first ${record.segments[0][1]} steps before`);
  return parts.join(", ");
}

function scaleOf(largest) {
  const ramp = "background:linear-gradient(90deg, rgba(var(--blue), .78), transparent 50%, rgba(var(--red), .78))";
  return el("span", { class: "scale" }, format(-largest, 3), el("span", { class: "ramp", style: ramp }), format(largest, 3));
}

function responseView(record) {
  const head = el("p", { class: "meta" }, el("b", { class: record.correct ? "right" : "wrong" }, metaOf(record)));
  const parts = [head];
  if (record.error) parts.push(el("p", { class: "note" }, record.error));
  if (!record.tokens) return [...parts, el("div", { class: "response" }, ...plainText(record))];
  const { spans, largest, present } = tokenSpans(record, picked.quantity);
  const wanting = `${QUANTITIES[picked.quantity]}: not recorded in this step`;
  parts.push(present ? scaleOf(largest) : el("p", { class: "note" }, wanting));
  return [...parts, el("div", { class: "response" }, ...spans)];
}

function entriesOf(samples) {
  return samples.kinds[picked.kind].map((entry) => (Array.isArray(entry) ? entry : [entry]).map((number) => samples.records[number]));
}

function listButton(records, number) {
  const [record] = records;
  const text =
    records.length > 1
      ? `${verdict(records[0])} \u2192 ${verdict(records[1])}`
      : `${verdict(record)}${record.reward === undefined ? "" : `, reward ${format(record.reward, 4)}`}`;
  const tone = records.at(-1).correct ? "right" : "wrong";
  const button = el(
    "button",
    { type: "button", "aria-pressed": String(number === picked.entry) },
    el("span", { class: tone }, text),
    el("br"),
    el("span", { class: "soft" }, `${stepOf(record)}, ${record.prompt_id}, ${record.response_length} tokens`),
  );
  button.addEventListener("click", () => {
    picked.entry = number;
    drawSamples();
  });
  return button;
}

function tab(text, pressed, choose) {
  const button = el("button", { type: "button", "aria-pressed": String(pressed) }, text);
  button.addEventListener("click", () => {
    choose();
    drawSamples();
  });
  return button;
}

function about(samples) {
  const [read, there] = samples.files;
  const from = read === there ? `${there} files of samples` : `${read} of ${there} files of samples, evenly spaced`;
  const changed =
    samples.evaluated.length > 1
      ? ` Between the evaluations after steps ${samples.evaluated.join(" and ")}, ${samples.to_right} verdicts turned right and ${samples.to_wrong} wrong.`
      : "";
  return `Chosen from ${from}.${changed} Training responses have values per token: blue is below 0, red above; hover over a token to read them.`;
}

function drawSamples() {
  const { samples } = RUNS[picked.run];
  const entries = entriesOf(samples);
  picked.entry = Math.min(picked.entry, Math.max(0, entries.length - 1));
  const records = entries[picked.entry] ?? [];
  const kinds = Object.keys(KINDS).map((kind) =>
    tab(`${kind} (${samples.kinds[kind].length})`, kind === picked.kind, () => Object.assign(picked, { kind, entry: 0 })),
  );
  const runs = RUNS.map((run, number) => tab(run.name, number === picked.run, () => Object.assign(picked, { run: number, entry: 0 })));
  const quantities = Object.keys(QUANTITIES).map((name) => tab(QUANTITIES[name], name === picked.quantity, () => (picked.quantity = name)));
  const [record] = records;
  const detail = record
    ? el(
        "div",
        { class: "card detail" },
        el("h3", {}, `Prompt ${record.prompt_id}`),
        record.prompt === null ? null : el("div", { class: "prompt" }, record.prompt),
        el("p", { class: "soft truth" }, `ground truth: ${record.ground_truth ?? "not kept"}`),
        ...records.flatMap(responseView),
      )
    : el("div", { class: "card none" }, "none");
  const parts = [
    el("h2", {}, "Samples"),
    el("p", { class: "about" }, about(samples)),
    RUNS.length > 1 ? el("div", { class: "tabs" }, el("span", { class: "soft" }, "run"), ...runs) : null,
    el("div", { class: "tabs kinds" }, ...kinds, el("span", { class: "soft" }, KINDS[picked.kind])),
    el("div", { class: "tabs quantities" }, el("span", { class: "soft" }, "colour"), ...quantities),
    el("div", { class: "browser" }, el("div", { class: "list" }, ...entries.map(listButton)), detail),
  ];
  document.getElementById("samples").replaceChildren(...parts.filter((part) => part !== null));
}

function buildSamples() {
  const first = Object.keys(KINDS).find((kind) => RUNS[0].samples.kinds[kind].length);
  if (first) picked.kind = first;
  const record = entriesOf(RUNS[0].samples)[0]?.[0];
  if (record?.tokens && !record.tokens.advantage) picked.quantity = "value";
  drawSamples();
}
