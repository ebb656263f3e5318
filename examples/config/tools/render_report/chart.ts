// The chart: strikes by month against the year before, and the species that were identified.

import { escaped, grouped, type Figures } from "./figures";

const INK = "#1f2933";
const FAINT = "#7b8794";
const NOW = "#2563eb";
const BEFORE = "#b6c2d1";

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/** The first of 1, 2 or 5 times a power of ten that reaches the value. */
function ceiling(value: number): number {
  for (let power = 1; ; power *= 10) {
    for (const step of [1, 2, 5]) if (step * power >= value) return step * power;
  }
}

function text(x: number, y: number, content: string, anchor = "start", fill = INK, size = 12): string {
  return `<text x="${x}" y="${y}" text-anchor="${anchor}" fill="${fill}" font-size="${size}">${escaped(content)}</text>`;
}

function bar(x: number, y: number, width: number, height: number, fill: string): string {
  return `<rect x="${x.toFixed(1)}" y="${y.toFixed(1)}" width="${width.toFixed(1)}" height="${height.toFixed(1)}" rx="2" fill="${fill}"/>`;
}

function byMonth(figures: Figures, earlier: Figures): string[] {
  const [left, top, width, height] = [56, 64, 384, 220];
  const highest = ceiling(Math.max(...figures.months.concat(earlier.months).map((month) => month.strikes), 1));
  const tall = (strikes: number) => (strikes / highest) * height;
  const parts = [text(16, 28, "Strikes by month", "start", INK, 15)];
  for (const part of [0, 0.5, 1]) {
    const y = top + height - part * height;
    parts.push(`<line x1="${left}" y1="${y}" x2="${left + width}" y2="${y}" stroke="#e4e7eb"/>`);
    parts.push(text(left - 8, y + 4, grouped(part * highest), "end", FAINT));
  }
  const slot = width / figures.months.length;
  figures.months.forEach((month, index) => {
    const middle = left + slot * (index + 0.5);
    const before = earlier.months[index]!.strikes;
    parts.push(bar(middle - 44, top + height - tall(before), 40, tall(before), BEFORE));
    parts.push(bar(middle + 4, top + height - tall(month.strikes), 40, tall(month.strikes), NOW));
    parts.push(text(middle - 24, top + height - tall(before) - 6, grouped(before), "middle", FAINT));
    parts.push(text(middle + 24, top + height - tall(month.strikes) - 6, grouped(month.strikes), "middle"));
    parts.push(text(middle, top + height + 20, MONTHS[Number(month.month.slice(5)) - 1]!, "middle"));
  });
  parts.push(bar(left, 316, 12, 12, BEFORE), text(left + 18, 326, earlier.quarter, "start", FAINT));
  parts.push(bar(left + 100, 316, 12, 12, NOW), text(left + 118, 326, figures.quarter));
  return parts;
}

function bySpecies(figures: Figures): string[] {
  const [left, top, width, row] = [640, 56, 240, 30];
  const most = Math.max(...figures.species.map((species) => species.strikes), 1);
  const parts = [text(490, 28, "Identified species, most struck", "start", INK, 15)];
  figures.species.forEach((species, index) => {
    const y = top + index * row;
    const long = (species.strikes / most) * width;
    parts.push(text(left - 10, y + 14, species.name, "end"));
    parts.push(bar(left, y, long, 20, NOW));
    parts.push(text(left + long + 8, y + 14, grouped(species.strikes)));
  });
  parts.push(text(490, 326, `${grouped(figures.unidentified)} strikes without an identified species`, "start", FAINT));
  return parts;
}

/** The chart as a stand-alone SVG document. */
export function chart(figures: Figures, earlier: Figures): string {
  const title = `Bird strikes in ${figures.quarter} and ${earlier.quarter}`;
  return [
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 940 344" role="img" font-family="system-ui, sans-serif">',
    `<title>${escaped(title)}</title>`,
    '<rect width="940" height="344" fill="#ffffff"/>',
    ...byMonth(figures, earlier),
    ...bySpecies(figures),
    "</svg>",
    "",
  ].join("\n");
}
