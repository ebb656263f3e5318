// The report as one HTML file that needs nothing else: no script, no style sheet, no font from elsewhere.

import { escaped, grouped, type Figures, type Ranked } from "./figures";

const STYLE = `
  body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
  .numbers { display: flex; flex-wrap: wrap; gap: 1rem; }
  .number { border: 1px solid #e4e7eb; border-radius: .5rem; padding: .75rem 1.25rem; min-width: 9rem; }
  .number b { display: block; font-size: 1.5rem; }
  .faint { color: #52606d; font-size: .9rem; }
  table { border-collapse: collapse; } td, th { padding: .25rem 1rem .25rem 0; text-align: left; }
  td + td, th + th { text-align: right; }
  svg { width: 100%; height: auto; }`;

/** How a figure moved, in words. */
function change(now: number, before: number): string {
  if (before === 0) return "none a year earlier";
  const percent = Math.round(((now - before) / before) * 100);
  if (percent === 0) return "as a year earlier";
  return `${Math.abs(percent)} % ${percent > 0 ? "more" : "less"} than a year earlier`;
}

function number(label: string, now: number, before: number, unit = ""): string {
  const note = `<span class="faint">${change(now, before)}</span>`;
  return `<div class="number">${escaped(label)}<b>${unit}${grouped(now)}</b>${note}</div>`;
}

function table(heading: string, ranked: Ranked[]): string {
  const rows = ranked.map(({ name, strikes }) => `<tr><td>${escaped(name)}</td><td>${grouped(strikes)}</td></tr>`);
  return `<table><tr><th>${escaped(heading)}</th><th>Strikes</th></tr>${rows.join("")}</table>`;
}

/** The whole page. */
export function page(figures: Figures, earlier: Figures, summary: string, svg: string): string {
  const title = `Bird strikes, ${figures.quarter}`;
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>${escaped(title)}</title>
<style>${STYLE}
</style>
</head>
<body>
<h1>${escaped(title)}</h1>
<p>${escaped(summary)}</p>
<div class="numbers">
${number("Strikes", figures.strikes, earlier.strikes)}
${number("With damage", figures.damaging, earlier.damaging)}
${number("Reported cost", figures.cost_usd, earlier.cost_usd, "$")}
</div>
<h2>Month by month, and species</h2>
${svg}<h2>By phase of flight</h2>
${table("Phase", figures.phases)}
<p class="faint">Source: FAA Wildlife Strike Database, the extract in birdstrikes.csv; a sample, not every strike.
Costs as reported, many reports name none.</p>
</body>
</html>
`;
}
