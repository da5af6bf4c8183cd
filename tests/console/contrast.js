// Number of shown texts, and those whose contrast is under 4.5 (WCAG 2.2, 1.4.3 AA): relative luminance of colours in sRGB.
const channels = color => color.match(/[\d.]+/g).map(Number);
const luminance = color => {
  const [r, g, b] = channels(color).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = element => {
  for (let at = element; at; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if ((channels(color)[3] ?? 1) > 0) return color;
  }
  return "rgb(255, 255, 255)";
};
const own = element => [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
const texts = [...document.querySelectorAll("body *")].filter(element => own(element) && element.checkVisibility() && !["SCRIPT", "STYLE", "OPTION"].includes(element.tagName));
const faint = [];
for (const element of texts) {
  const style = getComputedStyle(element), color = element.ownerSVGElement ? style.fill : style.color;
  const [light, dark] = [luminance(color), luminance(ground(element))].sort((a, b) => b - a);
  const ratio = (light + 0.05) / (dark + 0.05);
  if (ratio < 4.5) faint.push(`${ratio.toFixed(2)}: ${element.outerHTML.slice(0, 120)}`);
}
return [texts.length, faint];
