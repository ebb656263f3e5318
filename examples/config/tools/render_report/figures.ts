// What quarter_figures returns.

export type Ranked = { name: string; strikes: number };

export type Figures = {
  quarter: string;
  strikes: number;
  damaging: number;
  cost_usd: number;
  months: { month: string; strikes: number; damaging: number }[];
  phases: Ranked[];
  species: Ranked[];
  unidentified: number;
};

/** Text that may hold anything, made safe for HTML and SVG. */
export function escaped(text: string): string {
  const marks: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (mark) => marks[mark]!);
}

/** Thousands set apart by commas, whatever the locale. */
export function grouped(number: number): string {
  return String(number).replace(/\B(?=(\d{3})+$)/g, ",");
}
