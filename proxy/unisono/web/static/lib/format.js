// Consistent formats of numbers, units and times.

export function number(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

// Short form for axes and tiles: 12,345 is 12.3k.
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, from] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    const scale = from === 1e4 ? 1e3 : from;
    if (size >= from) return `${(value / scale).toFixed(size >= 100 * scale ? 0 : 1)}${unit}`;
  }
  return size >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(2)));
}

export function counted(value, what) {
  return `${number(value)} ${what}${value === 1 ? "" : "s"}`;
}

export function percent(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return `${share > 0 && share < 10 ? share.toFixed(1) : Math.round(share)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.0001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

// Small amounts have two significant digits.
export function dollars(value) {
  if (value === null || value === undefined) return "–";
  if (!value) return "$0";
  const digits = value < 1 ? Math.min(8, Math.max(2, 1 - Math.floor(Math.log10(value)))) : 2;
  return `$${value.toFixed(digits).replace(/(\.\d\d\d*?)0+$/, "$1")}`;
}

const two = (value) => String(value).padStart(2, "0");

export function clock(at) {
  const date = new Date(at * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

// Within the last twelve hours, the time alone identifies the moment.
export function day(at) {
  const ago = Date.now() / 1000 - at;
  return ago > -60 && ago < 43200 ? clock(at) : moment(at);
}

export function moment(at) {
  const date = new Date(at * 1000);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(at)}`;
}

// Name of the time zone of all times on the page.
export const ZONE = (() => {
  const minutes = -new Date().getTimezoneOffset();
  const size = Math.abs(minutes);
  return minutes ? `UTC${minutes < 0 ? "−" : "+"}${two(Math.floor(size / 60))}:${two(size % 60)}` : "UTC";
})();
