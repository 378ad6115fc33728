// Plots by uPlot, in the colours of the theme. The library is loaded for the first plot.

import { el } from "/page/lib/dom.js";
import { clock, moment } from "/page/lib/format.js";

let loaded = null;

function library() {
  loaded ??= new Promise((resolve, reject) => {
    const style = el("link", { rel: "stylesheet", href: "/page/vendor/uplot.css" });
    const script = el("script", { src: "/page/vendor/uplot.js" });
    script.addEventListener("load", () => resolve(globalThis.uPlot));
    script.addEventListener("error", () => { loaded = null; reject(new Error("The plots could not be loaded.")); });
    document.head.append(style, script);
  });
  return loaded;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A figure with a title, a legend with the latest values, and a plot. `series` are `{name, colour, bars}`; `format`
// formats a value. `link` follows the title.
export class Plot {
  constructor(title, series, { format, link, note }) {
    this.series = series;
    this.format = format;
    this.title = title;
    this.data = null;
    this.values = series.map(() => el("b", {}));
    this.time = el("span", { class: "muted" });
    const legend = el("p", { class: "plot-legend" }, series.map((one, at) =>
      el("span", { class: `key-of key-${one.colour}` }, el("i", { "aria-hidden": "true" }), `${one.name} `, this.values[at])), this.time);
    this.box = el("div", { class: "plot-box", role: "img", "aria-label": title });
    this.none = el("p", { class: "plot-none", hidden: true }, "No data in this range");
    this.node = el("figure", { class: "plot" },
      el("figcaption", {}, el("h2", {}, title), link ?? null, note ? el("span", { class: "muted" }, note) : null), legend, el("div", { class: "plot-area" }, this.box, this.none));
    this.sizes = new ResizeObserver(() => this.resized());
    this.sizes.observe(this.box);
    this.themes = matchMedia("(prefers-color-scheme: dark)");
    this.onTheme = () => this.rebuild();
    this.themes.addEventListener("change", this.onTheme);
    addEventListener("themed", this.onTheme);
  }

  // `data` are the times and one list of values for each series. A missing value is null.
  async draw(data) {
    this.data = data;
    const has = data.slice(1).some((values) => values.some((value) => value !== null));
    this.none.hidden = has;
    this.latest();
    this.box.setAttribute("aria-label", this.summary());
    const made = await library();
    if (!this.node.isConnected || this.data !== data) return;
    if (this.plot) this.plot.setData(data);
    else this.plot = new made(this.options(made), data, this.box);
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (this.data) this.draw(this.data);
  }

  resized() {
    const width = this.box.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.plot.height });
  }

  latest(at = null) {
    for (const [place, values] of this.data.slice(1).entries()) {
      // For bars, the legend contains the sum, because the last interval is not complete.
      const total = this.series[place].bars ? values.reduce((sum, one) => sum + (one ?? 0), 0) : values.findLast((one) => one !== null);
      const value = at === null ? total : values[at];
      this.values[place].textContent = this.format(value ?? null);
    }
    this.time.textContent = at === null ? "" : this.wide ? moment(this.data[0][at]).slice(0, 16) : clock(this.data[0][at]).slice(0, 5);
  }

  get wide() {
    const times = this.data[0];
    return times.length > 1 && times.at(-1) - times[0] > 86_400;
  }

  summary() {
    const parts = this.series.map((one, at) => {
      const values = this.data[at + 1].filter((value) => value !== null);
      return values.length ? `${one.name}: latest ${this.format(values.at(-1))}, highest ${this.format(Math.max(...values))}` : `${one.name}: no data`;
    });
    return `${this.title}. ${parts.join("; ")}.`;
  }

  options(made) {
    const [muted, line] = [colour("muted"), colour("line")];
    const font = `11px ${colour("sans")}`;
    const axis = { stroke: muted, font, grid: { stroke: line, width: 1 }, ticks: { show: false } };
    return {
      width: Math.max(this.box.clientWidth, 120),
      height: 148,
      padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: true, range: (plot, low, high) => [low - stepOf(plot.data[0]) / 2, high + stepOf(plot.data[0]) / 2] }, y: { range: (_, low, high) => [0, (high || 1) * 1.12] } },
      axes: [
        { ...axis, size: 26, gap: 3, space: 60, values: (_, splits, __, ___, by) => splits.map((at) => (by >= 86_400 ? moment(at).slice(5, 10) : clock(at).slice(0, 5))) },
        { ...axis, size: (_, labels) => Math.max(58, ...(labels ?? []).map((label) => 7 * label.length + 4)), gap: 4, space: 28, values: (_, splits) => splits.map((value) => this.format(value)) },
      ],
      series: [{}, ...this.series.map((one) => ({
        stroke: colour(one.colour),
        width: one.bars ? 0 : 1.6,
        fill: one.bars ? colour(one.colour) : undefined,
        paths: one.bars ? made.paths.bars({ size: [0.8, 40], align: 0 }) : made.paths.linear(),
        points: { show: (plot, at) => !one.bars && isSparse(plot.data[at]), size: 4, fill: colour(one.colour) },
        spanGaps: false,
      }))],
      hooks: { setCursor: [(plot) => this.latest(plot.cursor.idx ?? null)] },
    };
  }

  close() {
    this.sizes.disconnect();
    this.themes.removeEventListener("change", this.onTheme);
    removeEventListener("themed", this.onTheme);
    this.plot?.destroy();
  }
}

// Space for the first and the last bar.
const stepOf = (times) => (times.length > 1 ? times[1] - times[0] : 60);

// A line connects neighbouring values. Values without neighbours would be invisible, so sparse values also get points.
const isSparse = (values) => values.filter((value) => value !== null).length < values.length * 0.5;
