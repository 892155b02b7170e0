//! The diverging color scale of the heat map: centered at a speedup of 1, logarithmic, from 0.5 to 2.

/// Steps on each side of the center.
pub(super) const STEPS: i32 = 10;

/// Colors of speedups of 1, 0.7 and 0.5, and of 1, 1.4 and 2. They differ in lightness the same way and in hue as
/// orange and blue do, which people with any color vision tell apart.
const SLOWER: [[f64; 3]; 3] = [[245.0, 245.0, 243.0], [246.0, 160.0, 93.0], [150.0, 48.0, 4.0]];
const FASTER: [[f64; 3]; 3] = [[245.0, 245.0, 243.0], [107.0, 170.0, 215.0], [8.0, 64.0, 129.0]];

/// A step of the scale, from slower (negative) to faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Step(i32);

impl Step {
    /// The step of a speedup; those beyond the scale are at its ends.
    pub(super) fn of(speedup: f64) -> Self {
        let steps = (speedup.log2() * f64::from(STEPS)).round();
        Self(steps.clamp(f64::from(-STEPS), f64::from(STEPS)) as i32)
    }

    /// Every step, from slower to faster.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        (-STEPS..=STEPS).map(Self)
    }

    /// The speedup at its center.
    pub(super) fn speedup(self) -> f64 {
        2f64.powf(f64::from(self.0) / f64::from(STEPS))
    }

    /// The name of its class in the picture's style sheet.
    pub(super) fn class(self) -> String {
        if self.0 < 0 { format!("s{}", -self.0) } else { format!("f{}", self.0) }
    }

    /// Red, green and blue.
    fn rgb(self) -> [f64; 3] {
        let stops = if self.0 < 0 { SLOWER } else { FASTER };
        let place = f64::from(self.0.abs()) / f64::from(STEPS) * 2.0;
        let (from, to) = if place < 1.0 { (stops[0], stops[1]) } else { (stops[1], stops[2]) };
        let part = if place < 1.0 { place } else { place - 1.0 };
        std::array::from_fn(|i| (from[i] + (to[i] - from[i]) * part).round())
    }

    /// As in `#f5f5f3`.
    pub(super) fn fill(self) -> String {
        let [r, g, b] = self.rgb().map(|v| v as u8);
        format!("#{r:02x}{g:02x}{b:02x}")
    }

    /// Whether white text has more contrast on it than black text (WCAG 2: relative luminance). One of them has a
    /// contrast of at least 4.5 on any color.
    pub(super) fn is_dark(self) -> bool {
        contrast(luminance(self.rgb()), 1.0) > contrast(luminance(self.rgb()), 0.0)
    }
}

fn luminance(rgb: [f64; 3]) -> f64 {
    let [r, g, b] = rgb.map(|v| {
        let v = v / 255.0;
        if v <= 0.04045 { v / 12.92 } else { ((v + 0.055) / 1.055).powf(2.4) }
    });
    0.2126 * r + 0.7152 * g + 0.0722 * b
}

fn contrast(a: f64, b: f64) -> f64 {
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_centered_at_one_and_ends_at_its_ends() {
        let steps = [1.0, 0.98, 2.0, 100.0, 0.5, 1e-9, 1.41].map(|speedup| Step::of(speedup).0);
        assert_eq!(steps, [0, 0, 10, 10, -10, -10, 5]);
        assert_eq!(Step(0).fill(), "#f5f5f3");
        assert_eq!([Step(-10).fill(), Step(10).fill()], ["#963004", "#084081"]);
        assert!(Step::all().all(|step| Step::of(step.speedup()) == step));
        assert_eq!([Step(-3).class(), Step(0).class(), Step(3).class()], ["s3", "f0", "f3"]);
    }

    #[test]
    fn figures_are_readable_on_every_color() {
        for step in Step::all() {
            let text = if step.is_dark() { 1.0 } else { 0.0 };
            let contrast = contrast(luminance(step.rgb()), text);
            assert!(contrast >= 4.5, "{step:?}: {contrast:.2}");
        }
    }
}
