"""The report in a headless Chromium: what is drawn, where, and what happens when it is used. The runs are made up, with every metric of the
table, so that the places of points on the page can be worked out.
"""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, chromium
from tests.torchrun import ROOT
from vapo_mcore.records.metric_table import METRICS

STEPS, PRETRAINING = 2000, 50
HOSTILE = "</script><script>document.title='taken over'</script><img src=x onerror=alert(1)> <b>&amp;</b>"
LISTS = {
    "gae/lambda_histogram": 20,
    "groups/accuracy_histogram": 12,
    "response/length_histogram": 16,
    "horizon/segments_histogram": 16,
    "horizon/staleness_histogram": 16,
    **{f"critic/{what}_by_position": 20 for what in ("values", "returns", "tokens")},
    **{f"critic/{what}_by_length": 16 for what in ("values", "returns", "tokens")},
    **{f"critic/{what}_by_prediction": 10 for what in ("values", "returns", "tokens")},
    **{f"critic/{what}_by_cut": 10 for what in ("values", "returns", "tokens")},
    "critic/explained_variance_by_position": 20,
    "critic/explained_variance_by_length": 16,
}
CURVES = [metric.name for metric in METRICS if metric.name not in LISTS and metric.name not in ("step", "stage")]


def made_up_row(stage: str, step: int, chance: random.Random) -> dict[str, Any]:
    """Every metric of the table."""
    row: dict[str, Any] = {"step": step, "stage": stage}
    row |= {name: math.exp(-step / 900) * (1 + 0.3 * chance.random()) for name in CURVES}
    row["reward/mean"] = 0.2 + 0.6 * step / STEPS  # 0.5 in the middle of the run
    if (stage, step) == ("rl", 777):
        row["policy/entropy"] = 40.0  # a spike
    row["critic/explained_variance"] = None if step % 100 == 0 else 0.5
    for name, bins in LISTS.items():
        counts = "histogram" in name or "tokens" in name
        row[name] = [chance.randrange(1, 40) if counts else k / bins + step / STEPS for k in range(bins)]
    return row


def made_up_sample(step: int, number: int, length: int, **more: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt_id": f"train/{step}#{number}", "sample_index": number, "source": "train", "prompt": f"What is {step} + {number}? {HOSTILE}",
        "response": "x " * length, "ground_truth": str(step + number), "correct": number % 2 == 0, "score": float(number % 2 == 0),
        "error": None, "finish_reason": "stop", "response_length": length, "reward": float(number % 2 == 0),
    }  # fmt: skip
    chance = random.Random(step)
    columns = {name: [round(chance.gauss(0, 1), 3) for _ in range(length)] for name in ("logprob", "value", "return", "advantage")}
    columns["rollout_logprob"] = columns["logprob"]
    record["tokens"] = {"text": [HOSTILE, "line\n", *[f" tok{k}" for k in range(length - 3)], "<eos>"], **columns}
    record["tokens"]["advantage"][:2] = [-2.0, 4.0]
    return record | more


def write_run(folder: Path, steps: int, settings: str, *, seed: int) -> Path:
    chance = random.Random(seed)
    (folder / "samples").mkdir(parents=True)
    rows = [{"step": 0, "stage": "rl"}, *(made_up_row("value_pretraining", step, chance) for step in range(1, PRETRAINING + 1))]
    rows += [made_up_row("rl", step, chance) for step in range(1, steps + 1)]
    for row in rows:
        if row["stage"] == "rl" and row["step"] % 200 == 0:
            row |= {
                "eval/set/avg@4": row["step"] / 4000,
                "eval/set/ci_low": row["step"] / 4000 - 0.1,
                "eval/set/ci_high": row["step"] / 4000 + 0.1,
            }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in range(1, steps + 1, max(1, steps // 100)):
        found = [made_up_sample(step, number, 900 if number == 3 else 40 + step % 7) for number in range(4)]
        (folder / "samples" / f"step_{step:04d}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in found))
    for step, right in ((0, False), (steps, True)):
        items = [made_up_sample(0, number, 12, correct=right != (number == 1), tokens=None) for number in range(3)]
        (folder / "samples" / f"eval_step_{step:04d}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "config.yaml").write_text(f"rollout: {{max_response_length: 1600}}\nrun: {{dir: {folder}, steps: {STEPS}}}\n{settings}")
    return folder


def report(*arguments: str) -> str:
    """The command in a process of its own, which must not import torch."""
    script = "import sys; from vapo_mcore.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    command = [sys.executable, "-c", script, "report", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    long = write_run(folder / "long", STEPS, "seed: 1\nuntrusted: '</script>'\n", seed=1)
    short = write_run(folder / "short", 30, "seed: 2\n", seed=2)
    told = report(str(long))
    assert re.fullmatch(rf"wrote {long / 'report.html'} \(\d\.\d\d MB\)\n", told)
    report(str(long), str(short), "--output", str(folder / "both.html"))
    return {"long": long / "report.html", "both": folder / "both.html"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def shown(browser: Browser, selector: str) -> int:
    """How many elements of a selector take up room on the page."""
    return browser.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].filter((e) => {{ const b = e.getBoundingClientRect();"
        " return b.width > 1 || b.height > 1; }).length"
    )


def card(title: str, inside: str) -> str:
    return f'[data-chart="{title}"] {inside}'


def points(browser: Browser, selector: str) -> list[tuple[float, float]]:
    text = browser.evaluate(f"document.querySelector({json.dumps(selector)}).getAttribute('d')")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", text)]


def axis(browser: Browser, title: str, which: str) -> dict[float, float]:
    """Numbers of an axis and the places of their labels in the drawing."""
    place = "data-x" if which == "xtick" else "y"
    script = (
        f"[...document.querySelectorAll({json.dumps(card(title, '.' + which))})].map((t) => [t.textContent, +t.getAttribute('{place}')])"
    )
    return {float(text.replace(",", "")): at - (4 if which == "ytick" else 0) for text, at in browser.evaluate(script)}


def read_off(places: dict[float, float], place: float) -> float:
    """The number at a place of an axis, between or beyond its outer labels."""
    (a, at_a), *_, (b, at_b) = sorted(places.items())
    return a + (place - at_a) * (b - a) / (at_b - at_a)


def test_a_run_of_2000_steps_is_small_loads_fast_and_complains_of_nothing(pages: dict[str, Path], browser: Browser) -> None:
    assert pages["long"].stat().st_size <= 3e6
    milliseconds = math.inf
    for _ in range(3):  # the fastest of three: other tests run at the same time
        browser.open(pages["long"])
        milliseconds = min(milliseconds, browser.evaluate("performance.timing.loadEventEnd - performance.timing.navigationStart"))
    print(f"2,000 steps: {pages['long'].stat().st_size / 1e6:.2f} MB, opened in {milliseconds} ms")
    assert 0 < milliseconds <= 2000
    assert browser.evaluate("document.title") == "long"  # not taken over
    assert browser.evaluate("document.querySelectorAll('main img, main b > amp').length") == 0
    assert browser.evaluate("document.documentElement.dataset.errors") == "[]"
    assert browser.complaints() == []


def test_every_chart_is_drawn(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["long"])
    titles = browser.evaluate("[...document.querySelectorAll('#sections .card')].map((c) => c.dataset.chart)")
    assert len(titles) > 25
    for title in titles:
        drawn = (
            shown(browser, card(title, "path.curve"))
            + shown(browser, card(title, "rect.bar-now"))
            + shown(browser, card(title, ".phase-bar"))
        )
        assert drawn > 0, f"nothing is drawn in {title}"
    assert browser.evaluate("document.querySelectorAll('.none').length") == 0
    browser.evaluate("document.querySelector('.rest').open = true")
    browser.evaluate("new Promise((done) => setTimeout(done, 300))")
    rest = browser.evaluate("document.querySelectorAll('.rest .card').length")
    assert shown(browser, ".rest path.curve") == rest > 40


def test_points_stand_where_their_numbers_are(pages: dict[str, Path], browser: Browser) -> None:
    """The reward rises from 0.2 to 0.8 in a straight line; the places of the axes' labels say where that is."""
    browser.open(pages["long"])
    xs, ys = axis(browser, "Reward", "xtick"), axis(browser, "Reward", "ytick")
    curve = points(browser, card("Reward", "path.curve"))
    found = [(read_off(xs, x), read_off(ys, y)) for x, y in curve]
    assert 480 <= len(found) <= 500
    assert found[0][0] == pytest.approx(-48, abs=3) and found[-1][0] == pytest.approx(1998, abs=4)
    rl = [(x, y) for x, y in found if x > 0]
    assert all(y == pytest.approx(0.2 + 0.6 * x / STEPS, abs=0.004) for x, y in rl)
    # the scale of the value loss is logarithmic, its labels too
    loss = axis(browser, "Value loss", "ytick")
    (a, at_a), (b, at_b) = min(loss.items()), max(loss.items())
    assert a > 0
    last = points(browser, card("Value loss", "path.curve"))[-1][1]
    value = a * (b / a) ** ((last - at_a) / (at_b - at_a))
    assert value == pytest.approx(1.15 * math.exp(-STEPS / 900), rel=0.1)
    assert "undefined in 20 steps" in browser.evaluate(
        f"document.querySelector({json.dumps(card('Explained variance', '.note'))}).textContent"
    )


def test_spikes_evaluations_and_phases_show_their_numbers(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["long"])
    ys = axis(browser, "Entropy", "ytick")
    band = points(browser, card("Entropy", "path.band"))
    x, y = min(band, key=lambda point: point[1])  # the highest on the page
    assert read_off(ys, y) == pytest.approx(40, rel=0.01)
    assert read_off(axis(browser, "Entropy", "xtick"), x) == pytest.approx(777, abs=5)
    xs, ys = axis(browser, "Evaluation", "xtick"), axis(browser, "Evaluation", "ytick")
    found = [(read_off(xs, x), read_off(ys, y)) for x, y in points(browser, card("Evaluation", "path.curve"))]
    assert found == [(pytest.approx(step, abs=5), pytest.approx(step / 4000, abs=0.005)) for step in range(0, 2001, 200)]
    rows = [json.loads(line) for line in (pages["long"].parent / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["time/generate"] for row in rows if row["stage"] == "rl" and row["step"] > 0]
    table = dict(browser.evaluate("[...document.querySelectorAll('.phases tr')].map((r) => [r.cells[0].innerText, r.cells[2].innerText])"))
    assert table["generate"] == f"{sum(seconds) / len(seconds):.3g} s"
    no_phases = {"time/step", "time/run", "time/gpu_hours", "time/generate_mean"}
    assert set(table) == {name[5:].replace("_", " ") for name in CURVES if name.startswith("time/") and name not in no_phases}
    # 16 bins of 100 tokens, a point in the middle of each
    xs = axis(browser, "By response length", "xtick")
    places = [read_off(xs, x) for x, _ in points(browser, card("By response length", 'path[data-profile="values_by_length"]'))]
    assert places == pytest.approx([100 * k + 50 for k in range(16)], abs=5)


def test_distributions_follow_the_slider(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["long"])
    selector = card("By position", 'path[data-profile="values_by_position"]')

    def means() -> list[float]:
        ys = axis(browser, "By position", "ytick")
        return [read_off(ys, y) for _, y in points(browser, selector)]

    # bin k holds k / 20 + step / 2000 with random weights over the steps; the last window is steps 1876 to 2000
    assert means() == pytest.approx([k / 20 + 1938 / STEPS for k in range(20)], abs=0.03)
    assert browser.evaluate("document.getElementById('window-value').textContent") == "steps 1876 to 2000"
    browser.evaluate("(() => { const s = document.getElementById('window'); s.value = 0; s.dispatchEvent(new Event('input')); })()")
    assert "value pretraining" in browser.evaluate("document.getElementById('window-value').textContent")
    assert means() == pytest.approx([k / 20 + 6.5 / STEPS for k in range(20)], abs=0.03)
    heights = browser.evaluate(
        f"[...document.querySelectorAll({json.dumps(card('Group accuracy', 'rect.bar-now'))})].map((r) => +r.getAttribute('height'))"
    )
    rows = [json.loads(line) for line in (pages["long"].parent / "metrics.jsonl").read_text().splitlines()[1:13]]
    counts = [sum(row["groups/accuracy_histogram"][k] for row in rows) for k in range(12)]
    assert [height / sum(heights) for height in heights] == pytest.approx([count / sum(counts) for count in counts], abs=0.003)


def test_the_sample_browser_shows_tokens_in_colour(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["long"])
    texts = browser.evaluate("[...document.querySelectorAll('.response .token')].map((t) => t.textContent)")
    assert texts[0] == HOSTILE and texts[1] == "line\u21b5\n" and texts[-1] == "<eos>"
    assert browser.evaluate("document.querySelector('.prompt').textContent").endswith(HOSTILE)
    colours = browser.evaluate("[...document.querySelectorAll('.response .token')].map((t) => getComputedStyle(t).backgroundColor)")
    assert colours[:2] == ["rgba(33, 102, 172, 0.39)", "rgba(178, 24, 43, 0.78)"]  # -2 and 4: half blue, full red
    assert browser.evaluate("document.querySelector('.meta').textContent").startswith("step 1981, right, reward 1")
    browser.evaluate(
        "document.querySelector('.response .token').dispatchEvent(new PointerEvent('pointermove', {clientX: 50, clientY: 50}))"
    )
    tip = browser.evaluate("document.getElementById('tip').innerText")
    assert "advantage\n-2" in re.sub(r"\s*\n\s*", "\n", tip) and "token 1:" in tip
    browser.evaluate("[...document.querySelectorAll('.kinds button')].find((b) => b.textContent.startsWith('longest')).click()")
    assert len(browser.evaluate("document.querySelector('.response').innerText")) > 900
    assert "900 tokens" in browser.evaluate("document.querySelector('.meta').textContent")
    browser.evaluate("[...document.querySelectorAll('.list button')][1].click()")
    assert browser.evaluate("document.querySelectorAll('.list button')[1].getAttribute('aria-pressed')") == "true"
    browser.evaluate("[...document.querySelectorAll('.quantities button')].find((b) => b.textContent === 'value').click()")
    changed = browser.evaluate("getComputedStyle(document.querySelector('.response .token')).backgroundColor")
    assert changed != colours[0]
    browser.evaluate("[...document.querySelectorAll('.kinds button')].find((b) => b.textContent.startsWith('changed')).click()")
    assert browser.evaluate("document.querySelectorAll('.response').length") == 2
    assert browser.evaluate("[...document.querySelectorAll('.meta b')].map((b) => b.className)") == ["right", "wrong"]


def test_runs_are_laid_over_each_other_and_can_be_hidden(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["both"])
    assert shown(browser, card("Reward", "path.curve")) == 2
    colours = "new Set([...document.querySelectorAll('[data-chart=\"Reward\"] path.curve')].map((p) => p.getAttribute('stroke'))).size"
    assert browser.evaluate(colours) == 2
    table = browser.evaluate("[...document.querySelectorAll('.differences tr')].map((r) => r.innerText.split('\\t'))")
    assert ["seed", "1", "2"] in table
    lines = "new Set([...document.querySelectorAll('.phases td:first-child, .differences td:first-child')].map(linesOf))"
    count = "(cell) => { const range = document.createRange(); range.selectNodeContents(cell); return range.getClientRects().length; }"
    assert browser.evaluate(f"const linesOf = {count}; [...{lines}]") == [1]  # names are not broken
    first = "document.querySelector('.phases tr')"
    assert browser.evaluate(f"[...{first}.querySelectorAll('.phase-line')].map((line) => / s$|-/.test(line.innerText))") == [True, True]
    browser.evaluate("document.querySelector('.chip').click()")
    assert shown(browser, card("Reward", "path.curve")) == 1
    assert max(axis(browser, "Reward", "xtick")) <= 30  # the scale is that of what is left
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
    browser.open(pages["both"], width=420)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 420  # nothing sticks out on a phone
    assert browser.evaluate("document.documentElement.dataset.errors") == "[]"
    assert browser.complaints() == []
