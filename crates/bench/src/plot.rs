//! Line charts as self-contained SVG, without external fonts or styles, for any browser.

use std::fmt::Write as _;

/// Size of the picture in pixels: width, height.
const SIZE: (f64, f64) = (860.0, 440.0);
/// Margins of the picture in pixels: left, right (for the legend), top, bottom.
const EDGES: (f64, f64, f64, f64) = (76.0, 230.0, 46.0, 56.0);
/// Colours of consecutive lines (Okabe and Ito's palette for colour-blind readers), followed by dash patterns.
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"];
const DASHES: [&str; 3] = ["none", "7 4", "2 3"];
/// Maximum number of ticks per axis.
const TICKS: f64 = 6.0;

/// An axis of a chart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Axis {
    /// Label with unit.
    pub label: String,
    /// True if the scale is logarithmic.
    pub is_logarithmic: bool,
    /// Labelled values; if empty, round numbers are labelled.
    pub ticks: Vec<(f64, String)>,
}

/// A line of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Name in the legend.
    pub name: String,
    /// Points in the order in which they are joined.
    pub points: Vec<(f64, f64)>,
}

/// A chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// Title of the chart.
    pub title: String,
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Lines of the chart.
    pub curves: Vec<Curve>,
}

/// An axis with its range of values and pixels.
struct Scale<'a> {
    axis: &'a Axis,
    low: f64,
    high: f64,
    pixels: (f64, f64),
}

impl<'a> Scale<'a> {
    fn new(axis: &'a Axis, values: impl Iterator<Item = f64>, pixels: (f64, f64)) -> Self {
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), value| (l.min(value), h.max(value)));
        let (low, high) = match (low.is_finite(), axis.is_logarithmic) {
            (false, _) => (1.0, 10.0),
            (true, true) if low == high => (low / 2.0, high * 2.0),
            (true, true) => (low, high),
            // Axes of measured quantities begin at zero.
            (true, false) if high > low.min(0.0) => (low.min(0.0), high * 1.05),
            (true, false) => (low - 1.0, high + 1.0),
        };
        Scale { axis, low, high, pixels }
    }

    fn pixel(&self, value: f64) -> f64 {
        let share = match self.axis.is_logarithmic {
            true => (value / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        };
        self.pixels.0 + share * (self.pixels.1 - self.pixels.0)
    }

    fn ticks(&self) -> Vec<(f64, String)> {
        let round = match (self.axis.ticks.is_empty(), self.axis.is_logarithmic) {
            (false, _) => return self.within(self.axis.ticks.clone()),
            (true, true) => {
                let decades = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
                let steps: &[f64] = if decades.clone().count() > 4 { &[1.0] } else { &[1.0, 2.0, 5.0] };
                decades.flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade))).collect()
            }
            (true, false) => {
                let rough = (self.high - self.low) / TICKS;
                let decade = 10f64.powf(rough.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * decade).into_iter().find(|step| *step >= rough);
                let step = step.unwrap_or(rough);
                let first = (self.low / step).ceil() as i64;
                (first..first + 2 * TICKS as i64).map(|n| n as f64 * step).collect::<Vec<f64>>()
            }
        };
        self.within(round.into_iter().map(|value| (value, short(value))).collect())
    }

    fn within(&self, ticks: Vec<(f64, String)>) -> Vec<(f64, String)> {
        let slack = 1e-9 * (self.high - self.low).abs();
        ticks.into_iter().filter(|(value, _)| (self.low - slack..=self.high + slack).contains(value)).collect()
    }
}

/// Formats a round number with as few characters as possible.
fn short(value: f64) -> String {
    let rounded = format!("{value:.6}");
    let rounded = rounded.trim_end_matches('0').trim_end_matches('.');
    if rounded == "0" && value != 0.0 { format!("{value:e}") } else { rounded.to_owned() }
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // XML does not allow control characters.
            letter if letter < ' ' => out.push(' '),
            letter => out.push(letter),
        }
    }
    out
}

fn text(out: &mut String, (x, y): (f64, f64), more: &str, words: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" {more}>{}</text>", escaped(words));
}

impl Chart {
    /// Renders the chart. Points that an axis cannot show, such as zeros on a logarithmic axis, are omitted.
    pub fn svg(&self) -> String {
        let (width, height) = SIZE;
        let (left, right, top, bottom) = EDGES;
        let shown = |(x, y): &(f64, f64)| {
            x.is_finite()
                && y.is_finite()
                && (!self.x.is_logarithmic || *x > 0.0)
                && (!self.y.is_logarithmic || *y > 0.0)
        };
        let curves: Vec<Vec<(f64, f64)>> =
            self.curves.iter().map(|curve| curve.points.iter().copied().filter(shown).collect()).collect();
        let x = Scale::new(&self.x, curves.iter().flatten().map(|point| point.0), (left, width - right));
        let y = Scale::new(&self.y, curves.iter().flatten().map(|point| point.1), (height - bottom, top));
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
        );
        text(&mut out, (left, top - 20.0), "font-size=\"15\"", &self.title);
        grid(&mut out, &x, &y);
        for (number, (curve, points)) in self.curves.iter().zip(&curves).enumerate() {
            let look = format!(
                "stroke=\"{}\" stroke-dasharray=\"{}\" stroke-width=\"2\" fill=\"none\"",
                COLOURS[number % COLOURS.len()],
                DASHES[number / COLOURS.len() % DASHES.len()]
            );
            let path: Vec<String> = points.iter().map(|p| format!("{:.1},{:.1}", x.pixel(p.0), y.pixel(p.1))).collect();
            let _ = writeln!(out, "<polyline points=\"{}\" {look}/>", path.join(" "));
            for point in path.iter().filter_map(|point| point.split_once(',')).filter(|_| points.len() <= 12) {
                let colour = COLOURS[number % COLOURS.len()];
                let _ = writeln!(out, "<circle cx=\"{}\" cy=\"{}\" r=\"3\" fill=\"{colour}\"/>", point.0, point.1);
            }
            let (beside, line) = (width - right + 16.0, top + 8.0 + 18.0 * number as f64);
            let _ = writeln!(out, "<path d=\"M{beside} {line}h24\" {look}/>");
            text(&mut out, (beside + 30.0, line + 4.0), "", &curve.name);
        }
        out.push_str("</svg>\n");
        out
    }
}

/// Draws the frame, the ticks and the axis labels.
fn grid(out: &mut String, x: &Scale<'_>, y: &Scale<'_>) {
    let (from, to) = (x.pixels, y.pixels);
    for (value, words) in x.ticks() {
        let at = x.pixel(value);
        let _ = writeln!(out, "<path d=\"M{at:.1} {:.1}V{:.1}\" stroke=\"#ddd\"/>", to.0, to.1);
        text(out, (at, to.0 + 18.0), "text-anchor=\"middle\"", &words);
    }
    for (value, words) in y.ticks() {
        let at = y.pixel(value);
        let _ = writeln!(out, "<path d=\"M{:.1} {at:.1}H{:.1}\" stroke=\"#ddd\"/>", from.0, from.1);
        text(out, (from.0 - 8.0, at + 4.0), "text-anchor=\"end\"", &words);
    }
    let _ = writeln!(
        out,
        "<path d=\"M{:.1} {:.1}V{:.1}H{:.1}\" stroke=\"#444\" fill=\"none\"/>",
        from.0, to.1, to.0, from.1
    );
    text(out, ((from.0 + from.1) / 2.0, to.0 + 42.0), "text-anchor=\"middle\"", &x.axis.label);
    let (at, middle) = (from.0 - 54.0, (to.0 + to.1) / 2.0);
    let turned = format!("text-anchor=\"middle\" transform=\"rotate(-90 {at:.1} {middle:.1})\"");
    text(out, (at, middle), &turned, &y.axis.label);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn chart(is_logarithmic: bool, points: &[(f64, f64)]) -> Chart {
        let axis = |label: &str| Axis { label: label.into(), is_logarithmic, ticks: Vec::new() };
        let curve = Curve { name: "a <b> & \"c\"\n".into(), points: points.to_vec() };
        Chart { title: "x < y".into(), x: axis("K"), y: axis("ms"), curves: vec![curve] }
    }

    /// Returns the points of the first line, in pixels.
    fn drawn(svg: &str) -> Vec<(f64, f64)> {
        let points = svg.split("<polyline points=\"").nth(1).unwrap().split('"').next().unwrap();
        let pair = |point: &str| point.split_once(',').map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()));
        points.split_whitespace().filter_map(pair).collect()
    }

    #[test]
    fn equal_factors_are_equally_far_apart_and_nothing_is_outside() {
        let found = drawn(&chart(true, &[(1.0, 0.1), (10.0, 1.0), (100.0, 10.0)]).svg());
        assert_eq!(found.len(), 3);
        assert!((found[1].0 - (found[0].0 + found[2].0) / 2.0).abs() < 0.11, "{found:?}");
        assert_eq!((found[0], found[2]), ((76.0, 384.0), (630.0, 46.0)));
        let linear = drawn(&chart(false, &[(0.0, 0.0), (5.0, 5.0), (10.0, 10.0)]).svg());
        assert!(linear[0] == (76.0, 384.0) && linear[2].0 < 630.0 && linear[2].1 > 46.0, "{linear:?}");
    }

    #[test]
    fn values_that_cannot_be_drawn_are_omitted() {
        let odd = [(0.0, 1.0), (-1.0, 1.0), (f64::NAN, 1.0), (1.0, f64::INFINITY), (3.0, 3.0)];
        assert_eq!(drawn(&chart(true, &odd).svg()).len(), 1);
        for points in [&[][..], &[(2.0, 2.0)], &[(0.0, 0.0)], &[(-1.0, -1.0)], &[(1.0, 1.0), (1.0, 1.0)]] {
            for is_logarithmic in [false, true] {
                let svg = chart(is_logarithmic, points).svg();
                assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            }
        }
    }

    #[test]
    fn the_picture_is_xml_without_external_references() {
        let svg = chart(false, &[(1.0, 2.0)]).svg();
        assert!(svg.contains("a &lt;b&gt; &amp; &quot;c&quot; ") && svg.contains("x &lt; y"), "{svg}");
        assert!(!svg.contains("href") && svg.matches("http").count() == 1, "{svg}");
        let (opened, closed) = (svg.matches('<').count(), svg.matches('>').count());
        assert_eq!(opened, closed);
    }

    #[test]
    fn ticks_are_round_and_named_ones_stay() {
        let axis = |is_logarithmic| Axis { label: String::new(), is_logarithmic, ticks: Vec::new() };
        let names = |axis: &Axis, values: &[f64]| {
            let scale = Scale::new(axis, values.iter().copied(), (0.0, 100.0));
            scale.ticks().into_iter().map(|(_, name)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(&axis(false), &[0.0, 57.0]), ["0", "10", "20", "30", "40", "50"]);
        assert_eq!(names(&axis(false), &[0.0, 0.7]), ["0", "0.2", "0.4", "0.6"]);
        assert_eq!(names(&axis(true), &[3.0, 120.0]), ["5", "10", "20", "50", "100"]);
        assert_eq!(names(&axis(true), &[1e-3, 1e3]), ["0.001", "0.01", "0.1", "1", "10", "100", "1000"]);
        let named = Axis { ticks: vec![(1.0, "50 %".into()), (9.0, "90 %".into())], ..axis(true) };
        assert_eq!(names(&named, &[1.0, 5.0]), ["50 %"]);
    }
}
